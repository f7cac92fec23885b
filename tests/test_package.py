"""The package's front: every public name is there, and contracts do without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import rl_engine
from rl_engine.contracts import AdvantageNormalizer
from rl_engine.errors import InputError


@pytest.mark.parametrize("name", rl_engine.__all__)
def test_public_names_are_loaded_when_used(name: str) -> None:
    assert getattr(rl_engine, name) is not None
    assert name in dir(rl_engine)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'grpo'; it has .*grpo_loss"):
        rl_engine.grpo  # noqa: B018


def test_contracts_and_registry_are_used_without_torch() -> None:
    code = (
        "import sys, rl_engine; from rl_engine import LogprobContract, ShardingSpec, kernel_registry\n"
        "contract = LogprobContract(role='train', dtype='bf16', sharding=ShardingSpec.even(8))\n"
        "print(kernel_registry.explain(contract).selected_backend, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["exact_numba", "False"]


def test_an_advantage_that_overflows_the_surrogate_is_named() -> None:
    logps = torch.zeros(1, 2, requires_grad=True)
    old = torch.tensor([[-100.0, 0.0]])
    with pytest.raises(
        InputError, match=r"the surrogate, ratio × advantage, of token 0 \(sequence 0\) is inf"
    ):
        rl_engine.policy_loss(logps, old, torch.tensor([-1e5]), mask=torch.ones(1, 2))


def test_provenance_holds_the_mask_and_the_formula_of_the_call() -> None:
    logits, targets, old = (
        torch.zeros(2, 2, 4),
        torch.ones(2, 2, dtype=torch.long),
        torch.full((2, 2), -1.386),
    )
    mask, rewards = torch.ones(2, 2, dtype=torch.bool), torch.tensor([1.0, 0.0])
    result = rl_engine.grpo_loss(logits, targets, old, rewards, mask=mask, group_ids=[5, 5])
    digest = result.provenance.active_mask_sha256
    again = rl_engine.grpo_loss(logits, targets, old, rewards, mask=mask, group_ids=[5, 5])
    mask.zero_()  # a trainer that uses its buffer again
    assert again.provenance.active_mask_sha256 == digest
    assert again.provenance.advantage is not None
    assert again.provenance.advantage.normalizer is AdvantageNormalizer.MEAN_STD_POPULATION
    given = rl_engine.grpo_loss(logits, targets, old, advantages=rewards, mask=torch.ones(2, 2))
    assert given.provenance.advantage is None
