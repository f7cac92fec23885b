"""Which sequences each data-parallel rank holds, and how sequences form groups.

Legend: S sequences of the whole batch, G groups, T = local sequences × padded length, the tokens of this
rank.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rl_engine.contracts._checks import LOSS_RULES
from rl_engine.contracts._json import from_mapping, to_mapping

__all__ = ["LossShardingSpec"]


@dataclass(frozen=True, slots=True)
class LossShardingSpec:
    """The sequences of all ranks of one DP group, this rank's place among them, and the groups.

    Attributes:
        dp_rank: This rank, in [0, dp_world_size).
        dp_world_size: Number of sequence shards.
        num_sequences: S, over all ranks.
        padded_seq_len: Token slots of each of this rank's sequences; ranks may pad differently.
        sequence_shard_bounds: [start, end) of every rank in rank order: a contiguous partition of [0, S).
            Shards may be uneven and empty.
        group_boundaries: CSR offsets of all groups: group g holds the sequences [boundaries[g], boundaries[g
            + 1]). Groups may differ in size and straddle ranks.
        cp_rank: This rank on the context-parallel axis.
        cp_world_size: Size of the context-parallel axis.

    Raises:
        LossContractError: A rank is outside its world, the bounds do not tile the sequences, or the group
            boundaries do not rise from 0 to S.

    Example:
        >>> batch = LossShardingSpec.even(8, dp_rank=1, dp_world_size=3, padded_seq_len=16, group_size=4)
        >>> batch.sequence_shard_bounds, batch.group_sizes, batch.num_local_tokens
        (((0, 3), (3, 6), (6, 8)), (4, 4), 48)
    """

    dp_rank: int
    dp_world_size: int
    num_sequences: int
    padded_seq_len: int
    sequence_shard_bounds: tuple[tuple[int, int], ...]
    group_boundaries: tuple[int, ...]
    cp_rank: int = 0
    cp_world_size: int = 1

    def __post_init__(self) -> None:
        rules, put, name = LOSS_RULES, object.__setattr__, "LossShardingSpec"
        world, rank = "pass the size of the process group", "pass this process's rank in the group"
        put(
            self,
            "dp_world_size",
            rules.integer(f"{name}.dp_world_size", self.dp_world_size, minimum=1, remedy=world),
        )
        dp_rank = rules.integer(
            f"{name}.dp_rank", self.dp_rank, minimum=0, below=self.dp_world_size, remedy=rank
        )
        put(self, "dp_rank", dp_rank)
        put(
            self,
            "cp_world_size",
            rules.integer(f"{name}.cp_world_size", self.cp_world_size, minimum=1, remedy=world),
        )
        cp_rank = rules.integer(
            f"{name}.cp_rank", self.cp_rank, minimum=0, below=self.cp_world_size, remedy=rank
        )
        put(self, "cp_rank", cp_rank)
        size = "pass the number of sequences over all data-parallel ranks"
        put(
            self,
            "num_sequences",
            rules.integer(f"{name}.num_sequences", self.num_sequences, minimum=1, remedy=size),
        )
        length = "pass the token slots per sequence of this rank's tensors"
        padded = rules.integer(f"{name}.padded_seq_len", self.padded_seq_len, minimum=0, remedy=length)
        put(self, "padded_seq_len", padded)
        bounds = rules.partition(
            f"{name}.sequence_shard_bounds",
            self.sequence_shard_bounds,
            parts=self.dp_world_size,
            total=self.num_sequences,
            parts_name="dp_world_size",
            total_name="num_sequences",
            remedy="LossShardingSpec.even(...) builds them",
        )
        put(self, "sequence_shard_bounds", bounds)
        put(self, "group_boundaries", self._checked_boundaries())

    def _checked_boundaries(self) -> tuple[int, ...]:
        rules, field, total = LOSS_RULES, "LossShardingSpec.group_boundaries", self.num_sequences
        remedy = "pass offsets such as (0, 4, 8); LossShardingSpec.even(..., group_size=4) builds them"
        items = rules.iterable(field, self.group_boundaries, "integers")
        offsets = tuple(
            rules.integer(f"{field}[{place}]", item, remedy=remedy) for place, item in enumerate(items)
        )
        if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total:
            rules.fail(field, offsets, f"must rise from 0 to num_sequences = {total}", remedy)
        for group, (start, end) in enumerate(pairwise(offsets)):
            if end <= start:
                rules.fail(field, offsets, f"must rise strictly: group {group} is [{start}, {end})", remedy)
        return offsets

    @classmethod
    def even(
        cls,
        num_sequences: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        *,
        padded_seq_len: int,
        group_size: int | None = None,
        group_sizes: Iterable[int] | None = None,
        cp_rank: int = 0,
        cp_world_size: int = 1,
    ) -> LossShardingSpec:
        """Shards whose sizes differ by one sequence at most, larger ones first.

        Args:
            num_sequences: S, over all ranks.
            dp_rank: This rank.
            dp_world_size: Number of shards; trailing ones are empty where there are fewer sequences than
                ranks.
            padded_seq_len: Token slots of each of this rank's sequences.
            group_size: The size of every group; it must divide S.
            group_sizes: The size of each group, in order, instead; they must add up to S. One group where
                both are None.
            cp_rank: Carried along.
            cp_world_size: Carried along.

        Returns:
            The spec of this rank.

        Raises:
            LossContractError: Both group arguments are given, or they do not add up to S.
        """
        rules, name = LOSS_RULES, "LossShardingSpec"
        size = "pass the number of sequences over all data-parallel ranks"
        total = rules.integer(f"{name}.num_sequences", num_sequences, minimum=1, remedy=size)
        parts = rules.integer(
            f"{name}.dp_world_size", dp_world_size, minimum=1, remedy="pass the group's size"
        )
        cuts = [part * (total // parts) + min(part, total % parts) for part in range(parts + 1)]
        return cls(
            dp_rank=dp_rank,
            dp_world_size=parts,
            num_sequences=total,
            padded_seq_len=padded_seq_len,
            sequence_shard_bounds=tuple(pairwise(cuts)),
            group_boundaries=(0, *accumulate(_sizes(total, group_size, group_sizes))),
            cp_rank=cp_rank,
            cp_world_size=cp_world_size,
        )

    @property
    def local_sequence_start(self) -> int:
        """First sequence of this rank."""
        return self.sequence_shard_bounds[self.dp_rank][0]

    @property
    def local_sequence_end(self) -> int:
        """One past the last sequence of this rank."""
        return self.sequence_shard_bounds[self.dp_rank][1]

    @property
    def num_local_sequences(self) -> int:
        """Sequences of this rank; may be 0."""
        return self.local_sequence_end - self.local_sequence_start

    @property
    def num_local_tokens(self) -> int:
        """Token slots of this rank, padding included."""
        return self.num_local_sequences * self.padded_seq_len

    @property
    def num_groups(self) -> int:
        """Groups over all ranks."""
        return len(self.group_boundaries) - 1

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Number of sequences of each group."""
        return tuple(end - start for start, end in pairwise(self.group_boundaries))

    @property
    def has_variable_group_sizes(self) -> bool:
        """Whether groups differ in size."""
        return len(set(self.group_sizes)) > 1

    def group_of(self, sequence: int) -> int:
        """The group of a sequence, by its index in the whole batch.

        Raises:
            LossContractError: The index is not an integer in [0, S).
        """
        return bisect_right(self.group_boundaries, self._checked_sequence("group_of", sequence)) - 1

    def owner_rank(self, sequence: int) -> int:
        """The DP rank of a sequence, by its index in the whole batch.

        Raises:
            LossContractError: The index is not an integer in [0, S).
        """
        place = self._checked_sequence("owner_rank", sequence)
        return bisect_right([end for _, end in self.sequence_shard_bounds], place)

    def _checked_sequence(self, method: str, sequence: int) -> int:
        field, remedy = f"LossShardingSpec.{method} sequence", f"sequences lie in [0, {self.num_sequences})"
        return LOSS_RULES.integer(field, sequence, minimum=0, below=self.num_sequences, remedy=remedy)

    def __str__(self) -> str:
        sizes = sorted(set(self.group_sizes))
        of = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
        text = f"{self.num_sequences} sequences in {self.num_groups} groups of {of}"
        text += f", dp {self.dp_rank}/{self.dp_world_size}"
        text += f" [{self.local_sequence_start}, {self.local_sequence_end}) × {self.padded_seq_len}"
        return text if self.cp_world_size == 1 else f"{text}, cp {self.cp_rank}/{self.cp_world_size}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> LossShardingSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOSS_RULES)


def _sizes(total: int, group_size: int | None, group_sizes: Iterable[int] | None) -> tuple[int, ...]:
    rules, name = LOSS_RULES, "LossShardingSpec.even"
    if group_size is not None and group_sizes is not None:
        rules.fail(
            f"{name} group_size", group_size, "must be left out when group_sizes is given", "pass one of them"
        )
    if group_sizes is not None:
        remedy = f"pass sizes that add up to {total}"
        items = rules.iterable(f"{name} group_sizes", group_sizes, "integers")
        sizes = tuple(rules.integer(f"{name} group_sizes", item, minimum=1, remedy=remedy) for item in items)
        if sum(sizes) != total:
            rules.fail(
                f"{name} group_sizes",
                sizes,
                f"must add up to num_sequences = {total}, got {sum(sizes)}",
                remedy,
            )
        return sizes
    if group_size is None:
        return (total,)
    remedy = "pass group_sizes=(...) for groups of different sizes"
    size = rules.integer(f"{name} group_size", group_size, minimum=1, remedy=remedy)
    if total % size:
        rules.fail(f"{name} group_size", size, f"must divide num_sequences = {total}", remedy)
    return (size,) * (total // size)
