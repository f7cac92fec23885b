"""Exact sums of fp32 values in integer limbs: any order, any split, any device, the same bits.

A long accumulator in the sense of Kulisch ("Computer Arithmetic and Validity", 2008), docs/numerics.md
section 6. A sum is a row of 14 int64: ten limbs of 32 bits, limb i of weight 2^(32·i − 149), then the counts
of NaN, +inf, −inf and of values. Rows add as integers, so partial sums of ranks go through an ordinary
integer all-reduce.

Shapes: N values, S segments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.numerics import constants as C
from rl_engine.numerics.bits import fp32_bits

__all__ = ["accumulate", "close_fp32", "close_fp64", "normalise"]

_LIMB_MASK = (1 << C.LIMB_BITS) - 1


def accumulate(values: Tensor, index: Tensor, num_segments: int) -> Tensor:
    """Sum fp32 values exactly into segments.

    Args:
        values: [N] fp32, any finite or non-finite value.
        index: [N] int64 in [0, num_segments): the segment of each value.
        num_segments: S.

    Returns:
        [S, 14] int64 accumulators (not carry-normalised; at most 2^31 values a segment).
    """
    bits = fp32_bits(values.detach())
    exponent = (bits >> 23) & 0xFF
    mantissa = bits & 0x7FFFFF
    finite = exponent != 0xFF
    significand = torch.where(finite, mantissa | (torch.where(exponent > 0, 1, 0) << 23), 0)
    position = torch.where(finite, (exponent - 1).clamp(min=0), 0)
    limb = position // C.LIMB_BITS
    shifted = significand << (position % C.LIMB_BITS)  # < 2^55
    sign = 1 - 2 * (bits >> 31)
    base = index * C.ACC_COLUMNS
    out = torch.zeros(num_segments * C.ACC_COLUMNS, dtype=torch.int64, device=values.device)
    out.scatter_add_(0, base + limb, sign * (shifted & _LIMB_MASK))
    out.scatter_add_(0, base + limb + 1, sign * (shifted >> C.LIMB_BITS))
    nan = values.isnan().to(torch.int64)
    inf = values.isinf().to(torch.int64)
    special = torch.where(sign > 0, C.ACC_POSINF, C.ACC_NEGINF)
    out.scatter_add_(0, base + C.ACC_NAN, nan)
    out.scatter_add_(0, base + special, inf)
    out.scatter_add_(0, base + C.ACC_COUNT, torch.ones_like(base))
    return out.view(num_segments, C.ACC_COLUMNS)


def normalise(acc: Tensor) -> Tensor:
    """Carry-normalise: limbs 0…8 in [0, 2^32), limb 9 signed. The value is unchanged.

    Args:
        acc: [..., 14] int64.

    Returns:
        [..., 14] int64, a new tensor.
    """
    columns = list(acc.unbind(-1))
    for i in range(C.NUM_LIMBS - 1):
        columns[i + 1] = columns[i + 1] + (columns[i] >> C.LIMB_BITS)
        columns[i] = columns[i] & _LIMB_MASK
    return torch.stack(columns, -1)


def _leading_bits(acc: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sign, the 64 leading bits as two halves, whether anything lies below, and the exponent of the last.

    |value| = (high·2^32 + low + [sticky])·2^exponent with high ≥ 2^31, or high = low = 0 for a zero sum.
    """
    acc = normalise(acc)
    negative = acc[..., C.NUM_LIMBS - 1] < 0
    flipped = acc.clone()
    flipped[..., : C.NUM_LIMBS] = -flipped[..., : C.NUM_LIMBS]
    limbs = torch.where(negative[..., None], normalise(flipped), acc)[..., : C.NUM_LIMBS]
    nonzero = limbs != 0
    place = torch.arange(C.NUM_LIMBS, device=acc.device)
    top = torch.where(nonzero, place, 0).amax(-1, keepdim=True)
    padded = torch.nn.functional.pad(limbs, (2, 0))  # two limbs of zeros below the lowest
    first, second, third = (padded.gather(-1, top + 2 - i)[..., 0] for i in range(3))
    # bit length of the leading limb, which fits 32 bits and so is exact in float64
    length = torch.frexp(first.double()).exponent.to(torch.int64)
    shift = C.LIMB_BITS - length
    high = ((first << shift) | (second >> length)) & _LIMB_MASK
    low = ((second << shift) | (third >> length)) & _LIMB_MASK
    rest = (third << shift) & _LIMB_MASK
    below = (nonzero & (place < top - 2)).any(-1)
    sticky = (rest != 0) | below
    exponent = C.LIMB_BITS * top[..., 0] + length - 64 - 149
    return negative, high, low, sticky, exponent


def _assemble(acc: Tensor, negative: Tensor, mantissa: Tensor, exponent: Tensor) -> Tensor:
    """±mantissa·2^exponent in float64 (mantissa ≤ 2^53, so exact), with the specials that rode along."""
    power = ((exponent + 1023) << 52).view(torch.float64)
    value = mantissa.double() * power
    value = torch.where(negative, -value, value)
    nan, posinf, neginf = (acc[..., i] > 0 for i in (C.ACC_NAN, C.ACC_POSINF, C.ACC_NEGINF))
    value = torch.where(posinf, torch.inf, value)
    value = torch.where(neginf, -torch.inf, value)
    return torch.where(nan | (posinf & neginf), torch.nan, value)


def close_fp64(acc: Tensor) -> Tensor:
    """The correctly rounded float64 of each sum.

    Args:
        acc: [..., 14] int64 accumulators.

    Returns:
        [...] float64; an exact zero gives +0.0.
    """
    negative, high, low, sticky, exponent = _leading_bits(acc)
    mantissa = (high << 21) | (low >> 11)  # 53 bits
    remainder = low & 0x7FF
    up = (remainder > 0x400) | ((remainder == 0x400) & (sticky | ((mantissa & 1) == 1)))
    return _assemble(acc, negative, mantissa + up.to(torch.int64), exponent + 11)


def close_fp32(acc: Tensor) -> Tensor:
    """The correctly rounded fp32 of each sum, subnormals and overflow included.

    Args:
        acc: [..., 14] int64 accumulators.

    Returns:
        [...] fp32; an exact zero gives +0.0.
    """
    negative, high, low, sticky, exponent = _leading_bits(acc)
    inexact = ((low & 0x7FF) != 0) | sticky
    mantissa = (high << 21) | (low >> 11) | inexact.to(torch.int64)  # rounded to odd: safe to round again
    return _assemble(acc, negative, mantissa, exponent + 11).float()
