"""The naive loss: right within fp32 for every formula and normaliser, with other bits on other ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    DataParallelReduction,
    KLEstimator,
    LossReductionSpec,
    ObjectiveSpec,
    ReductionSpec,
    TokenNormalizer,
)
from rl_engine.loss import objective as exact_objective
from rl_engine.loss.advantages import group_advantages
from rl_engine.loss.naive import NaiveArithmetic
from rl_engine.mesh.pool import RankPool
from tests.bits import assert_bits_equal
from tests.logprob import tiers_on_ranks as on_rank

NAIVE = (("naive_torch", "naive"), ReductionSpec.naive())
EXACT = (("auto", "exact"), ReductionSpec.exact())
SCALARS = ("loss", "policy_loss", "kl", "advantages", "per_sequence_policy", "per_sequence_kl")


def reduction_of(normalizer: TokenNormalizer, **changes: Any) -> LossReductionSpec:
    constant = 37.5 if normalizer is TokenNormalizer.FIXED_CONSTANT else None
    return LossReductionSpec(
        token_normalizer=normalizer,
        fixed_normalizer_constant=constant,
        determinism_scope="fixed_topology",
        **changes,
    )


def alone(
    data: dict[str, Any],
    backends: Any,
    objective: ObjectiveSpec,
    reduction: LossReductionSpec,
    real: int = 60,
) -> dict[str, Any]:
    return on_rank.grpo(None, data, 1, 1, real, *backends, objective, reduction, (3, 4))


def assert_near(got: dict[str, Any], expected: dict[str, Any], grad: torch.Tensor) -> None:
    for name in SCALARS:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-5)
    for name in ("num_active_tokens", "num_guarded_tokens"):
        assert_bits_equal(got[name], expected[name], name)
    assert expected["grad"].abs().sum() > 0
    torch.testing.assert_close(grad, expected["grad"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normalizer", list(TokenNormalizer))
@pytest.mark.parametrize("estimator", list(KLEstimator))
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_near_the_exact_one(normalizer: TokenNormalizer, estimator: KLEstimator, beta: float) -> None:
    data = on_rank.random_batch(4)
    data["mask"][5] = False  # a sequence that some normalisers leave out
    objective = ObjectiveSpec(kl_estimator=estimator, beta=beta, log_ratio_guard=0.5)
    expected = alone(data, EXACT, objective, reduction_of(normalizer))
    got = alone(data, NAIVE, objective, reduction_of(normalizer))
    assert got["ids"] == ("naive_torch", "naive", "none")
    assert expected["num_guarded_tokens"] > 0
    assert_near(got, expected, got["grad"])


@pytest.mark.parametrize("normalizer", list(AdvantageNormalizer))
def test_advantages(normalizer: AdvantageNormalizer) -> None:
    data = on_rank.random_batch(8)
    objective = ObjectiveSpec(advantage=AdvantageSpec(normalizer=normalizer))
    reduction = reduction_of(TokenNormalizer.GLOBAL_ACTIVE_TOKENS)
    got = alone(data, NAIVE, objective, reduction)
    torch.testing.assert_close(
        got["advantages"], alone(data, EXACT, objective, reduction)["advantages"], rtol=1e-5, atol=1e-6
    )


def test_equal_rewards_show_its_weakness() -> None:
    """Kept on purpose: a rounded mean makes equal rewards differ from it, and the exact sums do not."""
    groups = [torch.full((size,), value) for size in range(6, 12) for value in (100.1, 0.1, 0.3, 3.3)]
    spec = AdvantageSpec()
    naive = [NaiveArithmetic().group_advantages(g, (0, len(g)), spec) for g in groups]
    assert any(a.any() for a in naive)
    assert not any(group_advantages(g, (0, len(g)), spec).any() for g in groups)


@pytest.mark.parametrize("normalizer", list(TokenNormalizer))
def test_nothing_active(normalizer: TokenNormalizer) -> None:
    data = on_rank.random_batch(4)
    data["mask"][:] = False
    got = alone(data, NAIVE, ObjectiveSpec(beta=0.1), reduction_of(normalizer))
    assert [float(got[name]) for name in SCALARS[:3]] == [0.0, 0.0, 0.0]
    assert not got["grad"].any()


def test_masked_tokens_are_selected_away() -> None:
    """Against the exact terms, garbage under the mask and far log-ratios included."""
    logp = torch.tensor([-1.0, float("nan"), -300.0, -2.0, float("inf")])
    old = torch.tensor([-300.0, -1.0, -1.0, -2.5, float("-inf")])
    ref = torch.tensor([-1.5, float("nan"), -1.0, -2.0, 0.0])
    advantage = torch.tensor([1.0, 0.0, -1.0, -0.5, 2.0])
    active = torch.tensor([True, False, True, True, False])
    objective = ObjectiveSpec(beta=0.1)
    got = NaiveArithmetic().token_terms(logp, old, advantage, ref, active, objective)
    expected = exact_objective.token_terms(logp, old, advantage, ref, active, objective)
    assert_bits_equal(got.guarded, expected.guarded, "guarded")
    assert got.kl is not None and expected.kl is not None
    torch.testing.assert_close(got.surrogate, expected.surrogate, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.kl, expected.kl, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.gradient, expected.gradient, rtol=1e-5, atol=1e-6)
    for values in (got.surrogate, got.kl, got.gradient):
        assert values[~active].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("normalizer", list(TokenNormalizer))
def test_on_ranks(pool: RankPool, normalizer: TokenNormalizer) -> None:
    """TP 2 × DP 2: near the exact loss of one rank, the same on all ranks, other bits than on one."""
    data = on_rank.random_batch(6, vocab=1000, padded=1024)
    objective = ObjectiveSpec(beta=0.04)
    reduction = reduction_of(normalizer)
    expected = alone(data, EXACT, objective, reduction, 1000)
    single = alone(data, NAIVE, objective, reduction, 1000)
    args = (data, 2, 2, 1000, *NAIVE, objective, reduction, (3, 4))
    results = pool.run(on_rank.grpo, world_size=4, args=args)
    grad = on_rank.joined_grad(results, 2)
    assert_near(results[0], expected, grad)
    for result in results:
        for name in SCALARS:
            assert_bits_equal(result[name], results[0][name], f"{name} on another rank")
    for name, got in (("per_sequence_policy", results[0]["per_sequence_policy"]), ("grad", grad)):
        with pytest.raises(AssertionError, match=rf"{name}: \d+ of \d+ elements differ"):
            assert_bits_equal(got, single[name], name)


def test_data_parallel_alone_changes_bits(pool: RankPool) -> None:
    """On exact log-probs: what differs is the order of the sums alone."""
    backends = (("auto", "naive"), ReductionSpec.exact())
    objective, reduction = ObjectiveSpec(beta=0.04), reduction_of(TokenNormalizer.GLOBAL_ACTIVE_TOKENS)
    rest = (60, *backends, objective, reduction, (5, 7))
    same: list[bool] = []
    for seed in range(4):
        data = on_rank.random_batch(seed, sequences=12, length=40)
        single = on_rank.grpo(None, data, 1, 1, *rest)
        results = pool.run(on_rank.grpo, world_size=3, args=(data, 1, 3, *rest))
        for name in ("loss", "policy_loss", "kl"):
            torch.testing.assert_close(results[0][name], single[name], rtol=1e-5, atol=1e-6)
            same.append(torch.equal(results[0][name], single[name]))
    assert not all(same)


def test_averaged_gradients(pool: RankPool) -> None:
    """`mean` multiplies the gradient by the DP degree, and leaves the loss."""
    data = on_rank.random_batch(6)
    objective = ObjectiveSpec()
    del data["ref_logits"]
    summed, averaged = (
        reduction_of(TokenNormalizer.PER_SEQUENCE_THEN_MEAN, data_parallel_reduction=how)
        for how in DataParallelReduction
    )
    single = alone(data, NAIVE, objective, summed)
    args = (data, 1, 2, 60, *NAIVE, objective, averaged, (3, 4))
    results = pool.run(on_rank.grpo, world_size=2, args=args)
    torch.testing.assert_close(results[0]["loss"], single["loss"], rtol=1e-5, atol=1e-6)
    grad = on_rank.joined_grad(results, 1)
    torch.testing.assert_close(grad, 2 * single["grad"], rtol=1e-4, atol=1e-6)
