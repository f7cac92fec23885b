"""What the tests of the numerics share: implementations, rows worth testing, and the oracle on tensors.

Shapes: n rows, V columns, K = 6 or 9 columns of a partial.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import random
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_engine.numerics import words
from tests.bits import assert_bits_equal
from tests.oracle import float64, rows
from tests.oracle.ieee import FORMATS, bits_of, fl32, to_format

IMPLEMENTATIONS = ["reference", "cpu"]
DTYPES = ["bf16", "fp16", "fp32"]
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}
INF, NAN = math.inf, math.nan
FINFO_MIN = {name: torch.finfo(TORCH[name]).min for name in DTYPES}


def implementation(name: str) -> ModuleType:
    return importlib.import_module(f"rl_engine.numerics.{name}")


def tensor(values: Sequence[Sequence[float]] | Sequence[float], dtype: str) -> Tensor:
    """Numbers in `dtype`; each must be exact there already or is rounded once, from float64."""
    return torch.tensor(values, dtype=torch.float64).to(TORCH[dtype])


def from_bits(patterns: Sequence[int], dtype: str) -> Tensor:
    """Unsigned patterns as numbers."""
    width = torch.finfo(TORCH[dtype]).bits
    signed = [p - (1 << width) if p >> (width - 1) else p for p in patterns]
    return torch.tensor(signed, dtype=_SIGNED[width // 8]).view(TORCH[dtype])


def floats(x: Tensor) -> list[float]:
    """Exact Python floats of a one-dimensional tensor."""
    return x.double().tolist()


def expect(values: Sequence[float], dtype: str) -> Tensor:
    """Oracle numbers as a tensor, by their bits (a conversion could hide a difference)."""
    return from_bits([bits_of(v, dtype) for v in values], dtype)


# ---------------------------------------------------------------------------------------- oracle on tensors


def oracle_partials(
    x: Tensor, target: Sequence[int], *, scale: float, real: int | None = None, entropy: bool = True
) -> Tensor:
    """[n, K] int64 partials of [n, V] logits by the oracle."""
    real = x.shape[1] if real is None else real
    out = [
        rows.partial(floats(row), t, scale=scale, real=real, entropy=entropy)
        for row, t in zip(x, target, strict=True)
    ]
    return torch.tensor(out, dtype=torch.int64).reshape(x.shape[0], 9 if entropy else 6)


def oracle_closed(partials: Tensor, scale: float) -> words.ClosedRows:
    """Closed rows by the oracle, in the shape of the implementation's answer."""
    closed = [rows.close(p, scale) for p in partials.tolist()]
    entropy = None
    if partials.shape[1] == 9:
        entropy = expect([NAN if c.entropy is None else c.entropy for c in closed], "fp32")
    return words.ClosedRows(
        expect([c.lse2 for c in closed], "fp64"),
        expect([c.logp for c in closed], "fp32"),
        expect([c.lse for c in closed], "fp32"),
        entropy,
        torch.tensor([c.good for c in closed]),
        torch.tensor([c.owned for c in closed]),
    )


def assert_closed_equal(actual: words.ClosedRows, expected: words.ClosedRows, name: str) -> None:
    for field in words.ClosedRows._fields:
        left, right = getattr(actual, field), getattr(expected, field)
        if right is None:
            assert left is None
        else:
            assert_bits_equal(left, right, f"{name}.{field}")


# ------------------------------------------------------------------------------------------------ splitting


def local_targets(target: Tensor, start: int, stop: int) -> Tensor:
    return torch.where((target >= start) & (target < stop), target - start, -1)


def merged(
    impl: ModuleType,
    x: Tensor,
    target: Tensor,
    *,
    scale: float,
    bounds: Sequence[int] | None = None,
    real: int | None = None,
    entropy: bool = True,
) -> Tensor:
    """The merged partial of [n, V] logits cut at `bounds` (0 … V; equal neighbours make empty shards)."""
    real = x.shape[1] if real is None else real
    bounds = [0, x.shape[1]] if bounds is None else bounds
    parts = []
    for start, stop in itertools.pairwise(bounds):
        local_real = min(max(real - start, 0), stop - start)
        local = local_targets(target, start, min(stop, max(real, start)))
        parts.append(
            impl.partial(x[:, start:stop], local, scale_l=scale, real_cols=local_real, with_entropy=entropy)
        )
    return words.merge(torch.stack(parts))


def uneven_bounds(num_cols: int, num_shards: int, seed: int) -> list[int]:
    """Random cuts, empty shards among them."""
    rng = random.Random(seed)
    return [0, *sorted(rng.randint(0, num_cols) for _ in range(num_shards - 1)), num_cols]


