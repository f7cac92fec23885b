"""Sound calls of the front door on one rank of a mesh, and everything that one rank may get wrong in them.

A change takes the keyword arguments of a sound call and spoils them. `OWN` changes are wrong by themselves,
and the text is what the rank itself is told. `TOGETHER` changes are sound alone but not beside the other
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rl_engine
from rl_engine.contracts import (
    AdvantageSpec,
    ClipSpec,
    LossReductionSpec,
    ObjectiveSpec,
)
from rl_engine.mesh import Axis
from rl_engine.mesh.pool import RankContext
from tests.faults.alive import Ending, outlive
from tests.logprob.op_cases import group_of

Call = dict[str, Any]
Change = Callable[[Call], None]
NAN, INF = float("nan"), float("inf")
B, T, V = 2, 3, 8
MEAN_ONLY = AdvantageSpec(normalizer="mean_only")  # type: ignore[arg-type]
BETA = ObjectiveSpec(beta=0.04, advantage=MEAN_ONLY)


def logits_of(dp_rank: int, seed: int) -> Tensor:
    """[B, T, V], the same on every machine."""
    generator = torch.Generator().manual_seed(100 * seed + dp_rank)
    return torch.randint(-32, 32, (B, T, V), generator=generator) / 8.0


def grpo_call(tp: Axis, dp: Axis) -> Call:
    """A sound call of grpo_loss: two groups that straddle all DP ranks."""
    width = V // tp.size
    columns = slice(tp.rank * width, (tp.rank + 1) * width)
    return {
        "logits": logits_of(dp.rank, 1)[..., columns].clone().requires_grad_(),
        "targets": torch.arange(B * T).view(B, T) % V,
        "old_logps": torch.linspace(-2.5, -1.5, B * T).view(B, T),
        "rewards": torch.tensor([[1.0, 0.25], [2.0, 0.0], [0.5, 0.75]][dp.rank]),
        "mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "group_ids": ["one", "two"] if dp.size > 1 else ["one", "one"],
        "ref_logits": logits_of(dp.rank, 2)[..., columns].clone(),
        "objective": BETA,
    }


def policy_call(dp: Axis) -> Call:
    """A sound call of policy_loss."""
    return {
        "logps": (torch.linspace(-2.0, -1.0, B * T).view(B, T) - 0.1 * dp.rank).requires_grad_(),
        "old_logps": torch.linspace(-2.5, -1.5, B * T).view(B, T),
        "advantages": torch.tensor([1.0, -0.5]),
        "mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "ref_logps": torch.linspace(-2.2, -1.4, B * T).view(B, T),
        "objective": BETA,
    }


def selected_call(tp: Axis) -> Call:
    """A sound call of selected_logprobs."""
    width = V // tp.size
    return {
        "logits": logits_of(0, 1)[..., tp.rank * width : (tp.rank + 1) * width].clone(),
        "targets": torch.arange(B * T).view(B, T) % V,
    }


def put(**changes: Any) -> Change:
    """Other arguments; a function is called on the argument that it replaces."""

    def change(call: Call) -> None:
        for name, value in changes.items():
            call[name] = value(call[name]) if callable(value) else value

    return change


def at(name: str, index: tuple[int, ...], value: float) -> Change:
    """Another value at one place."""

    def change(call: Call) -> None:
        tensor = call[name].detach().clone()
        tensor[index] = value
        call[name] = tensor

    return change


def boundaries(*offsets: Any) -> Change:
    def change(call: Call) -> None:
        del call["group_ids"]
        call["group_boundaries"] = offsets[0] if len(offsets) == 1 else offsets

    return change


def advantages(value: Any = None) -> Change:
    def change(call: Call) -> None:
        del call["group_ids"], call["rewards"]
        call["advantages"] = torch.tensor([0.5, -0.5]) if value is None else value

    return change


def both(*changes: Change) -> Change:
    def change(call: Call) -> None:
        for one in changes:
            one(call)

    return change


def out_of_range(call: Call) -> None:
    call["targets"] = call["targets"].clone().index_fill_(1, torch.tensor([1]), V)


GRPO_OWN: dict[str, tuple[Change, str]] = {
    "logits without a vocabulary": (
        put(logits=lambda x: x[..., 0]),
        r"logits must be \[B, T, V\] or \[N, V\]",
    ),
    "logits of no columns": (put(logits=lambda x: x[..., :0]), "logits have no columns"),
    "logits in a list": (put(logits=[1.0]), "must be torch tensors, got list and Tensor"),
    "float64 logits": (put(logits=lambda x: x.double()), "float64"),
    "targets of another shape": (
        put(targets=lambda x: x[:, :2]),
        r"\[2, 3, \d\] and \[2, 2\]; next_token_targets",
    ),
    "targets that are floats": (put(targets=lambda x: x.float()), "target_ids are torch.float32"),
    "targets in a list": (put(targets=[[1, 2, 3]] * 2), "must be torch tensors, got Tensor and list"),
    "a mask of halves": (at("mask", (0, 0), 2), "mask holds 2, expected 0 or 1; token weights are not part"),
    "a mask of NaN": (put(mask=torch.full((2, 3), NAN)), "mask holds nan, expected 0 or 1"),
    "no mask": (put(mask=None), r"mask must be a tensor \[2, 3\], one flag per token, got NoneType"),
    "a mask of another shape": (
        put(mask=torch.ones(2, 2)),
        r"mask must be a tensor \[2, 3\], .* got \[2, 2\]",
    ),
    "no old log-probs": (
        put(old_logps=None),
        r"old_logps must be a tensor \[2, 3\] like targets, got NoneType",
    ),
    "old log-probs of another shape": (put(old_logps=torch.zeros(6)), r"old_logps must be .* got \[6\]"),
    "bf16 old log-probs": (
        put(old_logps=lambda x: x.bfloat16()),
        "old_logps is torch.bfloat16, expected torch.float32",
    ),
    "no rewards": (put(rewards=None), "groups were given without rewards"),
    "rewards in a list": (put(rewards=[1.0, 0.0]), "rewards is list, expected a torch tensor"),
    "too few rewards": (
        put(rewards=torch.ones(1)),
        r"rewards must be \[2\] \(one per local sequence\), got \[1\]",
    ),
    "rewards that are flags": (put(rewards=torch.tensor([True, False])), "rewards is torch.bool"),
    "a reward of NaN": (at("rewards", (1,), NAN), "reward of sequence [13] is nan, expected a finite number"),
    "a reward of +inf": (
        at("rewards", (0,), INF),
        "reward of sequence [02] is inf, expected a finite number",
    ),
    "no groups": (put(group_ids=None), "neither of group_ids and group_boundaries given with rewards"),
    "ids and boundaries": (put(group_boundaries=(0, 4)), "both of group_ids and group_boundaries given"),
    "too few ids": (
        put(group_ids=["one"]),
        "group_ids must be 2, one per local sequence",
    ),
    "ids that are floats": (put(group_ids=[1.0, 2.0]), "group_ids hold 1.0, expected integers or strings"),
    "ids in two dims": (put(group_ids=torch.zeros(2, 2, dtype=torch.long)), r"group_ids hold \[0, 0\]"),
    "one id for all": (put(group_ids=7), "group_ids is 7, expected 2 integers or strings"),
    "rewards and advantages": (put(advantages=torch.zeros(2)), "both of rewards and advantages given"),
    "neither": (both(advantages(), put(advantages=None)), "neither of rewards and advantages given"),
    "advantages of another shape": (
        advantages(torch.zeros(4)),
        r"advantages must be \[2\] or \[2, 3\], got \[4\]",
    ),
    "advantages in a list": (advantages([0.5, 0.5]), r"advantages must be \[2\] or \[2, 3\], got list"),
    "groups beside advantages": (
        both(advantages(), put(group_ids=[1, 2])),
        "groups were given without rewards",
    ),
    "a reference of another shape": (
        put(ref_logits=torch.zeros(2, 3, 5)),
        r"ref_logits must be a tensor \[2, 3, \d\] like logits, got \[2, 3, 5\]",
    ),
    "a reference of another dtype": (
        put(ref_logits=lambda x: x.bfloat16()),
        "ref_local_logits are .*bfloat16",
    ),
    "two references": (put(ref_logps=torch.zeros(2, 3)), "both ref_logits and ref_logps were given"),
    "no reference": (put(ref_logits=None), "beta is 0.04 and no reference was given"),
    "a vocabulary beyond the logits": (
        put(vocab_size=9),
        "real_vocab_size = 9: must not exceed padded_vocab",
    ),
    "no vocabulary": (put(vocab_size=0), "real_vocab_size = 0: must be an integer >= 1"),
    "a temperature of 0": (put(temperature=0.0), r"temperature = 0.0: must be a number in \[0.01, 100\]"),
    "a temperature in a list": (put(temperature=[1.0]), r"temperature is \[1.0\], expected a number"),
    "no objective": (put(objective=None), "objective is None, expected a ObjectiveSpec"),
    "no reduction": (put(reduction=None), "reduction is None, expected a LossReductionSpec"),
    "a NaN among active logits": (at("logits", (0, 1, 1), NAN), "row 1: the policy logits hold a NaN"),
    "a NaN among active reference logits": (
        at("ref_logits", (1, 2, 0), NAN),
        "row 5: the reference logits hold a",
    ),
    "an active target beyond the vocabulary": (out_of_range, r"row 1 \(2 such rows\): target 8 lies outside"),
    "a NaN old log-prob": (at("old_logps", (1, 1), NAN), r"old_logps of token 4 \(sequence [13]\) is nan"),
}

GRPO_TOGETHER: dict[str, tuple[Change, str]] = {
    "boundaries on one rank": (boundaries(0, 2, 4), "agree|given different"),
    "advantages on one rank": (advantages(), "agree|given different"),
    "advantages per token on one rank": (advantages(torch.ones(2, 3)), "agree|given different"),
    "boundaries that do not reach the end": (boundaries(0, 2), "agree|rise from 0 to num_sequences = 4"),
    "boundaries of floats": (boundaries(0.0, 4.0), "agree|must be an integer"),
    "boundaries that are a number": (boundaries(4), "agree|not iterable"),
    "a reference as log-probs on one rank": (
        both(put(ref_logits=None), put(ref_logps=torch.zeros(2, 3))),
        "reference: .*logits.*logps|agree",
    ),
    "beta": (
        put(objective=ObjectiveSpec(beta=0.05, advantage=MEAN_ONLY)),
        r"objective.beta: .*0.04.*0.05|objective.beta: .*0.05.*0.04",
    ),
    "the clip": (
        put(objective=ObjectiveSpec(beta=0.04, clip=ClipSpec(0.2, 0.28), advantage=MEAN_ONLY)),
        "clip_eps_high",
    ),
    "the advantage formula": (
        put(objective=ObjectiveSpec(beta=0.04)),
        "objective.advantage|given different",
    ),
    "the normaliser": (
        put(reduction=LossReductionSpec(token_normalizer="per_sequence_then_mean")),  # type: ignore[arg-type]
        "reduction.token_normalizer",
    ),
    "data parallel reduction": (
        put(reduction=LossReductionSpec(data_parallel_reduction="mean")),  # type: ignore[arg-type]
        "reduction.data_parallel_reduction",
    ),
    "what an empty batch gives": (put(reduction=LossReductionSpec(on_empty="error")), "reduction.on_empty"),  # type: ignore[arg-type]
    "the temperature": (put(temperature=0.7), "logprob.temperature"),
    "the vocabulary": (put(vocab_size=7), "logprob.sharding.real_vocab_size"),
    "the width of the logits": (
        put(logits=lambda x: torch.cat([x, x], -1), ref_logits=lambda x: torch.cat([x, x], -1)),
        "logprob.sharding",
    ),
    "the dtype of the logits": (
        put(logits=lambda x: x.bfloat16(), ref_logits=lambda x: x.bfloat16()),
        "logprob.dtype",
    ),
    "integer ids beside strings": (put(group_ids=[1, 2]), "mix integers and strings|given different|agree"),
}

SIBLINGS: dict[str, tuple[Change, str]] = {
    "one sequence less": (
        put(
            **{
                name: (lambda x: x[:1])
                for name in ("logits", "targets", "old_logps", "rewards", "mask", "group_ids", "ref_logits")
            }
        ),
        "agree|group",
    ),
    "one slot less": (
        put(
            **{
                name: (lambda x: x[:, :2])
                for name in ("logits", "targets", "old_logps", "mask", "ref_logits")
            }
        ),
        r"sharding.padded_seq_len: rank 0 .* has [23], rank 1",
    ),
    "another target": (at("targets", (0, 0), 5), "given different tokens, masks or per-token data"),
    "another mask": (at("mask", (0, 0), 0), "given different tokens, masks or per-token data"),
    "other old log-probs": (
        at("old_logps", (1, 1), -1.25),
        "given different tokens, masks or per-token data",
    ),
    "another reward": (at("rewards", (0,), 9.0), "given different tokens, masks or per-token data"),
    "other groups": (put(group_ids=["two", "one"]), "given different tokens, masks or per-token data"),
}
"""What ranks of one TP group may not disagree on, and ranks of a DP group may."""

POLICY_OWN: dict[str, tuple[Change, str]] = {
    "flat log-probs": (
        put(logps=lambda x: x.reshape(-1)),
        r"logps must be \[B, T\], one row per sequence, got \[6\]",
    ),
    "log-probs in a list": (put(logps=[[1.0]]), r"logps must be \[B, T\], one row per sequence, got list"),
    "bf16 log-probs": (put(logps=lambda x: x.bfloat16()), "logps is torch.bfloat16, expected torch.float32"),
    "no old log-probs": (
        put(old_logps=None),
        r"old_logps must be a tensor \[2, 3\] like logps, got NoneType",
    ),
    "old log-probs of another shape": (
        put(old_logps=torch.zeros(3, 2)),
        r"old_logps must be .* got \[3, 2\]",
    ),
    "no advantages": (put(advantages=None), "neither of rewards and advantages given"),
    "advantages of another shape": (
        put(advantages=torch.zeros(3)),
        r"advantages must be \[2\] or \[2, 3\], got \[3\]",
    ),
    "a mask of 2": (at("mask", (1, 0), 2), "mask holds 2, expected 0 or 1"),
    "no mask": (put(mask=None), r"mask must be a tensor \[2, 3\], one flag per token, got NoneType"),
    "no reference": (
        put(ref_logps=None),
        "beta is 0.04 and no reference was given; pass ref_logps=, or beta=0",
    ),
    "a reference of another shape": (put(ref_logps=torch.zeros(6)), r"ref_logps must be .* got \[6\]"),
    "no objective": (put(objective=None), "objective is None, expected"),
    "no reduction": (put(reduction=None), "reduction is None, expected"),
    "a NaN log-prob": (at("logps", (1, 2), NAN), r"policy logps of token 5 \(sequence [13]\) is nan"),
    "a NaN reference": (at("ref_logps", (0, 0), -INF), r"ref_logps of token 0 \(sequence [02]\) is -inf"),
    "an infinite advantage": (at("advantages", (1,), INF), r"advantages of token 3 \(sequence [13]\) is inf"),
}

POLICY_TOGETHER: dict[str, tuple[Change, str]] = {
    "beta": (
        put(objective=ObjectiveSpec(beta=0.05, advantage=MEAN_ONLY)),
        "ranks of the dp axis disagree on objective: rank 0",
    ),
    "the normaliser": (
        put(reduction=LossReductionSpec(token_normalizer="per_sequence_then_mean")),  # type: ignore[arg-type]
        "ranks of the dp axis disagree on reduction",
    ),
    "a reference on one rank": (
        both(put(ref_logps=None), put(objective=ObjectiveSpec())),
        "ranks of the dp axis disagree on (objective|reference)",
    ),
}

SELECTED_OWN: dict[str, tuple[Change, str]] = {
    "targets of another shape": (
        put(targets=lambda x: x[:1]),
        r"\[2, 3, \d\] and \[1, 3\]; next_token_targets",
    ),
    "a mask of halves": (put(mask=torch.full((2, 3), 0.5)), "mask holds 0.5, expected 0 or 1"),
    "float64 logits": (put(logits=lambda x: x.double()), "float64"),
    "a temperature of 1000": (
        put(temperature=1000.0),
        r"temperature = 1000.0: must be a number in \[0.01, 100\]",
    ),
    "an ignore index in the vocabulary": (
        put(ignore_index=3),
        r"ignore_index = 3: must not lie in the real vocab",
    ),
    "logits in a list": (put(logits=[[1.0]]), "must be torch tensors, got list and Tensor"),
    "a vocabulary in a list": (put(vocab_size=[8]), r"vocab_size is \[8\], expected a number"),
    "an active target beyond the vocabulary": (out_of_range, r"row 1 \(2 such rows\): target 8 lies outside"),
}

SELECTED_TOGETHER: dict[str, tuple[Change, str]] = {
    "temperature": (put(temperature=0.5), "temperature: rank 0"),
    "ignore_index": (put(ignore_index=-1), "ignore_index: rank 0"),
    "vocabulary": (put(vocab_size=7), "sharding.real_vocab_size: rank 0"),
    "entropy": (put(with_entropy=True), "output.entropy: rank 0"),
    "one sequence less": (
        put(logits=lambda x: x[:1], targets=lambda x: x[:1]),
        "num_rows: rank 0 .* has [36], rank 1",
    ),
    "a mask on one rank": (
        put(mask=torch.tensor([[1, 0, 1], [1, 1, 1]])),
        "given different tokens, masks or",
    ),
    "an ignored target": (at("targets", (0, 1), -100), "given different tokens, masks or per-token data"),
}


def run_grpo(tp: Axis, dp: Axis, change: Change | None) -> Tensor:
    """The loss with its gradient done, `change` applied to the call."""
    call = grpo_call(tp, dp)
    if change is not None:
        change(call)
    result = rl_engine.grpo_loss(**call, tp_group=group_of(tp), dp_group=group_of(dp))
    result.loss.backward()
    return result.loss.detach()


def run_policy(dp: Axis, change: Change | None) -> Tensor:
    call = policy_call(dp)
    if change is not None:
        change(call)
    result = rl_engine.policy_loss(**call, dp_group=group_of(dp))
    result.loss.backward()
    return result.loss.detach()


def run_selected(tp: Axis, change: Change | None) -> Any:
    call = selected_call(tp)
    if change is not None:
        change(call)
    return rl_engine.selected_logprobs(**call, tp_group=group_of(tp))


TABLES = {
    "grpo": GRPO_OWN | GRPO_TOGETHER,
    "siblings": SIBLINGS,
    "policy": POLICY_OWN | POLICY_TOGETHER,
    "selected": SELECTED_OWN | SELECTED_TOGETHER,
}


def spoiled_on_ranks(context: RankContext, front: str, what: str, victim: int) -> Ending:
    """A call in which the victim does `what`, on real ranks that outlive it: tp 2 × dp 2, or two ranks."""
    change = TABLES[front][what][0] if context.rank == victim else None
    if front == "policy":
        dp = context.mesh(dp=context.world_size).dp
        return outlive(context, lambda: run_policy(dp, change))
    if front == "selected":
        tp = context.mesh(tp=context.world_size).tp
        return outlive(context, lambda: run_selected(tp, change))
    mesh = context.mesh(tp=2, dp=context.world_size // 2)
    return outlive(context, lambda: run_grpo(mesh.tp, mesh.dp, change))
