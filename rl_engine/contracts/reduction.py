"""How the partial sums of a row are put together across the vocabulary shards.

A `ReductionSpec` names a merge and all that fixes its bits. Three merges exist:

- `exact_words` sums integers, so that neither the order nor the transport can matter;
- `max_sumexp_tiles` adds one fp32 (max, sumexp) pair per fixed vocabulary tile, in the global order of the
  tiles;
- `shard_lse` adds per-shard log-sum-exps with a float all-reduce: what most trainers do, kept for comparison.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rl_engine.contracts._checks import LOGPROB_RULES
from rl_engine.contracts._json import from_mapping, to_mapping

__all__ = [
    "DEFAULT_NUM_VOCAB_TILES",
    "AccDtype",
    "DeterminismScope",
    "DowncastAt",
    "Engine",
    "MergeAxis",
    "MergeKind",
    "MergeOrder",
    "ReductionSpec",
    "Transport",
]

#: Divides the padded vocabularies in use (multiples of 64 or 128) and is a multiple of the usual TP degrees.
DEFAULT_NUM_VOCAB_TILES: Final = 64


class DeterminismScope(StrEnum):
    """Over which changes of layout the bits stay the same; each scope includes the ones before it."""

    FIXED_TOPOLOGY = "fixed_topology"
    CROSS_TP_BITWISE = "cross_tp_bitwise"
    LAYOUT_FREE = "layout_free"

    def covers(self, other: DeterminismScope) -> bool:
        """Whether bits that hold over this scope also hold over `other`.

        Example:
            >>> DeterminismScope.LAYOUT_FREE.covers(DeterminismScope.FIXED_TOPOLOGY)
            True
        """
        order = list(DeterminismScope)
        return order.index(self) >= order.index(DeterminismScope(other))


class MergeKind(StrEnum):
    """What a partial sum is made of, and thereby how two of them merge."""

    EXACT_WORDS = "exact_words"
    MAX_SUMEXP_TILES = "max_sumexp_tiles"
    SHARD_LSE = "shard_lse"


class MergeOrder(StrEnum):
    """In which order partial sums are merged: `free` where no order can change the bits."""

    FREE = "free"
    GLOBAL_TILE_ORDER = "global_tile_order"
    RANK_ORDER = "rank_order"


class MergeAxis(StrEnum):
    """Over which mesh axis a row is merged. Context parallelism splits tokens, so it never merges a row."""

    TP_VOCAB = "tp_vocab"


class Transport(StrEnum):
    """Which collectives carry the partial sums.

    `packed_all_gather` is one all-gather; `all_reduce_max_sum` is an integer MAX, then an integer SUM;
    `all_reduce_float` lets the collective add floats, in an order of its own.
    """

    PACKED_ALL_GATHER = "packed_all_gather"
    ALL_REDUCE_MAX_SUM = "all_reduce_max_sum"
    ALL_REDUCE_FLOAT = "all_reduce_float"


class AccDtype(StrEnum):
    """The dtype in which results are formed."""

    FP32 = "fp32"


class DowncastAt(StrEnum):
    """Where a value is rounded to its output dtype: once, when it is written."""

    FINAL_WRITE = "final_write"


class Engine(StrEnum):
    """Who runs the collectives."""

    TORCH_DISTRIBUTED = "torch_distributed"


_ORDERS: Final = {
    MergeKind.EXACT_WORDS: MergeOrder.FREE,
    MergeKind.MAX_SUMEXP_TILES: MergeOrder.GLOBAL_TILE_ORDER,
    MergeKind.SHARD_LSE: MergeOrder.RANK_ORDER,
}
_TRANSPORTS: Final = {
    MergeKind.EXACT_WORDS: (Transport.PACKED_ALL_GATHER, Transport.ALL_REDUCE_MAX_SUM),
    MergeKind.MAX_SUMEXP_TILES: (Transport.PACKED_ALL_GATHER,),
    MergeKind.SHARD_LSE: (Transport.ALL_REDUCE_FLOAT,),
}
_STRONGEST_SCOPES: Final = {
    MergeKind.EXACT_WORDS: DeterminismScope.LAYOUT_FREE,
    MergeKind.MAX_SUMEXP_TILES: DeterminismScope.CROSS_TP_BITWISE,
    MergeKind.SHARD_LSE: DeterminismScope.FIXED_TOPOLOGY,
}
_BUILDERS: Final = {
    MergeKind.EXACT_WORDS: "ReductionSpec.exact()",
    MergeKind.MAX_SUMEXP_TILES: "ReductionSpec.tiled(num_vocab_tiles=64)",
    MergeKind.SHARD_LSE: "ReductionSpec.naive()",
}


@dataclass(frozen=True, slots=True)
class ReductionSpec:
    """The merge of a row over the vocabulary shards, with all that fixes its bits.

    Attributes:
        merge: What a partial sum is made of.
        merge_axis: The mesh axis that is merged; only `tp_vocab`.
        acc_dtype: The dtype of the result; only `fp32`.
        order: The order of merging; follows from `merge`.
        transport: The collectives; `exact_words` may choose, the other merges fix theirs.
        downcast_at: Where the one rounding to the output happens; only `final_write`.
        engine: Who runs the collectives; only `torch_distributed`.
        determinism_scope: The promise that is asked for, at most what `merge` can keep.
        num_vocab_tiles: Number of equal tiles of the padded vocabulary; for `max_sumexp_tiles` alone, 64
            where None.

    Raises:
        LogprobContractError: A field is outside its closed set, or does not go with `merge`.

    Example:
        >>> str(ReductionSpec())
        'exact_words by packed_all_gather, layout_free'
        >>> ReductionSpec.tiled(num_vocab_tiles=32).order
        <MergeOrder.GLOBAL_TILE_ORDER: 'global_tile_order'>
    """

    merge: MergeKind = MergeKind.EXACT_WORDS
    merge_axis: MergeAxis = MergeAxis.TP_VOCAB
    acc_dtype: AccDtype = AccDtype.FP32
    order: MergeOrder = MergeOrder.FREE
    transport: Transport = Transport.PACKED_ALL_GATHER
    downcast_at: DowncastAt = DowncastAt.FINAL_WRITE
    engine: Engine = Engine.TORCH_DISTRIBUTED
    determinism_scope: DeterminismScope = DeterminismScope.LAYOUT_FREE
    num_vocab_tiles: int | None = None

    def __post_init__(self) -> None:
        rules, put = LOGPROB_RULES, object.__setattr__
        put(self, "merge", rules.member("ReductionSpec.merge", self.merge, MergeKind))
        put(self, "merge_axis", rules.member("ReductionSpec.merge_axis", self.merge_axis, MergeAxis))
        put(self, "acc_dtype", rules.member("ReductionSpec.acc_dtype", self.acc_dtype, AccDtype))
        put(self, "order", rules.member("ReductionSpec.order", self.order, MergeOrder))
        put(self, "transport", rules.member("ReductionSpec.transport", self.transport, Transport))
        put(self, "downcast_at", rules.member("ReductionSpec.downcast_at", self.downcast_at, DowncastAt))
        put(self, "engine", rules.member("ReductionSpec.engine", self.engine, Engine))
        scope = rules.member("ReductionSpec.determinism_scope", self.determinism_scope, DeterminismScope)
        put(self, "determinism_scope", scope)
        put(self, "num_vocab_tiles", self._checked_tiles())
        self._check_against_merge()

    def _checked_tiles(self) -> int | None:
        field = "ReductionSpec.num_vocab_tiles"
        if self.merge is not MergeKind.MAX_SUMEXP_TILES:
            if self.num_vocab_tiles is not None:
                rule = f"must be None, because merge={self.merge} has no tiles"
                LOGPROB_RULES.fail(
                    field, self.num_vocab_tiles, rule, f"{_BUILDERS[MergeKind.MAX_SUMEXP_TILES]} has them"
                )
            return None
        if self.num_vocab_tiles is None:
            return DEFAULT_NUM_VOCAB_TILES
        return LOGPROB_RULES.integer(
            field, self.num_vocab_tiles, minimum=1, remedy=f"pass {DEFAULT_NUM_VOCAB_TILES}"
        )

    def _check_against_merge(self) -> None:
        merge, remedy = self.merge, f"{_BUILDERS[self.merge]} sets what belongs to it"
        if self.order is not _ORDERS[merge]:
            rule = f"merge={merge} needs order={_ORDERS[merge]}"
            LOGPROB_RULES.fail("ReductionSpec.order", self.order, rule, remedy)
        if self.transport not in _TRANSPORTS[merge]:
            rule = f"merge={merge} needs transport={' | '.join(_TRANSPORTS[merge])}"
            LOGPROB_RULES.fail("ReductionSpec.transport", self.transport, rule, remedy)
        if not _STRONGEST_SCOPES[merge].covers(self.determinism_scope):
            rule = f"merge={merge} keeps at most {_STRONGEST_SCOPES[merge]}"
            LOGPROB_RULES.fail("ReductionSpec.determinism_scope", self.determinism_scope, rule, remedy)

    @classmethod
    def exact(cls, transport: Transport = Transport.PACKED_ALL_GATHER) -> ReductionSpec:
        """Exact integer words: the same bits in every layout."""
        return cls(transport=transport)

    @classmethod
    def tiled(cls, num_vocab_tiles: int = DEFAULT_NUM_VOCAB_TILES) -> ReductionSpec:
        """fp32 (max, sumexp) per tile in global order: the same bits for every tile-aligned TP split."""
        return cls(
            merge=MergeKind.MAX_SUMEXP_TILES,
            order=MergeOrder.GLOBAL_TILE_ORDER,
            determinism_scope=DeterminismScope.CROSS_TP_BITWISE,
            num_vocab_tiles=num_vocab_tiles,
        )

    @classmethod
    def naive(cls) -> ReductionSpec:
        """fp32 log-sum-exp per shard, then a float all-reduce: the same bits for one fixed topology only."""
        return cls(
            merge=MergeKind.SHARD_LSE,
            order=MergeOrder.RANK_ORDER,
            transport=Transport.ALL_REDUCE_FLOAT,
            determinism_scope=DeterminismScope.FIXED_TOPOLOGY,
        )

    def __str__(self) -> str:
        tiles = "" if self.num_vocab_tiles is None else f"({self.num_vocab_tiles})"
        return f"{self.merge}{tiles} by {self.transport}, {self.determinism_scope}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> ReductionSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOGPROB_RULES)
