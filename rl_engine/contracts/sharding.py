"""Which columns of the vocabulary each tensor-parallel rank holds.

Legend: real vocabulary [0, real), padding columns [real, padded), one half-open range of [0, padded) per
rank.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rl_engine.contracts._checks import LOGPROB_RULES
from rl_engine.contracts._json import from_mapping, to_mapping

__all__ = ["ShardingSpec"]


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """The vocabulary shards of all ranks of one TP group, and this rank's place among them.

    Attributes:
        tp_rank: This rank, in [0, tp_world_size).
        tp_world_size: Number of vocabulary shards.
        vocab_shard_bounds: [start, end) of every rank in rank order: a contiguous partition of [0,
            padded_vocab_size). Shards may be uneven, unaligned and empty.
        real_vocab_size: Columns that belong to the distribution.
        padded_vocab_size: Columns that the logits have over all ranks; the rest is padding and never counts.
        cp_rank: This rank on the context-parallel axis: carried along, never merged over.
        cp_world_size: Size of the context-parallel axis.

    Raises:
        LogprobContractError: A rank is outside its world, the bounds do not tile the padded vocabulary, or
            the real vocabulary is larger than the padded one.

    Example:
        >>> shards = ShardingSpec.even(151936, tp_rank=1, tp_world_size=4, padded_vocab_size=152064)
        >>> shards.local_vocab_start, shards.local_vocab_end, shards.owner_rank(151935)
        (38016, 76032, 3)
    """

    tp_rank: int
    tp_world_size: int
    vocab_shard_bounds: tuple[tuple[int, int], ...]
    real_vocab_size: int
    padded_vocab_size: int
    cp_rank: int = 0
    cp_world_size: int = 1

    def __post_init__(self) -> None:
        rules, put = LOGPROB_RULES, object.__setattr__
        name = "ShardingSpec"
        world = "pass the size of the process group"
        rank = "pass this process's rank in the group"
        build = "ShardingSpec.even(...) builds them"
        put(
            self,
            "tp_world_size",
            rules.integer(f"{name}.tp_world_size", self.tp_world_size, minimum=1, remedy=world),
        )
        tp_rank = rules.integer(
            f"{name}.tp_rank", self.tp_rank, minimum=0, below=self.tp_world_size, remedy=rank
        )
        put(self, "tp_rank", tp_rank)
        put(
            self,
            "cp_world_size",
            rules.integer(f"{name}.cp_world_size", self.cp_world_size, minimum=1, remedy=world),
        )
        cp_rank = rules.integer(
            f"{name}.cp_rank", self.cp_rank, minimum=0, below=self.cp_world_size, remedy=rank
        )
        put(self, "cp_rank", cp_rank)
        size = "pass the model's vocabulary size"
        real = rules.integer(f"{name}.real_vocab_size", self.real_vocab_size, minimum=1, remedy=size)
        put(self, "real_vocab_size", real)
        padded = rules.integer(
            f"{name}.padded_vocab_size",
            self.padded_vocab_size,
            minimum=1,
            remedy="pass the number of logits columns over all ranks",
        )
        put(self, "padded_vocab_size", padded)
        if real > padded:
            rule = f"must not exceed padded_vocab_size = {padded}"
            rules.fail(
                f"{name}.real_vocab_size", real, rule, "pass the real size first, the padded size second"
            )
        bounds = rules.partition(
            f"{name}.vocab_shard_bounds",
            self.vocab_shard_bounds,
            parts=self.tp_world_size,
            total=padded,
            parts_name="tp_world_size",
            total_name="padded_vocab_size",
            remedy=build,
        )
        put(self, "vocab_shard_bounds", bounds)

    @classmethod
    def even(
        cls,
        real_vocab_size: int,
        tp_rank: int = 0,
        tp_world_size: int = 1,
        *,
        padded_vocab_size: int | None = None,
        multiple_of: int = 1,
        cp_rank: int = 0,
        cp_world_size: int = 1,
    ) -> ShardingSpec:
        """Shards of equal width but for the last ones, as `torch.chunk` and DTensor's `Shard(-1)` cut them.

        Args:
            real_vocab_size: Columns that belong to the distribution.
            tp_rank: This rank.
            tp_world_size: Number of shards; trailing ones are empty where the vocabulary is too small.
            padded_vocab_size: Columns over all ranks; the real size where None.
            multiple_of: Every shard but the last non-empty one is a multiple of this wide (a tile's width,
                for instance).
            cp_rank: Carried along.
            cp_world_size: Carried along.

        Returns:
            The spec of this rank.

        Example:
            >>> ShardingSpec.even(6, tp_rank=0, tp_world_size=4).vocab_shard_bounds
            ((0, 2), (2, 4), (4, 6), (6, 6))
        """
        rules = LOGPROB_RULES
        padded = real_vocab_size if padded_vocab_size is None else padded_vocab_size
        total = rules.integer(
            "ShardingSpec.padded_vocab_size", padded, minimum=1, remedy="pass the model's vocabulary size"
        )
        parts = rules.integer(
            "ShardingSpec.tp_world_size", tp_world_size, minimum=1, remedy="pass the group's size"
        )
        step = rules.integer(
            "ShardingSpec.even multiple_of", multiple_of, minimum=1, remedy="pass 1 for no alignment"
        )
        width = -(-total // parts)
        width = -(-width // step) * step
        cuts = [min(part * width, total) for part in range(parts + 1)]
        return cls(
            tp_rank=tp_rank,
            tp_world_size=parts,
            vocab_shard_bounds=tuple(pairwise(cuts)),
            real_vocab_size=real_vocab_size,
            padded_vocab_size=total,
            cp_rank=cp_rank,
            cp_world_size=cp_world_size,
        )

    @classmethod
    def from_mesh(
        cls,
        tp: object,
        real_vocab_size: int,
        *,
        padded_vocab_size: int | None = None,
        multiple_of: int = 1,
        cp: object = None,
    ) -> ShardingSpec:
        """Even shards over a mesh axis.

        Args:
            tp: Anything with a rank and a size, as attributes or methods: a process group, a one-dimensional
                DeviceMesh, an axis of this package. None is a single rank.
            real_vocab_size: Columns that belong to the distribution.
            padded_vocab_size: Columns over all ranks; the real size where None.
            multiple_of: Alignment of the shards, see `even`.
            cp: The context-parallel axis, likewise.

        Returns:
            The spec of this rank.

        Raises:
            LogprobContractError: `tp` or `cp` has no rank or no size.
        """
        tp_rank, tp_world_size = _rank_and_size("tp", tp)
        cp_rank, cp_world_size = _rank_and_size("cp", cp)
        return cls.even(
            real_vocab_size,
            tp_rank,
            tp_world_size,
            padded_vocab_size=padded_vocab_size,
            multiple_of=multiple_of,
            cp_rank=cp_rank,
            cp_world_size=cp_world_size,
        )

    @property
    def local_vocab_start(self) -> int:
        """First column of this rank's shard."""
        return self.vocab_shard_bounds[self.tp_rank][0]

    @property
    def local_vocab_end(self) -> int:
        """One past the last column of this rank's shard."""
        return self.vocab_shard_bounds[self.tp_rank][1]

    @property
    def local_vocab_size(self) -> int:
        """Columns of this rank's logits, padding included."""
        return self.local_vocab_end - self.local_vocab_start

    @property
    def local_real_size(self) -> int:
        """Columns of this rank's logits that belong to the distribution; they come first."""
        return max(0, min(self.local_vocab_end, self.real_vocab_size) - self.local_vocab_start)

    @property
    def num_padding_columns(self) -> int:
        """Columns over all ranks that do not belong to the distribution."""
        return self.padded_vocab_size - self.real_vocab_size

    @property
    def has_empty_shards(self) -> bool:
        """Whether some rank holds no column at all."""
        return any(start == end for start, end in self.vocab_shard_bounds)

    def owner_rank(self, token_id: int) -> int:
        """The rank whose shard holds a token of the real vocabulary.

        Raises:
            LogprobContractError: The token is not an integer in [0, real_vocab_size).
        """
        remedy = f"token ids lie in [0, {self.real_vocab_size})"
        token = LOGPROB_RULES.integer(
            "ShardingSpec.owner_rank token_id", token_id, minimum=0, below=self.real_vocab_size, remedy=remedy
        )
        return bisect_right([end for _, end in self.vocab_shard_bounds], token)

    def __str__(self) -> str:
        padding = f" of {self.padded_vocab_size} padded" if self.num_padding_columns else ""
        text = f"vocab {self.real_vocab_size}{padding}, tp {self.tp_rank}/{self.tp_world_size}"
        text += f" [{self.local_vocab_start}, {self.local_vocab_end})"
        return text if self.cp_world_size == 1 else f"{text}, cp {self.cp_rank}/{self.cp_world_size}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> ShardingSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOGPROB_RULES)


