"""A pool of real ranks: worker processes that stay up, a fresh process group for every run.

Starting a process that has torch imported costs seconds; a fork of one that has, milliseconds. So workers
are forked by a server process that imported everything once, and they are used again. A run never hangs: a
rank that dies is noticed at once, and when one rank has failed the others have `grace` seconds to fail too,
then they are killed, with their stacks in the report.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from types import ModuleType, TracebackType
from typing import Any, Literal, Self, overload

from rl_engine.errors import InputError, RLEngineError
from rl_engine.mesh.pool_worker import RankContext as RankContext
from rl_engine.mesh.pool_worker import Report, Task, serve

__all__ = ["RankContext", "RankOutcome", "RankPool", "RankPoolError"]

# What the server imports before it forks; a name that cannot be imported is skipped.
_PRELOAD = [
    "rl_engine.mesh.single_thread",
    "torch",
    "torch.distributed",
    "rl_engine.mesh.pool_worker",
    "rl_engine.numerics.cpu",
    "rl_engine",
]
# Leaving a process group takes milliseconds; a worker that needs longer is stuck in the transport.
_READY_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How one rank of a run ended.

    Attributes:
        rank: The rank.
        kind: "value" (returned), "error" (raised), "died" (its process ended), "hung" (killed by the pool).
        value: What the function returned, for "value".
        seconds: How long the function ran, for "value" and "error".
        error_type: The exception's class name, for "error".
        error_bases: The qualified names of its class and of all its bases.
        error_message: Its text; for "died" and "hung" what is known.
        error_traceback: Its traceback; for "hung" the stacks at the end.
        signal: The signal that ended the process, for "died".
    """

    rank: int
    kind: Literal["value", "error", "died", "hung"]
    value: Any = None
    seconds: float = 0.0
    error_type: str = ""
    error_bases: tuple[str, ...] = ()
    error_message: str = ""
    error_traceback: str = ""
    signal: signal.Signals | None = None

    def raised(self, kind: type[BaseException]) -> bool:
        """Whether the rank raised this class or one below it."""
        return f"{kind.__module__}.{kind.__qualname__}" in self.error_bases

    def __str__(self) -> str:
        if self.kind == "value":
            return f"rank {self.rank} returned"
        if self.kind == "error":
            return f"rank {self.rank} raised {self.error_type}: {self.error_message}"
        return f"rank {self.rank} {self.error_message}"


class RankPoolError(RLEngineError, RuntimeError):
    """A run of the pool in which a rank raised, died or hung.

    Attributes:
        outcomes: How every rank ended, in rank order.
    """

    outcomes: tuple[RankOutcome, ...]

    def __init__(self, message: str, outcomes: Sequence[RankOutcome]) -> None:
        super().__init__(message)
        self.outcomes = tuple(outcomes)


