"""Batches for the GRPO loss, ways to lay them out over a mesh, and the loss run on one rank of it.

Shapes: S sequences of L tokens in the whole batch, V columns of the padded vocabulary; on a rank N = its
sequences × its padded length.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from rl_engine.contracts import (
    GRPOLossContract,
    LogitsDtype,
    LogprobContract,
    LossReductionSpec,
    LossShardingSpec,
    ObjectiveSpec,
    ShardingSpec,
)
from rl_engine.loss import DistributedGRPOLossOp, GRPOLossResult
from rl_engine.mesh import Axis, count_collectives
from rl_engine.mesh.pool import RankContext
from tests.bits import assert_bits_equal
from tests.logprob.op_cases import Bounds, cut, group_of
from tests.numerics.cases import TORCH
from tests.oracle.ieee import fl32

INF, NAN = float("inf"), float("nan")
RefBy = Literal["none", "logits", "logps"]
AdvantageBy = Literal["rewards", "sequence", "token"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The whole batch, as nobody holds it: every rank cuts out its part."""

    logits: Tensor  # [S, L, V]
    ref_logits: Tensor
    targets: Tensor  # [S, L]
    old: Tensor
    ref: Tensor
    active: Tensor
    rewards: Tensor  # [S]
    token_advantages: Tensor  # [S, L]
    boundaries: tuple[int, ...]
    real: int
    temperature: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Who holds what: vocabulary shards, sequence shards, and the padded length of each DP rank."""

    tp: Bounds
    dp: Bounds
    padding: tuple[int, ...]

    def __str__(self) -> str:
        return f"tp {self.tp} × dp {self.dp}, padding {self.padding}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One loss of a batch under a layout."""

    batch: Batch
    layout: Layout
    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)
    reduction: LossReductionSpec = field(default_factory=LossReductionSpec)
    ref_by: RefBy = "none"
    advantage_by: AdvantageBy = "rewards"
    backend: str = "auto"
    validate: bool = True
    scale: float = 1.0
    """Upstream gradient of the loss."""

    def alone(self) -> Job:
        """The same on one rank without padding."""
        s, _, v = self.batch.logits.shape
        layout = Layout(tp=((0, v),), dp=((0, s),), padding=(0,))
        return replace(self, layout=layout)


@dataclass(frozen=True, eq=False)
class Done:
    """What one rank holds after loss and backward; gradients [S_local, L, V_local], padding apart."""

    loss: Tensor
    policy_loss: Tensor
    kl: Tensor
    advantages: Tensor | None
    per_sequence_policy: Tensor
    per_sequence_kl: Tensor
    per_sequence_active_tokens: Tensor
    num_active_tokens: Tensor
    num_guarded_tokens: Tensor
    grad: Tensor
    padding_grad: Tensor
    forward: dict[tuple[str, str], int]
    backward: dict[tuple[str, str], int]


REPLICATED = [
    "loss",
    "policy_loss",
    "kl",
    "advantages",
    "per_sequence_policy",
    "per_sequence_kl",
    "per_sequence_active_tokens",
    "num_active_tokens",
    "num_guarded_tokens",
]


def make_batch(
    seed: int,
    *,
    sizes: Sequence[int] = (3, 4, 2),
    length: int = 5,
    dtype: str = "fp32",
    temperature: float = 1.0,
    density: float = 0.7,
) -> Batch:
    """Groups of given sizes, a padded vocabulary, a sequence without active tokens, garbage where masked."""
    rng = random.Random(seed)
    s, real, padded = sum(sizes), 11, 14

    def table(sigma: float, mean: float = 0.0) -> Tensor:
        return torch.tensor([[fl32(rng.gauss(mean, sigma)) for _ in range(length)] for _ in range(s)])

    def vocabulary() -> Tensor:
        values = [rng.gauss(0, 2.5) for _ in range(s * length * padded)]
        out = torch.tensor(values, dtype=torch.float64).to(TORCH[dtype]).view(s, length, padded)
        out[..., real:] = torch.tensor([NAN, INF, 5.0][: padded - real]).to(out.dtype)
        return out

    active = torch.tensor([[rng.random() < density for _ in range(length)] for _ in range(s)])
    active[0, 0] = True
    if s > 2:
        active[2] = False
    targets = torch.tensor([[rng.randrange(real) for _ in range(length)] for _ in range(s)])
    logits = vocabulary()
    logp = torch.log_softmax(logits[..., :real].double() / temperature, -1)
    chosen = logp.gather(-1, targets[..., None])[..., 0].float()
    # ratios around 1, some far outside the clip, some beyond the guard
    far = torch.tensor([[rng.choice([0.0] * 12 + [-100.0, 2.0]) for _ in range(length)] for _ in range(s)])
    batch = Batch(
        logits=logits,
        ref_logits=vocabulary(),
        targets=targets,
        old=chosen + table(0.3) + far,
        ref=chosen + table(0.5) + far.clamp(max=0) * -0.9,
        active=active,
        rewards=torch.tensor([fl32(rng.choice([0.0, 1.0, 0.3, 0.7])) for _ in range(s)]),
        token_advantages=table(1.0),
        boundaries=(0, *accumulate(sizes)),
        real=real,
        temperature=temperature,
    )
    return with_garbage(batch, seed)


