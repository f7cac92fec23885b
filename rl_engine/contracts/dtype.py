"""The dtypes that logits may have."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from rl_engine.contracts._checks import LOGPROB_RULES

__all__ = ["LogitsDtype"]


class LogitsDtype(StrEnum):
    """The dtype of the logits."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @classmethod
    def parse(cls, value: object) -> LogitsDtype:
        """A member, its name, or a torch or numpy dtype, which is read by its spelling.

        Raises:
            LogprobContractError: The dtype is none of the three.

        Example:
            >>> LogitsDtype.parse("torch.bfloat16")
            <LogitsDtype.BF16: 'bf16'>
        """
        name = str(value).removeprefix("torch.").lower()
        found = _DTYPE_SPELLINGS.get(name)
        if found is None:
            rule = "must be one of bf16 | fp16 | fp32, the dtype of the logits"
            LOGPROB_RULES.fail("LogprobContract.dtype", value, rule, "cast the logits, or pass their dtype")
        return found

    @property
    def torch_name(self) -> str:
        """The attribute of `torch` that is this dtype: `bfloat16`, `float16` or `float32`."""
        return {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[self.value]


_DTYPE_SPELLINGS: Final = {
    "bf16": LogitsDtype.BF16,
    "bfloat16": LogitsDtype.BF16,
    "fp16": LogitsDtype.FP16,
    "float16": LogitsDtype.FP16,
    "half": LogitsDtype.FP16,
    "fp32": LogitsDtype.FP32,
    "float32": LogitsDtype.FP32,
    "float": LogitsDtype.FP32,
}
