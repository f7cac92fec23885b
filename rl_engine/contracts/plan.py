"""A batch plan: which rank computes which sequences, in which micro-batches, for the whole mesh.

A plan is what a scheduler decides, as data. Every decision gives the same loss; plans differ in speed and in
memory only.

Legend: S sequences of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from rl_engine.contracts._checks import LOSS_RULES
from rl_engine.contracts._groups import checked_boundaries, sizes_of_groups
from rl_engine.contracts._json import from_mapping, to_mapping
from rl_engine.contracts.context import ContextSplit, context_ranges

__all__ = ["BatchPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Who computes what, in which micro-batch.

    Attributes:
        sequence_lengths: Token slots of each of the S sequences.
        micro_batches: For each DP rank its micro-batches, each a tuple of sequence ids in row order. Every
            sequence stands in exactly one of them. Ranks may have different numbers of micro-batches, none
            included.
        group_boundaries: CSR offsets of the groups, as in :class:`LossShardingSpec`.
        cp_world_size: Ranks that share each sequence.
        cp_split: How they share it.

    Raises:
        LossContractError: A sequence is missing or stands twice, or a number is out of range.

    Example:
        >>> plan = BatchPlan.balanced([90, 10, 50, 40], dp_world_size=2, max_tokens=100, group_size=2)
        >>> plan.micro_batches
        (((0, 1),), ((2, 3),))
    """

    sequence_lengths: tuple[int, ...]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    group_boundaries: tuple[int, ...]
    cp_world_size: int = 1
    cp_split: ContextSplit = ContextSplit.CONTIGUOUS

    def __post_init__(self) -> None:
        rules, put, name = LOSS_RULES, object.__setattr__, "BatchPlan"
        put(self, "sequence_lengths", _lengths(f"{name}.sequence_lengths", self.sequence_lengths))
        put(self, "micro_batches", self._checked_micro_batches())
        boundaries = checked_boundaries(f"{name}.group_boundaries", self.group_boundaries, self.num_sequences)
        put(self, "group_boundaries", boundaries)
        world = "pass the size of the process group"
        size = rules.integer(f"{name}.cp_world_size", self.cp_world_size, minimum=1, remedy=world)
        put(self, "cp_world_size", size)
        put(self, "cp_split", rules.member(f"{name}.cp_split", self.cp_split, ContextSplit))

    def _checked_micro_batches(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        rules, field, total = LOSS_RULES, "BatchPlan.micro_batches", self.num_sequences
        remedy = "pass [[ids of a micro-batch, …], …] for every DP rank; BatchPlan.even(...) builds them"
        seen: dict[int, int] = {}
        ranks: list[tuple[tuple[int, ...], ...]] = []
        for rank, own in enumerate(rules.iterable(field, self.micro_batches, "lists of micro-batches")):
            batches: list[tuple[int, ...]] = []
            for item in rules.iterable(f"{field}[{rank}]", own, "lists of sequence ids"):
                ids = tuple(
                    rules.integer(f"{field}[{rank}]", i, minimum=0, below=total, remedy=remedy)
                    for i in rules.iterable(f"{field}[{rank}]", item, "sequence ids")
                )
                for i in ids:
                    if i in seen:
                        rule = f"must hold every sequence once: {i} is on DP rank {seen[i]} and on {rank}"
                        rules.fail(field, ids, rule, remedy)
                    seen[i] = rank
                batches.append(ids)
            ranks.append(tuple(batches))
        if not ranks:
            rules.fail(field, self.micro_batches, "must hold one entry per DP rank", remedy)
        missing = next((i for i in range(total) if i not in seen), None)
        if missing is not None:
            rule = f"must hold every sequence once: {missing} of {total} is nowhere"
            rules.fail(field, tuple(ranks), rule, remedy)
        return tuple(ranks)

    @classmethod
    def even(
        cls,
        sequence_lengths: Iterable[int],
        *,
        dp_world_size: int = 1,
        micro_batch_size: int | None = None,
        group_size: int | None = None,
        group_sizes: Iterable[int] | None = None,
        cp_world_size: int = 1,
        cp_split: ContextSplit | str = ContextSplit.CONTIGUOUS,
    ) -> BatchPlan:
        """Sequences in order, as many on every rank and in every micro-batch as can be.

        Args:
            sequence_lengths: Token slots of each sequence.
            dp_world_size: Number of DP ranks; the first ones hold one sequence more where it does not divide
                S.
            micro_batch_size: Sequences of a micro-batch; None for one micro-batch a rank.
            group_size: The size of every group.
            group_sizes: The size of each group instead; one group where both are None.
            cp_world_size: Ranks that share each sequence.
            cp_split: How they share it.

        Raises:
            LossContractError: A number is out of range.
        """
        lengths = _lengths("BatchPlan.even sequence_lengths", sequence_lengths)
        parts = _positive("BatchPlan.even dp_world_size", dp_world_size)
        total = len(lengths)
        size = total if micro_batch_size is None else micro_batch_size
        size = _positive("BatchPlan.even micro_batch_size", size)
        cuts = [part * (total // parts) + min(part, total % parts) for part in range(parts + 1)]
        ranks = tuple(
            tuple(tuple(range(i, min(i + size, end))) for i in range(start, end, size))
            for start, end in pairwise(cuts)
        )
        sizes = sizes_of_groups("BatchPlan.even", total, group_size, group_sizes)
        return cls._of(lengths, ranks, sizes, cp_world_size, cp_split)

    @classmethod
    def balanced(
        cls,
        sequence_lengths: Iterable[int],
        *,
        max_tokens: int,
        dp_world_size: int = 1,
        group_size: int | None = None,
        group_sizes: Iterable[int] | None = None,
        cp_world_size: int = 1,
        cp_split: ContextSplit | str = ContextSplit.CONTIGUOUS,
    ) -> BatchPlan:
        """Longest sequences first, each to the rank with the fewest tokens; micro-batches by a token budget.

        Args:
            sequence_lengths: Token slots of each sequence.
            max_tokens: Tokens of a micro-batch over all its CP ranks; a longer sequence gets one for itself.
            dp_world_size: Number of DP ranks.
            group_size: The size of every group.
            group_sizes: The size of each group instead; one group where both are None.
            cp_world_size: Ranks that share each sequence.
            cp_split: How they share it.

        Raises:
            LossContractError: A number is out of range.
        """
        lengths = _lengths("BatchPlan.balanced sequence_lengths", sequence_lengths)
        parts = _positive("BatchPlan.balanced dp_world_size", dp_world_size)
        budget = _positive("BatchPlan.balanced max_tokens", max_tokens)
        loads, owned = [0] * parts, [list[int]() for _ in range(parts)]
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            rank = loads.index(min(loads))
            loads[rank] += lengths[i]
            owned[rank].append(i)
        ranks: list[tuple[tuple[int, ...], ...]] = []
        for ids in owned:
            batches: list[list[int]] = []
            filled = 0
            for i in sorted(ids):
                if not batches or filled + lengths[i] > budget:
                    batches.append([])
                    filled = 0
                batches[-1].append(i)
                filled += lengths[i]
            ranks.append(tuple(tuple(batch) for batch in batches))
        sizes = sizes_of_groups("BatchPlan.balanced", len(lengths), group_size, group_sizes)
        return cls._of(lengths, tuple(ranks), sizes, cp_world_size, cp_split)

    @classmethod
    def _of(
        cls,
        lengths: tuple[int, ...],
        ranks: tuple[tuple[tuple[int, ...], ...], ...],
        sizes: tuple[int, ...],
        cp_world_size: int,
        cp_split: ContextSplit | str,
    ) -> BatchPlan:
        split = LOSS_RULES.member("BatchPlan.cp_split", cp_split, ContextSplit)
        return cls(
            sequence_lengths=lengths,
            micro_batches=ranks,
            group_boundaries=(0, *accumulate(sizes)),
            cp_world_size=cp_world_size,
            cp_split=split,
        )

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.sequence_lengths)

    @property
    def dp_world_size(self) -> int:
        """Number of DP ranks."""
        return len(self.micro_batches)

    def sequence_ids(self, dp_rank: int, micro_batch: int | None = None) -> tuple[int, ...]:
        """The sequences of a rank in row order, or those of one of its micro-batches.

        Raises:
            LossContractError: There is no such rank or micro-batch.
        """
        remedy = f"the plan has {self.dp_world_size} DP ranks"
        rank = LOSS_RULES.integer(
            "BatchPlan dp_rank", dp_rank, minimum=0, below=self.dp_world_size, remedy=remedy
        )
        own = self.micro_batches[rank]
        if micro_batch is None:
            return tuple(i for batch in own for i in batch)
        remedy = f"DP rank {rank} has {len(own)} micro-batches"
        place = LOSS_RULES.integer(
            "BatchPlan micro_batch", micro_batch, minimum=0, below=len(own), remedy=remedy
        )
        return own[place]

    def segments(
        self, dp_rank: int, cp_rank: int = 0, micro_batch: int | None = None
    ) -> tuple[tuple[int, int, int], ...]:
        """(sequence, start, end) of every run of token slots of a rank, in row order.

        Raises:
            LossContractError: There is no such rank or micro-batch.
        """
        return tuple(
            (i, start, end)
            for i in self.sequence_ids(dp_rank, micro_batch)
            for start, end in context_ranges(
                self.sequence_lengths[i], cp_rank, self.cp_world_size, self.cp_split
            )
        )

    def __str__(self) -> str:
        counts = sorted({len(own) for own in self.micro_batches})
        of = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]}–{counts[-1]}"
        text = f"{self.num_sequences} sequences over dp {self.dp_world_size} in {of} micro-batches a rank"
        return text if self.cp_world_size == 1 else f"{text}, cp {self.cp_world_size} {self.cp_split}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> BatchPlan:
        """The plan that `to_dict` described."""
        return from_mapping(cls, data, LOSS_RULES)


def _positive(field: str, value: int) -> int:
    return LOSS_RULES.integer(field, value, minimum=1, remedy="pass a positive integer")


def _lengths(field: str, values: object) -> tuple[int, ...]:
    remedy = "pass the token slots of every sequence of the batch"
    items = LOSS_RULES.iterable(field, values, "integers")
    if not items:
        LOSS_RULES.fail(field, values, "must name at least one sequence", remedy)
    return tuple(LOSS_RULES.integer(field, item, minimum=0, remedy=remedy) for item in items)
