"""The front door on one rank: three calls, their forms, and that they are one computation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import rl_engine
from rl_engine.contracts import AdvantageSpec, LossReductionSpec, ObjectiveSpec, TokenNormalizer
from rl_engine.errors import InputError, RLEngineError
from rl_engine.mesh import Axis, count_collectives
from tests.bits import assert_bits_equal
from tests.faults.api_calls import (
    GRPO_OWN,
    POLICY_OWN,
    SELECTED_OWN,
    grpo_call,
    policy_call,
    run_grpo,
    run_policy,
    run_selected,
    selected_call,
)

TP, DP = Axis.single("tp"), Axis.single("dp")
INF, NAN = float("inf"), float("nan")
S, T, V = 4, 5, 9


def batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Four sequences of five slots; the values are exact in bf16."""
    generator = torch.Generator().manual_seed(7)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-24, 24, shape, generator=generator) / 8.0

    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    return {
        "logits": numbers(S, T, V).to(dtype),
        "ref_logits": numbers(S, T, V).to(dtype),
        "targets": torch.randint(0, V, (S, T), generator=generator),
        "old_logps": -numbers(S, T).abs() - 1.0,
        "rewards": torch.tensor([1.0, 0.0, 0.25, 0.5]),
        "mask": mask,
    }


def loss_and_grad(call: dict[str, Any]) -> tuple[rl_engine.GRPOLossResult, Tensor]:
    leaf = call["logits"].clone().requires_grad_()
    result = rl_engine.grpo_loss(**(call | {"logits": leaf}))
    result.loss.backward()
    assert leaf.grad is not None
    return result, leaf.grad


# --------------------------------------------------------------------------------------- selected_logprobs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_selected_logprobs_is_log_softmax(dtype: torch.dtype, temperature: float) -> None:
    data = batch(dtype)
    leaf = data["logits"].clone().requires_grad_()
    logp = rl_engine.selected_logprobs(leaf, data["targets"], temperature=temperature)
    exact = torch.log_softmax(data["logits"].double() / temperature, -1)
    near = exact.gather(-1, data["targets"][..., None])[..., 0]
    assert logp.shape == (S, T) and logp.dtype == torch.float32
    assert torch.allclose(logp.double(), near, atol=1e-5, rtol=0)
    logp.sum().backward()
    onehot = torch.nn.functional.one_hot(data["targets"], V)
    assert leaf.grad is not None
    slack = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    assert torch.allclose(leaf.grad.double(), (onehot - exact.exp()) / temperature, rtol=slack, atol=slack)


def test_selected_logprobs_flat_is_the_same() -> None:
    data = batch()
    expected = rl_engine.selected_logprobs(data["logits"], data["targets"])
    flat = rl_engine.selected_logprobs(data["logits"].view(-1, V), data["targets"].view(-1))
    assert flat.shape == (S * T,)
    assert_bits_equal(flat, expected.view(-1), "logp")


def test_selected_logprobs_of_a_shifted_view() -> None:
    """`logits[:, :-1]` of a causal model: no flat view of it exists; the gradient finds its way."""
    data = batch()
    leaf = torch.cat([data["logits"], torch.full((S, 1, V), NAN)], 1).requires_grad_()
    logp = rl_engine.selected_logprobs(leaf[:, :-1], data["targets"])
    assert_bits_equal(logp, rl_engine.selected_logprobs(data["logits"], data["targets"]), "logp")
    logp.sum().backward()
    assert leaf.grad is not None
    assert_bits_equal(leaf.grad[:, -1], torch.zeros(S, V), "the slot that was left out")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16, torch.uint8])
def test_masks_of_any_dtype(dtype: torch.dtype) -> None:
    data = batch()
    data["logits"][1, 0] = NAN
    logp = rl_engine.selected_logprobs(data["logits"], data["targets"], mask=data["mask"].to(dtype))
    plain = rl_engine.selected_logprobs(batch()["logits"], data["targets"])
    assert_bits_equal(logp, torch.where(data["mask"] == 1, plain, 0.0), "logp")


