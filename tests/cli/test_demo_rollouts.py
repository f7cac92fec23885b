"""The demo's grading, sampling and recording, on recorded rollouts and on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rl_engine.cli.demo.policy import Policy
from rl_engine.cli.demo.rollouts import Rollouts, sample_rollouts
from rl_engine.cli.demo.task import QUESTIONS, grade
from rl_engine.cli.demo.training import policy_gradient, train
from rl_engine.errors import InputError
from tests.bits import assert_bits_equal
from tests.cli.tiny import VOCAB

RECORDED = Path(__file__).resolve().parent.parent / "data" / "rollouts.safetensors"


def sample(policy: Policy, **changes: int) -> Rollouts:
    options = {"samples_per_question": 4, "max_tokens": 12, "seed": 3, **changes}
    return sample_rollouts(policy, QUESTIONS, **options)


@pytest.mark.parametrize(
    ("completion", "finished", "score"),
    [
        ("17 + 25 = 42.", True, 1.0),
        ("17 + 25 = 42", False, 0.9),
        ("It is 42, not 43", True, 0.6),
        ("1,042", True, 0.1),
        ("42.0", True, 1.0),
        ("17 + 25 = 21", False, 0.2),
        ("-42", False, 0.0),
        ("forty-two", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_grades(completion: str, finished: bool, score: float) -> None:
    assert grade(completion, 42, finished=finished) == pytest.approx(score)


def test_recorded_rollouts_are_whole() -> None:
    rollouts = Rollouts.load(RECORDED)
    assert rollouts.input_ids.shape == (32, 84)
    assert rollouts.offsets == [0, 8, 16, 24, 32]
    for group in rollouts.rewards.view(4, 8):
        assert len(set(group.tolist())) > 1, "every recorded group is mixed"
    assert bool((rollouts.old_logps[rollouts.completion_mask] <= 0).all())
    assert bool((rollouts.old_logps[~rollouts.completion_mask] == 0).all())
    records = [json.loads(line) for line in RECORDED.with_suffix(".jsonl").read_text().splitlines()]
    assert records == rollouts.records()
    assert RECORDED.stat().st_size < 1_000_000


def test_recorded_rewards_follow_from_the_recorded_texts() -> None:
    rollouts = Rollouts.load(RECORDED)
    ended = (rollouts.completion_ids == 2) & rollouts.completion_mask
    for index, text in enumerate(rollouts.completions):
        expected = grade(text, QUESTIONS[index // 8].answer, finished=bool(ended[index].any()))
        assert float(rollouts.rewards[index]) == pytest.approx(expected, abs=1e-6)


def test_save_and_load_keep_every_bit(policy: Policy, tmp_path: Path) -> None:
    rollouts = sample(policy)
    rollouts.save(tmp_path / "r.safetensors")
    again = Rollouts.load(tmp_path / "r.safetensors")
    for name, tensor in rollouts.tensors().items():
        assert_bits_equal(again.tensors()[name], tensor, name)
    assert (again.prompts, again.completions) == (rollouts.prompts, rollouts.completions)


def test_a_loss_batch_holds_the_completions(policy: Policy) -> None:
    rollouts = sample(policy)
    logits = torch.zeros(*rollouts.completion_mask.shape, VOCAB)
    batch = rollouts.loss_batch(logits)
    assert batch.group_boundaries == (0, 4, 8, 12, 16)
    assert_bits_equal(batch.targets, rollouts.completion_ids, "targets")
    assert_bits_equal(batch.old_logps, rollouts.old_logps, "old_logps")


def test_loading_something_else_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"input_ids": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="lacks attention_mask, completion_mask, completions"):
        Rollouts.load(tmp_path / "x.safetensors")


def test_samples_depend_on_the_seed_alone(policy: Policy) -> None:
    first = sample(policy)
    torch.rand(7)
    assert_bits_equal(sample(policy).input_ids, first.input_ids, "same seed")
    assert not torch.equal(sample(policy, seed=4).input_ids, first.input_ids)


def test_the_mask_ends_with_the_first_end(policy: Policy) -> None:
    rollouts = sample(policy, max_tokens=60)
    for ids, mask in zip(rollouts.completion_ids, rollouts.completion_mask, strict=True):
        length = int(mask.sum())
        assert bool(mask[:length].all())
        assert bool((ids[: length - 1] != 0).all())
        assert length == len(mask) or int(ids[length - 1]) == 0


@torch.no_grad()
def test_old_logps_are_those_of_a_whole_forward(policy: Policy) -> None:
    rollouts = sample(policy)
    logps = rollouts.logits(policy).log_softmax(-1).gather(-1, rollouts.completion_ids[..., None])[..., 0]
    # The cached and the whole forward add in different orders; 30 ulp at 1 is ample for two tiny layers.
    assert float(((logps - rollouts.old_logps) * rollouts.completion_mask).abs().max()) < 4e-6


def test_logits_and_their_gradient_are_those_of_whole_sequences(policy: Policy) -> None:
    rollouts = sample(policy)
    length = rollouts.completion_mask.shape[1]
    positions = (rollouts.attention_mask.cumsum(-1) - 1).clamp_min(0)
    whole = policy.model(
        input_ids=rollouts.input_ids, attention_mask=rollouts.attention_mask, position_ids=positions
    ).logits[:, -length - 1 : -1]
    gradients: list[list[torch.Tensor]] = []
    for logits in (whole, rollouts.logits(policy)):
        kept = logits[rollouts.completion_mask]
        policy.model.zero_grad()
        kept.square().mean().backward()
        gradients.append([weight.grad.clone() for weight in policy.model.parameters()])
    # matrix products of other shapes round differently: 1e-5 of the largest value is ample for two layers
    difference = (whole - rollouts.logits(policy)).detach()[rollouts.completion_mask].abs().max()
    assert float(difference) < 1e-5 * float(whole.detach().abs().max())
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max()) + 1e-9


def test_the_policy_gradient_is_not_zero(policy: Policy) -> None:
    rollouts = sample(policy)
    result = policy_gradient(policy, rollouts)
    assert int(result.num_active_tokens) == int(rollouts.completion_mask.sum())
    assert sum(float(weight.grad.abs().sum()) for weight in policy.model.parameters()) > 0


def test_training_yields_one_step_more_than_updates(policy: Policy) -> None:
    first = sample(policy)
    options = {"samples_per_question": 4, "max_tokens": 12, "seed": 3}
    steps = list(train(policy, QUESTIONS, first=first, num_steps=2, **options))
    assert [step.index for step in steps] == [0, 1, 2]
    assert steps[0].mean_reward == pytest.approx(float(first.rewards.mean()))
    assert steps[0].grad_norm > 0
