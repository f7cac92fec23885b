"""The front door over meshes: however a batch lies on the ranks, the bits are those of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import rl_engine
from rl_engine.contracts import AdvantageSpec, LossReductionSpec, ObjectiveSpec, TokenNormalizer
from rl_engine.mesh import Axis, count_collectives
from rl_engine.mesh.pool import RankPool
from tests.bits import assert_bits_equal
from tests.faults.thread_mesh import thread_mesh
from tests.logprob.op_cases import group_of
from tests.test_api import S, T, V, batch

IDS = ["q", "p", "q", "p"]
SETTINGS: dict[str, Any] = {"objective": ObjectiveSpec(beta=0.04)}


@dataclass(frozen=True, eq=False)
class Said:
    """What one rank says of the batch."""

    result: dict[str, Tensor | None]
    grad: Tensor
    counts: dict[tuple[str, str], int]


def rank_loss(tp: Axis, dp: Axis, sizes: tuple[int, ...], form: str, flat: bool, slots: int) -> Said:
    """grpo_loss of this rank's sequences and columns, with `slots` more per sequence on odd DP ranks."""
    data = batch()
    start = sum(sizes[: dp.rank])
    own = slice(start, start + sizes[dp.rank])
    width = (V + 3) // tp.size  # three columns of padding
    columns = slice(tp.rank * width, (tp.rank + 1) * width)
    extra = slots if dp.rank % 2 else 0

    def local(name: str, fill: float) -> Tensor:
        value = data[name][own]
        return torch.cat([value, value.new_full((value.shape[0], extra, *value.shape[2:]), fill)], 1)

    def logits(name: str) -> Tensor:
        wide = torch.cat(
            [local(name, float("nan")), torch.full((sizes[dp.rank], T + extra, 3), float("inf"))], -1
        )
        return wide[..., columns].clone()

    call: dict[str, Any] = {
        "logits": logits("logits"),
        "ref_logits": logits("ref_logits"),
        "targets": local("targets", -100),
        "old_logps": local("old_logps", float("nan")),
        "mask": local("mask", 0),
    }
    if flat:
        call = {name: v.reshape(-1, *v.shape[2:]) for name, v in call.items()}
    if form == "ids":
        call |= {"rewards": data["rewards"][own], "group_ids": IDS[own]}
    elif form == "boundaries":
        call |= {"rewards": data["rewards"][own], "group_boundaries": (0, 3, 4)}
    else:
        call |= {"advantages": data["rewards"][own]}
    call["logits"].requires_grad_()
    mean_only = AdvantageSpec(normalizer="mean_only")  # type: ignore[arg-type]
    with count_collectives() as counts:
        result = rl_engine.grpo_loss(
            **call,
            vocab_size=V,
            objective=ObjectiveSpec(beta=0.04, advantage=mean_only),
            reduction=LossReductionSpec(token_normalizer=TokenNormalizer.PER_SEQUENCE_THEN_MEAN),
            tp_group=group_of(tp),
            dp_group=group_of(dp),
        )
    result.loss.backward()
    names = ("loss", "policy_loss", "kl", "advantages", "per_sequence_policy", "per_sequence_active_tokens")
    values = {name: getattr(result, name) for name in names}
    grad = call["logits"].grad.view(sizes[dp.rank], T + extra, width)
    assert not grad[:, T:].any()
    return Said({n: None if v is None else v.detach() for n, v in values.items()}, grad[:, :T], dict(counts))


def assert_as_alone(said: list[Said], tp: int, dp: int, form: str) -> None:
    alone = rank_loss(Axis.single("tp"), Axis.single("dp"), (S,), form, False, 0)
    for rank, one in enumerate(said):
        for name, value in alone.result.items():
            if value is None:
                assert one.result[name] is None
            else:
                assert_bits_equal(one.result[name], value, f"{name} on rank {rank}")
    grad = torch.cat([torch.cat([s.grad for s in said[r * tp : r * tp + tp]], -1) for r in range(dp)], 0)
    assert_bits_equal(grad, alone.grad, "gradient")
    assert float(grad.norm()) > 1e-3


