"""Rows of logits, by sections 1 to 5 of the page: partials, their merge, closing, gradient, entropy."""

from __future__ import annotations

import math
from typing import NamedTuple

from tests.oracle.ieee import (
    FORMATS,
    NAN,
    add32,
    bits32,
    fl32,
    fma32,
    from_bits32,
    hex_floats,
    mul32,
    sub32,
    to_format,
)

LOG2E = float.fromhex("0x1.71547652b82fep+0")
MAGIC = 12582912.0
LN2_64 = float.fromhex("0x1.62e42fefa39efp-1")
LN2_32 = float.fromhex("0x1.62e430p-1")
EXP2_POLY = hex_floats(
    "0x1p+0 0x1.62e43p-1 0x1.ebfbdcp-3 0x1.c6aee8p-5 0x1.3b2d4cp-7 0x1.5f3e54p-10 0x1.41fbbcp-13"
)
LOG2_SERIES = hex_floats(
    "0x1.71547652b82fep+1 0x1.ec709dc3a03fdp-1 0x1.2776c50ef9bfep-1 0x1.a61762a7aded9p-2 "
    "0x1.484b13d7c02a9p-2 0x1.0c9a84994022dp-2 0x1.c68f568d31760p-3 0x1.89f3b1694cffep-3 "
    "0x1.5b9ac9b743f0dp-3 0x1.3703c1f4d0ffep-3 0x1.1964ec6fc9491p-3"
)
SQRT2 = float.fromhex("0x1.6a09e667f3bcdp+0")
EMPTY = -8388608
BEYOND = 4194322
DIGIT_MAGIC = [3.0, 3.0 * 2.0**-22, 3.0 * 2.0**-44]
FLAG_NAN, FLAG_POSINF, FLAG_TARGET = 1, 1 << 21, 1 << 42


def temperature_scale(temperature: float) -> float:
    """L, the one fp32 number that holds log2 e and the temperature."""
    return fl32(LOG2E / temperature)


def inverse_temperature(temperature: float) -> float:
    """INV_T, which every upstream gradient is multiplied by."""
    return fl32(1.0 / temperature)


def poly(r: float) -> float:
    """2^r on [-1/2, 1/2]."""
    p = EXP2_POLY[-1]
    for c in reversed(EXP2_POLY[:-1]):
        p = fma32(p, r, c)
    return p


class Scaled(NamedTuple):
    """g = 2^(k - e) * 2^r of one logit."""

    g: float
    k: int
    r: float


def exp2_scaled(x: float, scale: float, e: int) -> Scaled:
    """Section 1: the clamp, then g, k and r of the logit."""
    floor = fl32(float(e - 100) / scale)
    if x < floor:
        x = floor
    m = MAGIC - e
    t = fma32(x, scale, m)
    k = sub32(t, m)
    r = fma32(x, scale, -k)
    g = from_bits32(bits32(poly(r)) + (bits32(t) << 23))
    return Scaled(g, int(k), r)


def digits(g: float) -> list[int]:
    """Section 2: three signed digits of g on the grids 2^-22, 2^-44, 2^-66."""
    out = []
    for magic in DIGIT_MAGIC:
        b = add32(g, magic)
        out.append(bits32(b) - bits32(magic))
        g = sub32(g, sub32(b, magic))
    return out


