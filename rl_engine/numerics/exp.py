"""Elementwise exp with its relatives, on an emulated fused multiply-add, the same bits on every device.

The operations used are IEEE add, multiply, compare and select, and integer arithmetic on bit patterns
(docs/numerics.md, sections 1 and 7). The fused operation is emulated: a product of two fp32 numbers is exact
in float64, the float64 sum is rounded to odd, and rounding that to fp32 gives the once-rounded result (Boldo
& Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_engine.numerics import constants as C

__all__ = ["exp2_poly", "exp32", "expm1_32", "fma32", "phi32", "scale_by_power_of_two"]


def fma32(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Fused multiply-add of fp32 values, rounded once.

    Equals fl32(a·b + c). At least one argument is a tensor; numbers must be exactly representable in fp32.

    Args:
        a: fp32 tensor or number.
        b: fp32 tensor or number.
        c: fp32 tensor or number.

    Returns:
        fp32 tensor of the broadcast shape.
    """
    a64, b64, c64 = (v.double() if isinstance(v, Tensor) else v for v in (a, b, c))
    product = a64 * b64  # exact: 24 + 24 bits
    total = product + c64
    assert isinstance(total, Tensor)
    # TwoSum: the exact rounding error of `total`.
    virtual = total - product
    error = (product - (total - virtual)) + (c64 - virtual)
    bits = total.view(torch.int64)
    # Round to odd: an inexact even result moves one step towards the exact value.
    towards_zero = (error < 0) != (total < 0)
    step = torch.where(towards_zero, -1, 1)
    fix = (error != 0) & ((bits & 1) == 0) & error.isfinite()
    return (bits + torch.where(fix, step, 0)).view(torch.float64).float()


def exp2_poly(r: Tensor) -> Tensor:
    """2^r on [−1/2, 1/2] by six fma (0.95 ulp, exactly 1 at 0)."""
    p: Tensor = fma32(r, C.EXP2_POLY[6], C.EXP2_POLY[5])
    for c in reversed(C.EXP2_POLY[:5]):
        p = fma32(p, r, c)
    return p


def scale_by_power_of_two(p: Tensor, shift: Tensor) -> Tensor:
    """p·2^shift for fp32 p in [1/2, 2) and int32 shift, by a wrapping add to the exponent field."""
    return (p.view(torch.int32) + (shift << 23)).view(torch.float32)


def exp32(x: Tensor) -> Tensor:
    """Natural exponential of fp32, within 1.15 ulp, +inf above 88.7228 and +0 below −87.3365.

    Args:
        x: fp32, any shape. NaN stays NaN.

    Returns:
        fp32 tensor like `x`.
    """
    inside = x.clamp(C.EXP_MIN, C.EXP_MAX)  # NaN passes through, and is selected at the end
    inside = torch.where(x.isnan(), 0.0, inside)
    t = fma32(inside, C.EXP_L_HI, C.MAGIC)
    k = t - C.MAGIC
    r = fma32(inside, C.EXP_L_HI, -k)
    r = fma32(inside, C.EXP_L_LO, r)
    value = scale_by_power_of_two(exp2_poly(r), k.to(torch.int32))
    value = torch.where(x > C.EXP_MAX, torch.inf, value)
    value = torch.where(x < C.EXP_MIN, 0.0, value)
    return torch.where(x.isnan(), x, value)


def phi32(d: Tensor) -> Tensor:
    """exp(d) − 1 − d for fp32 d: never negative, and accurate where the plain form cancels.

    Args:
        d: fp32, any shape.

    Returns:
        fp32 tensor like `d`.
    """
    small = d.clamp(-1.0, 1.0)
    q: Tensor = fma32(small, C.PHI_POLY[8], C.PHI_POLY[7])
    for c in reversed(C.PHI_POLY[:7]):
        q = fma32(q, small, c)
    return torch.where(d.abs() <= 1.0, (small * small) * q, (exp32(d) - 1.0) - d)


def expm1_32(d: Tensor) -> Tensor:
    """exp(d) − 1 for fp32 d, accurate near 0: the derivative of :func:`phi32`."""
    return torch.where(d.abs() <= 1.0, d + phi32(d), exp32(d) - 1.0)