def test_ignored_targets_are_inactive_with_and_without_a_mask() -> None:
    data = batch()
    targets = data["targets"].clone()
    targets[0, :2] = -100
    plain = rl_engine.selected_logprobs(data["logits"], data["targets"])
    logp = rl_engine.selected_logprobs(data["logits"], targets)
    assert_bits_equal(logp, torch.where(targets == -100, 0.0, plain), "logp")
    both = rl_engine.selected_logprobs(data["logits"], targets, mask=data["mask"])
    assert_bits_equal(both, torch.where((targets == -100) | (data["mask"] == 0), 0.0, plain), "logp")
    other = rl_engine.selected_logprobs(
        data["logits"], torch.where(targets == -100, -1, targets), ignore_index=-1
    )
    assert_bits_equal(other, logp, "logp")


def test_selected_logprobs_with_entropy_and_padding() -> None:
    data = batch()
    wide = torch.cat([data["logits"], torch.full((S, T, 3), INF)], -1)
    logp, entropy = rl_engine.selected_logprobs(wide, data["targets"], vocab_size=V, with_entropy=True)
    p = torch.softmax(data["logits"].double(), -1)
    assert entropy.shape == (S, T)
    assert torch.allclose(entropy.double(), -(p * p.log()).sum(-1), atol=1e-6)
    assert_bits_equal(logp, rl_engine.selected_logprobs(data["logits"], data["targets"]), "logp")


# ----------------------------------------------------------------------------------------------- grpo_loss


def test_forms_of_the_batch_are_one_loss() -> None:
    """[B, T, V] or flat, ids of any kind and order, boundaries, ready advantages: the same bits."""
    data = batch()
    result, grad = loss_and_grad(data | {"group_ids": [5, 5, 8, 8]})
    assert result.advantages is not None
    forms: dict[str, dict[str, Any]] = {
        "strings": {"group_ids": ["b", "b", "a", "a"]},
        "a tensor": {"group_ids": torch.tensor([9, 9, -1, -1])},
        "a tuple": {"group_ids": (0, 0, 1, 1)},
        "boundaries": {"group_boundaries": (0, 2, 4)},
        "boundaries in a tensor": {"group_boundaries": torch.tensor([0, 2, 4])},
        "advantages": {"rewards": None, "advantages": result.advantages},
        "advantages per token": {
            "rewards": None,
            "advantages": torch.where(data["mask"] == 1, result.advantages[:, None], NAN),
        },
        "float64 rewards": {"rewards": data["rewards"].double(), "group_ids": [1, 1, 2, 2]},
        "a boolean mask": {"mask": data["mask"].bool(), "group_ids": [1, 1, 2, 2]},
        "int32 targets": {"targets": data["targets"].int(), "group_ids": [1, 1, 2, 2]},
        "without validation": {"validate": False, "group_ids": [1, 1, 2, 2]},
    }
    for name, changes in forms.items():
        other, other_grad = loss_and_grad(data | changes)
        assert_bits_equal(other.loss, result.loss, f"{name}: loss")
        assert_bits_equal(other.per_sequence_policy, result.per_sequence_policy, f"{name}: per sequence")
        assert_bits_equal(other_grad, grad, f"{name}: gradient")
        assert (other.advantages is None) == name.startswith("advantages")
        if other.advantages is not None:
            assert_bits_equal(other.advantages, result.advantages, f"{name}: advantages")
    flat = {
        name: value if name == "rewards" else value.reshape(S * T, *value.shape[2:])
        for name, value in data.items()
    }
    other, other_grad = loss_and_grad(flat | {"group_ids": [5, 5, 8, 8]})
    assert_bits_equal(other.loss, result.loss, "flat: loss")
    assert_bits_equal(other.per_sequence_policy, result.per_sequence_policy, "flat: per sequence")
    assert_bits_equal(other_grad.view(S, T, V), grad, "flat: gradient")


def test_groups_by_id_may_lie_anywhere() -> None:
    data = batch()
    result, grad = loss_and_grad(data | {"group_boundaries": (0, 2, 4)})
    order = torch.tensor([2, 0, 3, 1])
    shuffled = {name: value[order] for name, value in data.items()}
    other, other_grad = loss_and_grad(shuffled | {"group_ids": ["y", "x", "y", "x"]})
    assert result.advantages is not None and other.advantages is not None
    assert_bits_equal(other.loss, result.loss, "loss")
    assert_bits_equal(other.advantages, result.advantages[order], "advantages")
    assert_bits_equal(other_grad, grad[order], "gradient")