# ----------------------------------------------------------------------------------------------------- rows


class Row(NamedTuple):
    values: list[float]
    target: int


def gaussian(rng: random.Random, size: int, sigma: float = 3.0, mean: float = 0.0) -> list[float]:
    return [rng.gauss(mean, sigma) for _ in range(size)]


def next_up(x: float, dtype: str, steps: int = 1) -> float:
    """The number `steps` above x in the order of the format."""
    width = torch.finfo(TORCH[dtype]).bits
    sign = 1 << (width - 1)
    pattern = bits_of(x, dtype)
    place = (sign - pattern if pattern & sign else pattern) + steps
    return float(from_bits([place if place >= 0 else sign - place], dtype).double()[0])


@functools.cache
def domain_edges(dtype: str, scale: float) -> tuple[float, float, float, float] | None:
    """Smallest and largest x whose row is good, and their neighbours beyond; None where every x is."""
    top = torch.finfo(TORCH[dtype]).max

    def good(x: float) -> bool:
        return abs(rows.reference_exponent(x, scale)) <= 1 << 21

    if good(top) and good(-top):
        return None

    def edge(sign: float) -> tuple[float, float]:
        low, high = 0, bits_of(top, dtype)  # patterns of positive numbers are ordered
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if good(sign * float(from_bits([middle], dtype)[0])) else (low, middle)
        return sign * float(from_bits([low], dtype)[0]), sign * float(from_bits([high], dtype)[0])

    low_in, low_out = edge(-1.0)
    high_in, high_out = edge(1.0)
    return low_in, high_in, low_out, high_out


@functools.cache
def special_rows(dtype: str, temperature: float) -> dict[str, Row]:
    """Named short rows with a target each; values are rounded to the dtype."""
    rng = random.Random(20240607)
    fill = FINFO_MIN[dtype]
    scale = rows.temperature_scale(temperature)
    tiny = 2.0 ** FORMATS[dtype].min_exponent
    out: dict[str, Row] = {
        "gaussian": Row(gaussian(rng, 37), 5),
        "wide": Row(gaussian(rng, 37, 30.0), 6),
        "narrow": Row(gaussian(rng, 37, 0.01, -50.0), 7),
        "peaked": Row([*gaussian(rng, 20), 33.0, *gaussian(rng, 10)], 20),
        "peaked, other target": Row([*gaussian(rng, 20), 33.0, *gaussian(rng, 10)], 3),
        "constant": Row([-2.7] * 23, 22),
        "constant zero": Row([0.0] * 8, 0),
        "one column": Row([1.7], 0),
        "one column zero": Row([0.0], 0),
        "one column of -inf": Row([-INF], 0),
        "two columns": Row([0.3, -0.4], 1),
        "beside finfo.min": Row([fill, 1.0, fill, -0.5, 0.25, fill], 3),
        "finfo.min target": Row([fill, 1.0, fill, -0.5, 0.25, fill], 0),
        "beside -inf": Row([-INF, 1.0, -INF, -0.5, 0.25, -INF], 1),
        "-inf target": Row([1.0, -INF, 0.0], 1),
        "one finite logit": Row([-INF, -INF, 4.25, -INF], 2),
        "one finite logit, -inf target": Row([-INF, -INF, 4.25, -INF], 0),
        "all -inf": Row([-INF] * 5, 2),
        "NaN": Row([0.0, NAN, 1.0], 0),
        "NaN target": Row([0.0, NAN, 1.0], 1),
        "+inf": Row([0.0, 2.0, INF], 0),
        "+inf target": Row([0.0, INF, 1.0], 1),
        "NaN and +inf": Row([INF, NAN, 1.0, INF], 2),
        "NaN beside -inf": Row([-INF, NAN, -INF], 2),
        "subnormals": Row([tiny, -tiny, 3 * tiny, 0.0, -0.0, 100 * tiny], 1),
        "zeros": Row([0.0, -0.0, 0.0, -0.0], 0),
        "-0 target": Row([0.0, -0.0, -3.0], 1),
        "-0 alone": Row([-0.0], 0),
        "-0 largest": Row([-1.0, -0.0, -3.0], 1),
        "not owned": Row([1.0, 2.0, 3.0], -1),
        "ties": Row([k / (2 * scale) for k in range(-7, 8)], 4),  # x·L near half-integers
        "e crosses 22 upwards": Row([x / scale for x in range(-70, 75, 7)], 20),
        "e crosses 22 downwards": Row([x / scale for x in range(70, -75, -7)], 20),
        "e edges": Row([(22 * k - 2 + d) / scale for k in (-1, 0, 1) for d in (-0.51, -0.49, 0.49, 0.51)], 0),
        "-16.2889595 largest": Row([-16.2889595, -17.0, -40.0], 0),
        "-69400 largest": Row([-69400.0, -69401.0, -69500.0, -1e5], 1),
        "large": Row([4096.0, 4097.0, 4128.0, 8192.0, 1e4], 4),
        "large negative": Row([-4096.0, -4097.0, -4128.0, -8192.0, -1e4], 0),
        "beyond large": Row([65504.0, 65472.0, 65000.0, 6e4], 2),
    }
    if dtype != "fp16":
        out["beside -1e9"] = Row([-1e9, 1.0, -1e9, -0.5, 0.25, -1e9], 4)
        out["-1e9 target"] = Row([-1e9, 1.0, -1e9, -0.5, 0.25, -1e9], 2)
        out["-1e9 only"] = Row([-1e9] * 4, 2)
        out["1e5"] = Row([1e5, 1e5 - 512, 1e5 + 512, 9e4, -1e5], 1)
        out["finfo.min only"] = Row([fill] * 3, 0)
    edges = domain_edges(dtype, scale)
    if edges is not None:
        low_in, high_in, low_out, high_out = edges
        for name, x in (("least", low_in), ("greatest", high_in), ("below", low_out), ("above", high_out)):
            near = next_up(x, dtype, -1)
            out[f"{name} in the domain" if name in ("least", "greatest") else f"{name} the domain"] = Row(
                [x, near, x, next_up(x, dtype, -9)], 1
            )
        out["maximum of the dtype"] = Row([-fill, 0.0, 1.0], 0)
    return {
        name: Row([to_format(v, FORMATS[dtype]) for v in row.values], row.target) for name, row in out.items()
    }