@dataclass(slots=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection

    def kill(self) -> None:
        with suppress(OSError, ValueError):
            self.process.kill()
        self.process.join(5.0)
        self.connection.close()


class RankPool:
    """Worker processes that play the ranks of a mesh, for verify, the demo and the tests.

    Use it as a context manager, or call `close()`; the workers are daemons and end with this process in any
    case. A run gets ranks 0 … world_size − 1, one thread each, and a default process group that lives as
    long as the run.

    Args:
        max_ranks: The most ranks a run may ask for. Workers are started when first needed.

    Example:
        >>> from rl_engine.mesh.pool import RankPool
        >>> with RankPool(2) as pool:                                       # doctest: +SKIP
        ...     pool.run(my_module.loss_of_rank, world_size=2, args=(batch,))
    """

    def __init__(self, max_ranks: int) -> None:
        if max_ranks < 1:
            raise InputError(f"max_ranks is {max_ranks}, expected at least 1")
        self.max_ranks = max_ranks
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.Lock()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers. Never waits long: one that does not listen is killed."""
        for worker in self._workers.values():
            with suppress(OSError, ValueError):
                worker.connection.send_bytes(b"")
        for worker in self._workers.values():
            worker.process.join(1.0)
            worker.kill()
        self._workers.clear()

    @overload
    def run(
        self,
        fn: Callable[..., Any],
        *,
        world_size: int,
        args: Sequence[Any] = ...,
        per_rank_args: Sequence[Sequence[Any]] | None = ...,
        timeout: float = ...,
        grace: float = ...,
        group_timeout: float = ...,
        backend: Literal["gloo", "nccl"] = ...,
        device: Literal["cpu", "cuda"] | None = ...,
        expect_errors: Literal[False] = ...,
    ) -> list[Any]: ...

    @overload
    def run(
        self,
        fn: Callable[..., Any],
        *,
        world_size: int,
        args: Sequence[Any] = ...,
        per_rank_args: Sequence[Sequence[Any]] | None = ...,
        timeout: float = ...,
        grace: float = ...,
        group_timeout: float = ...,
        backend: Literal["gloo", "nccl"] = ...,
        device: Literal["cpu", "cuda"] | None = ...,
        expect_errors: Literal[True],
    ) -> list[RankOutcome]: ...

    def run(
        self,
        fn: Callable[..., Any],
        *,
        world_size: int,
        args: Sequence[Any] = (),
        per_rank_args: Sequence[Sequence[Any]] | None = None,
        timeout: float = 60.0,
        grace: float = 10.0,
        group_timeout: float = 30.0,
        backend: Literal["gloo", "nccl"] = "gloo",
        device: Literal["cpu", "cuda"] | None = None,
        expect_errors: bool = False,
    ) -> list[Any] | list[RankOutcome]:
        """Call `fn(context, *args, *per_rank_args[rank])` on every rank and wait for all of them.

        Args:
            fn: A function that can be imported by name (no lambda, nothing in __main__).
            world_size: The number of ranks.
            args: Arguments that every rank gets; pickled, tensors by value.
            per_rank_args: Further arguments, one sequence a rank.
            timeout: Seconds for the whole run.
            grace: Seconds that the other ranks have once one has failed.
            group_timeout: The timeout of the process group's collectives, in seconds.
            backend: "gloo", or "nccl" with one GPU a rank.
            device: Where the ranks compute; None: the GPU for NCCL, the CPU for gloo. Under gloo several
                ranks may share a GPU.
            expect_errors: Return how every rank ended instead of raising.

        Returns:
            What each rank returned, in rank order; with `expect_errors` a RankOutcome for each.

        Raises:
            InputError: a world size beyond the pool, or a function that cannot be sent.
            RankPoolError: a rank raised, died or hung; its notes hold the tracebacks.
        """
        if not 1 <= world_size <= self.max_ranks:
            raise InputError(
                f"world_size is {world_size}, expected 1 … {self.max_ranks} (RankPool(max_ranks))"
            )
        own = per_rank_args if per_rank_args is not None else [()] * world_size
        if len(own) != world_size:
            raise InputError(
                f"per_rank_args has {len(own)} entries, expected one for each of {world_size} ranks"
            )
        calls = [_pickle_call(fn, (*args, *own_args)) for own_args in own]
        with self._lock:
            directory = tempfile.mkdtemp(prefix="rl_engine_ranks_")
            try:
                tasks = [
                    Task(
                        rank=rank,
                        world_size=world_size,
                        backend=backend,
                        device=device or ("cuda" if backend == "nccl" else "cpu"),
                        directory=directory,
                        group_timeout=group_timeout,
                        sys_path=tuple(sys.path),
                        call=call,
                    )
                    for rank, call in enumerate(calls)
                ]
                outcomes = self._run(tasks, timeout, grace)
            except BaseException:
                for rank in range(world_size):  # their state is unknown
                    self._discard(rank)
                raise
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        if expect_errors:
            return outcomes
        _raise_failures(outcomes)
        return [outcome.value for outcome in outcomes]

    def _run(self, tasks: Sequence[Task], timeout: float, grace: float) -> list[RankOutcome]:
        for task in tasks:
            self._assign(task)
        outcomes: dict[int, RankOutcome] = {}
        limit = time.monotonic() + timeout
        while len(outcomes) < len(tasks):
            pending = [task.rank for task in tasks if task.rank not in outcomes]
            left = limit - time.monotonic()
            if left <= 0:
                outcomes.update(self._kill_hung(tasks[0].directory, pending))
                break
            ready = wait([self._workers[rank].connection for rank in pending], timeout=left)
            for rank in pending:
                if self._workers[rank].connection in ready:
                    outcomes[rank] = outcome = self._receive(rank)
                    if outcome.kind != "value":
                        limit = min(limit, time.monotonic() + grace)
        self._release([rank for rank, outcome in outcomes.items() if outcome.kind in ("value", "error")])
        if any(outcome.kind in ("died", "hung") for outcome in outcomes.values()):
            for task in tasks:  # their groups broke; new forks are cheaper than to reason about what is left
                self._discard(task.rank)
        return [outcomes[task.rank] for task in tasks]

    def _assign(self, task: Task) -> None:
        message = pickle.dumps(task)
        worker = self._workers.get(task.rank)
        if worker is not None and worker.process.is_alive():
            with suppress(OSError):
                worker.connection.send_bytes(message)
                return
        self._discard(task.rank)
        self._workers[task.rank] = worker = self._start(task.rank)
        worker.connection.send_bytes(message)

    def _start(self, rank: int) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=serve, args=(theirs,), daemon=True, name=f"rank-{rank}")
        with _no_main_module():
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _receive(self, rank: int) -> RankOutcome:
        worker = self._workers[rank]
        try:
            report: Report = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            worker.process.join(5.0)
            code = worker.process.exitcode
            self._discard(rank)
            name = signal.Signals(-code) if code is not None and code < 0 else None
            how = f"signal {name.name}" if name is not None else f"exit code {code}"
            return RankOutcome(rank=rank, kind="died", signal=name, error_message=f"died with {how}")
        if report.value is not None:
            return RankOutcome(
                rank=rank, kind="value", value=pickle.loads(report.value), seconds=report.seconds
            )
        return RankOutcome(
            rank=rank,
            kind="error",
            seconds=report.seconds,
            error_type=report.error_type,
            error_bases=report.error_bases,
            error_message=report.error_message,
            error_traceback=report.error_traceback,
        )

    def _kill_hung(self, directory: str, ranks: Sequence[int]) -> dict[int, RankOutcome]:
        """Ask for the stacks of those that do not come back, then end them."""
        for rank in ranks:
            pid = self._workers[rank].process.pid
            with suppress(OSError):
                if pid is not None:
                    os.kill(pid, signal.SIGUSR1)
        time.sleep(0.3)  # faulthandler writes from the signal handler: milliseconds on a busy machine
        outcomes: dict[int, RankOutcome] = {}
        for rank in ranks:
            stack = ""
            with suppress(OSError), open(os.path.join(directory, f"{rank}.stack")) as file:
                stack = file.read()
            text = "did not come back in time and was killed"
            outcomes[rank] = RankOutcome(rank=rank, kind="hung", error_message=text, error_traceback=stack)
            self._discard(rank)
        return outcomes

    def _release(self, ranks: Sequence[int]) -> None:
        """Let those that reported leave their groups; replace later whoever does not manage."""
        for rank in ranks:
            with suppress(OSError):
                self._workers[rank].connection.send_bytes(b"release")
        limit = time.monotonic() + _READY_SECONDS
        for rank in ranks:
            worker = self._workers[rank]
            try:
                ready = worker.connection.poll(max(0.0, limit - time.monotonic()))
                ready = ready and worker.connection.recv_bytes() == b"ready"
            except (EOFError, OSError):
                ready = False
            if not ready:
                self._discard(rank)

    def _discard(self, rank: int) -> None:
        worker = self._workers.pop(rank, None)
        if worker is not None:
            worker.kill()


@contextmanager
def _no_main_module() -> Generator[None]:
    """Hide __main__ while a worker starts, so that it does not run the caller's script a second time."""
    main = sys.modules["__main__"]
    stand_in = ModuleType("__main__")
    stand_in.__spec__ = None
    sys.modules["__main__"] = stand_in
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    name = f"{fn.__module__}.{getattr(fn, '__qualname__', fn)}"
    if fn.__module__ == "__main__":
        raise InputError(f"{name} cannot be run by the pool: put it in a module that the ranks can import")
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as exc:
        raise InputError(
            f"{name} or its arguments cannot be sent to the ranks ({exc}); expected a function at the top "
            f"level of a module, and arguments that pickle takes"
        ) from exc


def _raise_failures(outcomes: Sequence[RankOutcome]) -> None:
    failed = [outcome for outcome in outcomes if outcome.kind != "value"]
    if not failed:
        return

    # The cause before its consequences: a death, then what is no lost connection, then the rest.
    def urgency(outcome: RankOutcome) -> tuple[int, float]:
        lost = "LostRankError" in outcome.error_type
        return (("died", "error", "hung").index(outcome.kind) + 2 * lost, outcome.seconds)

    first, *others = sorted(failed, key=urgency)
    also = f" ({len(others)} more: ranks {sorted(outcome.rank for outcome in others)})" if others else ""
    error = RankPoolError(f"{first}, of {len(outcomes)} ranks{also}", outcomes)
    for outcome in (first, *others):
        error.add_note(f"--- {outcome}\n{outcome.error_traceback}")
    raise error