@pytest.mark.parametrize("normalizer", list(TokenNormalizer))
@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_the_three_doors_are_one_computation(normalizer: TokenNormalizer, beta: float) -> None:
    """Log-probs, then the loss of them, is the loss from logits: values and gradients by their bits."""
    data = batch(torch.bfloat16)
    constant = 9.5 if normalizer is TokenNormalizer.FIXED_CONSTANT else None
    settings: dict[str, Any] = {
        "objective": ObjectiveSpec(beta=beta),
        "reduction": LossReductionSpec(token_normalizer=normalizer, fixed_normalizer_constant=constant),
    }
    whole, grad = loss_and_grad(data | settings | {"group_ids": [0, 0, 1, 1], "temperature": 0.9})
    assert whole.advantages is not None
    leaf = data["logits"].clone().requires_grad_()
    mask = data["mask"]

    def logps(logits: Tensor) -> Tensor:
        return rl_engine.selected_logprobs(logits, data["targets"], mask=mask, temperature=0.9)

    parts = rl_engine.policy_loss(
        logps(leaf),
        data["old_logps"],
        whole.advantages,
        mask=mask,
        ref_logps=logps(data["ref_logits"]),
        **settings,
    )
    parts.loss.backward()
    assert leaf.grad is not None
    for name in ("loss", "policy_loss", "kl", "per_sequence_policy", "per_sequence_kl", "num_active_tokens"):
        assert_bits_equal(getattr(parts, name), getattr(whole, name), name)
    assert_bits_equal(leaf.grad, grad, "gradient")
    by_logps, grad_by_logps = loss_and_grad(
        {name: value for name, value in data.items() if name != "ref_logits"}
        | settings
        | {"group_ids": [0, 0, 1, 1], "temperature": 0.9, "ref_logps": logps(data["ref_logits"])}
    )
    assert_bits_equal(by_logps.loss, whole.loss, "loss with reference log-probs")
    assert_bits_equal(grad_by_logps, grad, "gradient with reference log-probs")


def test_policy_loss_takes_its_own_log_probs_as_old() -> None:
    leaf = torch.tensor([[-0.5, -1.0, -2.0]], requires_grad=True)
    result = rl_engine.policy_loss(leaf, leaf, torch.tensor([2.0]), mask=torch.tensor([[1, 1, 0]]))
    result.loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[-1.0, -1.0, 0.0]]
    assert result.loss.item() == -2.0
    assert result.advantages is None
    assert result.provenance.logprob_backend is None


@pytest.mark.parametrize("scale", [-1.0, NAN, INF])
def test_masked_tokens_get_a_gradient_of_plus_zero(scale: float) -> None:
    """Whatever flows in: −0.0 and NaN are not +0.0."""
    call = policy_call(DP)
    (rl_engine.policy_loss(**call).loss * scale).backward()
    masked = call["logps"].grad[call["mask"] == 0]
    assert len(masked) == 1
    assert_bits_equal(masked, torch.zeros(1), "gradient")


def test_policy_loss_with_advantages_per_token() -> None:
    call = policy_call(DP)
    per_sequence = rl_engine.policy_loss(**call)
    spread = torch.where(call["mask"] == 1, call["advantages"][:, None], NAN)
    per_token = rl_engine.policy_loss(**(call | {"advantages": spread}))
    assert_bits_equal(per_token.loss, per_sequence.loss, "loss")


@pytest.mark.parametrize("slots", [1, 3])
def test_garbage_at_masked_tokens_with_one_slot_a_sequence(slots: int) -> None:
    """With one slot, advantages per token and per sequence have one shape: masked ones do not matter."""
    logps = torch.full((3, slots), -1.0, requires_grad=True)
    mask = torch.ones(3, slots)
    mask[1] = 0
    advantages = torch.where(mask == 1, 0.5, NAN)
    result = rl_engine.policy_loss(logps, torch.full((3, slots), -1.25), advantages, mask=mask)
    assert result.loss.isfinite()


