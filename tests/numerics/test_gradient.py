"""The gradient of a row: the oracle's bits, float64's neighbourhood, and exact zeros where they belong."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from rl_engine.numerics import words
from tests.bits import assert_bits_equal
from tests.numerics import cases
from tests.numerics.cases import DTYPES, IMPLEMENTATIONS
from tests.oracle import rows

pytestmark = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def run(
    name: str,
    x: Tensor,
    target: Tensor,
    closed: words.ClosedRows,
    *,
    scale: float,
    a: Tensor | None = None,
    b: Tensor | None = None,
    h: Tensor | None = None,
    real: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    return cases.implementation(name).gradient(
        x,
        target,
        closed.lse2,
        grad_logp=a,
        grad_lse=b,
        grad_entropy=h,
        entropy=None if h is None else closed.entropy,
        scale_l=scale,
        real_cols=x.shape[1] if real is None else real,
        out=out,
    )


def closed_rows(x: Tensor, target: Tensor, scale: float, real: int | None = None) -> words.ClosedRows:
    part = cases.merged(
        cases.implementation("reference"), x, target, scale=scale, real=x.shape[1] if real is None else real
    )
    return words.close_rows(part, scale)


def oracle(
    x: Tensor,
    target: Tensor,
    closed: words.ClosedRows,
    *,
    scale: float,
    dtype: str,
    a: Tensor,
    b: Tensor,
    h: Tensor,
    real: int | None = None,
) -> Tensor:
    assert closed.entropy is not None
    out: list[float] = []
    for i in range(x.shape[0]):
        out += rows.gradient(
            cases.floats(x[i]),
            int(target[i]),
            lse2=closed.lse2[i].item(),
            a=a[i].item(),
            b=b[i].item(),
            h=h[i].item(),
            entropy=closed.entropy[i].item(),
            scale=scale,
            real=x.shape[1] if real is None else real,
            dtype=dtype,
        )
    return cases.expect(out, dtype).reshape(x.shape)


COEFFICIENTS = list(itertools.product((0.0, 0.7310585, -1.5e-3), (0.0, -0.25, 3.0), (0.0, 0.01, -0.6)))


@pytest.mark.parametrize("temperature", [1.0, 0.1, 10.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_rows_have_the_oracle_s_bits(name: str, dtype: str, temperature: float) -> None:
    scale = words.temperature_scale(temperature)
    inverse = rows.inverse_temperature(temperature)
    assert words.inverse_temperature(temperature) == inverse
    for number, (label, row) in enumerate(cases.special_rows(dtype, temperature).items()):
        x, target = cases.tensor([row.values], dtype), torch.tensor([row.target])
        closed = closed_rows(x, target, scale)
        for a, b, h in COEFFICIENTS[number % 2 :: 5]:
            a, b, h = (torch.tensor([cases.round32(c * inverse)]) for c in (a, b, h))
            expected = oracle(x, target, closed, scale=scale, dtype=dtype, a=a, b=b, h=h)
            got = run(name, x, target, closed, scale=scale, a=a, b=b, h=h)
            assert_bits_equal(got, expected, f"{label}: gradient of {a.item()}, {b.item()}, {h.item()}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_combination_of_coefficients(name: str, dtype: str) -> None:
    x, target = cases.random_batch(dtype, len(COEFFICIENTS), 41, seed=3)
    target[::9] = -1
    scale = words.temperature_scale(1.3)
    closed = closed_rows(x, target, scale)
    a, b, h = (torch.tensor(column) for column in zip(*COEFFICIENTS, strict=True))
    expected = oracle(x, target, closed, scale=scale, dtype=dtype, a=a, b=b, h=h)
    assert_bits_equal(run(name, x, target, closed, scale=scale, a=a, b=b, h=h), expected, "gradient")
    zero = torch.zeros_like(a)
    for used in itertools.product((False, True), repeat=3):
        chosen = [c if use else None for c, use in zip((a, b, h), used, strict=True)]
        got = run(name, x, target, closed, scale=scale, a=chosen[0], b=chosen[1], h=chosen[2])
        filled = [zero if c is None else c for c in chosen]
        with_zeros = run(name, x, target, closed, scale=scale, a=filled[0], b=filled[1], h=filled[2])
        assert_bits_equal(got, with_zeros, f"None counts as 0: {used}")
        expected = oracle(x, target, closed, scale=scale, dtype=dtype, a=filled[0], b=filled[1], h=filled[2])
        assert_bits_equal(got, expected, f"gradient of {used}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_coefficients(name: str, dtype: str) -> None:
    """Overflow and underflow of the dtype, ties, subnormals, −0, and coefficients that are not finite."""
    sizes = [
        1e38,
        3e5,
        7e4,
        1e-6,
        5e-8,
        3e-8,
        1e-38,
        1e-40,
        1e-44,
        2.0**-149,
        0.0,
        -0.0,
        cases.INF,
        cases.NAN,
    ]
    values = [sign * size for size in sizes for sign in (1.0, -1.0)]
    n = len(values)
    x, target = cases.random_batch(dtype, n, 33, seed=4)
    x[:, 7] = 2.5
    scale = words.temperature_scale(1.0)
    closed = closed_rows(x, target, scale)
    c = torch.tensor(values, dtype=torch.float64).float()
    zero = torch.zeros(n)
    finite = c.isfinite()
    for place in range(3):
        coefficients = [zero, zero, zero]
        coefficients[place] = c
        a, b, h = coefficients
        got = run(name, x, target, closed, scale=scale, a=a, b=b, h=h)
        expected = oracle(x, target, closed, scale=scale, dtype=dtype, a=a, b=b, h=h)
        assert_bits_equal(got[finite], expected[finite], f"coefficient {place}")
        assert bool(got[~finite].isnan().all()), "a coefficient that is not finite gives NaN"
        assert bool((got[c == 0].view(cases._SIGNED[x.element_size()]) == 0).all()), "+0 by selection"


def test_rounding_to_half_at_ties(name: str) -> None:
    """p = 1/2 exactly gives a/2: every tie and subnormal of fp16 and bf16 can be dialled in."""
    rng = random.Random(5)
    for dtype in ("fp16", "bf16"):
        patterns = [rng.getrandbits(15 if dtype == "bf16" else 14) for _ in range(1500)]
        base = cases.from_bits(patterns, dtype).float()
        above = cases.from_bits([p + 1 for p in patterns], dtype).float()
        a = torch.cat([base * 2, above * 2, base + above, (base + above).nextafter(above)])
        a = a[a.isfinite() & (a != 0)]
        a = torch.cat([a, -a, torch.tensor([2 * 65519.0, 2 * 65520.0, 2 * 65535.0, 2.0**-24, 2.0**-25])])
        x = torch.zeros(len(a), 2).to(cases.TORCH[dtype])
        target = torch.zeros(len(a), dtype=torch.int64)
        lse2 = torch.ones(len(a), dtype=torch.float64)
        closed = words.ClosedRows(lse2, a, a, torch.zeros_like(a), a > 0, a > 0)
        got = run(name, x, target, closed, scale=1.0, a=a)
        half = [v / 2 for v in a.tolist()]
        assert_bits_equal(got[:, 0], cases.expect([_round(v, dtype) for v in half], dtype), dtype)
        assert_bits_equal(got[:, 1], cases.expect([_round(-v, dtype) for v in half], dtype), dtype)


def _round(value: float, dtype: str) -> float:
    return cases.to_format(cases.round32(value), cases.FORMATS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_in_place_and_strides(name: str, dtype: str) -> None:
    x, target = cases.random_batch(dtype, 12, 90, seed=5)
    target %= 64
    real = 64
    x[:, real:] = torch.nan
    scale = words.temperature_scale(1.0)
    closed = closed_rows(x, target, scale, real)
    a, b, h = torch.linspace(-1, 1, 12), torch.linspace(0, 3, 12), torch.linspace(1, 0, 12)
    a[4] = b[4] = h[4] = 0.0
    expected = oracle(x, target, closed, scale=scale, dtype=dtype, a=a, b=b, h=h, real=real)
    assert bool((expected[:, real:].view(cases._SIGNED[x.element_size()]) == 0).all())
    before = x.clone()
    got = run(name, x, target, closed, scale=scale, a=a, b=b, h=h, real=real)
    assert_bits_equal(got, expected, "gradient")
    assert_bits_equal(x, before, "the input", nan_payload=True)

    wide = torch.full((24, 120), 7.0).to(x.dtype)
    view = wide[::2, 20:110]
    view.copy_(x)
    out = torch.full((12, 95), 9.0).to(x.dtype)
    returned = run(name, view, target, closed, scale=scale, a=a, b=b, h=h, real=real, out=out[:, 5:])
    assert_bits_equal(out[:, 5:], expected, "gradient into a view")
    assert returned.data_ptr() == out[:, 5:].data_ptr()
    assert bool((out[:, :5] == 9).all())

    for coefficients in ((a, b, h), (a, None, None)):
        fresh = run(
            name,
            x,
            target,
            closed,
            scale=scale,
            a=coefficients[0],
            b=coefficients[1],
            h=coefficients[2],
            real=real,
        )
        own = x.clone()
        run(
            name, own, target, closed, scale=scale, a=coefficients[0], b=coefficients[1], h=coefficients[2],
            real=real, out=own,
        )  # fmt: skip
        assert_bits_equal(own, fresh, "gradient in place of the logits")


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_are_slices(name: str, dtype: str) -> None:
    """A shard's gradient is the slice of the whole one, whether it owns the target or not."""
    x, target = cases.random_batch(dtype, 16, 1500, seed=6)
    scale = words.temperature_scale(0.8)
    closed = closed_rows(x, target, scale)
    a, b, h = torch.linspace(-1, 1, 16), torch.linspace(0, 3, 16), torch.linspace(1, 0, 16)
    for chosen in ((a, b, h), (a, None, None)):
        whole = run(name, x, target, closed, scale=scale, a=chosen[0], b=chosen[1], h=chosen[2])
        for shards in (2, 5, 9):
            bounds = cases.uneven_bounds(1500, shards, shards)
            for start, stop in itertools.pairwise(bounds):
                part = run(
                    name,
                    x[:, start:stop],
                    cases.local_targets(target, start, stop),
                    closed,
                    scale=scale,
                    a=chosen[0],
                    b=chosen[1],
                    h=chosen[2],
                )
                assert_bits_equal(part, whole[:, start:stop], f"columns {start} to {stop}")
        for i in range(16):
            one = words.ClosedRows(*(None if f is None else f[i : i + 1] for f in closed))
            alone = run(
                name,
                x[i : i + 1],
                target[i : i + 1],
                one,
                scale=scale,
                a=chosen[0][i : i + 1],
                b=None if chosen[1] is None else chosen[1][i : i + 1],
                h=None if chosen[2] is None else chosen[2][i : i + 1],
            )
            assert_bits_equal(alone, whole[i : i + 1], f"row {i} alone")


