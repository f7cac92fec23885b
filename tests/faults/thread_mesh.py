"""A mesh whose ranks are threads: thousands of layouts and faults in the time of one real run.

Only the transport is replaced: an exchange is a meeting of the axis's threads, who compare what they
brought. Everything above it is the package's own code: preflight, gathers, reductions, the alarm. A meeting
is stricter than a real transport: ranks that meet with different exchanges or shapes are an error at once
(gloo ends the process), and a rank that waits while another will never come raises `Hang` after `PATIENCE`
seconds instead of after half an hour.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from rl_engine.mesh import Axis, LostRankError, exchange
from tests.faults.alive import Ending

PATIENCE = 2.0


class Hang(BaseException):
    """A rank waited for one that never came. No Exception, so that nothing on the way can catch it."""


class Mismatch(BaseException):
    """Ranks met with different exchanges: a real transport ends the process, or returns garbage."""


class _Room:
    """Where the threads of one axis meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.brought: dict[int, tuple[str, torch.Tensor]] = {}
        self.meetings = 0
        self.results: dict[int, Any] = {}
        self.alarm: str | None = None

    def meet(self, rank: int, kind: str, words: torch.Tensor) -> torch.Tensor:
        with self.changed:
            if self.alarm is not None:
                raise LostRankError(f"{kind}: {self.alarm}")
            number = self.meetings
            self.brought[rank] = (kind, words.detach().clone())
            if len(self.brought) == self.size:
                kinds = {(k, tuple(w.shape), w.dtype) for k, w in self.brought.values()}
                rows = [self.brought[r][1] for r in range(self.size)]
                self.results[number] = (
                    torch.stack(rows)
                    if len(kinds) == 1
                    else Mismatch(f"ranks met with {sorted(map(str, kinds))}")
                )
                self.brought = {}
                self.meetings += 1
                self.changed.notify_all()
            limit = time.monotonic() + PATIENCE
            while self.meetings == number and self.alarm is None:
                left = limit - time.monotonic()
                if left <= 0:
                    waiting = sorted(self.brought)
                    raise Hang(f"{kind}: rank {rank} waits with {waiting} of {self.size} ranks")
                self.changed.wait(left)
            if self.meetings == number:
                raise LostRankError(f"{kind}: {self.alarm}")
            result = self.results[number]
        if isinstance(result, BaseException):
            raise result
        return result.clone()

    def ring(self, why: str) -> None:
        with self.changed:
            self.alarm = self.alarm or why
            self.changed.notify_all()


class ThreadMesh:
    """Ranks as threads; see the module."""

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, tuple[int, ...]], _Room] = {}
        self.counts: list[Counter[tuple[str, str]]] = []

    def _axis(self, name: str, rank: int, ranks: tuple[int, ...]) -> Axis:
        return Axis(name=name, group=None, rank=rank, size=len(ranks), ranks=ranks)

    def gather(self, axis: Axis, kind: str, words: torch.Tensor) -> torch.Tensor:
        if axis.size == 1:
            return words.unsqueeze(0)
        if words.numel() == 0:
            return words.new_empty((axis.size, *words.shape))
        self.counts[axis.ranks[axis.rank]][(axis.name, kind)] += 1
        return self._rooms[(axis.name, axis.ranks)].meet(axis.rank, kind, words)

    def ring_alarm(self, axis: Axis, why: str) -> None:
        if axis.size > 1:
            self._rooms[(axis.name, axis.ranks)].ring(why)

    def run(self, call: Callable[[int, Axis, Axis], Any], *, tp: int = 1, dp: int = 1) -> list[Ending]:
        """`call(rank, tp axis, dp axis)` on tp × dp threads, TP fastest; how each ended. Raises on a hang."""
        self._rooms = {}
        self.counts = [Counter() for _ in range(tp * dp)]
        endings: list[Ending | BaseException] = [Ending(0.0)] * (tp * dp)

        def play(rank: int) -> None:
            row, column = divmod(rank, tp)
            tp_axis = self._axis("tp", column, tuple(range(row * tp, row * tp + tp)))
            dp_axis = self._axis("dp", row, tuple(range(column, tp * dp, tp)))
            started = time.monotonic()
            try:
                endings[rank] = Ending(0.0, value=call(rank, tp_axis, dp_axis))
            except Exception as exc:  # noqa: BLE001  the test looks at it
                endings[rank] = Ending(time.monotonic() - started, type(exc).__name__, str(exc))
            except BaseException as exc:  # noqa: BLE001  Hang and Mismatch are raised by the caller's thread
                endings[rank] = exc

        for row in range(dp):
            ranks = tuple(range(row * tp, row * tp + tp))
            self._rooms[("tp", ranks)] = _Room(tp)
        for column in range(tp):
            self._rooms[("dp", tuple(range(column, tp * dp, tp)))] = _Room(dp)
        if tp * dp == 1:
            play(0)
        else:
            threads = [threading.Thread(target=play, args=(rank,)) for rank in range(tp * dp)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        done: list[Ending] = []
        for rank, ending in enumerate(endings):
            if not isinstance(ending, Ending):
                raise AssertionError(f"rank {rank}: {type(ending).__name__}: {ending}; {endings}") from ending
            done.append(ending)
        return done

    def values(self, call: Callable[[int, Axis, Axis], Any], *, tp: int = 1, dp: int = 1) -> list[Any]:
        """What each rank returned; an error of any rank fails the test."""
        endings = self.run(call, tp=tp, dp=dp)
        assert all(not e.error for e in endings), [str(e) for e in endings]
        return [e.value for e in endings]


@contextmanager
def thread_mesh() -> Generator[ThreadMesh]:
    """A ThreadMesh in place of the transport. Ops take its axes where they take process groups."""
    import sys

    preflight = sys.modules["rl_engine.mesh.preflight"]
    mesh = ThreadMesh()
    from_group = Axis.__dict__["from_group"]

    def from_axis(cls: type[Axis], name: str, group: Any) -> Axis:
        return group if isinstance(group, Axis) else from_group.__func__(cls, name, group)

    kept = [
        (module, name, getattr(module, name))
        for module in (exchange, preflight)
        for name in ("gather", "ring_alarm")
    ]
    try:
        for module, name, _old in kept:
            setattr(module, name, getattr(mesh, name))
        Axis.from_group = classmethod(from_axis)  # type: ignore[assignment,method-assign]
        yield mesh
    finally:
        for module, name, old in kept:
            setattr(module, name, old)
        Axis.from_group = from_group  # type: ignore[method-assign]
