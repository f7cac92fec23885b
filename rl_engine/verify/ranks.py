"""What one rank of a layout does: cut its shard from the shared files, evaluate the loss, write its gradient.

The batch and the gradients are files that all ranks map into memory, so that nothing large is sent. No
collective of its own: those of the loss are all there are.

Legend: S sequences, T token slots, V padded vocabulary, N = local sequences × local slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rl_engine.contracts import (
    GRPOLossContract,
    LogitsDtype,
    LogprobContract,
    LogprobRole,
    LossReductionSpec,
    LossShardingSpec,
    ObjectiveSpec,
    ReductionSpec,
    ShardingSpec,
)
from rl_engine.mesh.pool import RankContext
from rl_engine.registry import kernel_registry
from rl_engine.verify.layouts import Layout

__all__ = [
    "REPLICATED",
    "Case",
    "Job",
    "RankReport",
    "contract_of",
    "evaluate_shard",
    "gradient_path",
    "map_file",
]


# The fields of the result that every rank must hold alike, in the order in which a difference is named first.
REPLICATED = (
    "loss",
    "policy_loss",
    "kl",
    "advantages",
    "per_sequence_policy",
    "per_sequence_kl",
    "per_sequence_active_tokens",
    "num_active_tokens",
    "num_guarded_tokens",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One loss that is computed on the batch.

    Attributes:
        name: What reports call it.
        objective: Clip, advantages, KL.
        reduction: The normaliser.
    """

    name: str
    objective: ObjectiveSpec
    reduction: LossReductionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One layout of a run, as every rank is told it; tensors that are small enough travel with it.

    Attributes:
        layout: The TP and DP degree.
        directory: Where the files are.
        shape: (S, T, V).
        dtype: Of the logits.
        has_reference: Whether there is a file of reference logits.
        targets: [S, T] int64.
        old_logps: [S, T] fp32.
        rewards: [S] fp32.
        mask: [S, T] bool.
        group_boundaries: Offsets of the groups.
        vocab_size: Real columns.
        temperature: The logits are divided by it.
        vocab_bounds: [start, end) of every TP rank.
        sequence_bounds: [start, end) of every DP rank.
        logprob_reduction: The merge over the vocabulary.
        logprob_backend: Registry policy of the logprobs.
        loss_backend: Registry policy of the loss.
        cases: The losses to compute.
    """

    layout: Layout
    directory: str
    shape: tuple[int, int, int]
    dtype: torch.dtype
    has_reference: bool
    targets: Tensor
    old_logps: Tensor
    rewards: Tensor
    mask: Tensor
    group_boundaries: tuple[int, ...]
    vocab_size: int
    temperature: float
    vocab_bounds: tuple[tuple[int, int], ...]
    sequence_bounds: tuple[tuple[int, int], ...]
    logprob_reduction: ReductionSpec
    logprob_backend: str
    loss_backend: str
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank hands back: for each case the replicated outputs by name, and who computed them."""

    outputs: tuple[dict[str, Tensor], ...]
    backends: str


def map_file(path: Path, shape: tuple[int, int, int], dtype: torch.dtype, *, shared: bool) -> Tensor:
    """[S, T, V] on the CPU, backed by a file; writes go to the file where `shared`."""
    count = shape[0] * shape[1] * shape[2]
    return torch.from_file(str(path), shared=shared, size=count, dtype=dtype).view(shape)


def gradient_path(directory: str, case: int) -> Path:
    """The file that the ranks write the gradient of a case to."""
    return Path(directory) / f"gradient-{case}"


def evaluate_shard(context: RankContext, job: Job) -> RankReport:
    """Evaluate every case on this rank's shard."""
    mesh = context.mesh(tp=job.layout.tp, dp=job.layout.dp)
    first, last = job.sequence_bounds[mesh.dp.rank]
    start, end = job.vocab_bounds[mesh.tp.rank]
    # As trainers do, each DP rank pads its sequences to its own longest one.
    used = job.mask[first:last].any(0).nonzero()
    slots = int(used.amax()) + 1 if used.numel() else 0
    cut = (slice(first, last), slice(0, slots), slice(start, end))

    def flat(tensor: Tensor) -> Tensor:
        return tensor.reshape((last - first) * slots, *tensor.shape[2:]).to(context.device)

    def logits_of(name: str) -> Tensor:
        return flat(map_file(Path(job.directory) / name, job.shape, job.dtype, shared=False)[cut])

    policy = logits_of("logits").requires_grad_()
    reference = logits_of("ref_logits") if job.has_reference else None
    targets, old, mask = (flat(t[cut[:2]]) for t in (job.targets, job.old_logps, job.mask))
    rewards = job.rewards[first:last].to(context.device)
    outputs: list[dict[str, Tensor]] = []
    backends = ""
    for index, case in enumerate(job.cases):
        contract = contract_of(job, case, mesh.tp.rank, mesh.dp.rank, slots)
        op = kernel_registry.get_loss_op(contract, job.loss_backend, device=context.device).op
        policy.grad = None
        result = op.apply(
            policy,
            targets,
            old,
            rewards,
            contract=contract,
            mask=mask,
            ref_local_logits=reference,
            tp_group=mesh.tp.group,
            dp_group=mesh.dp.group,
            logprob_backend=job.logprob_backend,
        )
        result.loss.backward()
        gradient = map_file(gradient_path(job.directory, index), job.shape, job.dtype, shared=True)
        own = gradient[first:last, :, start:end]
        own.zero_()
        if policy.grad is not None:
            own[:, :slots] = policy.grad.view(last - first, slots, end - start).cpu()
        outputs.append({name: _to_cpu(getattr(result, name)) for name in REPLICATED})
        backends = f"{result.provenance.loss_backend} on {result.provenance.logprob_backend}"
    return RankReport(outputs=tuple(outputs), backends=backends)


def contract_of(job: Job, case: Case, tp_rank: int, dp_rank: int, slots: int) -> GRPOLossContract:
    """The contract of one rank, whose sequences have so many slots."""
    return GRPOLossContract(
        LogprobContract(
            role=LogprobRole.TRAIN,
            dtype=LogitsDtype.parse(job.dtype),
            sharding=ShardingSpec(
                tp_rank=tp_rank,
                tp_world_size=job.layout.tp,
                vocab_shard_bounds=job.vocab_bounds,
                real_vocab_size=job.vocab_size,
                padded_vocab_size=job.shape[2],
            ),
            reduction=job.logprob_reduction,
            temperature=job.temperature,
        ),
        LossShardingSpec(
            dp_rank=dp_rank,
            dp_world_size=job.layout.dp,
            num_sequences=job.shape[0],
            padded_seq_len=slots,
            sequence_shard_bounds=job.sequence_bounds,
            group_boundaries=job.group_boundaries,
        ),
        case.objective,
        case.reduction,
    )


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()
