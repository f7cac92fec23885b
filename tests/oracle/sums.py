"""The exact sum of section 6: a fraction, its limbs, and its correctly rounded closings."""

from __future__ import annotations

import math
from fractions import Fraction

from tests.oracle.ieee import FP32, FP64, INF, NAN, Format, bits32, round_fraction

LIMBS = 10
UNIT = Fraction(1, 1 << 149)


def limbs_of(value: float) -> list[int]:
    """The 14 integers that one fp32 value adds."""
    out = [0] * 14
    out[13] = 1
    pattern = bits32(value)
    if math.isnan(value):
        out[10] = 1
        return out
    if math.isinf(value):
        out[11 if value > 0 else 12] = 1
        return out
    field, m = (pattern >> 23) & 0xFF, pattern & 0x7FFFFF
    if field:
        m |= 1 << 23
    q = max(field, 1) - 1
    limb, shift = divmod(q, 32)
    sign = -1 if pattern >> 31 else 1
    wide = m << shift
    out[limb] += sign * (wide & 0xFFFFFFFF)
    out[limb + 1] += sign * (wide >> 32)
    return out


def accumulate(values: list[float]) -> list[int]:
    """The accumulator of several values."""
    return [sum(column) for column in zip([0] * 14, *(limbs_of(v) for v in values), strict=True)]


def normalise(acc: list[int]) -> list[int]:
    """Limbs 0 to 8 in [0, 2^32), limb 9 signed, the same exact sum."""
    total = sum(limb << (32 * i) for i, limb in enumerate(acc[:LIMBS]))
    out = [(total >> (32 * i)) & 0xFFFFFFFF for i in range(LIMBS - 1)]
    return [*out, total >> (32 * (LIMBS - 1)), *acc[LIMBS:]]


def exact(values: list[float]) -> Fraction:
    """The exact sum of the finite values."""
    return sum((Fraction(v) for v in values if math.isfinite(v)), Fraction(0))


def close(values: list[float], fmt: Format) -> float:
    """The correctly rounded sum; NaN and infinities by the page's rule."""
    if any(math.isnan(v) for v in values) or (INF in values and -INF in values):
        return NAN
    for special in (INF, -INF):
        if special in values:
            return special
    return round_fraction(exact(values), fmt)


def close32(values: list[float]) -> float:
    """The correctly rounded fp32 sum."""
    return close(values, FP32)


def close64(values: list[float]) -> float:
    """The correctly rounded float64 sum."""
    return close(values, FP64)
