"""Section 7, one token at a time: exp, phi, expm1, the clipped surrogate, the KL estimators."""

from __future__ import annotations

import math
from typing import NamedTuple

from tests.oracle.ieee import INF, NAN, add32, bits32, fl32, fma32, from_bits32, hex_floats, mul32, sub32
from tests.oracle.rows import MAGIC, poly

EXP_MAX = float.fromhex("0x1.62e42ep+6")
EXP_MIN = float.fromhex("-0x1.5d589ep+6")
LOG2E_HIGH = float.fromhex("0x1.715476p+0")
LOG2E_LOW = float.fromhex("0x1.4ae0cp-26")
PHI_POLY = hex_floats(
    "0x1p-1 0x1.555556p-3 0x1.555558p-5 0x1.1110dep-7 0x1.6c14dcp-10 0x1.a02432p-13 0x1.a0de14p-16 "
    "0x1.752cfp-19 0x1.11e61ap-22"
)


def exp(x: float) -> float:
    """exp in fp32."""
    if math.isnan(x):
        return NAN
    if x > EXP_MAX:
        return INF
    if x < EXP_MIN:
        return 0.0
    k = sub32(fma32(x, LOG2E_HIGH, MAGIC), MAGIC)
    r = fma32(x, LOG2E_HIGH, -k)
    r = fma32(x, LOG2E_LOW, r)
    return from_bits32(bits32(poly(r)) + (int(k) << 23))


def phi(d: float) -> float:
    """exp(d) - 1 - d."""
    if abs(d) <= 1.0:
        q = PHI_POLY[-1]
        for c in reversed(PHI_POLY[:-1]):
            q = fma32(q, d, c)
        return mul32(mul32(d, d), q)
    return sub32(sub32(exp(d), 1.0), d)


def expm1(d: float) -> float:
    """exp(d) - 1."""
    if abs(d) <= 1.0:
        return add32(d, phi(d))
    return sub32(exp(d), 1.0)


def minimum(a: float, b: float) -> float:
    """min that propagates NaN."""
    return NAN if math.isnan(a) or math.isnan(b) else min(a, b)


def maximum(a: float, b: float) -> float:
    """max that propagates NaN."""
    return NAN if math.isnan(a) or math.isnan(b) else max(a, b)


class Term(NamedTuple):
    """A value, its derivative in logp, and whether the guard was met."""

    value: float
    derivative: float
    guarded: bool


def surrogate(
    logp: float,
    old: float,
    advantage: float,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    guard: float = 80.0,
) -> Term:
    """The clipped surrogate of one token."""
    guard = fl32(guard)
    delta = sub32(logp, old)
    guarded = delta > guard
    ratio = exp(minimum(delta, guard))
    low, high = fl32(1.0 - eps_low), fl32(1.0 + eps_high)
    s1 = mul32(ratio, advantage)
    s2 = mul32(minimum(maximum(ratio, low), high), advantage)
    return Term(-minimum(s1, s2), -s1 if s1 <= s2 and not guarded else 0.0, guarded)


def kl_k3(logp: float, ref: float, guard: float = 80.0) -> Term:
    """exp(d) - d - 1 with d = ref - logp."""
    guard = fl32(guard)
    d = sub32(ref, logp)
    guarded = d > guard
    d = minimum(d, guard)
    return Term(phi(d), 0.0 if guarded else -expm1(d), guarded)


def kl_k1(logp: float, ref: float) -> Term:
    """logp - ref."""
    return Term(sub32(logp, ref), 1.0, False)
