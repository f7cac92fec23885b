"""Correct rounding of exact numbers to binary floating-point formats, with integers.

An exact dyadic number is a pair ``(m, q)`` of integers meaning ``m * 2**q``.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import NamedTuple

Dyadic = tuple[int, int]
NAN = float("nan")
INF = float("inf")


class Format(NamedTuple):
    """A binary format: significand bits, exponent of its smallest unit, first exponent that overflows."""

    precision: int
    min_exponent: int
    overflow: int


FP32 = Format(24, -149, 128)
FP64 = Format(53, -1074, 1024)
FP16 = Format(11, -24, 16)
BF16 = Format(8, -133, 128)
FORMATS = {"fp32": FP32, "fp64": FP64, "fp16": FP16, "bf16": BF16}


def hex_floats(text: str) -> list[float]:
    """Hexadecimal floats separated by blanks, as the page writes them."""
    return [float.fromhex(word) for word in text.split()]


def split(x: float) -> Dyadic:
    """The exact dyadic value of a finite Python float."""
    mantissa, exponent = math.frexp(x)
    return int(math.ldexp(mantissa, 53)), exponent - 53


def round_dyadic(m: int, q: int, fmt: Format) -> float:
    """``m * 2**q`` rounded to nearest, ties to even; zero keeps the sign of a negative `m`."""
    if m == 0:
        return 0.0
    size = abs(m)
    drop = max(size.bit_length() - fmt.precision, fmt.min_exponent - q)
    if drop > 0:
        rest = size & ((1 << drop) - 1)
        size >>= drop
        half = 1 << (drop - 1)
        if rest > half or (rest == half and size & 1):
            size += 1
        q += drop
    value = INF if size.bit_length() + q > fmt.overflow else math.ldexp(float(size), q)
    return -value if m < 0 else value


def round_fraction(f: Fraction, fmt: Format) -> float:
    """Any fraction rounded to nearest, ties to even (through 130 bits and a sticky bit)."""
    if f == 0:
        return 0.0
    shift = max(0, 130 - (abs(f.numerator).bit_length() - f.denominator.bit_length()))
    quotient, rest = divmod(abs(f.numerator) << shift, f.denominator)
    m = (quotient << 1) | (rest != 0)
    return round_dyadic(m if f > 0 else -m, -shift - 1, fmt)


def to_format(x: float, fmt: Format) -> float:
    """A Python float rounded to another format; infinities and NaN stay."""
    if x == 0.0 or not math.isfinite(x):
        return x
    return round_dyadic(*split(x), fmt)


def fl32(x: float) -> float:
    """A float64 rounded to fp32."""
    return to_format(x, FP32)


def fma32(a: float, b: float, c: float) -> float:
    """``a * b + c`` rounded once to fp32."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    (ma, qa), (mb, qb), (mc, qc) = split(a), split(b), split(c)
    m, q = ma * mb, qa + qb
    low = min(q, qc)
    total = (m << (q - low)) + (mc << (qc - low))
    if total == 0:
        if m == 0 and mc == 0:  # two zeros: negative only when both are
            return math.copysign(1.0, a) * math.copysign(1.0, b) * 0.0 + c
        return 0.0
    return round_dyadic(total, low, FP32)


def add32(a: float, b: float) -> float:
    """``a + b`` rounded once to fp32."""
    return fma32(a, 1.0, b)


def sub32(a: float, b: float) -> float:
    """``a - b`` rounded once to fp32."""
    return fma32(b, -1.0, a)


def mul32(a: float, b: float) -> float:
    """``a * b`` rounded once to fp32, with the sign of zero of IEEE."""
    if a == 0.0 or b == 0.0 or not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    (ma, qa), (mb, qb) = split(a), split(b)
    return round_dyadic(ma * mb, qa + qb, FP32)


def bits32(x: float) -> int:
    """The unsigned 32-bit pattern of a number that fp32 holds exactly (canonical quiet NaN for NaN)."""
    if math.isnan(x):
        return 0x7FC00000
    return struct.unpack("<I", struct.pack("<f", x))[0]


def from_bits32(pattern: int) -> float:
    """The fp32 number of a 32-bit pattern; higher bits are dropped, as a 32-bit register drops them."""
    return struct.unpack("<f", struct.pack("<I", pattern & 0xFFFFFFFF))[0]


def bits64(x: float) -> int:
    """The unsigned 64-bit pattern of a float64 (canonical quiet NaN for NaN)."""
    if math.isnan(x):
        return 0x7FF8000000000000
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def bits_of(x: float, dtype: str) -> int:
    """The unsigned pattern of a number in the format `dtype` that holds it exactly."""
    if dtype == "fp64":
        return bits64(x)
    if dtype == "bf16":
        return bits32(x) >> 16
    if dtype == "fp16":
        return 0x7E00 if math.isnan(x) else struct.unpack("<H", struct.pack("<e", x))[0]
    return bits32(x)