def reference_exponent(x_max: float, scale: float) -> int:
    """e of a set of logits without NaN and +inf; EMPTY and BEYOND outside the range."""
    t = fma32(x_max, scale, MAGIC)
    if t < 2.0**23:
        return EMPTY
    if t >= 2.0**24:
        return BEYOND
    k_max = int(t - MAGIC)
    return 22 * -(-(k_max + 2) // 22)


def partial(row: list[float], target: int, *, scale: float, real: int, entropy: bool = False) -> list[int]:
    """The int64 row `e, w0, w1, w2, flags, target_bits` (`h0, h1, h2`) of one rank's logits.

    `target` is local, and anything outside [0, real) is not owned here.
    """
    seen = row[:real]
    flags = 0
    target_bits = 0
    if 0 <= target < real:
        flags += FLAG_TARGET
        target_bits = bits32(row[target])
    has_nan = any(math.isnan(x) for x in seen)
    has_posinf = any(x == math.inf for x in seen)
    flags += FLAG_NAN * has_nan + FLAG_POSINF * has_posinf
    words, h_words = [0, 0, 0], [0, 0, 0]
    if has_nan or has_posinf or not seen:
        e = EMPTY
    else:
        x_max = max(seen)
        e = reference_exponent(x_max, scale)
        t = fma32(x_max, scale, MAGIC)
        if 2.0**23 <= t < 2.0**24:
            for x in seen:
                g, k, r = exp2_scaled(x, scale, e)
                d, dq = digits(g), digits(mul32(g, r))
                for i in range(3):
                    words[i] += d[i]
                    h_words[i] += d[i] * (k - e) + dq[i]
    return [e, *words, flags, target_bits] + (h_words if entropy else [])


def raise_exponent(part: list[int], e: int) -> list[int]:
    """The partial as it would be under a larger reference exponent."""
    if part[0] == e:
        return list(part)
    s = 3 if part[0] == EMPTY else (e - part[0]) // 22
    assert s > 0
    w, h = part[1:4], part[6:9]
    words = [w[i - s] if i >= s else 0 for i in range(3)]
    out = [e, *words, *part[4:6]]
    if h:
        out += [h[i - s] - 22 * s * w[i - s] if i >= s else 0 for i in range(3)]
    return out


def merge(parts: list[list[int]]) -> list[int]:
    """One partial of several ranks."""
    e = max(p[0] for p in parts)
    raised = [raise_exponent(p, e) for p in parts]
    return [e] + [sum(column) for column in zip(*(p[1:] for p in raised), strict=True)]


def carry(w: list[int]) -> list[int]:
    """Words 1 and 2 brought into [0, 2^22)."""
    w0, w1, w2 = w
    c = w2 >> 22
    w2 -= c << 22
    w1 += c
    c = w1 >> 22
    w1 -= c << 22
    w0 += c
    return [w0, w1, w2]


def words_to_float(w: list[int]) -> float:
    """S of carry-normalised words: two float64 additions."""
    assert 0 <= w[1] < 1 << 22 and 0 <= w[2] < 1 << 22
    return (float(w[0]) * 2.0**22 + float(w[1])) + float(w[2]) * 2.0**-22


def log2_parts(s: float) -> tuple[int, float]:
    """(j, log2m) with log2 s = j + log2m."""
    m, j = math.frexp(s)
    m, j = m * 2.0, j - 1
    if m > SQRT2:
        m, j = m / 2.0, j + 1
    u = (m - 1.0) / (m + 1.0)
    q = u * u
    acc = LOG2_SERIES[-1]
    for c in reversed(LOG2_SERIES[:-1]):
        acc = acc * q + c  # two roundings: CPython does not contract
    return j, u * acc


class Closed(NamedTuple):
    """One closed row; `entropy` is None where it was not asked for."""

    lse2: float
    logp: float
    lse: float
    entropy: float | None
    good: bool
    owned: bool


def close(part: list[int], scale: float) -> Closed:
    """Sections 3 and 5 for an active row."""
    e, flags, has_entropy = part[0], part[4], len(part) == 9
    owned = bool(flags >> 42)
    good = abs(e) <= 1 << 21 and flags & ((1 << 42) - 1) == 0
    if not good:
        return Closed(NAN, NAN, NAN, NAN if has_entropy else None, good, owned)
    s = words_to_float(carry(part[1:4]))
    j, log2m = log2_parts(s)
    lse2 = float(e + j - 44) + log2m
    logp = NAN
    if owned:
        x = from_bits32(part[5])
        v = fl32((x * scale - lse2) * LN2_64)
        logp = v if v < 0.0 or math.isnan(v) else 0.0
    h = None
    if has_entropy:
        hs = words_to_float(carry(part[6:9]))
        v = fl32(((float(j - 44) + log2m) - hs / s) * LN2_64)
        h = v if v > 0.0 or math.isnan(v) else 0.0
    return Closed(lse2, logp, fl32(lse2 * LN2_64), h, good, owned)


def gradient(
    row: list[float],
    target: int,
    *,
    lse2: float,
    a: float = 0.0,
    b: float = 0.0,
    h: float = 0.0,
    entropy: float = 0.0,
    scale: float,
    real: int,
    dtype: str,
) -> list[float]:
    """Section 4 for one row; a, b, h are already multiplied by INV_T and masked."""
    if a == 0.0 and b == 0.0 and h == 0.0:
        return [0.0] * len(row)
    if math.isnan(lse2):
        return [NAN] * real + [0.0] * (len(row) - real)
    n = float(round(lse2))
    f = fl32(lse2 - n)
    out = []
    for col, x in enumerate(row[:real]):
        y = sub32(fma32(x, scale, -n), f)
        if y < -126.0:
            p = 0.0
        else:
            k = sub32(add32(y, MAGIC), MAGIC)
            p = from_bits32(bits32(poly(sub32(y, k))) + (int(k) << 23))
        total: float | None = None
        if a != 0.0:
            total = mul32(a, sub32(1.0 if col == target else 0.0, p))
        if b != 0.0:
            term = mul32(b, p)
            total = term if total is None else add32(total, term)
        if h != 0.0:
            term = 0.0 if p == 0.0 else mul32(h, mul32(p, fma32(y, LN2_32, entropy)))
            total = -term if total is None else sub32(total, term)
        assert total is not None
        out.append(to_format(total, FORMATS[dtype]))
    return out + [0.0] * (len(row) - real)
