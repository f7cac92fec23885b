"""exp, phi, expm1 and the emulated fma: the oracle's bits, and float64's neighbourhood."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.numerics import constants as C
from rl_engine.numerics import exp as elementwise
from tests.bits import assert_bits_equal
from tests.numerics import cases
from tests.oracle import elementwise as oracle
from tests.oracle import rows
from tests.oracle.ieee import fma32

FUNCTIONS = {
    "exp": (elementwise.exp32, oracle.exp),
    "phi": (elementwise.phi32, oracle.phi),
    "expm1": (elementwise.expm1_32, oracle.expm1),
}
SPECIAL = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    math.inf,
    -math.inf,
    math.nan,
    2.0**-149,
    -(2.0**-149),
    2.0**-126,
    3.4e38,
    -3.4e38,
]


def inputs() -> Tensor:
    """About 4000 numbers: every scale, the neighbours of each threshold and of half-integer powers of 2."""
    rng = random.Random(1)
    values = [rng.uniform(-1, 1) * 2.0 ** rng.randint(-50, 8) for _ in range(2000)]
    values += [rng.uniform(-90, 90) for _ in range(800)]
    edges = [C.EXP_MAX, C.EXP_MIN, 1.0, -1.0, 88.0, 80.0, -80.0, 0.5, -0.5]
    edges += [cases.round32((k + 0.5) * math.log(2.0)) for k in range(-127, 129, 3)]
    values += [cases.next_up(cases.round32(edge), "fp32", d) for edge in edges for d in range(-4, 5)]
    return torch.tensor(values + SPECIAL, dtype=torch.float64).float()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_oracle_bits(function: str) -> None:
    actual, expected = FUNCTIONS[function]
    x = inputs()
    assert_bits_equal(actual(x), cases.expect([expected(v) for v in x.tolist()], "fp32"), function)


@settings(max_examples=60, deadline=None)
@given(patterns=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_oracle_bits_of_any_pattern(function: str, patterns: list[int]) -> None:
    actual, expected = FUNCTIONS[function]
    x = cases.from_bits(patterns, "fp32")
    assert_bits_equal(actual(x), cases.expect([expected(v) for v in x.tolist()], "fp32"), function)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_position_and_shape_do_not_matter(function: str) -> None:
    """torch.exp gives other bits in the scalar tail of a tensor; this must not."""
    actual, _ = FUNCTIONS[function]
    x = inputs()[:1003]
    whole = actual(x)
    for start, stop in ((1, 1003), (5, 12), (17, 18), (0, 1002), (3, 67)):
        assert_bits_equal(actual(x[start:stop]), whole[start:stop], f"[{start}:{stop}]")
    assert_bits_equal(actual(x[::3]), whole[::3], "strided")
    assert_bits_equal(actual(x[:1000].reshape(10, 100).t()), whole[:1000].reshape(10, 100).t(), "transposed")
    assert actual(torch.zeros(0)).shape == (0,)


def ulps(actual: Tensor, exact: Tensor) -> Tensor:
    """Error in units of the last place of fp32 at the exact value."""
    _, exponent = torch.frexp(exact)
    unit = torch.ldexp(torch.ones_like(exact), (exponent - 24).clamp(min=-149))
    return (actual.double() - exact).abs() / unit


def test_exp_is_within_1_15_ulp() -> None:
    lowest, highest = C.EXP_MIN, C.EXP_MAX
    x = torch.linspace(lowest, highest, 1_000_003, dtype=torch.float64).float().clamp(lowest, highest)
    assert float(ulps(elementwise.exp32(x), x.double().exp()).max()) <= 1.15
    small = torch.cat([s * torch.logspace(-45, 0, 10001, dtype=torch.float64).float() for s in (1, -1)])
    assert float(ulps(elementwise.exp32(small), small.double().exp()).max()) <= 1.15


def test_exp_ends() -> None:
    top, bottom = torch.tensor(C.EXP_MAX), torch.tensor(C.EXP_MIN)
    beyond = torch.nextafter(top, torch.tensor(math.inf)), torch.nextafter(bottom, torch.tensor(-math.inf))
    assert float(top.double().exp()) < 2.0**128 <= float(beyond[0].double().exp())
    assert float(beyond[1].double().exp()) < 2.0**-126 <= float(bottom.double().exp())
    got = elementwise.exp32(torch.stack([top, beyond[0], bottom, beyond[1]]))
    assert got[0].isfinite()
    assert got[0] > 3.4e38
    assert got[1] == math.inf
    assert got[2] >= 2.0**-126
    assert_bits_equal(got[3], torch.tensor(0.0), "below the range")


def exact_phi(d: Tensor) -> Tensor:
    """exp(d) − 1 − d in float64 without its cancellation: a series for |d| ≤ 1."""
    series = torch.zeros_like(d)
    for i in range(24, 1, -1):
        series = series + d**i / float(math.factorial(i))
    return torch.where(d.abs() <= 1, series, torch.expm1(d) - d)


def test_phi_is_accurate_and_not_negative() -> None:
    tiny = torch.logspace(-18, 0, 200_001, dtype=torch.float64).float().clamp(max=1)
    d = torch.cat([tiny, -tiny, torch.linspace(-1, 1, 200_001).float()])
    got = elementwise.phi32(d)
    assert bool((got >= 0).all())
    assert (
        float(ulps(got, exact_phi(d.double())).max()) <= 2.5
    )  # d·d, Q and their product: ½ ulp each, doubled
    far = torch.linspace(-88, 88, 100_001).float()
    far = far[far.abs() > 1]
    assert bool((elementwise.phi32(far) >= 0).all())
    assert (
        float(ulps(elementwise.phi32(far), exact_phi(far.double())).max()) <= 8.0
    )  # e^1 − 1 − 1: 2 bits cancel
    plain = torch.tensor([1e-3]).exp() - 1 - 1e-3
    assert abs(float(plain) - 5.001667e-7) > 1e-9, "the plain form is as bad as the page says"


def test_expm1_is_accurate() -> None:
    tiny = torch.logspace(-40, 0, 200_001, dtype=torch.float64).float().clamp(max=1)
    d = torch.cat([tiny, -tiny, torch.linspace(-88, 88, 200_001).float()])
    got = elementwise.expm1_32(d)
    assert float(ulps(got, torch.expm1(d.double())).max()) <= 2.5
    assert bool((got.sign() == d.sign()).all())


def test_phi_is_continuous_at_one() -> None:
    for edge in (1.0, -1.0):
        near = torch.tensor([cases.next_up(edge, "fp32", d) for d in range(-5, 6)])
        assert float(ulps(elementwise.phi32(near), exact_phi(near.double())).max()) <= 4.0


# ------------------------------------------------------------------------------------------------------- fma

float32 = st.floats(width=32)


@settings(max_examples=300, deadline=None)
@given(a=float32, b=float32, c=float32)
def test_fma_of_anything(a: float, b: float, c: float) -> None:
    got = elementwise.fma32(torch.tensor([a]), b, c)
    assert_bits_equal(got, cases.expect([fma32(a, b, c)], "fp32"), f"fma({a!r}, {b!r}, {c!r})")


def test_fma_near_ties_and_cancellation() -> None:
    """Where one rounding and two differ: products that almost cancel, and ties decided far below."""
    rng = random.Random(2)
    triples: list[tuple[float, float, float]] = []
    for _ in range(3000):
        a = cases.round32(rng.uniform(1, 2) * 2.0 ** rng.randint(-70, 60))
        b = cases.round32(rng.uniform(1, 2) * 2.0 ** rng.randint(-70, 60))
        kind = rng.randrange(4)
        if kind == 0:
            c = cases.next_up(cases.round32(-a * b), "fp32", rng.randint(-2, 2))
        elif kind == 1:  # c large: the product is a fraction of its last place
            c = cases.round32(a * b * rng.uniform(1, 2) * 2.0 ** rng.randint(22, 27))
        elif kind == 2:  # the product is a half-way case of fp32, c decides
            a, b = cases.round32(1 + rng.randrange(1 << 12) * 2.0**-12), cases.round32(1 + 2.0**-12)
            c = rng.choice([-1, 1]) * 2.0 ** -rng.randint(30, 140)
        else:  # results around the smallest normal numbers
            b = cases.round32(2.0 ** rng.randint(-149, -100) / a)
            c = rng.choice([-1, 1]) * 2.0 ** rng.randint(-149, -120)
        if all(math.isfinite(v) for v in (a, b, c)):
            triples.append((a, b, c))
    a, b, c = (torch.tensor(column, dtype=torch.float64).float() for column in zip(*triples, strict=True))
    expected = cases.expect([fma32(*t) for t in triples], "fp32")
    assert_bits_equal(elementwise.fma32(a, b, c), expected, "fma")
    assert_bits_equal(elementwise.fma32(b, a, c), expected, "fma, factors exchanged")
    assert_bits_equal(elementwise.fma32(-a, b, -c), -expected, "fma, signs changed", nan_payload=False)


def test_constants_are_the_page_s() -> None:
    assert (C.LOG2E, C.MAGIC, C.LN2_64, C.LN2_32, C.SQRT2) == (
        rows.LOG2E,
        rows.MAGIC,
        rows.LN2_64,
        rows.LN2_32,
        rows.SQRT2,
    )
    assert list(C.EXP2_POLY) == rows.EXP2_POLY
    assert list(C.LOG2_POLY) == rows.LOG2_SERIES
    assert list(C.PHI_POLY) == oracle.PHI_POLY
    assert (C.EXP_MAX, C.EXP_MIN, C.EXP_L_HI, C.EXP_L_LO) == (
        oracle.EXP_MAX,
        oracle.EXP_MIN,
        oracle.LOG2E_HIGH,
        oracle.LOG2E_LOW,
    )
    assert (C.EMPTY_EXPONENT, C.OVER_EXPONENT, C.MAX_EXPONENT) == (rows.EMPTY, rows.BEYOND, 1 << 21)
    assert (C.FLAG_NAN, C.FLAG_POSINF, C.FLAG_OWNED) == (rows.FLAG_NAN, rows.FLAG_POSINF, rows.FLAG_TARGET)
    assert list(C.DIGIT_MAGIC) == rows.DIGIT_MAGIC
    assert C.NUMERICS_ID == "exact-words/1"
