"""What the ranks of the tier tests run: every rank gets the whole batch and cuts its own part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_engine.contracts import (
    GRPOLossContract,
    LogprobContract,
    LossReductionSpec,
    LossShardingSpec,
    ObjectiveSpec,
    ReductionSpec,
    ShardingSpec,
)
from rl_engine.logprob import tiled
from rl_engine.logprob.op import VocabParallelLogprobOp
from rl_engine.mesh import count_collectives
from rl_engine.mesh.pool import RankContext
from rl_engine.registry import kernel_registry

Bounds = list[tuple[int, int]]
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def even_bounds(padded: int, parts: int) -> Bounds:
    return [(padded * i // parts, padded * (i + 1) // parts) for i in range(parts)]


def contract_of(
    logits: Tensor,
    rank: int,
    bounds: Bounds,
    real: int,
    reduction: ReductionSpec,
    temperature: float = 1.0,
) -> LogprobContract:
    return LogprobContract(
        role="train",
        dtype=DTYPES[logits.dtype],
        sharding=ShardingSpec(rank, len(bounds), tuple(bounds), real, logits.shape[1]),
        reduction=reduction,
        temperature=temperature,
    )


def logprobs(
    context: RankContext | None,
    logits: Tensor,
    targets: Tensor,
    bounds: Bounds,
    real: int,
    reduction: ReductionSpec,
    grads: tuple[Tensor | None, Tensor | None],
    temperature: float = 1.0,
    mask: Tensor | None = None,
    validate: bool = True,
) -> dict[str, Any]:
    """The op that the registry chooses, on this rank's columns; `grads` are those of logp and lse."""
    rank = 0 if context is None else context.rank
    group = None if context is None else context.mesh(tp=context.world_size).tp.group
    contract = contract_of(logits, rank, bounds, real, reduction, temperature)
    start, stop = bounds[rank]
    local = logits[:, start:stop].clone().requires_grad_()
    with count_collectives() as forward:
        out = VocabParallelLogprobOp()(
            local, targets, contract=contract, mask=mask, tp_group=group, validate=validate
        )
    with count_collectives() as backward:
        used = [(o, g) for o, g in zip(out, grads, strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in used], [g for _, g in used])
    assert local.grad is not None
    return {
        "logp": out[0].detach(),
        "lse": out[1].detach(),
        "grad": local.grad,
        "forward": dict(forward),
        "backward": dict(backward),
    }


def direct_call(
    context: RankContext, logits: Tensor, targets: Tensor, bounds: Bounds, real: int, tiles: int
) -> None:
    """The tiled op itself, which no registry has asked for its capability."""
    contract = contract_of(logits, context.rank, bounds, real, ReductionSpec.tiled(tiles))
    start, stop = bounds[context.rank]
    group = context.mesh(tp=context.world_size).tp.group
    tiled.load()(logits[:, start:stop], targets, contract=contract, tp_group=group)


def grpo(
    context: RankContext | None,
    batch: dict[str, Tensor],
    tp: int,
    dp: int,
    real: int,
    backends: tuple[str, str],
    logprob_reduction: ReductionSpec,
    objective: ObjectiveSpec,
    reduction: LossReductionSpec,
    group_sizes: tuple[int, ...],
) -> dict[str, Any]:
    """The loss by named (logprob, loss) backends.

    `batch`: logits and ref_logits [S, T, V], ids, old and mask [S, T], rewards [S].
    """
    mesh = None if context is None else context.mesh(tp=tp, dp=dp)
    tp_rank, dp_rank = (0, 0) if mesh is None else (mesh.tp.rank, mesh.dp.rank)
    sequences, length, padded = batch["logits"].shape
    sharding = LossShardingSpec.even(sequences, dp_rank, dp, padded_seq_len=length, group_sizes=group_sizes)
    own = slice(sharding.local_sequence_start, sharding.local_sequence_end)
    bounds = even_bounds(padded, tp)
    start, stop = bounds[tp_rank]
    flat = batch["logits"][own, :, start:stop].flatten(0, 1)
    logits = flat.clone().requires_grad_()
    reference = batch["ref_logits"][own, :, start:stop].flatten(0, 1) if "ref_logits" in batch else None
    contract = GRPOLossContract(
        contract_of(batch["logits"].flatten(0, 1), tp_rank, bounds, real, logprob_reduction),
        sharding,
        objective,
        reduction,
    )
    op = kernel_registry.get_loss_op(contract, backends[1]).op
    result = op.apply(
        logits,
        batch["ids"][own].flatten(),
        batch["old"][own].flatten(),
        batch["rewards"][own],
        contract=contract,
        mask=batch["mask"][own].flatten(),
        ref_local_logits=reference,
        tp_group=None if mesh is None else mesh.tp.group,
        dp_group=None if mesh is None else mesh.dp.group,
        logprob_backend=backends[0],
    )
    result.loss.backward()
    assert logits.grad is not None
    return {
        "loss": result.loss.detach(),
        "policy_loss": result.policy_loss,
        "kl": result.kl,
        "advantages": result.advantages,
        "per_sequence_policy": result.per_sequence_policy,
        "per_sequence_kl": result.per_sequence_kl,
        "num_active_tokens": result.num_active_tokens,
        "num_guarded_tokens": result.num_guarded_tokens,
        "grad": logits.grad.view(-1, length, stop - start),
        "ids": (
            result.provenance.logprob_backend,
            result.provenance.loss_backend,
            result.provenance.numerics_id,
        ),
    }


def joined_grad(results: list[dict[str, Any]], tp: int) -> Tensor:
    """[S, T, V] of all ranks' gradients; TP is the fastest axis of the mesh."""
    rows = [torch.cat([r["grad"] for r in results[i : i + tp]], -1) for i in range(0, len(results), tp)]
    return torch.cat(rows, 0)


def random_batch(seed: int, *, sequences: int = 7, length: int = 9, vocab: int = 60, padded: int = 64) -> Any:
    """A batch whose ratios, clips and KL are all in play; masked tokens hold garbage."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sequences, length, padded, generator=generator) * 3
    ids = torch.randint(0, vocab, (sequences, length), generator=generator)
    mask = torch.rand(sequences, length, generator=generator) < 0.7
    mask[:, 0] = True
    live = torch.log_softmax(logits[..., :vocab], -1).gather(-1, ids[..., None])[..., 0]
    old = live + torch.randn(sequences, length, generator=generator) * 0.3
    old = torch.where(mask, old, torch.nan)
    reference = logits + torch.randn(sequences, length, padded, generator=generator) * 0.3
    logits[..., vocab:] = torch.nan
    reference[..., vocab:] = torch.inf
    ids = torch.where(mask, ids, -100)
    rewards = torch.randn(sequences, generator=generator)
    return {
        "logits": logits,
        "ids": ids,
        "mask": mask,
        "old": old,
        "ref_logits": reference,
        "rewards": rewards,
    }
