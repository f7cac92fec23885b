"""The oracle against things known otherwise: `math`, `struct`, `fractions`, and the claims of the page."""

from __future__ import annotations

import math
import random
import struct
from fractions import Fraction

import pytest

from tests.oracle import elementwise, float64, loss, rows, sums
from tests.oracle.ieee import (
    BF16,
    FP16,
    FP32,
    FP64,
    INF,
    add32,
    bits32,
    bits64,
    fl32,
    fma32,
    from_bits32,
    mul32,
    round_dyadic,
    round_fraction,
    split,
    sub32,
    to_format,
)


def ln2(bits: int = 300) -> Fraction:
    """ln 2 = sum 1 / (k 2^k), to more digits than any constant needs."""
    return sum((Fraction(1, k << k) for k in range(1, bits)), Fraction(0))


def fp32_values(seed: int, count: int) -> list[float]:
    """Finite fp32 numbers with uniformly random bits, and the awkward ones."""
    rng = random.Random(seed)
    values = [from_bits32(rng.getrandbits(32)) for _ in range(count)]
    values += [
        from_bits32(b) for b in (0, 1 << 31, 1, 0x80000001, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x3F800000)
    ]
    return [v for v in values if math.isfinite(v)]


def ulp32(x: float) -> float:
    """The unit in the last place of fp32 at x."""
    return 2.0 ** (max(math.frexp(abs(x))[1] - 24, -149) if x else -149)


def test_rounding_agrees_with_the_machine() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        x = rng.uniform(-1, 1) * 2.0 ** rng.randint(-160, 130)
        try:
            expected = struct.unpack("<f", struct.pack("<f", x))[0]
        except OverflowError:
            expected = math.copysign(INF, x)
        assert bits32(fl32(x)) == bits32(expected)
        half = rng.uniform(-1, 1) * 2.0 ** rng.randint(-27, 14)
        assert to_format(half, FP16) == struct.unpack("<e", struct.pack("<e", half))[0]
        assert bits64(round_fraction(Fraction(x), FP64)) == bits64(x)
        assert bits32(round_fraction(Fraction(x), FP32)) == bits32(fl32(x))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (1 + 2.0**-8, 1.0),
        (1 + 3 * 2.0**-8, 1 + 2.0**-6),
        (2.0**-133, 2.0**-133),
        (2.0**-134, 0.0),
        (3.4e38, INF),
    ],
)
def test_bf16_rounds_to_even(x: float, expected: float) -> None:
    assert to_format(x, BF16) == expected


def test_fma_against_fractions() -> None:
    rng = random.Random(2)
    values = fp32_values(3, 400)
    for _ in range(4000):
        a, b = rng.choice(values), rng.choice(values)
        c = rng.choice(values) if rng.random() < 0.5 else fl32(-a * b * rng.uniform(0.9, 1.1))
        if not math.isfinite(c):
            continue
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        got = fma32(a, b, c)
        assert got == round_fraction(exact, FP32)
        if exact == 0:
            assert math.copysign(1, got) == math.copysign(1, a * b + c)


def test_fma_rounds_once() -> None:
    a = 1.0 + 2.0**-12
    assert fma32(a, a, -(1.0 + 2.0**-11)) == 2.0**-24
    # 2^-60 decides a tie that float64 would lose
    assert fma32(1.0 + 2.0**-23, 1.0 + 2.0**-23, 2.0**-60) == 1.0 + 2.0**-22
    assert fma32(1.0, 1.0 + 2.0**-23, 2.0**-24) == 1.0 + 2.0**-22
    assert fma32(1.0 + 2.0**-23, 1.0, 2.0**-24 - 2.0**-48) == 1.0 + 2.0**-23


def test_fma_signs_of_zero_and_specials() -> None:
    assert math.copysign(1, fma32(-0.0, 1.0, -0.0)) == -1
    assert math.copysign(1, fma32(-0.0, 1.0, 0.0)) == 1
    assert math.copysign(1, fma32(2.0, 3.0, -6.0)) == 1
    assert math.copysign(1, fma32(-(2.0**-149), 2.0**-149, 0.0)) == -1
    assert math.isnan(fma32(INF, 0.0, 1.0))
    assert fma32(INF, 2.0, -1.0) == INF
    assert fma32(3.0e38, 3.0e38, -INF) == -INF
    assert math.copysign(1, mul32(-0.0, 2.0)) == -1
    assert math.copysign(1, sub32(0.0, 0.0)) == 1
    assert math.copysign(1, sub32(-0.0, 0.0)) == -1
    assert math.copysign(1, add32(-0.0, 0.0)) == 1


def test_split_is_exact() -> None:
    for x in fp32_values(4, 100):
        m, q = split(x)
        assert Fraction(m) * Fraction(2) ** q == Fraction(x)
    assert math.copysign(1, round_dyadic(-1, -500, FP32)) == -1