def test_cpu_equals_reference_on_a_large_vocabulary(name: str) -> None:
    if name == "reference":
        other = "cpu"
    else:
        other = "reference"
    for dtype in ("bf16", "fp32"):
        x, target = cases.random_batch(dtype, 3, 50257, seed=7)
        scale = words.temperature_scale(1.0)
        closed = closed_rows(x, target, scale)
        a, h = torch.tensor([1.0, -0.3, 1e-4]), torch.tensor([0.0, 0.1, 1.0])
        left = run(name, x, target, closed, scale=scale, a=a, h=h)
        assert_bits_equal(left, run(other, x, target, closed, scale=scale, a=a, h=h), dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.1, 10.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_near_float64_autograd(name: str, dtype: str, temperature: float) -> None:
    size = 400
    x, target = cases.random_batch(dtype, 16, size, seed=8)
    scale = words.temperature_scale(temperature)
    inverse = torch.tensor(words.inverse_temperature(temperature))
    closed = closed_rows(x, target, scale)
    leaf = x.double().requires_grad_()
    # log-softmax in float64; −inf logits are taken out of p·ln p, not multiplied
    logp = torch.log_softmax(leaf / temperature, 1)
    p = logp.exp()
    entropy = -torch.where(p > 0, p * logp.clamp(min=-1e5), 0.0).sum(1)
    lse = torch.logsumexp(leaf / temperature, 1)
    picked = logp.gather(1, target[:, None])[:, 0]
    a, b, h = torch.linspace(-1, 1, 16), torch.linspace(0, 3, 16), torch.linspace(1, 0, 16)
    for chosen in ((True, False, False), (False, True, False), (False, False, True), (True, True, True)):
        coefficients = [c if use else torch.zeros_like(c) for c, use in zip((a, b, h), chosen, strict=True)]
        objective = (coefficients[0] * torch.where(picked.isfinite(), picked, 0.0)).sum()
        objective = objective + (coefficients[1] * lse).sum() + (coefficients[2] * entropy).sum()
        (want,) = torch.autograd.grad(objective, leaf, retain_graph=True)
        scaled = [(c * inverse).float() for c in coefficients]
        got = run(name, x, target, closed, scale=scale, a=scaled[0], b=scaled[1], h=scaled[2])
        size_of = sum(c.abs() for c in scaled)[:, None].double()
        mean = torch.where(p > 0, p * x.double(), 0.0).sum(1, keepdim=True).detach()
        away = torch.where(p > 0, (x.double() - mean).abs(), 0.0) / temperature
        # p is off by ½ ulp of y (|y| < 126: 2.7e-6), by 1 ulp of 2^r and by the temperature's rounding;
        # 1 − p loses 2^-25; the entropy's factor |ln p| + H multiplies what p carries
        relative = 3.2e-6 + 6e-8 * away
        weight = 1 + torch.where(p > 0, logp.abs(), 0.0) + entropy[:, None].abs()
        bound = size_of * (p * relative * weight + 2.0**-24 * (p * weight + 1e-3 * (want != 0)) + 1e-37)
        onehot = torch.zeros_like(p).scatter(1, target[:, None], 1.0)
        bound = bound + 2.0**-24 * size_of * onehot
        rounding = torch.tensor([[cases.ulp(v, dtype) / 2 for v in r] for r in got.double().tolist()])
        wrong = (got.double() - want).abs() > bound + rounding
        wrong &= picked.isfinite()[:, None]
        assert not bool(wrong.any()), (wrong.nonzero()[0], chosen)


def test_p_near_one_is_accurate(name: str) -> None:
    """a·(1 − p) at a target of probability 1 − 1e-5 keeps three digits; the others sum to it."""
    x = torch.tensor([[12.0, 0.0, 0.3]])
    scale = words.temperature_scale(1.0)
    target = torch.tensor([0])
    closed = closed_rows(x, target, scale)
    got = run(name, x, target, closed, scale=scale, a=torch.ones(1))[0].double()
    rest = math.exp(-12.0) + math.exp(x[0, 2].item() - 12.0)
    want = rest / (1 + rest)
    assert got[0].item() == pytest.approx(want, abs=2.0**-23)
    assert got[1:].sum().item() == pytest.approx(-want, rel=1e-5)


def test_probabilities_around_the_smallest(name: str) -> None:
    """p is 2^y down to y = −126 and +0 below; L = 1 and lse2 = 0 make y the logit itself."""
    near = [cases.next_up(-126.0, "fp32", d) for d in range(-4, 5)]
    middle = [cases.next_up(-125.5, "fp32", d) for d in range(-2, 3)]
    x = torch.tensor(
        [[*near, *middle, -127.0, -1e38, -cases.INF, 0.0, -0.0, 2.0**-30, 1e-7, -0.5, -1.5, -2.5]]
    )
    one = torch.ones(1)
    for lse2 in (0.0, 1.0, -0.25, 0.5, 1.5):
        exact = torch.tensor([lse2], dtype=torch.float64)
        closed = words.ClosedRows(exact, one, one, 0.75 * one, one > 0, one > 0)
        for a, b, h in COEFFICIENTS:
            coefficients = [torch.tensor([1e4 * c]) for c in (a, b, h)]
            expected = oracle(
                x,
                torch.tensor([2]),
                closed,
                scale=1.0,
                dtype="fp32",
                a=coefficients[0],
                b=coefficients[1],
                h=coefficients[2],
            )
            got = run(
                name,
                x,
                torch.tensor([2]),
                closed,
                scale=1.0,
                a=coefficients[0],
                b=coefficients[1],
                h=coefficients[2],
            )
            assert_bits_equal(got, expected, f"gradient at lse2 = {lse2}")


def test_rows_that_are_not_good(name: str) -> None:
    """NaN in each real column where a coefficient is used, +0 where none is, +0 in the padding either way."""
    x = torch.tensor(
        [[0.0, math.nan, 1.0, 5.0], [-math.inf] * 4, [math.inf, 0.0, 0.0, 0.0], [0.0, 1.0, 2.0, 3.0]]
    )
    target = torch.tensor([0, 1, 2, 2])
    scale = words.temperature_scale(1.0)
    closed = closed_rows(x, target, scale, 3)
    for used in (1.0, 0.0):
        a = torch.full((4,), used)
        got = run(name, x, target, closed, scale=scale, a=a, real=3)
        assert got[:3, :3].isnan().all().item() is (used != 0)
        assert bool(got[3].isfinite().all())
        assert bool((got[:, 3].view(torch.int32) == 0).all())
        if not used:
            assert bool((got.view(torch.int32) == 0).all())
    for b, h in ((torch.ones(4), None), (None, torch.ones(4))):
        got = run(name, x, target, closed, scale=scale, b=b, h=h, real=3)
        assert got[:3, :3].isnan().all().item() and bool(got[3].isfinite().all())


def test_empty_shapes(name: str) -> None:
    scale = words.temperature_scale(1.0)
    for shape, real in (((0, 4), 4), ((2, 0), 0), ((2, 3), 0)):
        x = torch.full(shape, math.nan)
        lse2 = torch.zeros(shape[0], dtype=torch.float64)
        one = torch.ones(shape[0])
        closed = words.ClosedRows(lse2, one, one, one, one > 0, one > 0)
        got = run(name, x, torch.full((shape[0],), -1), closed, scale=scale, a=one, b=one, h=one, real=real)
        assert_bits_equal(got, torch.zeros(shape), f"{shape}")