def with_garbage(batch: Batch, seed: int) -> Batch:
    """The batch with other garbage at its inactive tokens: nothing of it may change a bit."""
    rng = random.Random(f"garbage {seed}")
    kinds = [NAN, INF, -INF, 1e30, -1e30, 0.0]

    def spoiled(values: Tensor) -> Tensor:
        junk = [rng.choice(kinds) for _ in range(values.numel())]
        mask = batch.active if values.dim() == 2 else batch.active[..., None]
        return torch.where(mask, values, torch.tensor(junk).view(values.shape).to(values.dtype))

    junk_ids = [rng.choice([-100, -1, batch.real, 10**9, 2]) for _ in range(batch.targets.numel())]
    return replace(
        batch,
        logits=spoiled(batch.logits),
        ref_logits=spoiled(batch.ref_logits),
        old=spoiled(batch.old),
        ref=spoiled(batch.ref),
        token_advantages=spoiled(batch.token_advantages),
        targets=torch.where(batch.active, batch.targets, torch.tensor(junk_ids).view(batch.targets.shape)),
    )


# ------------------------------------------------------------------------------------------------- layouts


def layout_of(batch: Batch, tp: int, dp: int, seed: int) -> Layout:
    """Random shards of both axes, empty ones among them, and a padding of its own for every DP rank."""
    rng = random.Random(f"{tp} {dp} {seed}")
    s, _, v = batch.logits.shape
    if seed == 0:
        tp_bounds = tuple(ShardingSpec.even(batch.real, 0, tp, padded_vocab_size=v).vocab_shard_bounds)
        dp_bounds = tuple(LossShardingSpec.even(s, 0, dp, padded_seq_len=1).sequence_shard_bounds)
    else:
        tp_bounds = cut([rng.randint(0, v) for _ in range(tp - 1)], v)
        dp_bounds = cut([rng.choice([0, s, rng.randint(0, s)]) for _ in range(dp - 1)], s)
    return Layout(tp=tp_bounds, dp=dp_bounds, padding=tuple(rng.choice([0, 0, 1, 3]) for _ in range(dp)))


def padded_rows(values: Tensor, rows: tuple[int, int], padding: int, fill: float) -> Tensor:
    """[N, …] of this rank: its sequences with `padding` slots behind each."""
    own = values[rows[0] : rows[1]]
    slots = own.new_full((own.shape[0], padding, *own.shape[2:]), fill)
    out = torch.cat([own, slots], 1)
    return out.reshape(out.shape[0] * out.shape[1], *own.shape[2:])


def contract_of(job: Job, tp_rank: int, dp_rank: int) -> GRPOLossContract:
    batch, layout = job.batch, job.layout
    s, length, v = batch.logits.shape
    return GRPOLossContract(
        LogprobContract(
            role="train",
            dtype=LogitsDtype.parse(batch.logits.dtype),
            sharding=ShardingSpec(tp_rank, len(layout.tp), layout.tp, batch.real, v),
            temperature=batch.temperature,
        ),
        LossShardingSpec(
            dp_rank, len(layout.dp), s, length + layout.padding[dp_rank], layout.dp, batch.boundaries
        ),
        job.objective,
        job.reduction,
    )