def test_constants_are_what_they_say() -> None:
    two = ln2()
    assert round_fraction(1 / two, FP64) == rows.LOG2E
    assert round_fraction(two, FP64) == rows.LN2_64
    assert round_fraction(two, FP32) == rows.LN2_32
    assert rows.temperature_scale(1.0) == float.fromhex("0x1.715476p+0") == elementwise.LOG2E_HIGH
    assert round_fraction(1 / two - Fraction(elementwise.LOG2E_HIGH), FP32) == elementwise.LOG2E_LOW
    assert [round_fraction(2 / ((2 * i + 1) * two), FP64) for i in range(11)] == rows.LOG2_SERIES
    assert math.sqrt(2.0) == rows.SQRT2
    for c in rows.EXP2_POLY + elementwise.PHI_POLY:
        assert fl32(c) == c
    assert bits32(rows.MAGIC) << 23 & 0xFFFFFFFF == 0


def test_poly_is_within_one_ulp_of_exp2() -> None:
    rng = random.Random(5)
    assert rows.poly(0.0) == 1.0
    worst = 0.0
    for _ in range(4000):
        r = fl32(rng.uniform(-0.5, 0.5))
        worst = max(worst, abs(rows.poly(r) - 2.0**r) / ulp32(2.0**r))
    assert worst < 0.96


@pytest.mark.parametrize("temperature", [0.01, 0.1, 1.0, 10.0, 100.0])
def test_digits_do_not_depend_on_the_reference_exponent(temperature: float) -> None:
    rng = random.Random(6)
    scale = rows.temperature_scale(temperature)
    for _ in range(60):
        x = fl32(rng.gauss(0, 30))
        e = rows.reference_exponent(x, scale)
        one = rows.partial([x, fl32(x - 3)], 0, scale=scale, real=2, entropy=True)
        for s in (1, 2, 3, 4):
            higher = [0] * 6
            for value in (x, fl32(x - 3)):
                g, k, r = rows.exp2_scaled(value, scale, e + 22 * s)
                d, dq = rows.digits(g), rows.digits(mul32(g, r))
                for i in range(3):
                    higher[i] += d[i]
                    higher[3 + i] += d[i] * (k - e - 22 * s) + dq[i]
            raised = rows.raise_exponent(one, e + 22 * s)
            assert raised[1:4] + raised[6:9] == higher


def test_clamp_does_not_show() -> None:
    rng = random.Random(7)
    for temperature in (0.01, 0.6, 1.0, 100.0):
        scale = rows.temperature_scale(temperature)
        for e in (-2097150, -22, 0, 22, 2200, 2097150):
            floor = fl32((e - 100) / scale)
            for x in (-INF, -3.4e38, floor, floor - abs(floor) * 0.5, fl32(floor + abs(floor) * 1e-7)):
                g, k, r = rows.exp2_scaled(x, scale, e)
                assert -120 <= k - e <= -69
                assert rows.digits(g) == [0, 0, 0] == rows.digits(mul32(g, r))
            x = fl32((e - 100 + rng.uniform(-1, 34)) / scale)  # between the clamp and the grid
            assert rows.digits(rows.exp2_scaled(x, scale, e).g) in ([0, 0, 0], [0, 0, 1])


def test_reference_exponent_edges() -> None:
    assert rows.reference_exponent(-INF, 1.0) == rows.EMPTY
    assert rows.reference_exponent(-(2.0**22) - 1, 1.0) == rows.EMPTY
    assert rows.reference_exponent(2.0**22, 1.0) == rows.BEYOND
    assert rows.BEYOND % 22 == 0
    for k in range(-50, 50):
        e = rows.reference_exponent(float(k), 1.0)
        assert e % 22 == 0 and k <= e - 2 < k + 22
    rng = random.Random(8)
    for _ in range(200):  # the maximum's own digits use the k that gave e
        x = fl32(rng.uniform(-1, 1) * 2.0 ** rng.randint(-3, 20))
        scale = rows.temperature_scale(rng.choice([0.3, 1.0, 2.0]))
        e = rows.reference_exponent(x, scale)
        if abs(e) <= 1 << 21:
            assert -23 <= rows.exp2_scaled(x, scale, e).k - e <= -2


def test_log2_series() -> None:
    rng = random.Random(9)
    for _ in range(500):
        s = rng.uniform(1, 2) * 2.0 ** rng.randint(20, 61)
        j, log2m = rows.log2_parts(s)
        assert abs(log2m) <= 0.5 + 1e-15
        assert j + log2m == pytest.approx(math.log2(s), rel=2e-16, abs=4e-16)
    assert rows.log2_parts(2.0**40) == (40, 0.0)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