def _rank_and_size(name: str, axis: object) -> tuple[int, int]:
    if axis is None:
        return 0, 1
    dimensions = getattr(axis, "ndim", 1)
    if dimensions != 1:
        rule = f"must be one axis, got {dimensions} dimensions"
        LOGPROB_RULES.fail(f"ShardingSpec.from_mesh {name}", axis, rule, "pass one of them, e.g. mesh['tp']")
    # A DeviceMesh answers `get_local_rank()`; process groups have methods, this package's axes attributes.
    rank = getattr(axis, "get_local_rank", getattr(axis, "rank", None))
    size = getattr(axis, "size", None)
    rank, size = rank() if callable(rank) else rank, size() if callable(size) else size
    if rank is None or size is None:
        rule = "must have a rank and a size"
        LOGPROB_RULES.fail(
            f"ShardingSpec.from_mesh {name}",
            axis,
            rule,
            "pass a process group or a one-dimensional DeviceMesh",
        )
    remedy = "pass a group that this process belongs to"
    return (
        LOGPROB_RULES.integer(f"ShardingSpec.from_mesh {name}.rank", rank, minimum=0, remedy=remedy),
        LOGPROB_RULES.integer(f"ShardingSpec.from_mesh {name}.size", size, minimum=1, remedy=remedy),
    )