def test_an_empty_rank_among_flat_batches() -> None:
    """One of the ranks may hold nothing; alone that is a batch of nothing, and says so."""
    empty = {
        "logits": torch.zeros(0, V),
        "targets": torch.zeros(0, dtype=torch.long),
        "old_logps": torch.zeros(0),
        "rewards": torch.zeros(0),
        "mask": torch.zeros(0),
    }
    for form in (empty | {"group_ids": []}, empty | {"group_boundaries": (0,)}):
        with pytest.raises(InputError, match="the batch holds no sequence on any rank; pass at least one"):
            rl_engine.grpo_loss(**form)  # type: ignore[arg-type]
    none = torch.zeros(0, 3)
    with pytest.raises(InputError, match="the batch holds no sequence on any rank"):
        rl_engine.policy_loss(none, none, torch.zeros(0), mask=none)


def test_groups_of_one_need_a_formula_that_takes_them() -> None:
    data = batch() | {"group_ids": ["a", "b", "a", "a"]}
    with pytest.raises(
        InputError, match="group 'b' has 1 sequence, advantages by mean_std_population need 2"
    ):
        rl_engine.grpo_loss(**data)
    only = ObjectiveSpec(advantage=AdvantageSpec(normalizer="mean_only"))  # type: ignore[arg-type]
    assert rl_engine.grpo_loss(**data, objective=only).loss.isfinite()


def test_flat_logits_need_to_know_the_sequences() -> None:
    data = batch()
    flat = {name: value.reshape(S * T, *value.shape[2:]) for name, value in data.items() if name != "rewards"}
    match = r"flat logits of 20 rows need one reward or advantage per sequence.* got \[3\]; pass \[B, T, V\]"
    with pytest.raises(InputError, match=match):
        rl_engine.grpo_loss(**flat, rewards=torch.zeros(3), group_ids=[1, 1, 1])
    with pytest.raises(InputError, match=r"flat logits of 20 rows need .* got NoneType"):
        rl_engine.grpo_loss(**flat)
    per_token = rl_engine.grpo_loss(**flat, advantages=torch.ones(S * T))
    assert per_token.loss.isfinite()
    with pytest.raises(
        InputError, match="do not say where sequences begin, which per_sequence_then_mean needs"
    ):
        rl_engine.grpo_loss(
            **flat,
            advantages=torch.ones(S * T),
            reduction=LossReductionSpec(token_normalizer="per_sequence_then_mean"),  # type: ignore[arg-type]
        )


def test_nothing_is_modified_or_exchanged() -> None:
    data: dict[str, Any] = batch() | {"group_ids": [0, 0, 1, 1]}
    kept = {name: value.clone() for name, value in data.items() if isinstance(value, Tensor)}
    with count_collectives() as counts:
        loss_and_grad(data)
    assert not counts
    for name, value in kept.items():
        assert_bits_equal(data[name], value, name)


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("what", list(GRPO_OWN))
def test_grpo_loss_refuses(what: str) -> None:
    change, match = GRPO_OWN[what]
    with pytest.raises((RLEngineError, TypeError, AttributeError)) as caught:
        run_grpo(TP, DP, change)
    assert re.search(match.replace("[13]", "1").replace("[02]", "0"), str(caught.value), re.DOTALL), (
        caught.value
    )


@pytest.mark.parametrize("what", list(POLICY_OWN))
def test_policy_loss_refuses(what: str) -> None:
    change, match = POLICY_OWN[what]
    with pytest.raises((RLEngineError, TypeError, AttributeError)) as caught:
        run_policy(DP, change)
    assert re.search(match.replace("[13]", "1").replace("[02]", "0"), str(caught.value), re.DOTALL), (
        caught.value
    )


@pytest.mark.parametrize("what", list(SELECTED_OWN))
def test_selected_logprobs_refuses(what: str) -> None:
    change, match = SELECTED_OWN[what]
    with pytest.raises((RLEngineError, TypeError, AttributeError)) as caught:
        run_selected(TP, change)
    assert re.search(match, str(caught.value), re.DOTALL), caught.value


def test_the_calls_that_they_come_from_are_sound() -> None:
    assert run_grpo(TP, DP, None).isfinite()
    assert run_policy(DP, None).isfinite()
    assert run_selected(TP, None).isfinite().all()
    assert grpo_call(TP, DP)["logits"].shape == (2, 3, 8)
    assert selected_call(TP)["logits"].shape == (2, 3, 8)


