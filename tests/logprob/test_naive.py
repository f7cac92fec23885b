"""The naive tier: right within fp32, and not the same bits on other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rl_engine.contracts import LogprobContract, ReductionSpec, ShardingSpec
from rl_engine.errors import InputError
from rl_engine.logprob.naive import load
from rl_engine.mesh.pool import RankPool
from rl_engine.registry import kernel_registry
from tests.bits import assert_bits_equal
from tests.logprob import tiers_on_ranks as on_rank

INF, NAN = float("inf"), float("nan")
PADDED, REAL, ROWS = 240, 230, 32


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(ROWS, PADDED, generator=generator) * 3
    logits[:, 7::31] = -INF
    targets = torch.randint(0, REAL, (ROWS,), generator=generator)
    logits[torch.arange(ROWS), targets] = torch.randn(ROWS, generator=generator)
    logits[:, REAL:] = NAN
    return logits, targets


def grads() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1.5, ROWS), torch.linspace(2, -1, ROWS)


def run(logits: Tensor, targets: Tensor, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "bounds": [(0, PADDED)],
        "real": REAL,
        "reduction": ReductionSpec.naive(),
        "grads": grads(),
    }
    return on_rank.logprobs(None, logits, targets, **fields | changes)


def check(got: dict[str, Any], grad: Tensor, logits: Tensor, targets: Tensor, temperature: float) -> None:
    """Within 1e-5 of float64."""
    exact = logits[:, :REAL].double().requires_grad_()
    logp = torch.log_softmax(exact / temperature, -1).gather(1, targets[:, None])[:, 0]
    lse = torch.logsumexp(exact / temperature, -1)
    torch.autograd.backward([logp, lse], [g.double() for g in grads()])
    assert exact.grad is not None
    torch.testing.assert_close(got["logp"].double(), logp, rtol=0, atol=1e-5)
    torch.testing.assert_close(got["lse"].double(), lse, rtol=0, atol=1e-5)
    torch.testing.assert_close(grad[:, :REAL].double(), exact.grad, rtol=1e-5, atol=1e-5)
    assert_bits_equal(grad[:, REAL:], torch.zeros(ROWS, PADDED - REAL), "padding")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_near_float64_on_one_rank(temperature: float) -> None:
    logits, targets = batch()
    got = run(logits, targets, temperature=temperature)
    check(got, got["grad"], logits, targets, temperature)


@pytest.mark.parametrize(
    "bounds",
    [
        on_rank.even_bounds(PADDED, 2),
        on_rank.even_bounds(PADDED, 3),
        [(0, 101), (101, 101), (101, 235), (235, 240)],
    ],
    ids=["tp 2", "tp 3", "uneven, empty, padding only"],
)
def test_near_float64_on_ranks_but_not_the_same_bits(pool: RankPool, bounds: on_rank.Bounds) -> None:
    """What makes it worth having: a comparison that uses it can fail."""
    logits, targets = batch()
    alone = run(logits, targets, temperature=0.6)
    args = (logits, targets, bounds, REAL, ReductionSpec.naive(), grads(), 0.6)
    results = pool.run(on_rank.logprobs, world_size=len(bounds), args=args)
    grad = torch.cat([r["grad"] for r in results], 1)
    check(results[0], grad, logits, targets, 0.6)
    for result in results:
        assert_bits_equal(result["logp"], results[0]["logp"], "logp on another rank")
        assert result["forward"] == {
            ("tp", "preflight"): 1,
            ("tp", "all_reduce_float"): 2,
            ("tp", "all_gather_rows"): 1,
        }
        assert result["backward"] == {}
    for name, got in (("logp", results[0]["logp"]), ("lse", results[0]["lse"]), ("grad", grad)):
        with pytest.raises(AssertionError, match=rf"{name}: \d+ of \d+ elements differ, by at most"):
            assert_bits_equal(got, alone[name], name)


def test_rows_without_a_distribution(pool: RankPool) -> None:
    """On one rank and on two; what is masked does not matter."""
    logits, targets = batch()
    logits[0, 40], logits[1, 40], logits[2, :REAL] = NAN, INF, -INF
    targets[3], targets[4] = REAL, -100
    mask = torch.arange(ROWS) != 4
    alone = run(logits, targets, mask=mask, validate=False)
    rest = (REAL, ReductionSpec.naive(), grads(), 1.0, mask, False)
    results = pool.run(
        on_rank.logprobs, world_size=2, args=(logits, targets, on_rank.even_bounds(PADDED, 2), *rest)
    )
    grad = torch.cat([r["grad"] for r in results], 1)
    for got, d in ((alone, alone["grad"]), (results[1], grad)):
        assert got["logp"][:6].isnan().tolist() == [True, True, True, True, False, False]
        assert got["lse"][:5].isnan().tolist() == [True, True, True, False, False]
        assert got["logp"][4] == 0.0
        assert d[:4, :REAL].isnan().all()
        assert d[4:, :].isfinite().all()
        assert not d[:, REAL:].any()
    only_logp = run(logits, targets, mask=mask, validate=False, grads=(torch.ones(ROWS), None))
    assert_bits_equal(only_logp["grad"][4], torch.zeros(PADDED), "inactive row")
    with pytest.raises(InputError, match="row 0: the logits hold a NaN"):
        run(logits, targets, mask=torch.arange(ROWS) == 0)


def test_siblings_with_other_targets(pool: RankPool) -> None:
    logits, targets = batch()
    other = targets.clone()
    other[1] = (other[1] + 1) % REAL
    rest = (on_rank.even_bounds(PADDED, 2), REAL, ReductionSpec.naive(), grads())
    per_rank = [(logits, targets, *rest), (logits, other, *rest)]
    outcomes = pool.run(on_rank.logprobs, world_size=2, per_rank_args=per_rank, expect_errors=True)
    assert [o.error_type for o in outcomes] == ["AgreementError"] * 2


def test_served_only_where_it_is_asked_for() -> None:
    sharding = ShardingSpec.even(REAL, padded_vocab_size=PADDED)
    naive = LogprobContract(role="train", dtype="fp32", sharding=sharding, reduction=ReductionSpec.naive())
    exact = LogprobContract(role="train", dtype="fp32", sharding=sharding)
    assert kernel_registry.get_logprob_op(naive).backend_id == "naive_torch"
    assert kernel_registry.get_logprob_op(exact).backend_id != "naive_torch"
    logits, targets = batch()
    with pytest.raises(InputError, match="merge is exact_words, naive_torch computes shard_lse"):
        load()(logits, targets, contract=exact)