def test_rows_are_near_float64(temperature: float) -> None:
    rng = random.Random(10)
    scale = rows.temperature_scale(temperature)
    for _ in range(30):
        row = [fl32(rng.gauss(0, 4)) for _ in range(50)]
        part = rows.merge(
            [
                rows.partial(row[:20], 3, scale=scale, real=20, entropy=True),
                rows.partial(row[20:], -1, scale=scale, real=30, entropy=True),
            ]
        )
        assert part == rows.partial(row, 3, scale=scale, real=50, entropy=True)
        got = rows.close(part, scale)
        want = float64.logp(row, 3, temperature)
        bound = ulp32(want) / 2 + 1e-7 + 6e-8 * float64.mean_distance(row, 3, temperature) / temperature
        assert abs(got.logp - want) <= bound
        assert got.entropy == pytest.approx(float64.entropy(row, temperature), rel=4e-7, abs=1e-6)
        assert got.lse == pytest.approx(float64.logsumexp(row, temperature), rel=2e-7)
        inv = rows.inverse_temperature(temperature)
        grad = rows.gradient(
            row, 3, lse2=got.lse2, a=inv, b=fl32(0.5 * inv), h=fl32(0.25 * inv), entropy=got.entropy or 0.0,
            scale=scale, real=50, dtype="fp32",
        )  # fmt: skip
        exact = float64.gradient(row, 3, a=1.0, b=0.5, h=0.25, temperature=temperature)
        assert grad == pytest.approx(exact, rel=2e-5, abs=3e-7 / temperature)


def test_accumulator_limbs_hold_the_exact_sum() -> None:
    values = fp32_values(11, 200)
    acc = sums.accumulate(values)
    total = sum(Fraction(limb) * (1 << (32 * i)) for i, limb in enumerate(acc[:10])) * sums.UNIT
    assert total == sums.exact(values)
    normal = sums.normalise(acc)
    assert all(0 <= limb < 1 << 32 for limb in normal[:9])
    assert sum(limb << (32 * i) for i, limb in enumerate(normal[:10])) * sums.UNIT == total
    assert sums.close64(values) == math.fsum(values)
    assert sums.close64([]) == 0.0 and math.copysign(1, sums.close32([-0.0])) == 1
    assert math.isnan(sums.close32([INF, -INF])) and sums.close32([INF, 1.0]) == INF
    assert sums.close32([3.4028234663852886e38] * 2) == INF


def test_exp_and_its_thresholds() -> None:
    rng = random.Random(12)
    xs = [fl32(rng.uniform(-87.3, 88.7)) for _ in range(3000)]
    xs += [elementwise.EXP_MAX, elementwise.EXP_MIN, 0.0, -0.0, 1.0, 2.0**-149]
    worst = 0.0
    for x in xs:
        got = elementwise.exp(x)
        worst = max(worst, abs(got - math.exp(x)) / ulp32(math.exp(x)))
    assert worst <= 1.15
    above, below = from_bits32(bits32(elementwise.EXP_MAX) + 1), from_bits32(bits32(elementwise.EXP_MIN) + 1)
    assert fl32(math.exp(above)) == INF == elementwise.exp(above)
    assert elementwise.exp(below) == 0.0
    assert math.exp(below) < 2.0**-126 <= math.exp(elementwise.EXP_MIN)


def test_phi_and_expm1() -> None:
    rng = random.Random(13)
    for _ in range(3000):
        d = fl32(rng.uniform(-1, 1) * 2.0 ** rng.randint(-40, 7))
        if d > 88.0:
            continue
        exact_d = Fraction(d)
        if abs(d) < 0.1:  # a short series in fractions, where math.expm1(d) - d cancels
            want = float(sum((exact_d**i / math.factorial(i) for i in range(2, 16)), Fraction(0)))
        else:
            want = math.expm1(d) - d
        assert elementwise.phi(d) == pytest.approx(want, rel=3e-7, abs=1e-300) or abs(d) > 1
        assert elementwise.phi(d) >= 0.0
        assert abs(elementwise.expm1(d) - math.expm1(d)) <= 2 * ulp32(math.expm1(d)) or abs(d) > 1


def test_loss_by_hand() -> None:
    got = loss.grpo([[0.0, 0.0]], [[0.0, 0.0]], [1.0], [[True, False]])
    assert (got.loss, got.grad) == (-1.0, [[-1.0, 0.0]])
    got = loss.grpo(
        [[0.0], [0.0]],
        [[0.0], [0.0]],
        [1.0, -1.0],
        [[True], [False]],
        normalizer="per_sequence_then_mean_all",
    )
    assert got.loss == -0.5
    assert loss.advantages([1e8, 1e8 + 8], [0, 2]) == [-1.0, 1.0]
    assert loss.advantages([fl32(0.1)] * 7, [0, 7]) == [0.0] * 7
    assert loss.advantages([1.0, 2.0, 3.0], [0, 3], normalizer="mean_only") == [-1.0, 0.0, 1.0]