@functools.cache
def oracle_special(dtype: str, temperature: float) -> dict[str, tuple[list[int], rows.Closed]]:
    """Partial and closed row of each special row."""
    scale = rows.temperature_scale(temperature)
    out = {}
    for name, row in special_rows(dtype, temperature).items():
        part = rows.partial(row.values, row.target, scale=scale, real=len(row.values), entropy=True)
        out[name] = (part, rows.close(part, scale))
    return out


def random_batch(dtype: str, num_rows: int, num_cols: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """[n, V] logits of mixed kinds and [n] targets, from numpy's RandomState (torch.randn differs by CPU)."""
    rng = np.random.RandomState(seed)
    x = rng.standard_normal((num_rows, num_cols)) * 3
    target = torch.from_numpy(rng.randint(0, num_cols, num_rows))
    for i in range(num_rows):
        kind = i % 8
        if kind == 1:
            x[i, rng.randint(num_cols)] += 30
        elif kind == 2:
            x[i, rng.rand(num_cols) < 0.5] = -np.inf
            x[i, rng.randint(num_cols)] = 0.5
        elif kind == 3:
            x[i] *= 10
        elif kind == 4:
            x[i] = x[i] * 0.01 - 50
        elif kind == 5:
            x[i, 1::2] = FINFO_MIN[dtype]
        elif kind == 6:
            x[i] = np.linspace(-80, 80, num_cols)[:: 1 if i % 16 < 8 else -1]
        elif kind == 7:
            x[i] = np.round(x[i])
    return torch.from_numpy(x).to(TORCH[dtype]), target


# -------------------------------------------------------------------------------------------------- float64


def ulp(x: float, dtype: str = "fp32") -> float:
    """The unit in the last place of a format at x."""
    fmt = FORMATS[dtype]
    return 2.0 ** max(math.frexp(abs(x))[1] - fmt.precision, fmt.min_exponent) if x else 2.0**fmt.min_exponent


def logp_bound(exact: float, distance: float, temperature: float) -> float:
    """The page's bound on |logp − exact|; `distance` is |x_t − E[x]|."""
    factor = 1.4e-8 if temperature == 1.0 else 6e-8 / temperature
    return ulp(exact) / 2 + 1e-7 + factor * distance


def exact_logp(row: list[float], target: int, temperature: float) -> tuple[float, float]:
    """float64 logp of the target, and its distance from the mean."""
    distance = float64.mean_distance(row, target, temperature)
    return float64.logp(row, target, temperature), distance


def scaled(temperature: float) -> float:
    return rows.temperature_scale(temperature)


def round32(x: float) -> float:
    return fl32(x)