def test_next_token_targets() -> None:
    ids = torch.tensor([[10, 11, 12, 13]])
    targets, mask = rl_engine.next_token_targets(ids, torch.tensor([[0, 0, 1, 1]]))
    assert targets.tolist() == [[11, 12, 13, -100]]
    assert mask.tolist() == [[False, True, True, False]] and mask.dtype == torch.bool
    for bad_ids, bad_mask in ((ids[0], ids[0]), (ids, ids[:, :2]), (ids[:, :1], ids[:, :1])):
        with pytest.raises(InputError, match=r"must both be \[B, T\] with T ≥ 2, got"):
            rl_engine.next_token_targets(bad_ids, bad_mask)


ROWS, TOKENS = torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.long)


def one_loss(**changed: object) -> object:
    call: dict[str, object] = {"mask": torch.ones(2, 3), "group_ids": [0, 0]} | changed
    return rl_engine.grpo_loss(ROWS, TOKENS, torch.zeros(2, 3), torch.tensor([1.0, 0.0]), **call)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"group_ids": 5}, "group_ids is 5, expected 2 integers or strings"),
        ({"group_ids": "ab"}, "group_ids is 'ab', expected 2 integers or strings"),
        ({"group_ids": [True, False]}, "group_ids hold True, expected integers or strings"),
        ({"group_ids": torch.zeros(2)}, r"group_ids hold 0.0, expected integers or strings; use .long\(\)"),
        ({"group_ids": [0]}, "group_ids must be 2, one per local sequence, got 1"),
        ({"group_ids": None, "group_boundaries": 4}, "group_boundaries = 4"),
        ({"objective": {"beta": 0}}, r"objective is \{'beta': 0\}, expected a ObjectiveSpec"),
        ({"reduction": "mean"}, "reduction is 'mean', expected a LossReductionSpec"),
        ({"objective": ObjectiveSpec(beta=0.1)}, "no reference was given; pass ref_logits= or ref_logps="),
        ({"vocab_size": [8]}, r"vocab_size is \[8\], expected a number"),
    ],
)
def test_what_grpo_loss_cannot_read(changed: dict[str, object], text: str) -> None:
    with pytest.raises(RLEngineError, match=text):
        one_loss(**changed)


def test_integers_of_numpy_name_groups() -> None:
    ours, numpys = one_loss(), one_loss(group_ids=np.array([0, 0]))
    assert_bits_equal(numpys.advantages, ours.advantages, "advantages")  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["temperature", "vocab_size"])
def test_a_refusal_does_not_depend_on_the_calls_before(name: str) -> None:
    good, bad = {"temperature": (1.0, True), "vocab_size": (1, True)}[name]
    for _ in range(2):
        rl_engine.selected_logprobs(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long), **{name: good})
        with pytest.raises(RLEngineError, match=f"{name} = True"):
            rl_engine.selected_logprobs(torch.zeros(1, 1), torch.zeros(1, dtype=torch.long), **{name: bad})


@pytest.mark.parametrize(
    ("ids", "mask", "text"),
    [
        ([[1, 2]], torch.ones(1, 2), "input_ids is list, expected a torch.int64 tensor"),
        (torch.ones(1, 2), torch.ones(1, 2), "input_ids is torch.float32, expected"),
        (torch.ones(1, 2, dtype=torch.long), [[1, 1]], "completion_mask is list, expected a tensor"),
        (torch.ones(1, 2, dtype=torch.long), torch.full((1, 2), 0.5), "mask holds 0.5, expected 0 or 1"),
    ],
)
def test_what_next_token_targets_cannot_read(ids: object, mask: object, text: str) -> None:
    with pytest.raises(InputError, match=text):
        rl_engine.next_token_targets(ids, mask)  # type: ignore[arg-type]


def test_policy_loss_wants_specs() -> None:
    logps = torch.zeros(1, 2)
    with pytest.raises(InputError, match="objective is None, expected a ObjectiveSpec"):
        rl_engine.policy_loss(logps, logps, torch.ones(1), mask=torch.ones(1, 2), objective=None)  # type: ignore[arg-type]
