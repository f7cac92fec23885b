"""The long accumulator: limbs, any order, any split, and closings rounded once."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_engine.numerics import accumulator
from tests.bits import assert_bits_equal
from tests.numerics import cases
from tests.oracle import sums

patterns = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 1 << 31, 1, 0x80000001, 0x7F7FFFFF, 0xFF7FFFFF, 0x00800000, 0x3F800000, 0xBF800000]),
)
finite_patterns = patterns.filter(lambda p: (p >> 23) & 0xFF != 0xFF)
special_patterns = st.one_of(
    finite_patterns, st.sampled_from([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001])
)


def one_segment(values: Tensor) -> Tensor:
    return accumulator.accumulate(values, torch.zeros(len(values), dtype=torch.int64), 1)


def check_closings(acc: Tensor, values: list[float]) -> None:
    assert_bits_equal(accumulator.close_fp32(acc), cases.expect([sums.close32(values)], "fp32"), "fp32")
    assert_bits_equal(accumulator.close_fp64(acc), cases.expect([sums.close64(values)], "fp64"), "fp64")


@settings(max_examples=150, deadline=None)
@given(bits=st.lists(special_patterns, max_size=30))
def test_limbs_and_closings_of_anything(bits: list[int]) -> None:
    values = cases.from_bits(bits, "fp32")
    acc = one_segment(values)
    assert acc.shape == (1, 14)
    assert acc.dtype == torch.int64
    assert acc[0].tolist() == sums.accumulate(values.tolist())
    assert accumulator.normalise(acc)[0].tolist() == sums.normalise(acc[0].tolist())
    check_closings(acc, values.tolist())


@settings(max_examples=100, deadline=None)
@given(bits=st.lists(finite_patterns, min_size=1, max_size=40), data=st.data())
def test_any_order_and_any_split(bits: list[int], data: st.DataObject) -> None:
    values = cases.from_bits(bits, "fp32")
    whole = one_segment(values)
    order = torch.tensor(data.draw(st.permutations(range(len(bits)))))
    assert_bits_equal(one_segment(values[order]), whole, "permuted")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(bits)), max_size=8)))
    bounds = [0, *cuts, len(bits)]
    parts = [one_segment(values[order][i:j]) for i, j in itertools.pairwise(bounds)]
    assert_bits_equal(torch.stack(parts).sum(0), whole, "limbs of the parts")
    normal = [accumulator.normalise(p) for p in parts]
    total = torch.stack(normal).sum(0)
    assert_bits_equal(
        accumulator.normalise(total), accumulator.normalise(whole), "normalised before and after"
    )
    check_closings(total, values.tolist())


@settings(max_examples=100, deadline=None)
@given(bits=st.lists(special_patterns, max_size=30), segments=st.integers(1, 6), seed=st.integers(0, 1000))
def test_segments(bits: list[int], segments: int, seed: int) -> None:
    rng = random.Random(seed)
    values = cases.from_bits(bits, "fp32")
    index = [rng.randrange(segments) for _ in bits]
    acc = accumulator.accumulate(values, torch.tensor(index, dtype=torch.int64), segments)
    assert acc.shape == (segments, 14)
    for s in range(segments):
        own = [v for v, i in zip(values.tolist(), index, strict=True) if i == s]
        assert acc[s].tolist() == sums.accumulate(own)
        check_closings(acc[s : s + 1], own)


@settings(max_examples=100, deadline=None)
@given(
    exponents=st.lists(st.integers(-149, 127), min_size=1, max_size=12),
    noise=st.integers(-2, 2),
    sign=st.sampled_from([1.0, -1.0]),
)
def test_sums_near_ties(exponents: list[int], noise: int, sign: float) -> None:
    """Sparse sums of powers of two: half-way cases of fp32 and of fp64, decided (or not) far below."""
    top = max(exponents)
    near = [e for e in (top - 23, top - 24, top - 53, top - 54) if e >= -149]
    values = [sign * 2.0**e for e in exponents + near] + [noise * 2.0**-149]
    check_closings(one_segment(torch.tensor(values, dtype=torch.float64).float()), values)


@settings(max_examples=60, deadline=None)
@given(bits=st.lists(finite_patterns, min_size=1, max_size=20), last=finite_patterns)
def test_exact_cancellation(bits: list[int], last: int) -> None:
    values = cases.from_bits(bits, "fp32")
    rest = cases.from_bits([last], "fp32")
    acc = one_segment(torch.cat([values, rest, -values.flip(0)]))
    assert_bits_equal(accumulator.close_fp32(acc), rest + 0.0, "what is left")  # −0 closes to +0
    assert_bits_equal(accumulator.close_fp64(acc), rest.double() + 0.0, "what is left")


@pytest.mark.parametrize(
    ("values", "as_fp32", "as_fp64"),
    [
        ([], 0.0, 0.0),
        ([-0.0, -0.0], 0.0, 0.0),
        ([1.0, -1.0], 0.0, 0.0),
        ([1.0, 2.0**-24], 1.0, 1.0 + 2.0**-24),
        (
            [1.0, 2.0**-24, 2.0**-149],
            1.0 + 2.0**-23,
            1.0 + 2.0**-24,
        ),  # float64 loses the 2^-149, fp32 must not
        ([1.0 + 2.0**-23, 2.0**-24, -(2.0**-149)], 1.0 + 2.0**-23, 1.0 + 2.0**-23 + 2.0**-24),
        ([2.0**53, 1.0], 2.0**53, 2.0**53),
        ([2.0**53, 1.0, 2.0**-149], 2.0**53, 2.0**53 + 2),
        ([2.0**127, 2.0**127], math.inf, 2.0**128),
        ([-(2.0**127), -(2.0**127)], -math.inf, -(2.0**128)),
        ([2.0**127 * (2 - 2.0**-23), 2.0**102], 2.0**127 * (2 - 2.0**-23), 2.0**128 - 2.0**104 + 2.0**102),
        ([2.0**127 * (2 - 2.0**-23), 2.0**103], math.inf, 2.0**128 - 2.0**103),
        ([2.0**127, 2.0**127, -(2.0**127)], 2.0**127, 2.0**127),
        ([2.0**-149, 2.0**-149], 2.0**-148, 2.0**-148),
        ([2.0**-126, -(2.0**-149)], 2.0**-126 - 2.0**-149, 2.0**-126 - 2.0**-149),
        ([math.inf, 1.0], math.inf, math.inf),
        ([-math.inf, 1.0], -math.inf, -math.inf),
        ([math.inf, -math.inf], math.nan, math.nan),
        ([math.nan, 1.0], math.nan, math.nan),
        ([math.nan, math.inf], math.nan, math.nan),
    ],
)
def test_known_sums(values: list[float], as_fp32: float, as_fp64: float) -> None:
    acc = one_segment(torch.tensor(values, dtype=torch.float64).float())
    assert_bits_equal(accumulator.close_fp32(acc), cases.expect([as_fp32], "fp32"), "fp32")
    assert_bits_equal(accumulator.close_fp64(acc), cases.expect([as_fp64], "fp64"), "fp64")
    assert acc[0, 13].item() == len(values)


def test_many_values() -> None:
    """200,000 numbers of every exponent; the oracle is `math.fsum` (correctly rounded in float64)."""
    rng = random.Random(3)
    bits = [rng.getrandbits(32) for _ in range(200_000)]
    values = cases.from_bits(bits, "fp32")
    values = values[values.isfinite()]
    acc = one_segment(values)
    assert_bits_equal(
        accumulator.close_fp64(acc)[0], torch.tensor(math.fsum(values.tolist()), dtype=torch.float64), "sum"
    )
    spread = accumulator.accumulate(values, torch.arange(len(values)) % 1000, 1000)
    assert_bits_equal(
        accumulator.normalise(spread.sum(0)), accumulator.normalise(acc[0]), "thousand segments"
    )


def test_a_limb_far_beyond_32_bits() -> None:
    """The largest number 2^31 times: as many as a limb is said to hold, by adding accumulators."""
    acc = one_segment(torch.tensor([3.4028234663852886e38, 2.0**-149 * 0x7FFFFF]))
    for sign in (1, -1):
        many = acc * sign * 2**31
        many[:, 13] = 2**32
        exact = sign * 2**31 * sums.exact([3.4028234663852886e38, 2.0**-149 * 0x7FFFFF])
        assert accumulator.normalise(many)[0].tolist()[:10] == sums.normalise(many[0].tolist())[:10]
        want = sums.round_fraction(exact, sums.FP64)
        assert_bits_equal(accumulator.close_fp64(many), cases.expect([want], "fp64"), "fp64")
        assert_bits_equal(accumulator.close_fp32(many), cases.expect([sign * math.inf], "fp32"), "fp32")


def test_normalise_keeps_the_value_and_settles() -> None:
    rng = random.Random(4)
    acc = torch.tensor([[rng.randint(-(2**60), 2**60) for _ in range(10)] + [0, 0, 0, 5] for _ in range(50)])
    once = accumulator.normalise(acc)
    assert [row.tolist() for row in once] == [sums.normalise(row.tolist()) for row in acc]
    assert_bits_equal(accumulator.normalise(once), once, "normalised twice")
    assert bool((once[:, :9] >= 0).all()) and bool((once[:, :9] < 2**32).all())


def test_batches_of_accumulators_close_elementwise() -> None:
    rng = random.Random(5)
    values = cases.from_bits([rng.getrandbits(31) % 0x7F000000 for _ in range(60)], "fp32")
    acc = accumulator.accumulate(values, torch.arange(60) % 6, 6).reshape(2, 3, 14)
    for close in (accumulator.close_fp32, accumulator.close_fp64):
        together = close(acc)
        assert together.shape == (2, 3)
        assert_bits_equal(
            together.flatten(), torch.cat([close(a[None]) for a in acc.reshape(6, 14)]), "closing"
        )


def test_does_not_touch_its_input() -> None:
    values = torch.tensor([1.0, -2.5, 3.0], requires_grad=True)
    before = values.detach().clone()
    acc = one_segment(values)
    kept = acc.clone()
    accumulator.normalise(acc)
    accumulator.close_fp32(acc)
    assert_bits_equal(acc, kept, "accumulator")
    assert_bits_equal(values, before, "values")
    strided = torch.arange(12.0).reshape(3, 4)[:, 1]
    assert_bits_equal(accumulator.close_fp32(one_segment(strided)), torch.tensor([15.0]), "strided")
