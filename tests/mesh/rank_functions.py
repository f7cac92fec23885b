"""What the ranks of the mesh tests run: functions that the pool's workers can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl_engine.errors import InputError
from rl_engine.mesh import (
    Axis,
    Claim,
    all_gather_rows,
    all_reduce_float,
    all_reduce_max,
    all_reduce_sum,
    count_collectives,
    gather_json,
    guard,
    preflight,
    preflight_mesh,
)
from rl_engine.mesh.pool import RankContext


def world(context: RankContext) -> Axis:
    return context.mesh(tp=context.world_size).tp


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- pool


def hello(context: RankContext, word: str, number: int) -> tuple[int, int, str, int, int]:
    return context.rank, context.world_size, word, number, torch.get_num_threads()


def pid_and_sum(context: RankContext) -> tuple[int, int]:
    total = torch.tensor([context.rank])
    if context.world_size > 1:
        dist.all_reduce(total)
    return os.getpid(), int(total)


def send_back(context: RankContext, tensor: torch.Tensor) -> dict[str, Any]:
    return {"same": tensor, "view": tensor[1:, ::2], "bf16": tensor.to(torch.bfloat16), "rank": context.rank}


def raise_on(context: RankContext, bad_rank: int) -> str:
    if context.rank == bad_rank:
        raise InputError("the text of rank 1")
    return "fine"


def die_on(context: RankContext, victim: int, how: str) -> str:
    if context.rank == victim:
        if how == "exit":
            os._exit(3)
        kill_oneself()
    total = torch.ones(1)
    dist.all_reduce(total)
    return "fine"


def sleep_on(context: RankContext, sleeper: int) -> str:
    if context.rank == sleeper:
        time.sleep(60)
    return "fine"


def unpicklable(context: RankContext) -> Any:
    return lambda: context


def grid(context: RankContext, tp: int, dp: int, cp: int) -> dict[str, Any]:
    mesh = context.mesh(tp=tp, dp=dp, cp=cp)
    axes = {"tp": mesh.tp, "dp": mesh.dp, "cp": mesh.cp}
    return {
        name: (axis.rank, axis.size, axis.ranks, gather_json(axis, context.rank))
        for name, axis in axes.items()
    }


# --- axis


def bad_groups(context: RankContext) -> list[str]:
    texts: list[str] = []
    other = dist.new_group([0])
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    gone = dist.new_group([0, 1])
    dist.destroy_process_group(gone)
    for group in (other if context.rank == 1 else "tp", mesh, gone):
        try:
            Axis.from_group("tp", group)  # type: ignore[arg-type]
        except InputError as exc:
            texts.append(str(exc))
    assert Axis.from_group("tp", mesh["dp"]).size == 2
    assert Axis.from_group("tp", None).size == 1
    return texts


# --- exchange


def exchange_all(context: RankContext) -> dict[str, Any]:
    axis = world(context)
    rows = torch.arange(6).reshape(3, 2) + 100 * context.rank
    words = torch.tensor([2**62, -context.rank, 7])
    kept = words.clone()
    with count_collectives() as counts:
        result = {
            "rows": all_gather_rows(axis, rows.t().contiguous().t()),
            "empty": all_gather_rows(axis, torch.empty(0, 5, dtype=torch.int64)),
            "sum": all_reduce_sum(axis, words),
            "max": all_reduce_max(axis, words),
            "float": all_reduce_float(axis, torch.tensor([0.5]), "sum"),
        }
        assert torch.equal(words, kept)
        same = all_reduce_sum(axis, words, in_place=True)
        assert same is words
    result["in_place"] = words
    result["counts"] = dict(counts)
    return result


def gather_texts_of_lengths(context: RankContext, lengths: list[int]) -> tuple[list[str], dict[Any, int]]:
    axis = world(context)
    with count_collectives() as counts:
        texts = gather_json(axis, "é" * lengths[context.rank])
    return texts, dict(counts)


def gather_with_error(context: RankContext, bad_rank: int) -> None:
    error = InputError("no group ids") if context.rank == bad_rank else None
    gather_json(world(context), {"ids": [1]}, error=error)


# --- preflight


def agree(context: RankContext) -> dict[Any, int]:
    axis = world(context)
    with count_collectives() as counts:
        preflight(axis, fingerprint="same", facts={"beta": "0.0"})
    return dict(counts)


def disagree(
    context: RankContext, facts: list[dict[str, str]], failing: dict[int, str], padding: int = 0
) -> dict[Any, int]:
    mine = {key: value + "!" * padding * context.rank for key, value in facts[context.rank].items()}
    error = InputError(failing[context.rank]) if context.rank in failing else None
    preflight(world(context), fingerprint=str(mine), facts=mine, error=error)
    raise AssertionError("the preflight let a disagreement pass")


def disagree_then_agree(context: RankContext) -> str:
    """After a refusal the axis is in step and can be used again."""
    axis = world(context)
    try:
        preflight(axis, fingerprint=str(context.rank), facts={"seed": str(context.rank)})
    except RuntimeError as exc:
        preflight(axis, fingerprint="same", facts={})
        return str(exc)
    raise AssertionError("the preflight let a disagreement pass")


def mesh_preflight(
    context: RankContext,
    tp: int,
    dp: int,
    tp_prints: list[str],
    dp_prints: list[str],
    failing: int | None,
    victim: int | None = None,
) -> None:
    """Raises on every rank of the mesh, or on none."""
    mesh = context.mesh(tp=tp, dp=dp)
    if context.rank == victim:
        kill_oneself()
    claims = [
        Claim(axis=mesh.tp, fingerprint=tp_prints[context.rank], facts={"tp_fact": tp_prints[context.rank]}),
        Claim(axis=mesh.dp, fingerprint=dp_prints[context.rank], facts={"dp_fact": dp_prints[context.rank]}),
    ]
    error = InputError("my logits are [3, 7]") if context.rank == failing else None
    preflight_mesh(claims, error=error)


# --- lost ranks

# How long a survivor keeps its process and its connections after its error, so that nobody is told by its
# end.
HOLD = 2.0


@dataclass
class Lost:
    """What a survivor saw: the error, and after how many seconds."""

    seconds: float
    error: str
    text: str


def catch_and_live_on(call: Callable[[], object]) -> Lost:
    started = time.monotonic()
    try:
        call()
    except Exception as exc:  # noqa: BLE001  whatever it is, the test looks at it
        seconds = time.monotonic() - started
        time.sleep(max(0.0, HOLD - seconds))
        return Lost(seconds, type(exc).__name__, str(exc))
    raise AssertionError("the step passed without a rank")


def lose_rank(context: RankContext, victim: int, exchange: str) -> Lost:
    """One good round, then the victim dies in the next."""
    axis = world(context)
    rows = torch.arange(12).reshape(4, 3)
    calls = {
        "preflight": lambda: preflight(axis, fingerprint="same", facts={}),
        "all_gather_rows": lambda: all_gather_rows(axis, rows),
        "all_reduce_sum": lambda: all_reduce_sum(axis, rows),
        "all_reduce_max": lambda: all_reduce_max(axis, rows),
        "all_reduce_float": lambda: all_reduce_float(axis, rows.float(), "sum"),
        "gather_json": lambda: gather_json(axis, "x" * 3000),
    }
    calls[exchange]()
    if context.rank == victim:
        time.sleep(0.2)
        kill_oneself()
    return catch_and_live_on(calls[exchange])


def lose_rank_of_mesh(context: RankContext, victim: int, guarded: bool) -> Lost:
    """tp 2 × dp 2, a step with a TP and a DP exchange; the victim dies between preflight and TP exchange."""
    mesh = context.mesh(tp=2, dp=2)
    claims = [Claim(axis=axis, fingerprint="same") for axis in (mesh.tp, mesh.dp)]
    preflight_mesh(claims)
    if context.rank == victim:
        kill_oneself()

    def step() -> None:
        with guard(mesh.tp, mesh.dp) if guarded else nullcontext():
            all_gather_rows(mesh.tp, torch.ones(2, 2, dtype=torch.int64))
            all_reduce_sum(mesh.dp, torch.ones(2, dtype=torch.int64))

    return catch_and_live_on(step)


def leave_step(context: RankContext, leaver: int) -> Lost:
    """A rank that fails locally inside a guarded step, and lives on."""
    mesh = context.mesh(tp=2, dp=2)

    def step() -> None:
        with guard(mesh.tp, mesh.dp):
            all_gather_rows(mesh.tp, torch.ones(2, 2, dtype=torch.int64))
            if context.rank == leaver:
                raise MemoryError("out of memory")
            all_reduce_sum(mesh.dp, torch.ones(2, dtype=torch.int64))
            all_reduce_sum(mesh.tp, torch.ones(2, dtype=torch.int64))

    return catch_and_live_on(step)


def use_broken_axis(context: RankContext) -> str:
    axis = world(context)
    if context.rank == 1:
        kill_oneself()
    for _ in range(2):
        try:
            preflight(axis, fingerprint="same", facts={})
        except RuntimeError as exc:
            text = str(exc)
    return text


def late_rank(context: RankContext, seconds: float) -> float:
    """A straggler is waited for."""
    if context.rank == 1:
        time.sleep(seconds)
    started = time.monotonic()
    preflight(world(context), fingerprint="same", facts={})
    return time.monotonic() - started


def disagree_silently(context: RankContext) -> None:
    preflight(world(context), fingerprint=str(context.rank), facts={"beta": "0.0"})
