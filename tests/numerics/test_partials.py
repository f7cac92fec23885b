"""Words and closings: the same bits as the oracle, and as themselves however the work is cut."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.numerics import constants as C
from rl_engine.numerics import words
from tests.bits import assert_bits_equal
from tests.numerics import cases
from tests.numerics.cases import DTYPES, IMPLEMENTATIONS
from tests.oracle import rows

TEMPERATURES = [1.0, 0.1, 10.0]

pytestmark = pytest.mark.parametrize("name", IMPLEMENTATIONS)


@pytest.mark.parametrize("temperature", [*TEMPERATURES, 0.6, 0.01, 100.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_rows_have_the_oracle_s_bits(name: str, dtype: str, temperature: float) -> None:
    impl = cases.implementation(name)
    scale = words.temperature_scale(temperature)
    assert scale == rows.temperature_scale(temperature)
    for label, row in cases.special_rows(dtype, temperature).items():
        part, closed = cases.oracle_special(dtype, temperature)[label]
        x, target = cases.tensor([row.values], dtype), torch.tensor([row.target])
        got = impl.partial(x, target, scale_l=scale, real_cols=x.shape[1], with_entropy=True)
        expected = torch.tensor([part])
        if closed.good or part[0] in (rows.EMPTY, rows.BEYOND):
            columns = [c for c in range(9) if c != 5 or not math.isnan(row.values[row.target])]
            assert_bits_equal(got[:, columns], expected[:, columns], f"{label}: partial")
        short = impl.partial(x, target, scale_l=scale, real_cols=x.shape[1])
        assert_bits_equal(short, got[:, :6], f"{label}: partial without entropy")
        result = words.close_rows(got, scale)
        assert_bits_equal(result.good, torch.tensor([closed.good]), f"{label}: good")
        cases.assert_closed_equal(result, cases.oracle_closed(expected, scale), label)
        for field in (result.logp, result.lse, result.entropy):
            assert field is not None and field.dtype == torch.float32
        assert not bool((result.logp > 0).any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_has_the_oracle_s_bits(name: str, dtype: str) -> None:
    x, target = cases.random_batch(dtype, 16, 61)
    for temperature in (1.0, 0.7):
        scale = words.temperature_scale(temperature)
        expected = cases.oracle_partials(x, target.tolist(), scale=scale)
        got = cases.implementation(name).partial(x, target, scale_l=scale, real_cols=61, with_entropy=True)
        assert_bits_equal(got, expected, "partial")
        cases.assert_closed_equal(
            words.close_rows(got, scale), cases.oracle_closed(expected, scale), "closed"
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_permuted_vocabulary(name: str, dtype: str) -> None:
    impl = cases.implementation(name)
    x, target = cases.random_batch(dtype, 16, 3001, seed=1)
    scale = words.temperature_scale(1.0)
    whole = impl.partial(x, target, scale_l=scale, real_cols=3001, with_entropy=True)
    for seed in range(3):
        order = torch.from_numpy(np.random.RandomState(seed).permutation(3001))
        inverse = torch.argsort(order)
        got = impl.partial(x[:, order], inverse[target], scale_l=scale, real_cols=3001, with_entropy=True)
        assert_bits_equal(got, whole, "partial of the permuted row")
    backwards = impl.partial(x.flip(1), 3000 - target, scale_l=scale, real_cols=3001, with_entropy=True)
    assert_bits_equal(backwards, whole, "partial of the reversed row")


@pytest.mark.parametrize("num_shards", range(1, 10))
@pytest.mark.parametrize("dtype", DTYPES)
def test_uneven_shards(name: str, dtype: str, num_shards: int) -> None:
    impl = cases.implementation(name)
    x, target = cases.random_batch(dtype, 16, 2500, seed=2)
    scale = words.temperature_scale(0.9)
    for entropy in (False, True):
        whole = impl.partial(x, target, scale_l=scale, real_cols=2500, with_entropy=entropy)
        for seed in range(2):
            bounds = cases.uneven_bounds(2500, num_shards, seed)
            got = cases.merged(impl, x, target, scale=scale, bounds=bounds, entropy=entropy)
            assert_bits_equal(got, whole, f"merged partial of {bounds}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_rows_in_shards(name: str, dtype: str) -> None:
    """Each special row beside 30 ordinary logits, and alone, cut in every place."""
    impl = cases.implementation(name)
    scale = words.temperature_scale(1.0)
    for label, row in cases.special_rows(dtype, 1.0).items():
        target = torch.tensor([row.target])
        for extra in ([], cases.gaussian(random.Random(3), 5)):
            x = cases.tensor([[*row.values, *extra]], dtype)
            size = x.shape[1]
            closed = cases.oracle_closed(cases.oracle_partials(x, [row.target], scale=scale), scale)
            for cut in range(0, size + 1, 1 if name == "cpu" or size < 12 else 5):
                got = cases.merged(impl, x, target, scale=scale, bounds=[0, cut, size])
                cases.assert_closed_equal(words.close_rows(got, scale), closed, f"{label} cut at {cut}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_see_each_other(name: str, dtype: str) -> None:
    impl = cases.implementation(name)
    x, target = cases.random_batch(dtype, 24, 1100, seed=4)
    x[5, 3] = torch.nan
    x[6, 4] = torch.inf
    x[7] = -torch.inf
    scale = words.temperature_scale(1.0)
    whole = impl.partial(x, target, scale_l=scale, real_cols=1100, with_entropy=True)
    order = torch.from_numpy(np.random.RandomState(5).permutation(24))
    reordered = impl.partial(x[order], target[order], scale_l=scale, real_cols=1100, with_entropy=True)
    assert_bits_equal(reordered, whole[order], "reordered rows")
    for i in range(24):
        one = impl.partial(x[i : i + 1], target[i : i + 1], scale_l=scale, real_cols=1100, with_entropy=True)
        assert_bits_equal(one, whole[i : i + 1], f"row {i} alone")
    closed = words.close_rows(whole, scale)
    assert closed.good.tolist() == [i not in (5, 6, 7) for i in range(24)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views_and_padding(name: str, dtype: str) -> None:
    """A column slice of a wider tensor, with NaN and +inf in the padding columns and around the slice."""
    impl = cases.implementation(name)
    x, target = cases.random_batch(dtype, 8, 300, seed=6)
    wide = torch.full((16, 400), torch.nan).to(x.dtype)
    wide[::2, 50:350] = x
    wide[::2, 350:] = torch.inf
    scale = words.temperature_scale(1.0)
    whole = impl.partial(x, target, scale_l=scale, real_cols=300, with_entropy=True)
    view = wide[::2, 50:370]
    before = view.clone()
    got = impl.partial(view, target, scale_l=scale, real_cols=300, with_entropy=True)
    assert_bits_equal(got, whole, "strided")
    assert_bits_equal(view, before, "the input", nan_payload=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_shapes(name: str, dtype: str) -> None:
    impl = cases.implementation(name)
    scale = words.temperature_scale(1.0)
    for entropy in (False, True):
        columns = 9 if entropy else 6
        for shape, real in (((0, 5), 5), ((3, 0), 0), ((3, 4), 0)):
            x = torch.full(shape, torch.nan).to(cases.TORCH[dtype])
            got = impl.partial(
                x, torch.full((shape[0],), -1), scale_l=scale, real_cols=real, with_entropy=entropy
            )
            expected = torch.zeros(shape[0], columns, dtype=torch.int64)
            expected[:, 0] = rows.EMPTY
            assert_bits_equal(got, expected, f"{shape}, {real} real columns")
            assert not bool(words.close_rows(got, scale).good.any())


@pytest.mark.parametrize("dtype", DTYPES)
def test_flags_and_target_bits(name: str, dtype: str) -> None:
    """NaN and +inf on each of three ranks; −0.0 and NaN targets keep their pattern."""
    impl = cases.implementation(name)
    scale = words.temperature_scale(1.0)
    base = cases.tensor([[0.5, -0.0, 1.0, 2.0, -0.0, 3.0]], dtype)
    for rank in range(3):
        for bad, flag in ((torch.nan, C.FLAG_NAN), (torch.inf, C.FLAG_POSINF)):
            x = base.clone()
            x[0, 2 * rank] = bad
            part = cases.merged(impl, x, torch.tensor([1]), scale=scale, bounds=[0, 2, 4, 6])
            assert part[0, 4].item() == flag + C.FLAG_OWNED
            assert part[0, 5].item() == 0x80000000
            closed = words.close_rows(part, scale)
            assert closed.owned.item() and not closed.good.item()
            assert closed.logp.isnan().all() and closed.lse.isnan().all() and closed.lse2.isnan().all()
    x = base.expand(1, 6).clone()
    x[0, 0], x[0, 2], x[0, 3] = torch.nan, torch.nan, torch.inf
    part = cases.merged(impl, x, torch.tensor([4]), scale=scale, bounds=[0, 2, 4, 6])
    assert part[0, 4].item() == 2 * C.FLAG_NAN + C.FLAG_POSINF + C.FLAG_OWNED
    assert part[0, 5].item() == 0x80000000


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_pattern_of_a_16_bit_dtype(name: str, dtype: str) -> None:
    """All 65,536 logits alone in a row, cpu against reference, and every 131st against the oracle."""
    if name == "reference":
        picked = torch.arange(0, 65536, 131)
    else:
        picked = torch.arange(65536)
    x = (picked - 32768).to(torch.int16).view(cases.TORCH[dtype])[:, None]
    target = torch.zeros(len(x), dtype=torch.int64)
    impl = cases.implementation(name)
    for temperature in (1.0, 0.05):
        scale = words.temperature_scale(temperature)
        got = impl.partial(x, target, scale_l=scale, real_cols=1, with_entropy=True)
        if name == "reference":
            expected = cases.oracle_partials(x, [0] * len(x), scale=scale)
        else:
            reference = cases.implementation("reference")
            expected = reference.partial(x, target, scale_l=scale, real_cols=1, with_entropy=True)
        nan = x[:, 0].isnan()
        assert_bits_equal(got[~nan], expected[~nan], "partial")
        assert_bits_equal(got[nan, :5], expected[nan, :5], "partial of NaN")
        finite = x[:, 0].isfinite()
        assert_bits_equal(
            got[finite, 5], x[finite, 0].float().view(torch.int32).to(torch.int64) & 0xFFFFFFFF, "target bits"
        )
        closed = words.close_rows(got, scale)
        domain = got[:, 0].abs() <= C.MAX_EXPONENT
        assert_bits_equal(closed.good, domain & ~nan & (x[:, 0] != torch.inf), "good")
        assert bool((closed.logp[closed.good].abs() <= 1e-7).all())  # one column: the answer is 0
        assert bool((closed.logp[closed.good] <= 0).all())


def _row_with_large_digit(word: int, sign: int, dtype: str, scale: float) -> tuple[float, list[int]]:
    """A logit whose digit `word` is ± 2^21 exactly, the most that a digit can be."""
    rng = random.Random(word)
    span = {1: (-3.0, 0.0), 2: (-23.4, -21.0)}[word]  # where numbers end half a unit below the digit's grid
    for _ in range(200000):
        x = cases.to_format(rng.uniform(*span) / scale, cases.FORMATS[dtype])
        digits = rows.digits(rows.exp2_scaled(x, scale, 0).g)
        if digits[word] == sign << 21 and rows.reference_exponent(x, scale) == 0:
            return x, digits
    raise AssertionError("no such logit")


@pytest.mark.parametrize(("word", "sign"), [(1, 1), (1, -1), (2, 1), (2, -1)])
def test_lanes_hold_their_adds(name: str, word: int, sign: int) -> None:
    """Constant rows of the largest digits, at the lengths around a full int32 lane."""
    scale = words.temperature_scale(1.0)
    x, digits = _row_with_large_digit(word, sign, "fp32", scale)
    impl = cases.implementation(name)
    for size in (1007, 1008, 1009, 1023, 1024, 1025, 2047, 2048, 4097, 40000):
        row = torch.full((1, size), x)
        for entropy in (False, True):  # each has its own loop
            got = impl.partial(row, torch.tensor([0]), scale_l=scale, real_cols=size, with_entropy=entropy)
            assert got[0, :4].tolist() == [0, *(d * size for d in digits)]
        one = rows.partial([x], 0, scale=scale, real=1, entropy=True)
        assert got[0, 6:].tolist() == [h * size for h in one[6:]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponent_raised_block_by_block(name: str, dtype: str) -> None:
    """Stretches whose maxima step over 1, 2, 3 and 50 multiples of 22, up and down."""
    impl = cases.implementation(name)
    rng = np.random.RandomState(8)
    scale = words.temperature_scale(1.0)
    steps = [0, 16, 31, 62, 61, 100, 84, 53, 0, 1000, 985, 954, 2000]
    for stretch in (1008, 700, 333):
        row = np.concatenate([rng.standard_normal(stretch) * 3 + s for s in steps])
        x = torch.from_numpy(np.stack([row, row[::-1], rng.permutation(row)])).to(cases.TORCH[dtype])
        target = torch.zeros(3, dtype=torch.int64)
        size = x.shape[1]
        got = impl.partial(x, target, scale_l=scale, real_cols=size, with_entropy=True)
        pieces = cases.merged(
            cases.implementation("reference"), x, target, scale=scale, bounds=[*range(0, size, 211), size]
        )
        assert_bits_equal(got, pieces, f"stretches of {stretch}")
        top = [v for v in x[0].tolist() if v > 2000 - 64]  # all else lies below the last grid
        expected = rows.partial(top, -1, scale=scale, real=len(top), entropy=True)
        assert got[0, :4].tolist() == expected[:4]
        assert got[0, 6:].tolist() == expected[6:]


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_maximum_between_two_exponents(name: str, dtype: str) -> None:
    """floor(x·L + ½) would give another e for −16.2889595 (and 77 thousand other numbers)."""
    impl = cases.implementation(name)
    scale = words.temperature_scale(1.0)
    values: list[float] = []
    for k in range(-60, 60):
        middle = (k + 0.5) / scale
        values += [
            cases.next_up(cases.to_format(middle, cases.FORMATS[dtype]), dtype, d) for d in range(-3, 4)
        ]
    values += [cases.to_format(v, cases.FORMATS[dtype]) for v in (-16.2889595, -69400.0)]
    x = cases.tensor([[v] for v in values], dtype)
    got = impl.partial(x, torch.zeros(len(values), dtype=torch.int64), scale_l=scale, real_cols=1)
    assert_bits_equal(got, cases.oracle_partials(x, [0] * len(values), scale=scale, entropy=False), "partial")


def test_large_vocabulary_matches_the_reference(name: str) -> None:
    """V = 151,936 and 262,144: split and whole, for cpu against the reference as well."""
    impl = cases.implementation(name)
    scale = words.temperature_scale(1.0)
    for size, dtype in ((151936, "bf16"), (262144, "fp32")):
        x, target = cases.random_batch(dtype, 4, size, seed=9)
        whole = impl.partial(x, target, scale_l=scale, real_cols=size)
        if name == "cpu":
            expected = cases.implementation("reference").partial(x, target, scale_l=scale, real_cols=size)
            assert_bits_equal(whole, expected, f"V = {size}")
        bounds = cases.uneven_bounds(size, 3, 10)
        assert_bits_equal(
            cases.merged(impl, x, target, scale=scale, bounds=bounds, entropy=False), whole, "split"
        )


@settings(max_examples=150, deadline=None)
@given(
    large=st.lists(st.integers(-(2**38), 2**38), min_size=5, max_size=5),
    first=st.integers(1, 2**39),
    e=st.integers(-95325, 95325),
    target=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([1.0, 0.3, 50.0]),
)
def test_closing_of_any_words(
    name: str, large: list[int], first: int, e: int, target: int, temperature: float
) -> None:
    """Words as long as a million columns make them: sums of more than 53 bits round where the page says."""
    scale = words.temperature_scale(temperature)
    # the first word carries the sum, as it does where the largest logit is in the row
    row = [22 * e, first << 1, large[0], large[1], C.FLAG_OWNED, target, *(v << 6 for v in large[2:])]
    if (row[1] << 22) + row[2] <= 1 << 23:
        row[1] += 1 << 18
    part = torch.tensor([row])
    expected = cases.oracle_closed(part, scale)
    cases.assert_closed_equal(words.close_rows(part, scale), expected, "closed")
    # the same sum written with other carries
    carried = part.clone()
    carried[0, 1] -= 3
    carried[0, 2] += (3 << 22) - 5
    carried[0, 3] += 5 << 22
    carried[0, 6] += 7
    carried[0, 7] -= 7 << 22
    cases.assert_closed_equal(words.close_rows(carried, scale), expected, "closed with other carries")
    without = words.close_rows(part[:, :6], scale)
    assert without.entropy is None
    assert_bits_equal(without.logp, expected.logp, "logp without entropy")


def test_closing_from_carried_words(name: str) -> None:
    """Sums beyond 53 bits whose words overlap: without carries, two roundings give other bits of lse2."""
    rng = random.Random(17)
    scale = words.temperature_scale(1.0)
    part = torch.tensor(
        [
            [
                -22,  # lse2 lies between −6 and −4, where one unit of S shows most often
                rng.getrandbits(39) | 1 << 38,
                rng.randint(-(2**42), 2**42),
                rng.randint(-(2**42), 2**42),
                C.FLAG_OWNED,
                cases.bits_of(cases.round32(rng.uniform(-20, -4)), "fp32"),
                *(rng.randint(-(2**42), 2**42) for _ in range(3)),
            ]
            for _ in range(1000)
        ]
    )
    cases.assert_closed_equal(words.close_rows(part, scale), cases.oracle_closed(part, scale), "closed")


def test_owner_count(name: str) -> None:
    """No owner, or two, makes logp NaN and leaves lse alone."""
    impl = cases.implementation(name)
    scale = words.temperature_scale(1.0)
    x = cases.tensor([[0.5, 1.0, 2.0]], "fp32")
    parts = [impl.partial(x, torch.tensor([t]), scale_l=scale, real_cols=3) for t in (0, 1, -1)]
    for chosen, owned in ((parts[:2], False), (parts[1:], True), (parts[2:], False)):
        closed = words.close_rows(words.merge(torch.stack(chosen)), scale)
        assert closed.owned.item() is owned
        assert closed.logp.isnan().item() is not owned
        assert bool(closed.lse.isfinite()) and closed.good.item()


SPECIALS = [
    0.0,
    -0.0,
    INF := float("inf"),
    -INF,
    float("nan"),
    -1e9,
    -3.0e38,
    1e5,
    -1e5,
    1.5e6,
    2.0**-149,
    33.0,
]


@st.composite
def split_rows(draw: st.DrawFn) -> tuple[list[float], int, list[int], float]:
    """A row, a target or none, cuts into up to nine shards, a temperature."""
    ordinary = st.floats(-60, 60, width=32)
    weird = st.one_of(st.sampled_from(SPECIALS), st.floats(width=32))
    element = draw(st.sampled_from([ordinary, st.one_of(ordinary, ordinary, ordinary, weird), weird]))
    row = draw(st.lists(element, min_size=1, max_size=24))
    target = draw(st.integers(-1, len(row) - 1))
    cuts = sorted(draw(st.lists(st.integers(0, len(row)), max_size=8)))
    return row, target, [0, *cuts, len(row)], draw(st.sampled_from([1.0, 0.01, 0.6, 3.0, 100.0]))


@settings(max_examples=120, deadline=None)
@given(case=split_rows())
def test_any_row_in_any_shards(name: str, case: tuple[list[float], int, list[int], float]) -> None:
    row, target, bounds, temperature = case
    scale = words.temperature_scale(temperature)
    x = cases.tensor([row], "fp32")
    expected = cases.oracle_closed(cases.oracle_partials(x, [target], scale=scale), scale)
    got = cases.merged(cases.implementation(name), x, torch.tensor([target]), scale=scale, bounds=bounds)
    cases.assert_closed_equal(words.close_rows(got, scale), expected, "closed")
