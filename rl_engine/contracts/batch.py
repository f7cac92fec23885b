"""Which token slots of the batch each rank holds, and how sequences form groups.

Legend: S sequences of the whole batch, G groups. A *segment* is a run of token slots of one sequence.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from rl_engine.contracts._checks import LOSS_RULES
from rl_engine.contracts._groups import checked_boundaries, sizes_of_groups
from rl_engine.contracts._json import from_mapping, to_mapping
from rl_engine.contracts.context import ContextSplit, context_ranges
from rl_engine.contracts.plan import BatchPlan

__all__ = ["LossShardingSpec"]


@dataclass(frozen=True, slots=True)
class LossShardingSpec:
    """What this rank holds of the batch, and the groups.

    Two forms. *Contiguous*: `sequence_shard_bounds` cuts the sequences in DP order, each of `padded_seq_len`
    slots. *Segments*: this rank names what it holds, any sequences in any order, any token range of each, or
    nothing; the ranks together must hold every slot of [0, length) of every sequence once.

    Attributes:
        dp_rank: This rank, in [0, dp_world_size).
        dp_world_size: Number of sequence shards.
        num_sequences: S, over all ranks.
        padded_seq_len: Token slots of each of this rank's sequences; ranks may pad differently. 0 in the form
            of segments.
        sequence_shard_bounds: [start, end) of every rank in rank order: a contiguous partition of [0, S).
            Shards may be uneven and empty. None in the form of segments.
        group_boundaries: CSR offsets of all groups: group g holds the sequences [boundaries[g], boundaries[g
            + 1]). Groups may differ in size and straddle ranks.
        cp_rank: This rank on the context-parallel axis.
        cp_world_size: Size of the context-parallel axis: ranks that hold other tokens of the same sequences.
        segments: (sequence, start, end) of every segment, in the order of this rank's rows; None in the
            contiguous form.

    Raises:
        LossContractError: A rank is outside its world, the bounds do not tile the sequences, segments
            overlap, or the group boundaries do not rise from 0 to S.

    Example:
        >>> batch = LossShardingSpec.even(8, dp_rank=1, dp_world_size=3, padded_seq_len=16, group_size=4)
        >>> batch.sequence_shard_bounds, batch.group_sizes, batch.num_local_tokens
        (((0, 3), (3, 6), (6, 8)), (4, 4), 48)
        >>> LossShardingSpec.packed([0, 8, 12]).zigzag(0, 2).segments
        ((0, 0, 2), (0, 6, 8), (1, 0, 1), (1, 3, 4))
    """

    dp_rank: int
    dp_world_size: int
    num_sequences: int
    padded_seq_len: int
    sequence_shard_bounds: tuple[tuple[int, int], ...] | None
    group_boundaries: tuple[int, ...]
    cp_rank: int = 0
    cp_world_size: int = 1
    segments: tuple[tuple[int, int, int], ...] | None = None

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
        if self.segments is None:
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
        else:
            put(self, "segments", self._checked_segments(self.segments))
        boundaries = checked_boundaries(f"{name}.group_boundaries", self.group_boundaries, self.num_sequences)
        put(self, "group_boundaries", boundaries)

    def _checked_segments(self, given: object) -> tuple[tuple[int, int, int], ...]:
        rules, name = LOSS_RULES, "LossShardingSpec.segments"
        remedy = "pass (sequence, start, end) of every run of slots; from_sequence_ids(...) builds them"
        for part, empty in (("sequence_shard_bounds", None), ("padded_seq_len", 0)):
            if getattr(self, part) != empty:
                rule = f"must be {empty} where segments say what the rank holds"
                rules.fail(f"LossShardingSpec.{part}", getattr(self, part), rule, "pass one of the two forms")
        segments: list[tuple[int, int, int]] = []
        for place, item in enumerate(rules.iterable(name, given, "(sequence, start, end)")):
            triple = rules.iterable(f"{name}[{place}]", item, "three integers")
            if len(triple) != 3:
                rules.fail(f"{name}[{place}]", item, "must be (sequence, start, end)", remedy)
            first, start, end = (
                rules.integer(f"{name}[{place}]", n, minimum=0, remedy=remedy) for n in triple
            )
            if first >= self.num_sequences:
                rule = f"must name a sequence in [0, num_sequences = {self.num_sequences})"
                rules.fail(f"{name}[{place}]", (first, start, end), rule, remedy)
            if end < start:
                rules.fail(f"{name}[{place}]", (first, start, end), "must end at or after its start", remedy)
            segments.append((first, start, end))
        for one, other in pairwise(sorted(s for s in segments if s[2] > s[1])):
            if one[0] == other[0] and other[1] < one[2]:
                rules.fail(name, [one, other], f"must not overlap: sequence {one[0]} does", remedy)
        return tuple(segments)

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
            cp_rank: This rank on the context-parallel axis; `padded_seq_len` counts its own slots.
            cp_world_size: Size of that axis.

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
            group_boundaries=(
                0,
                *accumulate(sizes_of_groups(f"{name}.even", total, group_size, group_sizes)),
            ),
            cp_rank=cp_rank,
            cp_world_size=cp_world_size,
        )

    @classmethod
    def contiguous(
        cls,
        sequences_per_rank: Iterable[int],
        dp_rank: int = 0,
        *,
        padded_seq_len: int,
        group_size: int | None = None,
        group_sizes: Iterable[int] | None = None,
        cp_rank: int = 0,
        cp_world_size: int = 1,
    ) -> LossShardingSpec:
        """The contiguous form: as many sequences as given for each DP rank, in rank order.

        Args:
            sequences_per_rank: Sequences of every DP rank; 0 is legal.
            dp_rank: This rank.
            padded_seq_len: Token slots of each of this rank's sequences.
            group_size: The size of every group.
            group_sizes: The size of each group instead; one group where both are None.
            cp_rank: This rank on the context-parallel axis; `padded_seq_len` counts its own slots.
            cp_world_size: Size of that axis.

        Raises:
            LossContractError: A count is negative, or the groups do not add up.

        Example:
            >>> LossShardingSpec.contiguous([3, 0, 1], padded_seq_len=16).sequence_shard_bounds
            ((0, 3), (3, 3), (3, 4))
        """
        rules, name = LOSS_RULES, "LossShardingSpec.contiguous"
        remedy = "pass the number of sequences of every DP rank"
        items = rules.iterable(f"{name} sequences_per_rank", sequences_per_rank, "integers")
        counts = [
            rules.integer(f"{name} sequences_per_rank", item, minimum=0, remedy=remedy) for item in items
        ]
        sizes = sizes_of_groups(name, sum(counts), group_size, group_sizes)
        return cls(
            dp_rank=dp_rank,
            dp_world_size=len(counts),
            num_sequences=sum(counts),
            padded_seq_len=padded_seq_len,
            sequence_shard_bounds=tuple(pairwise([0, *accumulate(counts)])),
            group_boundaries=(0, *accumulate(sizes)),
            cp_rank=cp_rank,
            cp_world_size=cp_world_size,
        )

    @classmethod
    def from_sequence_ids(
        cls,
        sequence_ids: Iterable[int],
        *,
        num_sequences: int,
        sequence_lengths: int | Iterable[int],
        dp_rank: int = 0,
        dp_world_size: int = 1,
        group_size: int | None = None,
        group_sizes: Iterable[int] | None = None,
    ) -> LossShardingSpec:
        """Whole sequences by their index in the batch, in the order of this rank's rows.

        Args:
            sequence_ids: Indices in [0, S), in any order; none is legal.
            num_sequences: S, over all ranks.
            sequence_lengths: Token slots of each of these sequences, or of every one.
            dp_rank: This rank.
            dp_world_size: Number of ranks that hold sequences.
            group_size: The size of every group.
            group_sizes: The size of each group instead; one group where both are None.

        Raises:
            LossContractError: An index is out of range or stands twice, or the lengths are of another number.

        Example:
            >>> spec = LossShardingSpec.from_sequence_ids([5, 0], num_sequences=6, sequence_lengths=8)
            >>> spec.local_sequences, spec.num_local_tokens
            ((5, 0), 16)
        """
        rules, name = LOSS_RULES, "LossShardingSpec.from_sequence_ids"
        ids = rules.iterable(f"{name} sequence_ids", sequence_ids, "integers")
        size = "pass the number of sequences over all data-parallel ranks"
        total = rules.integer(f"{name} num_sequences", num_sequences, minimum=1, remedy=size)
        remedy = "pass the token slots of each of these sequences, or one number for all"
        if isinstance(sequence_lengths, Iterable):
            lengths = rules.iterable(f"{name} sequence_lengths", sequence_lengths, "integers")
        else:
            lengths = (sequence_lengths,) * len(ids)
        if len(lengths) != len(ids):
            rules.fail(
                f"{name} sequence_lengths", lengths, f"must be {len(ids)}, one per sequence id", remedy
            )
        if len(set(ids)) != len(ids):
            twice = next(i for place, i in enumerate(ids) if i in ids[:place])
            rules.fail(f"{name} sequence_ids", ids, f"must be distinct: {twice} stands twice", "drop it")
        slots = [
            rules.integer(f"{name} sequence_lengths", item, minimum=0, remedy=remedy) for item in lengths
        ]
        return cls._of_segments(
            [(i, 0, length) for i, length in zip(ids, slots, strict=True)],
            total,
            sizes_of_groups(name, total, group_size, group_sizes),
            dp_rank,
            dp_world_size,
        )

    @classmethod
    def packed(
        cls,
        cu_seqlens: Iterable[int],
        *,
        sequence_ids: Iterable[int] | None = None,
        num_sequences: int | None = None,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        group_size: int | None = None,
        group_sizes: Iterable[int] | None = None,
    ) -> LossShardingSpec:
        """Sequences one behind the other without padding, cut by cumulative lengths.

        Args:
            cu_seqlens: Offsets (0, …, N) of this rank's sequences, as variable-length attention takes them.
            sequence_ids: Their indices in the batch; None numbers them from 0, for a single rank.
            num_sequences: S, over all ranks; None takes the sequences of this rank.
            dp_rank: This rank.
            dp_world_size: Number of ranks that hold sequences.
            group_size: The size of every group.
            group_sizes: The size of each group instead; one group where both are None.

        Raises:
            LossContractError: The offsets do not rise from 0, or other ranks hold sequences and the ids are
                missing.

        Example:
            >>> LossShardingSpec.packed([0, 3, 5], group_size=2).segments
            ((0, 0, 3), (1, 0, 2))
        """
        rules, name = LOSS_RULES, "LossShardingSpec.packed"
        remedy = "pass offsets such as (0, 3, 5), as variable-length attention takes them"
        items = rules.iterable(f"{name} cu_seqlens", cu_seqlens, "integers")
        cuts = tuple(rules.integer(f"{name} cu_seqlens", item, remedy=remedy) for item in items)
        if not cuts or cuts[0] != 0 or any(b < a for a, b in pairwise(cuts)):
            rules.fail(f"{name} cu_seqlens", cuts, "must start at 0 and not fall", remedy)
        if sequence_ids is None and (num_sequences is not None or dp_world_size != 1):
            rule = "must be given where other ranks hold sequences too"
            rules.fail(f"{name} sequence_ids", None, rule, "pass the batch index of each sequence")
        ids = range(len(cuts) - 1) if sequence_ids is None else sequence_ids
        return cls.from_sequence_ids(
            ids,
            num_sequences=len(cuts) - 1 if num_sequences is None else num_sequences,
            sequence_lengths=[end - start for start, end in pairwise(cuts)],
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            group_size=group_size,
            group_sizes=group_sizes,
        )

    @classmethod
    def from_batch_plan(
        cls, plan: BatchPlan, dp_rank: int = 0, cp_rank: int = 0, *, micro_batch: int | None = None
    ) -> LossShardingSpec:
        """What a plan gives to one rank, over the whole step or in one micro-batch of it.

        Args:
            plan: The plan of the whole mesh.
            dp_rank: This rank on the DP axis.
            cp_rank: This rank on the CP axis.
            micro_batch: One of its micro-batches; None for all, one behind the other.

        Raises:
            LossContractError: The plan has no such rank or micro-batch.
        """
        LOSS_RULES.instance("LossShardingSpec.from_batch_plan plan", plan, BatchPlan)
        return cls(
            dp_rank=dp_rank,
            dp_world_size=plan.dp_world_size,
            num_sequences=plan.num_sequences,
            padded_seq_len=0,
            sequence_shard_bounds=None,
            group_boundaries=plan.group_boundaries,
            cp_rank=cp_rank,
            cp_world_size=plan.cp_world_size,
            segments=plan.segments(dp_rank, cp_rank, micro_batch),
        )

    @classmethod
    def _of_segments(
        cls, segments: Iterable[Any], total: int, sizes: tuple[int, ...], dp_rank: int, dp_world_size: int
    ) -> LossShardingSpec:
        return cls(
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            num_sequences=total,
            padded_seq_len=0,
            sequence_shard_bounds=None,
            group_boundaries=(0, *accumulate(sizes)),
            segments=tuple(segments),
        )

    def zigzag(self, cp_rank: int, cp_world_size: int) -> LossShardingSpec:
        """The part of this rank's sequences that a CP rank holds: chunks i and 2n − 1 − i of 2n.

        Args:
            cp_rank: i.
            cp_world_size: n.

        Raises:
            LossContractError: The spec is split over CP ranks already.

        Example:
            >>> whole = LossShardingSpec.even(1, padded_seq_len=8)
            >>> [whole.zigzag(rank, 2).segments for rank in range(2)]
            [((0, 0, 2), (0, 6, 8)), ((0, 2, 4), (0, 4, 6))]
        """
        return self.split_context(cp_rank, cp_world_size, ContextSplit.ZIGZAG)

    def split_context(
        self, cp_rank: int, cp_world_size: int, split: ContextSplit | str = ContextSplit.CONTIGUOUS
    ) -> LossShardingSpec:
        """The part of this rank's sequences that a CP rank holds, in the form of segments.

        Args:
            cp_rank: The rank on the CP axis.
            cp_world_size: Its size.
            split: Which chunks the rank holds.

        Raises:
            LossContractError: The spec is split over CP ranks already, or holds parts of sequences.
        """
        name = "LossShardingSpec.split_context"
        remedy = "split a spec of whole sequences, once"
        if self.cp_world_size != 1:
            LOSS_RULES.fail(name, self.cp_world_size, "the spec is split over CP ranks already", remedy)
        parts: list[tuple[int, int, int]] = []
        for sequence, first, length in self._runs():
            if first != 0:
                rule = f"the spec holds only [{first}, {length}) of sequence {sequence}"
                LOSS_RULES.fail(name, self.segments, rule, remedy)
            ranges = context_ranges(length, cp_rank, cp_world_size, split)
            parts += [(sequence, start, end) for start, end in ranges]
        return replace(
            self,
            padded_seq_len=0,
            sequence_shard_bounds=None,
            cp_rank=cp_rank,
            cp_world_size=cp_world_size,
            segments=tuple(parts),
        )

    def _runs(self) -> tuple[tuple[int, int, int], ...]:
        """Segments in either form."""
        if self.segments is not None:
            return self.segments
        return tuple((i, 0, self.padded_seq_len) for i in self.local_sequences)

    @property
    def is_contiguous(self) -> bool:
        """Whether ranks hold contiguous blocks of padded rows; False in the form of segments."""
        return self.segments is None

    @property
    def local_sequences(self) -> tuple[int, ...]:
        """This rank's sequences by their index in the batch, in the order in which its rows show them."""
        if self.segments is None:
            return tuple(range(self.local_sequence_start, self.local_sequence_end))
        return tuple(dict.fromkeys(sequence for sequence, _, _ in self.segments))

    @property
    def local_sequence_start(self) -> int:
        """First sequence of this rank, in the contiguous form."""
        return self._bounds()[self.dp_rank][0]

    @property
    def local_sequence_end(self) -> int:
        """One past the last sequence of this rank, in the contiguous form."""
        return self._bounds()[self.dp_rank][1]

    def _bounds(self) -> tuple[tuple[int, int], ...]:
        if self.sequence_shard_bounds is None:
            rule = "is None: this rank's sequences are no contiguous block"
            remedy = "use local_sequences"
            LOSS_RULES.fail("LossShardingSpec.sequence_shard_bounds", None, rule, remedy)
        return self.sequence_shard_bounds

    @property
    def num_local_sequences(self) -> int:
        """Sequences of which this rank holds a part; may be 0."""
        return len(self.local_sequences)

    @property
    def num_local_tokens(self) -> int:
        """Token slots of this rank, padding included."""
        if self.segments is None:
            return self.num_local_sequences * self.padded_seq_len
        return sum(end - start for _, start, end in self.segments)

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
        """The DP rank of a sequence, by its index in the whole batch; known in the contiguous form only.

        Raises:
            LossContractError: The index is not an integer in [0, S), or the spec holds segments.
        """
        place = self._checked_sequence("owner_rank", sequence)
        return bisect_right([end for _, end in self._bounds()], place)

    def _checked_sequence(self, method: str, sequence: int) -> int:
        field, remedy = f"LossShardingSpec.{method} sequence", f"sequences lie in [0, {self.num_sequences})"
        return LOSS_RULES.integer(field, sequence, minimum=0, below=self.num_sequences, remedy=remedy)

    def __str__(self) -> str:
        sizes = sorted(set(self.group_sizes))
        of = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
        text = f"{self.num_sequences} sequences in {self.num_groups} groups of {of}"
        text += f", dp {self.dp_rank}/{self.dp_world_size}"
        if self.segments is None:
            text += f" [{self.local_sequence_start}, {self.local_sequence_end}) × {self.padded_seq_len}"
        else:
            text += f" {self.num_local_tokens} slots of {self.num_local_sequences} sequences"
        return text if self.cp_world_size == 1 else f"{text}, cp {self.cp_rank}/{self.cp_world_size}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> LossShardingSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOSS_RULES)
