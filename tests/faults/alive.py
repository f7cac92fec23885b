"""Run a step on a rank and stay alive afterwards, so that no rank is helped by the end of another.

A process that ends closes its connections, and whoever waits for it learns of it at once. What must be shown
is that the ranks tell each other: so every rank records how its own call ended and then waits, with its
groups open, until all ranks have come back or `PATIENCE` is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rl_engine.mesh.pool import RankContext

PATIENCE = 10.0
"""Seconds in which every rank must have come back: the bound that the project promises."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ended on one rank: `error` is "" where it returned."""

    seconds: float
    error: str = ""
    message: str = ""
    value: Any = None

    def __str__(self) -> str:
        return f"{self.error or 'returned'} after {self.seconds:.1f} s: {self.message}"


def record(call: Callable[[], Any]) -> Ending:
    """How a call ends, without waiting for anybody."""
    started = time.monotonic()
    try:
        value = call()
    except Exception as exc:  # noqa: BLE001  whatever it is, the test looks at it
        return Ending(time.monotonic() - started, type(exc).__name__, str(exc))
    return Ending(time.monotonic() - started, value=value)


def outlive(context: RankContext, call: Callable[[], Any], dead: int | None = None) -> Ending:
    """How a call ends on this rank, told once all ranks but the `dead` one have come back from theirs."""
    ending = record(call)
    if context.world_size > 1:
        store = _get_default_store()
        assert dist.is_initialized()
        store.set(f"came_back/{context.rank}", "yes")
        keys = [f"came_back/{rank}" for rank in range(context.world_size) if rank != dead]
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit and not all(store.check([key]) for key in keys):
            time.sleep(0.02)
    return ending
