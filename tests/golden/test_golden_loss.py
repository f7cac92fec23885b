"""Losses and gradients that public libraries give for one shared input (tests/data/golden_loss.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import rl_engine
from rl_engine.contracts import ClipSpec, LossReductionSpec, ObjectiveSpec, TokenNormalizer
from tests.oracle import float64

DATA: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "golden_loss.json").read_text())
INPUT: dict[str, Any] = DATA["input"]
CASES = {case["name"]: case for case in DATA["cases"]}
MASK = [[bool(m) for m in row] for row in INPUT["mask"]]


class Setting(NamedTuple):
    """What our contract calls a library's loss."""

    normalizer: TokenNormalizer
    constant: float | None = None
    beta: float = 0.0


TOKENS = Setting(TokenNormalizer.GLOBAL_ACTIVE_TOKENS)
SETTINGS = {
    "trl.grpo": Setting(TokenNormalizer.PER_SEQUENCE_THEN_MEAN_ALL),
    "trl.bnpo": TOKENS,
    "trl.dapo": TOKENS,
    "trl.dr_grpo": Setting(TokenNormalizer.FIXED_CONSTANT, 4 * 5),
    "trl.dapo.beta.1": TOKENS._replace(beta=0.1),
    "verl.vanilla.token-mean.cinf": TOKENS,
    "verl.vanilla.token-sum.cinf": Setting(TokenNormalizer.FIXED_CONSTANT, 1),
    "verl.vanilla.token-sum.cinf.gbs4": Setting(TokenNormalizer.FIXED_CONSTANT, 1),
    "verl.vanilla.seq-mean-token-mean.cinf": Setting(TokenNormalizer.PER_SEQUENCE_THEN_MEAN),
    "verl.vanilla.seq-mean-token-mean.cinf.gbs4": Setting(TokenNormalizer.PER_SEQUENCE_THEN_MEAN_ALL),
    # token sums over 3 sequences that have tokens, or over the global batch of 4; norm: over 5 slots each
    "verl.vanilla.seq-mean-token-sum.cinf": Setting(TokenNormalizer.FIXED_CONSTANT, 3),
    "verl.vanilla.seq-mean-token-sum.cinf.gbs4": Setting(TokenNormalizer.FIXED_CONSTANT, 4),
    "verl.vanilla.seq-mean-token-sum-norm.cinf": Setting(TokenNormalizer.FIXED_CONSTANT, 3 * 5),
    "verl.vanilla.seq-mean-token-sum-norm.cinf.gbs4": Setting(TokenNormalizer.FIXED_CONSTANT, 4 * 5),
}
# Dual clip, CISPO and ratios of a whole sequence are objectives that ObjectiveSpec does not have.
NOT_EXPRESSIBLE = {
    "trl.cispo",
    "trl.grpo.seq",
    "verl.vanilla.token-mean.c3",
    "verl.vanilla.seq-mean-token-mean.c3",
    "verl.gspo",
    "verl.geo_mean",
}


def test_every_case_is_accounted_for() -> None:
    assert set(SETTINGS) | NOT_EXPRESSIBLE == set(CASES)
    assert not set(SETTINGS) & NOT_EXPRESSIBLE


@pytest.mark.parametrize("name", SETTINGS)
def test_fp32_loss(name: str) -> None:
    """Values and gradients to 2e-6: fp32 inputs, fp32 token terms."""
    setting, case = SETTINGS[name], CASES[name]
    logps = torch.tensor(INPUT["new"], requires_grad=True)
    result = rl_engine.policy_loss(
        logps,
        torch.tensor(INPUT["old"]),
        torch.tensor(INPUT["adv"]),
        mask=torch.tensor(MASK),
        ref_logps=torch.tensor(INPUT["ref"]) if setting.beta else None,
        objective=ObjectiveSpec(clip=ClipSpec(INPUT["eps_low"], INPUT["eps_high"]), beta=setting.beta),
        reduction=LossReductionSpec(
            token_normalizer=setting.normalizer, fixed_normalizer_constant=setting.constant
        ),
    )
    result.loss.backward()
    assert logps.grad is not None
    assert result.loss.item() == pytest.approx(case["loss"], rel=2e-6)
    for row, want in zip(logps.grad.tolist(), case["grad_new"], strict=True):
        assert row == pytest.approx(want, rel=2e-6, abs=1e-7)


@pytest.mark.parametrize("name", SETTINGS)
def test_float64_oracle(name: str) -> None:
    """The textbook in float64 agrees to 1e-7 (verl adds 1e-8 to denominators): the settings mean the same."""
    setting, case = SETTINGS[name], CASES[name]
    value, grad = float64.grpo(
        INPUT["new"],
        INPUT["old"],
        INPUT["adv"],
        MASK,
        ref=INPUT["ref"],
        beta=setting.beta,
        normalizer=str(setting.normalizer),
        constant=setting.constant,
        eps_low=INPUT["eps_low"],
        eps_high=INPUT["eps_high"],
    )
    assert value == pytest.approx(case["loss"], rel=1e-7)
    for row, want in zip(grad, case["grad_new"], strict=True):
        assert row == pytest.approx(want, rel=1e-7, abs=1e-12)


def test_empties_counted_and_left_out_differ() -> None:
    counted, left_out = CASES["trl.grpo"]["loss"], CASES["verl.vanilla.seq-mean-token-mean.cinf"]["loss"]
    assert (round(counted, 7), round(left_out, 7)) == (0.5873833, 0.7831777)
