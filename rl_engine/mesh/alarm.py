"""The alarm bell of a process group: a key in its store by which a rank that leaves a step tells the others.

A collective waits for its peers. A peer that has left the step (it raised, or another of its groups broke)
will never come, and the transport notices only when that process ends. So whoever leaves a step rings here,
and whoever waits looks at the bell twice a second. A rung bell stays rung: some members have issued
collectives that others have not, so the group cannot be used again.
"""

from __future__ import annotations

import json
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from rl_engine.mesh.axis import Axis

__all__ = ["is_broken", "read_alarm", "ring_alarm"]

_KEY = "rl_engine/alarm"
_MAX_TEXT = 2000  # a store is not a log: enough for one error line

# Why this process itself counts a group as broken, so that it does not wait for the store to say it.
_broken: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()


def _store(axis: Axis) -> Store | None:
    try:
        return axis.group.get_group_store() if axis.group is not None else None
    except (RuntimeError, AttributeError):  # a group without a store (fake and wrapped backends)
        return None


def ring_alarm(axis: Axis, why: str) -> None:
    """Tell every member of the axis that this rank has left the step; the first text stands. Never raises."""
    if axis.group is None or axis.size == 1:
        return
    _broken.setdefault(axis.group, why)
    store = _store(axis)
    if store is None:
        return
    try:
        if not store.check([_KEY]):
            store.set(_KEY, json.dumps({"rank": axis.rank, "why": why[:_MAX_TEXT]}))
    except (RuntimeError, OSError):
        pass  # the store's host is gone: every member then learns from its own connections


def read_alarm(axis: Axis) -> str | None:
    """What a member rang the alarm for: its rank with its text; None while all is quiet."""
    store = _store(axis)
    if store is None:
        return None
    try:
        if not store.check([_KEY]):
            return None
        note = json.loads(store.get(_KEY))
    except (RuntimeError, OSError, ValueError):
        return None
    return f"{axis.describe_rank(int(note['rank']))} left the step: {note['why']}"


def is_broken(axis: Axis) -> str | None:
    """Why this process already counts the axis as broken; None for a healthy one."""
    return None if axis.group is None else _broken.get(axis.group)
