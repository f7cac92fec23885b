"""Distance from float64: the bounds that the page states, and the entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.numerics import words
from tests.bits import assert_bits_equal
from tests.numerics import cases
from tests.numerics.cases import DTYPES, IMPLEMENTATIONS
from tests.oracle import float64

pytestmark = pytest.mark.parametrize("name", IMPLEMENTATIONS)


def exact(x: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """float64 logp, lse, entropy and |x_t − E[x]| of [n, V] logits; a logp near 0 by log1p."""
    z = x.double() / temperature
    shifted = z - z.amax(1, keepdim=True)
    weight = shifted.exp()
    total = weight.sum(1)
    picked = shifted.gather(1, target[:, None])[:, 0]
    logp = picked - total.log()
    others = weight.scatter(1, target[:, None], 0.0).sum(1)
    logp = torch.where(picked == 0, -torch.log1p(others), logp)
    p = weight / total[:, None]
    mean = torch.where(p > 0, p * x.double(), 0.0).sum(1)
    entropy = torch.where(p > 0, p * (total.log()[:, None] - shifted), 0.0).sum(1)
    distance = (x.double().gather(1, target[:, None])[:, 0] - mean).abs()
    return logp, z.amax(1) + total.log(), entropy, distance


def check(name: str, x: Tensor, target: Tensor, temperature: float, label: str) -> None:
    scale = words.temperature_scale(temperature)
    part = cases.implementation(name).partial(
        x, target, scale_l=scale, real_cols=x.shape[1], with_entropy=True
    )
    got = words.close_rows(part, scale)
    assert bool(got.good.all()), label
    logp, lse, entropy, distance = exact(x, target, temperature)
    assert bool((got.logp <= 0).all()), f"{label}: logp {got.logp.max()}"
    impossible = logp.float().isinf()  # −inf, or finfo.min over a temperature below 1
    assert_bits_equal(got.logp[impossible], logp[impossible].float(), f"{label}: impossible targets")
    for i in (~impossible).nonzero()[:, 0].tolist():
        bound = cases.logp_bound(logp[i].item(), distance[i].item(), temperature)
        error = abs(got.logp[i].item() - logp[i].item())
        assert error <= bound, f"{label}, row {i}: logp {got.logp[i]} off by {error}, bound {bound}"
        largest = x[i][x[i].isfinite()].abs().max().item() / temperature
        lse_error = abs(got.lse[i].item() - lse[i].item())
        # rounding of L acts on the logit itself here: 2^-24 relative (1.0e-8 at T = 1)
        lse_bound = cases.ulp(lse[i].item()) / 2 + 1e-7 + 6e-8 * largest
        assert lse_error <= lse_bound, f"{label}, row {i}: lse {got.lse[i]} off by {lse_error}"
        assert got.entropy is not None
        entropy_error = abs(got.entropy[i].item() - entropy[i].item())
        # dH/dln T = Var[x]/T² ≤ (spread/T)²; 1e-7 · (1 + H) from 0.95 ulp of 2^r, on both sides of the sum
        spread = _deviation(x[i], temperature)
        entropy_bound = cases.ulp(entropy[i].item()) / 2 + 1.2e-7 * (1 + entropy[i].item()) + 6e-8 * spread**2
        assert entropy_error <= entropy_bound, f"{label}, row {i}: entropy off by {entropy_error}"


def _deviation(row: Tensor, temperature: float) -> float:
    p = torch.softmax(row.double() / temperature, 0)
    z = torch.where(p > 0, row.double() / temperature, 0.0)
    return math.sqrt(max(0.0, float((p * (z - (p * z).sum()) ** 2).sum())))


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.6, 10.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_rows(name: str, dtype: str, temperature: float) -> None:
    checked = 0
    for label, row in cases.special_rows(dtype, temperature).items():
        closed = cases.oracle_special(dtype, temperature)[label][1]
        if closed.good and closed.owned:
            x = cases.tensor([row.values], dtype)
            check(name, x, torch.tensor([row.target]), temperature, label)
            checked += 1
    assert checked >= 28


@pytest.mark.parametrize("size", [1, 2, 3, 17, 1000, 32768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes(name: str, dtype: str, size: int) -> None:
    for temperature in (1.0, 0.7):
        x, target = cases.random_batch(dtype, 8, size, seed=size)
        check(name, x, target, temperature, f"V = {size}")


def test_the_largest_vocabulary(name: str) -> None:
    size = 262144
    rng = np.random.RandomState(11)
    rows = [
        rng.standard_normal(size) * 3,
        np.full(size, -11.3),
        np.where(rng.rand(size) < 1e-4, 20.0, -1e9),
        rng.standard_normal(size) * 0.05 + 4096,
    ]
    target = torch.tensor([5, 6, int(rows[2].argmax()), 7])
    for dtype in ("bf16", "fp32"):
        x = torch.from_numpy(np.stack(rows)).to(cases.TORCH[dtype])
        check(name, x, target, 1.0, f"V = {size}, {dtype}")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_large_logits(name: str, dtype: str) -> None:
    """|x| from 4096 to 1e5, where a rounded clamp would leave its band and exp of x would overflow."""
    rng = np.random.RandomState(12)
    for size in (4096.0, 20000.0, 1e5):
        for sign in (1.0, -1.0):
            x = torch.from_numpy(sign * size * (1 + 0.01 * rng.standard_normal((4, 200)))).to(
                cases.TORCH[dtype]
            )
            check(name, x, x.argmax(1), 1.0, f"|x| = {size}")
            check(name, x, torch.tensor([0, 1, 2, 3]), 1.0, f"|x| = {size}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_logp_is_never_positive(name: str, dtype: str) -> None:
    """40,000 rows that are almost one-hot: unclamped, some reach +6e-8."""
    rng = np.random.RandomState(13)
    n = 40000
    x = torch.from_numpy(rng.standard_normal((n, 3)) * 8).to(cases.TORCH[dtype])
    x[:, 0] = x.amax(1) + torch.from_numpy(rng.uniform(0, 25, n)).to(x.dtype)
    x[::3, 1:] = -torch.inf
    target = torch.zeros(n, dtype=torch.int64)
    for temperature in (1.0, 0.3):
        scale = words.temperature_scale(temperature)
        part = cases.implementation(name).partial(x, target, scale_l=scale, real_cols=3)
        logp = words.close_rows(part, scale).logp
        assert bool((logp <= 0).all())
        alone = logp[::3]
        assert bool((alone > -1.5e-7).all())
        bits = alone.view(torch.int32)
        assert not bool((bits == -(2**31)).any()), "a logp of zero is +0.0"
        assert bool((bits == 0).any())


def test_known_entropies(name: str) -> None:
    impl = cases.implementation(name)
    scale = words.temperature_scale(1.0)

    def entropy(row: list[float], dtype: str = "fp32") -> float:
        x = cases.tensor([row], dtype)
        part = impl.partial(x, torch.tensor([0]), scale_l=scale, real_cols=len(row), with_entropy=True)
        value = words.close_rows(part, scale).entropy
        assert value is not None
        return value.item()

    for dtype in DTYPES:
        assert entropy([1.0, -math.inf, 0.0], dtype) == pytest.approx(0.5822, abs=5e-5)
        assert entropy([-math.inf, 3.0], dtype) == pytest.approx(0.0, abs=1.5e-7)
        assert entropy([2.0] * 64, dtype) == pytest.approx(math.log(64), rel=1e-7)
    rng = np.random.RandomState(14)
    for _ in range(50):
        row = [cases.round32(v) for v in rng.standard_normal(40) * 5]
        assert entropy(row) == pytest.approx(float64.entropy(row), rel=3e-7, abs=2e-7)
        assert entropy(row) >= 0.0


def test_entropy_of_peaked_rows_is_not_negative(name: str) -> None:
    rng = np.random.RandomState(15)
    x = torch.from_numpy(rng.standard_normal((20000, 3)) * 2).float()
    x[:, 0] += torch.from_numpy(rng.uniform(0, 60, 20000)).float()
    scale = words.temperature_scale(1.0)
    target = torch.zeros(20000, dtype=torch.int64)
    part = cases.implementation(name).partial(x, target, scale_l=scale, real_cols=3, with_entropy=True)
    entropy = words.close_rows(part, scale).entropy
    assert entropy is not None
    assert bool((entropy >= 0).all()) and not bool((entropy.view(torch.int32) < 0).any())
    exact_entropy = exact(x, target, 1.0)[2]
    assert bool(((entropy - exact_entropy).abs() <= 1.2e-7 * (1 + exact_entropy) + 1.2e-7).all())