@pytest.mark.parametrize("form", ["ids", "boundaries", "advantages"])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("tp", "sizes"),
    [
        (1, (1, 3)),
        (2, (4,)),
        (3, (2, 2)),
        (2, (3, 0, 1)),
        (1, (0, 4, 0, 0)),
        (4, (1, 1, 1, 1)),
        (2, (0, 0, 4)),
    ],
)
def test_any_mesh_of_threads(tp: int, sizes: tuple[int, ...], flat: bool, form: str) -> None:
    with thread_mesh() as mesh:
        said = mesh.values(
            lambda rank, tp_axis, dp_axis: rank_loss(tp_axis, dp_axis, sizes, form, flat, 2),
            tp=tp,
            dp=len(sizes),
        )
    assert_as_alone(said, tp, len(sizes), form)


def on_ranks(context: Any, tp: int, sizes: tuple[int, ...], form: str) -> Said:
    mesh = context.mesh(tp=tp, dp=len(sizes))
    return rank_loss(mesh.tp, mesh.dp, sizes, form, False, 1)


@pytest.mark.parametrize("form", ["ids", "boundaries"])
def test_real_ranks_and_their_exchanges(pool: RankPool, form: str) -> None:
    said = pool.run(on_ranks, world_size=6, args=(2, (1, 0, 3), form))
    assert_as_alone(said, 2, 3, form)
    for one in said:
        assert one.counts == {
            ("dp", "grpo_loss"): 1,
            ("tp", "preflight"): 1,
            ("dp", "preflight"): 1,
            ("dp", "all_reduce_sum"): 2,
            ("tp", "all_gather_rows"): 2,
        }


def policy_on_ranks(
    context: Any, sizes: tuple[int, ...], validate: bool
) -> tuple[Tensor, Tensor, dict[Any, int]]:
    dp = context.mesh(dp=context.world_size).dp
    data = batch()
    own = slice(sum(sizes[: dp.rank]), sum(sizes[: dp.rank + 1]))
    logps = (data["old_logps"][own] + 0.25).requires_grad_()
    with count_collectives() as counts:
        result = rl_engine.policy_loss(
            logps,
            data["old_logps"][own],
            data["rewards"][own],
            mask=data["mask"][own],
            dp_group=dp.group,
            validate=validate,
        )
    result.loss.backward()
    assert logps.grad is not None
    return result.loss.detach(), logps.grad, dict(counts)


@pytest.mark.parametrize("validate", [True, False])
def test_policy_loss_over_real_ranks(pool: RankPool, validate: bool) -> None:
    data = batch()
    leaf = (data["old_logps"] + 0.25).requires_grad_()
    alone = rl_engine.policy_loss(leaf, data["old_logps"], data["rewards"], mask=data["mask"])
    alone.loss.backward()
    said = pool.run(policy_on_ranks, world_size=3, args=((3, 0, 1), validate))
    for loss, _, counts in said:
        assert_bits_equal(loss, alone.loss, "loss")
        assert counts == {("dp", "policy_loss"): 1, ("dp", "all_reduce_sum"): 2}
    assert_bits_equal(torch.cat([grad for _, grad, _ in said]), leaf.grad, "gradient")


def selected_on_ranks(context: Any, entropy: bool) -> tuple[Any, dict[Any, int]]:
    tp = context.mesh(tp=context.world_size).tp
    data = batch()
    width = V // tp.size
    columns = slice(tp.rank * width, (tp.rank + 1) * width)
    with count_collectives() as counts:
        out = rl_engine.selected_logprobs(
            data["logits"][..., columns],
            data["targets"],
            mask=data["mask"],
            tp_group=tp.group,
            with_entropy=entropy,
        )
    return out, dict(counts)


@pytest.mark.parametrize("entropy", [False, True])
def test_selected_logprobs_over_real_ranks(pool: RankPool, entropy: bool) -> None:
    data = batch()
    alone = rl_engine.selected_logprobs(
        data["logits"], data["targets"], mask=data["mask"], with_entropy=entropy
    )
    for out, counts in pool.run(selected_on_ranks, world_size=3, args=(entropy,)):
        pairs = zip(out, alone, strict=True) if entropy else [(out, alone)]
        for value, expected in pairs:
            assert_bits_equal(value, expected, "output")
        assert counts == {("tp", "preflight"): 1, ("tp", "all_gather_rows"): 1}
