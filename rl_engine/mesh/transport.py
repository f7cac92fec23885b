"""How words cross an axis: one routing decision, one way to wait, one error for a rank that is gone.

Routes:

- gloo: direct exchange (all-to-all of copies). gloo's own all-gather and all-reduce pass messages along a
  ring, so a rank that is no neighbour of a dead one waits for the group's full timeout (measured: 20 s of
  20 s). In the direct exchange every rank waits for every other, and each survivor sees the closed
  connection at once (measured: < 0.1 s), at the same or a better latency.
- anything else (NCCL): the library's own collective, on the current stream, not waited for here.
- a tensor on a device that the group cannot carry: through the CPU.

Waiting: a rank that waits looks at the alarm twice a second (alarm.py). The group's own timeout stays in
force; nothing here shortens it, so stragglers are not hurt.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from rl_engine.errors import AgreementError
from rl_engine.mesh.alarm import is_broken, read_alarm, ring_alarm
from rl_engine.mesh.axis import Axis

__all__ = ["LostRankError", "count_collectives", "gather", "native_all_reduce", "sync_to_cpu"]

# How often a waiting rank looks at the alarm: rare enough to cost nothing, often enough to end a mesh
# within a second.
_LOOK_EVERY = timedelta(milliseconds=500)

# torch 2.13 renamed it and warns about the old name.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

_counters: list[Counter[tuple[str, str]]] = []


class LostRankError(AgreementError):
    """A collective failed in transport: a rank of the axis died, left the step, or did not come in time."""


@contextmanager
def count_collectives() -> Generator[Counter[tuple[str, str]]]:
    """Count the exchanges that this process issues, by (axis name, kind); size-1 axes issue none.

    Not bound to a thread or context: autograd runs backward passes on threads of its own.

    Example:
        >>> with count_collectives() as counts:
        ...     pass
        >>> dict(counts)
        {}
    """
    counts: Counter[tuple[str, str]] = Counter()
    _counters.append(counts)
    try:
        yield counts
    finally:
        _counters[:] = [other for other in _counters if other is not counts]


def gather(axis: Axis, kind: str, words: torch.Tensor) -> torch.Tensor:
    """Every rank's `words`, in axis order: [...] → [size, ...], on the same device. One collective.

    Args:
        axis: The axis; of size 1 the result is a view with a leading 1.
        kind: What the counter and the messages call this exchange.
        words: Any dtype, the same shape on every rank.

    Raises:
        LostRankError: a rank is gone.
    """
    if axis.size == 1:
        return words.unsqueeze(0)
    shape = (axis.size, *words.shape)
    if words.numel() == 0:
        return words.new_empty(shape)
    flat = words.contiguous().reshape(-1)
    backend, device = _route(axis, words.device)
    flat = flat.to(device)
    out = flat.new_empty(axis.size * flat.numel())

    def issue() -> dist.Work:
        if backend == "gloo":
            copies = flat.repeat(axis.size)
            return cast(dist.Work, dist.all_to_all_single(out, copies, group=axis.group, async_op=True))
        return cast(dist.Work, _all_gather(out, flat, group=axis.group, async_op=True))

    _run(axis, kind, backend, issue)
    return out.reshape(shape).to(words.device)


def native_all_reduce(axis: Axis, kind: str, values: torch.Tensor, op: Any) -> torch.Tensor:
    """The transport's own all-reduce, in place on `values`, in whatever order it adds. One collective."""
    if axis.size == 1:
        return values
    backend, device = _route(axis, values.device)
    wire = values.to(device).contiguous()

    def issue() -> dist.Work:
        return cast(dist.Work, dist.all_reduce(wire, op=op, group=axis.group, async_op=True))

    _run(axis, kind, backend, issue)
    if wire is not values:
        values.copy_(wire)
    return values


def sync_to_cpu(axis: Axis, kind: str, values: torch.Tensor) -> torch.Tensor:
    """`values` on the CPU, looking at the alarm while a GPU works towards them."""
    if values.device.type == "cuda":
        event = torch.cuda.Event()
        event.record()
        pause, looked = 2e-5, time.monotonic()
        while not event.query():
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
            if time.monotonic() - looked > _LOOK_EVERY.total_seconds():
                looked = time.monotonic()
                _heed_alarm(axis, kind)
    return values.cpu()


def _route(axis: Axis, device: torch.device) -> tuple[str, torch.device]:
    kinds = axis.device_types()
    backend = kinds.get(device.type)
    if backend == "gloo" or (backend is None and "cpu" in kinds):
        return kinds.get("cpu", "gloo"), torch.device("cpu")
    if backend is None:
        raise AgreementError(
            f"the {axis.name} group carries {', '.join(sorted(kinds))} tensors and this one is on {device}; "
            f"make the group with a backend for {device.type}, or move the tensor"
        )
    return backend, device


def _run(axis: Axis, kind: str, backend: str, issue: Callable[[], dist.Work | None]) -> None:
    why = is_broken(axis)
    if why is not None:
        raise LostRankError(
            f"the {axis.name} group broke earlier and cannot be used again ({why}); "
            f"restart the ranks, or make new process groups"
        )
    for counts in _counters:
        counts[(axis.name, kind)] += 1
    try:
        work = issue()
        if work is None:
            return
        if backend != "gloo":
            work.wait()  # orders the current stream behind it; does not block
            return
        while True:
            try:
                work.wait(timeout=_LOOK_EVERY)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            _heed_alarm(axis, kind)
    except AgreementError:
        raise
    except RuntimeError as exc:  # DistBackendError and DistNetworkError are RuntimeErrors too
        text = (
            f"{kind} over the {axis.name} axis (global ranks {list(axis.ranks)}) failed on "
            f"{axis.describe_rank(axis.rank)}: a rank of this group died or left the step, "
            f"look at its log first; the transport said: {_gist(exc)}"
        )
        ring_alarm(axis, text)
        raise LostRankError(text) from exc


def _gist(exc: BaseException) -> str:
    """The transport's text without its source position and small talk; the whole of it is the cause."""
    text = " ".join(str(exc).split())
    return re.sub(r"^\[[^\]]*\] ", "", text).split(". This is typically")[0][:300]


def _heed_alarm(axis: Axis, kind: str) -> None:
    heard = read_alarm(axis)
    if heard is None:
        return
    text = (
        f"{kind} over the {axis.name} axis (global ranks {list(axis.ranks)}) will never complete on "
        f"{axis.describe_rank(axis.rank)}: {heard}"
    )
    ring_alarm(axis, text)
    raise LostRankError(text)
