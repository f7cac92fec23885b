"""The child side of the rank pool: one process that plays a rank, run after run.

A run, seen from here:

1. receive the task, join a fresh default process group over a file store;
2. call the function, report its value or its error;
3. after an error leave the group at once, so that ranks which wait for this one see closed connections;
4. wait for the release (all ranks have reported), leave the group, say that this process is ready again.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from rl_engine.errors import InputError
from rl_engine.mesh.axis import Axis

__all__ = ["Mesh", "RankContext", "Report", "Task", "serve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The three axes as one rank sees them; an axis of one rank has no group."""

    tp: Axis
    dp: Axis
    cp: Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a function run by the pool learns about itself.

    Attributes:
        rank: Its rank in the default process group.
        world_size: The number of ranks of this run.
        backend: "gloo" or "nccl".
        device: Where its tensors live: the CPU or a GPU.
    """

    rank: int
    world_size: int
    backend: str
    device: torch.device

    def mesh(self, *, tp: int = 1, dp: int = 1, cp: int = 1) -> Mesh:
        """The ranks as a tp × cp × dp grid, TP fastest. Collective over all ranks of the run.

        Raises:
            InputError: the degrees do not multiply to the number of ranks.
        """
        if tp * dp * cp != self.world_size:
            raise InputError(
                f"tp {tp} × dp {dp} × cp {cp} is {tp * dp * cp} ranks and the run has {self.world_size}; "
                f"the product must be the world size"
            )
        strides = {"tp": (1, tp), "cp": (tp, cp), "dp": (tp * cp, dp)}
        mesh = Mesh(**{name: self._axis(name, *strides[name]) for name in ("tp", "cp", "dp")})
        _settle(self, f"mesh-{tp}-{cp}-{dp}")
        return mesh

    def _axis(self, name: str, stride: int, size: int) -> Axis:
        if size == 1:
            return Axis.single(name)
        first = self.rank - (self.rank // stride % size) * stride
        ranks = [first + i * stride for i in range(size)]
        if size == self.world_size:
            return Axis.from_group(name, dist.group.WORLD)
        # Only members take part, all in the same order of axes: no rank waits for groups that are not its
        # own.
        group = dist.new_group(ranks, use_local_synchronization=True)
        return Axis.from_group(name, group)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One rank's part of a run; `call` is a pickled (function, arguments)."""

    rank: int
    world_size: int
    backend: str
    device: str
    directory: str
    group_timeout: float
    sys_path: tuple[str, ...]
    call: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank tells the pool: a pickled value, or an error in words."""

    value: bytes | None = None
    joined: bool = False
    seconds: float = 0.0
    error_type: str = ""
    error_bases: tuple[str, ...] = ()
    error_message: str = ""
    error_traceback: str = ""


def serve(connection: Connection) -> None:
    """The life of a worker: tasks until the pool closes or its process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    torch.set_num_threads(1)
    gc.freeze()  # what was imported stays: the collections between runs need not look at it
    # All ranks are on this machine, and looking up a host name may be slow or fail.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    with suppress(EOFError, OSError):
        while message := connection.recv_bytes():
            _play(pickle.loads(message), connection)


def _play(task: Task, connection: Connection) -> None:
    with open(os.path.join(task.directory, f"{task.rank}.stack"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            report = _call(task)
            connection.send_bytes(pickle.dumps(report))
            if report.value is None:
                _leave()
            connection.recv_bytes()
            _leave()
            # torch.distributed counts its initialisations, failed ones too: that process is out of step.
            connection.send_bytes(b"ready" if report.joined else b"retire")
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def _call(task: Task) -> Report:
    started = time.monotonic()
    joined = False
    try:
        sys.path[:] = task.sys_path
        function, args = pickle.loads(task.call)
        context = _join(task)
        joined = True
        started = time.monotonic()
        value: Any = function(context, *args)
        seconds = time.monotonic() - started
        return Report(value=pickle.dumps(value), joined=True, seconds=seconds)
    except BaseException as exc:  # noqa: BLE001  reported to the pool, which raises it there
        return Report(
            joined=joined,
            seconds=time.monotonic() - started,
            error_type=type(exc).__name__,
            error_bases=tuple(f"{base.__module__}.{base.__qualname__}" for base in type(exc).__mro__),
            error_message=str(exc),
            error_traceback="".join(traceback.format_exception(exc)),
        )


def _join(task: Task) -> RankContext:
    device = torch.device("cpu")
    if task.device == "cuda":
        device = torch.device("cuda", task.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    path = os.path.join(task.directory, "store")
    store = dist.FileStore(path, task.world_size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(
        task.backend,
        store=store,
        rank=task.rank,
        world_size=task.world_size,
        timeout=timedelta(seconds=task.group_timeout),
        device_id=device if task.backend == "nccl" else None,
    )
    context = RankContext(rank=task.rank, world_size=task.world_size, backend=task.backend, device=device)
    _settle(context, "joined")
    return context


def _settle(context: RankContext, what: str) -> None:
    """Wait until every rank is past its rendezvous: one that dies earlier would break the others' rendezvous.

    Over the store, not by a barrier: a rank that has left a barrier may die while others are still in it.
    """
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    store.set(f"rl_engine/{what}/{context.rank}", "")
    store.wait([f"rl_engine/{what}/{rank}" for rank in range(context.world_size)])


def _leave() -> None:
    if dist.is_initialized():
        with suppress(RuntimeError):  # a broken group may complain about being closed
            dist.destroy_process_group()
    gc.collect()  # the last reference to a group is what closes its connections
