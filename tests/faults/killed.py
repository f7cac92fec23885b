"""Ranks that die, or fail, in the middle of a step: what the others do."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

from rl_engine.contracts import LogprobContract, ShardingSpec
from rl_engine.logprob import VocabParallelLogprobOp, exact
from rl_engine.loss import sequences, sums
from rl_engine.mesh import exchange
from rl_engine.mesh.pool import RankContext
from rl_engine.mesh.pool_worker import Mesh
from rl_engine.registry import kernel_registry
from tests.faults.alive import Ending, outlive, record
from tests.faults.api_calls import NAN, Change, at, put, run_grpo, run_policy, run_selected


def kill_oneself(*_args: Any, **_kwargs: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def fail_here(*_args: Any, **_kwargs: Any) -> Any:
    raise MemoryError("out of memory")


class Spoiled:
    """An attribute that is another one for as long as the step lasts: workers are used again."""

    def __init__(self, owner: Any, name: str, stand_in: Any) -> None:
        self.owner, self.name, self.stand_in = owner, name, stand_in
        self.kept = getattr(owner, name)

    def __enter__(self) -> None:
        setattr(self.owner, self.name, self.stand_in)

    def __exit__(self, *_exc: object) -> None:
        setattr(self.owner, self.name, self.kept)


def at_exchange(number: int) -> Spoiled:
    """Death right before this rank's exchange of that number; the preflights are not among them."""
    count = 0
    kept = exchange.gather

    def gather(*args: Any) -> torch.Tensor:
        nonlocal count
        if count == number:
            kill_oneself()
        count += 1
        return kept(*args)

    return Spoiled(exchange, "gather", gather)


def two_steps(mesh: Mesh, change: Change | None) -> None:
    """A rank with no part in the last exchange of a lost one ends its step, and hears of it in the next."""
    for _ in range(2):
        run_grpo(mesh.tp, mesh.dp, change)


def kill_in_loss(context: RankContext, victim: int, number: int) -> Ending:
    """tp 2 × dp 2; the victim dies before its exchange of that number inside grpo_loss."""
    mesh = context.mesh(tp=2, dp=2)
    if context.rank == victim:
        with at_exchange(number):
            run_grpo(mesh.tp, mesh.dp, None)
            raise AssertionError(f"the loss has no exchange of number {number}")
    return outlive(context, lambda: two_steps(mesh, None), dead=victim)


def kill_in_backend(context: RankContext, victim: int) -> Ending:
    """tp 2 × dp 2; the victim's logprob backend kills its process."""
    mesh = context.mesh(tp=2, dp=2)
    if context.rank == victim:
        with Spoiled(exact.ExactBackend, "rows", kill_oneself):
            run_grpo(mesh.tp, mesh.dp, None)
    return outlive(context, lambda: run_grpo(mesh.tp, mesh.dp, None), dead=victim)


def kill_in_op(context: RankContext, victim: int, front: str) -> Ending:
    """Three ranks on one axis; the victim dies in the exchange of the log-probs, or of the loss."""
    if front == "policy":
        dp = context.mesh(dp=context.world_size).dp
        if context.rank == victim:
            with at_exchange(1):
                run_policy(dp, None)
        return outlive(context, lambda: run_policy(dp, None), dead=victim)
    tp = context.mesh(tp=context.world_size).tp
    if context.rank == victim:
        with at_exchange(0):
            run_selected(tp, None)
    return outlive(context, lambda: run_selected(tp, None), dead=victim)


FAILURES: dict[str, tuple[Any, str]] = {
    "in the backend": (exact.ExactBackend, "rows"),
    "in the closing": (exact.TorchWords, "close"),
    "in the gather": (sequences, "fp32_bits"),
    "in the sums": (sums, "accumulate"),
}


def fail_in_loss(context: RankContext, victim: int, where: str, validate: bool) -> Ending:
    """tp 2 × dp 2; the victim fails by itself, and lives on."""
    mesh = context.mesh(tp=2, dp=2)

    def change(call: dict[str, Any]) -> None:
        call["validate"] = validate
        # the rewards travel through fp32_bits only where the op itself forms the groups
        del call["group_ids"]
        call["group_boundaries"] = (0, 2, 4)

    def call() -> Any:
        if context.rank != victim:
            return two_steps(mesh, change)
        owner, name = FAILURES[where]
        with Spoiled(owner, name, fail_here):
            return run_grpo(mesh.tp, mesh.dp, change)

    return outlive(context, call)


def fail_in_op(context: RankContext, victim: int, validate: bool) -> Ending:
    """Two ranks; the victim's backend is out of memory."""
    tp = context.mesh(tp=2).tp
    contract = LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(8, tp.rank, 2))
    op: VocabParallelLogprobOp = kernel_registry.get_logprob_op(contract, "exact_torch").op

    def run() -> torch.Tensor:
        ids = torch.tensor([1, 2, 3])
        return op(torch.zeros(3, 4), ids, contract=contract, tp_group=tp.group, validate=validate)[0]

    def call() -> torch.Tensor:
        if context.rank != victim:
            return run()
        with Spoiled(exact.ExactBackend, "rows", fail_here):
            return run()

    return outlive(context, call)


def wrong_shape_without_validation(context: RankContext, victim: int) -> Ending:
    """Nothing is compared, but a rank that fails its own checks still rings."""
    mesh = context.mesh(tp=2, dp=2)

    def change(call: dict[str, Any]) -> None:
        call["validate"] = False
        if context.rank == victim:
            call["old_logps"] = torch.zeros(5)

    return outlive(context, lambda: run_grpo(mesh.tp, mesh.dp, change))


REFUSED: dict[str, Change] = {
    "no old log-probs": put(old_logps=None),
    "a reward of NaN": at("rewards", (1,), NAN),
    "a NaN among active logits": at("logits", (0, 1, 1), NAN),
    "another target than its sibling": at("targets", (0, 0), 5),
    "another temperature": put(temperature=0.5),
    "a mask of halves": put(mask=torch.full((2, 3), 0.5)),
}


def steps_after_refusals(context: RankContext) -> tuple[list[Ending], float]:
    """Refused steps leave the groups in step: the next one goes through."""
    mesh = context.mesh(tp=2, dp=2)
    ends = [
        record(lambda change=change: run_grpo(mesh.tp, mesh.dp, change if context.rank == 2 else None))
        for change in REFUSED.values()
    ]
    return ends, float(run_grpo(mesh.tp, mesh.dp, None))
