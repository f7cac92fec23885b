"""The loss from log-probs against the integer oracle: values, gradients, advantages, bit by bit."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rl_engine
from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    ClipSpec,
    KLEstimator,
    LossReductionSpec,
    ObjectiveSpec,
    TokenNormalizer,
)
from rl_engine.loss.advantages import group_advantages
from tests.bits import assert_bits_equal
from tests.numerics.cases import expect
from tests.oracle import loss as oracle
from tests.oracle.ieee import fl32, mul32

NORMALIZERS = list(TokenNormalizer)
Rows = list[list[float]]


def numbers(rng: random.Random, mask: list[list[bool]], low: float = -8.0, high: float = 0.0) -> Rows:
    """fp32 log-probs; masked tokens hold garbage."""
    garbage = [float("nan"), float("inf"), -1e30, 200.0]
    return [
        [fl32(rng.uniform(low, high)) if active else rng.choice(garbage) for active in row] for row in mask
    ]


def near(rng: random.Random, rows: Rows, spread: float) -> Rows:
    return [[fl32(v + rng.gauss(0, spread)) for v in row] for row in rows]


def compare(
    logp: Rows,
    old: Rows,
    advantage: list[float],
    mask: list[list[bool]],
    ref: Rows | None,
    objective: ObjectiveSpec,
    reduction: LossReductionSpec,
    upstream: float = 1.0,
) -> None:
    expected = oracle.grpo(
        logp,
        old,
        advantage,
        mask,
        ref=ref,
        beta=objective.beta,
        kl_estimator=str(objective.kl_estimator),
        normalizer=str(reduction.token_normalizer),
        constant=reduction.fixed_normalizer_constant,
        eps_low=objective.clip.clip_eps_low,
        eps_high=objective.clip.clip_eps_high,
        guard=objective.log_ratio_guard,
    )
    leaf = torch.tensor(logp, requires_grad=True)
    result = rl_engine.policy_loss(
        leaf,
        torch.tensor(old),
        torch.tensor(advantage),
        mask=torch.tensor(mask),
        ref_logps=None if ref is None else torch.tensor(ref),
        objective=objective,
        reduction=reduction,
    )
    (result.loss * upstream).backward()
    assert leaf.grad is not None
    assert_bits_equal(result.policy_loss, expect([expected.policy_loss], "fp32")[0], "policy_loss")
    if ref is not None:
        assert_bits_equal(result.kl, expect([expected.kl or 0.0], "fp32")[0], "kl")
    assert_bits_equal(result.loss, expect([expected.loss], "fp32")[0], "loss")
    assert_bits_equal(
        result.per_sequence_policy, expect(expected.per_sequence_policy, "fp32"), "per_sequence_policy"
    )
    flat = [mul32(fl32(upstream), g) + 0.0 for row in expected.grad for g in row]  # last, and zero is +0
    assert_bits_equal(leaf.grad.flatten(), expect(flat, "fp32"), "gradient")
    assert result.num_guarded_tokens.item() == expected.guarded
    assert result.num_active_tokens.item() == sum(map(sum, mask))


def reduction_of(normalizer: TokenNormalizer) -> LossReductionSpec:
    constant = 37.5 if normalizer is TokenNormalizer.FIXED_CONSTANT else None
    return LossReductionSpec(token_normalizer=normalizer, fixed_normalizer_constant=constant)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("estimator", list(KLEstimator))
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_random_batches(normalizer: TokenNormalizer, estimator: KLEstimator, beta: float) -> None:
    rng = random.Random(f"{normalizer}{estimator}{beta}")
    for round_number in range(8):
        length = rng.randint(1, 9)
        mask = [[rng.random() < 0.7 for _ in range(length)] for _ in range(rng.randint(1, 5))]
        mask[0][0] = True
        logp = numbers(rng, mask)
        old, ref = near(rng, logp, 0.2), near(rng, logp, 0.5)
        advantage = [fl32(rng.gauss(0, 1)) for _ in mask]
        objective = ObjectiveSpec(clip=ClipSpec(0.2, 0.28), kl_estimator=estimator, beta=beta)
        compare(
            logp,
            old,
            advantage,
            mask,
            ref if beta or round_number % 2 else None,
            objective,
            reduction_of(normalizer),
            upstream=(1.0, 0.3, 1024.0)[round_number % 3],
        )


@st.composite
def batches(
    draw: st.DrawFn,
) -> tuple[Rows, Rows, list[float], list[list[bool]], Rows, float, TokenNormalizer]:
    """Any finite log-probs where the mask is active, far apart and equal ones among them."""
    sequences, length = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    number = st.one_of(
        st.floats(-20, 0, width=32),
        st.floats(-300, 300, width=32),
        st.sampled_from([0.0, -0.0, -(2.0**-133), -80.0]),
    )
    table = st.lists(
        st.lists(number, min_size=length, max_size=length), min_size=sequences, max_size=sequences
    )
    flags = st.lists(
        st.lists(st.booleans(), min_size=length, max_size=length), min_size=sequences, max_size=sequences
    )
    advantage = st.one_of(st.floats(-3, 3, width=32), st.sampled_from([0.0, -0.0, 2.0**-133, 2.0**100]))
    return (
        draw(table),
        draw(table),
        draw(st.lists(advantage, min_size=sequences, max_size=sequences)),
        draw(flags),
        draw(table),
        draw(st.sampled_from([0.0, 0.1])),
        draw(st.sampled_from(NORMALIZERS)),
    )


@settings(max_examples=150, deadline=None)
@given(batch=batches(), guard=st.sampled_from([80.0, 5.0, 0.3]))
def test_any_batch(
    batch: tuple[Rows, Rows, list[float], list[list[bool]], Rows, float, TokenNormalizer], guard: float
) -> None:
    logp, old, advantage, mask, ref, beta, normalizer = batch
    objective = ObjectiveSpec(beta=beta, log_ratio_guard=guard)
    compare(logp, old, advantage, mask, ref, objective, reduction_of(normalizer))


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    data=st.data(),
    normalizer=st.sampled_from(list(AdvantageNormalizer)),
)
def test_advantages(sizes: list[int], data: st.DataObject, normalizer: AdvantageNormalizer) -> None:
    boundaries = [0, *itertools.accumulate(sizes)]
    reward = st.one_of(
        st.floats(-1e9, 1e9, width=32), st.floats(-2, 2, width=32), st.sampled_from([0.0, 1.0])
    )
    rewards = data.draw(st.lists(reward, min_size=boundaries[-1], max_size=boundaries[-1]))
    got = group_advantages(torch.tensor(rewards), tuple(boundaries), AdvantageSpec(normalizer=normalizer))
    expected = oracle.advantages(rewards, boundaries, normalizer=str(normalizer))
    assert_bits_equal(got, expect(expected, "fp32"), "advantages")
