"""What the ranks of the op's tests run: functions that the pool's workers can import."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from rl_engine.contracts import Transport
from rl_engine.mesh import count_collectives
from rl_engine.mesh.pool import RankContext
from tests.bits import assert_bits_equal
from tests.faults.alive import Ending, record
from tests.logprob.op_cases import (
    Answer,
    Bounds,
    Case,
    answer_of,
    backward_of,
    outputs_of,
)


class Job(NamedTuple):
    """One call of the op on every rank."""

    case: Case
    bounds: Bounds
    backend: str
    transport: Transport = Transport.PACKED_ALL_GATHER
    validate: bool = True


class Done(NamedTuple):
    answer: Answer
    forward: dict[tuple[str, str], int]
    backward: dict[tuple[str, str], int]


def run_jobs(context: RankContext, jobs: list[Job]) -> list[Done]:
    """Forward and backward of each job on this rank's shard, with the collectives of each."""
    axis = context.mesh(tp=context.world_size).tp
    done: list[Done] = []
    for job in jobs:
        start, end = job.bounds[axis.rank]
        leaf = job.case.logits[:, start:end].clone().requires_grad_()
        kept = leaf.detach().clone()
        with count_collectives() as forward:
            outputs = outputs_of(job.case, leaf, axis, job.bounds, job.backend, job.transport, job.validate)
        with count_collectives() as backward:
            grad = backward_of(job.case, outputs, leaf)
        assert_bits_equal(leaf, kept, "the logits after the call", nan_payload=True)
        detached = [out.detach() for out in outputs]
        answer = Answer(detached[0], detached[1], detached[2] if job.case.entropy else None, grad)
        done.append(Done(answer, dict(forward), dict(backward)))
    return done


def endings(context: RankContext, jobs: list[Job]) -> list[Ending]:
    """How each job ends; the ranks go on to the next one, so no group may be left out of step."""
    axis = context.mesh(tp=context.world_size).tp

    def call(job: Job) -> Any:
        return answer_of(job.case, axis, job.bounds, job.backend, job.transport, job.validate)

    return [record(lambda job=job: call(job)) for job in jobs]


def target_bits(context: RankContext, job: Job) -> list[int]:
    """The bits of the target logits as the merged rows hold them on this rank."""
    from rl_engine.logprob import exact
    from rl_engine.numerics import constants as C
    from rl_engine.numerics.words import merge

    axis = context.mesh(tp=context.world_size).tp
    seen: list[torch.Tensor] = []
    original = exact._exchange

    def spy(*args: Any) -> torch.Tensor:
        pieces = original(*args)
        seen.append(merge(pieces)[:-1, C.COL_TARGET])
        return pieces

    exact._exchange = spy  # type: ignore[assignment]
    try:
        answer_of(job.case, axis, job.bounds, job.backend, job.transport)
    finally:
        exact._exchange = original
    return seen[0].tolist()
