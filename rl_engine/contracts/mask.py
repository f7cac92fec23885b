"""Which tokens of a rank count."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any, cast

from rl_engine.contracts._checks import LOGPROB_RULES

__all__ = ["DEFAULT_IGNORE_INDEX", "MaskMode", "MaskSpec"]

#: The ignore index of torch's cross entropy, which data loaders write into their labels.
DEFAULT_IGNORE_INDEX = -100


class MaskMode(StrEnum):
    """How a backend learns which tokens count: by a mask of its own, or only by the filler in the targets."""

    EXPLICIT_ACTIVE_MASK = "explicit_active_mask"
    IGNORE_INDEX = "ignore_index"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MaskSpec:
    """One bool per token: the active mask alone decides which tokens count.

    Targets of inactive tokens may hold `ignore_index`, or anything else. A mask that changes from step to
    step is better handed to the call, as a tensor, than built into a contract.

    Attributes:
        num_tokens: Tokens of this rank.
        active_mask: One bool per token; any iterable of bools is taken, tensors and arrays included.
        ignore_index: The filler of inactive targets; it must lie outside the real vocabulary.

    Raises:
        LogprobContractError: The mask's length is not `num_tokens`, or it holds something other than bools.

    Example:
        >>> mask = MaskSpec(4, [True, False, True, True])
        >>> mask.active_token_count, str(mask)
        (3, 'mask 3/4 active')
    """

    num_tokens: int
    active_mask: tuple[bool, ...] = field(repr=False)
    ignore_index: int = DEFAULT_IGNORE_INDEX

    def __post_init__(self) -> None:
        rules, put = LOGPROB_RULES, object.__setattr__
        count = rules.integer(
            "MaskSpec.num_tokens", self.num_tokens, minimum=0, remedy="pass the number of this rank's tokens"
        )
        put(self, "num_tokens", count)
        mask = rules.iterable("MaskSpec.active_mask", self.active_mask, "bools")
        mask = tuple(
            item if isinstance(item, bool) else _as_bool(index, item) for index, item in enumerate(mask)
        )
        put(self, "active_mask", mask)
        if len(mask) != count:
            rule = f"must hold one bool per token: num_tokens is {count}, got {len(mask)}"
            rules.fail("MaskSpec.active_mask", mask, rule, "flatten the mask as the logits are flattened")
        ignored = rules.integer(
            "MaskSpec.ignore_index", self.ignore_index, remedy=f"pass {DEFAULT_IGNORE_INDEX}"
        )
        put(self, "ignore_index", ignored)

    @classmethod
    def all_active(cls, num_tokens: int, ignore_index: int = DEFAULT_IGNORE_INDEX) -> MaskSpec:
        """A mask under which every token counts."""
        remedy = "pass the number of this rank's tokens"
        count = LOGPROB_RULES.integer("MaskSpec.num_tokens", num_tokens, minimum=0, remedy=remedy)
        return cls(count, (True,) * count, ignore_index)

    @property
    def active_token_count(self) -> int:
        """Number of tokens that count."""
        return sum(self.active_mask)

    @property
    def active_mask_sha256(self) -> str:
        """SHA-256, in hex, of the mask as one byte 0 or 1 per token; computed when read."""
        return hashlib.sha256(bytes(self.active_mask)).hexdigest()

    def __str__(self) -> str:
        text = f"mask {self.active_token_count}/{self.num_tokens} active"
        return (
            text if self.ignore_index == DEFAULT_IGNORE_INDEX else f"{text}, ignore_index {self.ignore_index}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The mask as JSON types: the active tokens as [start, end) runs, and the digest of them."""
        runs: list[list[int]] = []
        position = 0
        for active, items in groupby(self.active_mask):
            start, position = position, position + sum(1 for _ in items)
            if active:
                runs.append([start, position])
        return {
            "num_tokens": self.num_tokens,
            "active_runs": runs,
            "active_mask_sha256": self.active_mask_sha256,
            "ignore_index": self.ignore_index,
        }

    @classmethod
    def from_dict(cls, data: object) -> MaskSpec:
        """The mask that `to_dict` described.

        Raises:
            LogprobContractError: The runs are not ascending within [0, num_tokens), or are not those of the
                digest.
        """
        rules, name = LOGPROB_RULES, "MaskSpec.from_dict"
        remedy = "pass the output of to_dict()"
        given = dict(cast("Mapping[str, object]", data)) if isinstance(data, Mapping) else {}
        if not {"num_tokens", "active_runs"} <= given.keys():
            rules.fail(name, cast(object, data), "must be a mapping with num_tokens and active_runs", remedy)
        count = rules.integer("MaskSpec.num_tokens", given["num_tokens"], minimum=0, remedy=remedy)
        mask: list[bool] = []
        for item in rules.iterable("MaskSpec.active_runs", given["active_runs"], "(start, end) pairs"):
            pair = rules.iterable("MaskSpec.active_runs", item, "two integers")
            run = [rules.integer("MaskSpec.active_runs", number, minimum=0, remedy=remedy) for number in pair]
            if len(run) != 2 or not len(mask) <= run[0] < run[1] <= count:
                rules.fail(
                    "MaskSpec.active_runs",
                    item,
                    f"runs must be ascending (start, end) within [0, {count})",
                    remedy,
                )
            mask += [False] * (run[0] - len(mask)) + [True] * (run[1] - run[0])
        mask += [False] * (count - len(mask))
        spec = cls(count, tuple(mask), cast(int, given.get("ignore_index", DEFAULT_IGNORE_INDEX)))
        digest = given.get("active_mask_sha256", spec.active_mask_sha256)
        if digest != spec.active_mask_sha256:
            rules.fail("MaskSpec.active_mask_sha256", digest, "is not the digest of the active runs", remedy)
        return spec


def _as_bool(index: int, item: object) -> bool:
    # numpy's bool scalar is no bool, but says so of itself.
    if str(getattr(item, "dtype", "")).endswith("bool") and not getattr(item, "shape", ()):
        return bool(item)
    LOGPROB_RULES.fail(
        f"MaskSpec.active_mask[{index}]",
        item,
        f"must be a bool, got {type(item).__name__}",
        "pass a one-dimensional mask, such as (targets != -100)",
    )
