"""fp32 values as bit patterns in int64: how floats travel through integer exchanges."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fp32_bits", "from_fp32_bits"]


def fp32_bits(values: Tensor) -> Tensor:
    """The bit patterns of fp32 values, as int64 in [0, 2^32)."""
    return values.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def from_fp32_bits(bits: Tensor) -> Tensor:
    """The fp32 values of patterns in [0, 2^32)."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