def call_of(job: Job, tp: Axis, dp: Axis) -> tuple[Tensor, dict[str, Any]]:
    """The leaf (this rank's logits) and the other arguments of the op's `apply`."""
    batch, layout = job.batch, job.layout
    rows, padding = layout.dp[dp.rank], layout.padding[dp.rank]
    columns = slice(*layout.tp[tp.rank])

    def local(values: Tensor, fill: float) -> Tensor:
        return padded_rows(values, rows, padding, fill)

    leaf = local(batch.logits[..., columns], NAN).clone().requires_grad_()
    own = slice(*rows)
    per_sequence = batch.rewards[own]
    call: dict[str, Any] = {
        "action_ids": local(batch.targets, -100),
        "old_logps": local(batch.old, NAN),
        "rewards": per_sequence if job.advantage_by == "rewards" else None,
        "contract": contract_of(job, tp.rank, dp.rank),
        "mask": local(batch.active, 0),
        "tp_group": group_of(tp),
        "dp_group": group_of(dp),
        "validate": job.validate,
        "logprob_backend": job.backend,
    }
    if job.advantage_by == "sequence":
        call["advantages"] = per_sequence
    if job.advantage_by == "token":
        call["advantages"] = local(batch.token_advantages, INF)
    if job.ref_by == "logits":
        call["ref_local_logits"] = local(batch.ref_logits[..., columns], INF)
    if job.ref_by == "logps":
        call["ref_logps"] = local(batch.ref, NAN)
    return leaf, call


def apply(job: Job, tp: Axis | None = None, dp: Axis | None = None) -> tuple[GRPOLossResult, Tensor]:
    """The op's forward on this rank, and the leaf."""
    tp = Axis.single("tp") if tp is None else tp
    dp = Axis.single("dp") if dp is None else dp
    leaf, call = call_of(job, tp, dp)
    return DistributedGRPOLossOp().apply(leaf, **call), leaf


def run_job(job: Job, tp: Axis | None = None, dp: Axis | None = None) -> Done:
    """Forward and backward on this rank."""
    with count_collectives() as forward:
        result, leaf = apply(job, tp, dp)
    kept = leaf.detach().clone()
    with count_collectives() as backward:
        (result.loss * job.scale).backward()
    assert_bits_equal(leaf, kept, "the logits after the call", nan_payload=True)
    assert leaf.grad is not None
    length = job.batch.logits.shape[1]
    rank = 0 if dp is None else dp.rank
    start, end = job.layout.dp[rank]
    grad = leaf.grad.view(end - start, length + job.layout.padding[rank], -1) if leaf.numel() else None
    if grad is None:
        grad = leaf.new_zeros(end - start, length + job.layout.padding[rank], leaf.shape[1])
    values = {name: getattr(result, name) for name in REPLICATED}
    return Done(
        **{name: None if v is None else v.detach() for name, v in values.items()},
        grad=grad[:, :length].clone(),
        padding_grad=grad[:, length:].clone(),
        forward=dict(forward),
        backward=dict(backward),
    )


def whole_gradient(done: Sequence[Done], job: Job) -> Tensor:
    """[S, L, V] from the parts of all ranks, TP fastest."""
    tp = len(job.layout.tp)
    rows = [torch.cat([d.grad for d in done[r * tp : r * tp + tp]], -1) for r in range(len(job.layout.dp))]
    return torch.cat(rows, 0)


def assert_replicated(done: Sequence[Done], name: str) -> None:
    """Every rank of the mesh holds the same result."""
    for rank, other in enumerate(done):
        for part in REPLICATED:
            mine, first = getattr(other, part), getattr(done[0], part)
            assert (mine is None) == (first is None), f"{name}: {part} of rank {rank}"
            if first is not None:
                assert_bits_equal(mine, first, f"{name}: {part} of rank {rank} against rank 0")


def assert_as_alone(done: Sequence[Done], job: Job, alone: Done) -> None:
    """The mesh says what one rank says, and the gradients join to its gradient."""
    name = f"{job.layout}"
    assert_replicated(done, name)
    for part in REPLICATED:
        value, expected = getattr(done[0], part), getattr(alone, part)
        if expected is not None:
            assert_bits_equal(value, expected, f"{name}: {part}")
    assert_bits_equal(whole_gradient(done, job), alone.grad, f"{name}: gradient")
    for rank, d in enumerate(done):
        assert_bits_equal(d.padding_grad, torch.zeros_like(d.padding_grad), f"{name}: padding of rank {rank}")


# ------------------------------------------------------------------------------------------ for real ranks


def run_jobs(context: RankContext, tp: int, dp: int, jobs: list[Job]) -> list[Done]:
    """All jobs on this rank of a real mesh."""
    mesh = context.mesh(tp=tp, dp=dp)
    return [run_job(job, mesh.tp, mesh.dp) for job in jobs]


def sequences_of(bounds: Bounds) -> list[int]:
    return [end - start for start, end in bounds]


def offsets(sizes: Sequence[int]) -> Bounds:
    return tuple(pairwise([0, *accumulate(sizes)]))
