"""The tiled fp32 rows, one number at a time: log-sum-exp over fixed tiles, log-probability, gradient."""

from __future__ import annotations

import math
from typing import NamedTuple

from tests.oracle.elementwise import exp
from tests.oracle.ieee import FORMATS, INF, NAN, add32, fl32, mul32, sub32, to_format
from tests.oracle.rows import LN2_64, inverse_temperature, log2_parts


class Row(NamedTuple):
    """One closed row; `lse` in float64."""

    logp: float
    lse: float
    good: bool


def tree(values: list[float]) -> float:
    """Halves of a power of two are added elementwise until one number is left."""
    size = 1 << (len(values) - 1).bit_length()
    values = values + [0.0] * (size - len(values))
    while size > 1:
        size //= 2
        values = [add32(values[i], values[i + size]) for i in range(size)]
    return values[0]


def highest(values: list[float]) -> float:
    """Maximum that propagates NaN, +0 where it is a zero."""
    return NAN if any(math.isnan(v) for v in values) else max(values) + 0.0


def tile(y: list[float]) -> tuple[float, float]:
    """(max, sum of exp) of one tile; padding columns are -inf by then."""
    top = highest(y)
    if not math.isfinite(top):
        return top, 0.0
    return top, tree([exp(sub32(v, top)) if v > -INF else 0.0 for v in y])


def merge(tiles: list[tuple[float, float]]) -> tuple[float, float]:
    """(max, sum of exp) of a row from those of its tiles."""
    top = highest([m for m, _ in tiles])
    if not math.isfinite(top):
        return top, 0.0
    return top, tree([mul32(s, exp(sub32(m, top))) if m > -INF else 0.0 for m, s in tiles])


def close(row: list[float], target: int, *, num_tiles: int, real: int, temperature: float = 1.0) -> Row:
    """A row of all padded columns; `target` outside [0, real) has no owner."""
    t = fl32(temperature)
    y = [fl32(x / t) for x in row[:real]] + [-INF] * (len(row) - real)
    width = len(row) // num_tiles
    top, total = merge([tile(y[start : start + width]) for start in range(0, len(row), width)])
    if not math.isfinite(top):
        return Row(NAN, NAN, good=False)
    j, log2m = log2_parts(total)
    lse = top + (j + log2m) * LN2_64
    return Row(fl32(y[target] - lse) if 0 <= target < real else NAN, lse, good=True)


def gradient(
    row: list[float],
    target: int,
    *,
    lse: float,
    a: float,
    b: float,
    real: int,
    temperature: float = 1.0,
    dtype: str = "fp32",
) -> list[float]:
    """d(a * logp + b * lse) / d(logits) of an active row; a and b as they come from upstream."""
    t, inverse = fl32(temperature), inverse_temperature(temperature)
    a, b = mul32(a, inverse), mul32(b, inverse)
    out = [0.0] * len(row)
    if a == 0.0 and b == 0.0:
        return out
    for col, x in enumerate(row[:real]):
        p = exp(fl32(fl32(x / t) - lse))
        terms = []
        if a != 0.0:
            terms.append(mul32(a, sub32(1.0 if col == target else 0.0, p)))
        if b != 0.0:
            terms.append(mul32(b, p))
        out[col] = to_format(terms[0] if len(terms) == 1 else add32(*terms), FORMATS[dtype])
    return out
