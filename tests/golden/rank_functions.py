"""What the ranks of the multi-rank tests run: functions that the pool's workers can import.

Each returns plain tensors; every rank gets the whole batch and cuts its own part, so that layouts are all
that differs between runs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rl_engine
from rl_engine.contracts import (
    LogprobContract,
    LogprobOutputSpec,
    LossReductionSpec,
    LossShardingSpec,
    ObjectiveSpec,
    ShardingSpec,
)
from rl_engine.logprob.exact import load_exact_numba
from rl_engine.mesh import Axis, all_gather_rows, count_collectives
from rl_engine.mesh.pool import RankContext
from rl_engine.numerics import reference, words


def world_group(context: RankContext) -> Any:
    return dist.group.WORLD if context.world_size > 1 else None


def policy_loss(
    context: RankContext,
    batch: dict[str, Tensor],
    bounds: list[int],
    objective: ObjectiveSpec,
    reduction: LossReductionSpec,
    padded: list[int] | None = None,
) -> dict[str, Any]:
    """`rl_engine.policy_loss` on sequences bounds[rank] to bounds[rank + 1], in padded[rank] slots."""
    own = slice(bounds[context.rank], bounds[context.rank + 1])
    length = batch["logps"].shape[1] if padded is None else padded[context.rank]
    local = {
        name: fit(value[own], length) if value.dim() == 2 else value[own] for name, value in batch.items()
    }
    logps = local["logps"].clone().requires_grad_()
    with count_collectives() as counts:
        result = rl_engine.policy_loss(
            logps,
            local["old"],
            local["advantages"],
            mask=local["mask"],
            ref_logps=local.get("ref"),
            objective=objective,
            reduction=reduction,
            dp_group=world_group(context),
        )
        result.loss.backward()
    assert logps.grad is not None
    return {
        "loss": result.loss.detach(),
        "policy_loss": result.policy_loss,
        "kl": result.kl,
        "per_sequence_policy": result.per_sequence_policy,
        "per_sequence_kl": result.per_sequence_kl,
        "num_active_tokens": result.num_active_tokens,
        "grad": logps.grad,
        "collectives": dict(counts),
    }


def fit(value: Tensor, length: int) -> Tensor:
    """[S, T] cut or zero-padded to [S, length]."""
    if value.shape[1] >= length:
        return value[:, :length]
    return torch.nn.functional.pad(value, (0, length - value.shape[1]))


def logprobs(
    context: RankContext,
    logits: Tensor,
    targets: Tensor,
    bounds: list[tuple[int, int]],
    real: int,
    grads: tuple[Tensor, Tensor],
    validate: bool = True,
) -> dict[str, Tensor]:
    """The op on this rank's columns; `grads` are those of logp and lse."""
    contract = LogprobContract(
        role="train",
        dtype={torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[logits.dtype],
        sharding=ShardingSpec(context.rank, context.world_size, tuple(bounds), real, logits.shape[1]),
        output=LogprobOutputSpec(entropy=True),
    )
    start, stop = bounds[context.rank]
    local = logits[:, start:stop].clone().requires_grad_()
    out = load_exact_numba()(
        local, targets, contract=contract, tp_group=world_group(context), validate=validate
    )
    torch.autograd.backward(out[:2], grads)
    assert local.grad is not None
    return {"logp": out[0].detach(), "lse": out[1].detach(), "entropy": out[2].detach(), "grad": local.grad}


def exchanged_target_bits(context: RankContext, logits: Tensor, targets: Tensor, width: int) -> Tensor:
    """The merged partial of each row as every rank sees it, by the packed exchange."""
    axis = Axis.from_group("tp", dist.group.WORLD)
    start = context.rank * width
    local = logits[:, start : start + width]
    own = torch.where((targets >= start) & (targets < start + width), targets - start, -1)
    partial = reference.partial(local, own, scale_l=words.temperature_scale(1.0), real_cols=local.shape[1])
    return words.merge(all_gather_rows(axis, partial))[:, 5]


def grpo_by_ids(context: RankContext, rewards: Tensor, ids: list[str], bounds: list[int]) -> Tensor | None:
    """Advantages of the whole batch, from group ids in any order."""
    own = slice(bounds[context.rank], bounds[context.rank + 1])
    count = bounds[context.rank + 1] - bounds[context.rank]
    logits = torch.zeros(count, 2, 4)
    result = rl_engine.grpo_loss(
        logits,
        torch.zeros(count, 2, dtype=torch.long),
        torch.zeros(count, 2),
        rewards[own],
        mask=torch.ones(count, 2),
        group_ids=ids[own],
        dp_group=world_group(context),
    )
    return result.advantages


def loss_with_backend(context: RankContext, backends: list[str]) -> None:
    """A loss over TP whose ranks ask for different backends."""
    contract = rl_engine.GRPOLossContract(
        LogprobContract(
            role="train", dtype="fp32", sharding=ShardingSpec.even(8, context.rank, context.world_size)
        ),
        LossShardingSpec.even(2, padded_seq_len=1),
    )
    rl_engine.DistributedGRPOLossOp().apply(
        torch.zeros(2, 8 // context.world_size),
        torch.zeros(2, dtype=torch.long),
        torch.zeros(2),
        torch.tensor([1.0, 0.0]),
        contract=contract,
        tp_group=dist.group.WORLD,
        logprob_backend=backends[context.rank],
    )
