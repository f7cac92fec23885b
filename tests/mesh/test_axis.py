"""Axes: one process is an axis of its own, and a group that is not ours is refused."""

from __future__ import annotations

import torch

from rl_engine.mesh import (
    Axis,
    all_gather_rows,
    all_reduce_max,
    all_reduce_sum,
    count_collectives,
    gather_json,
    preflight,
)
from rl_engine.mesh.pool import RankPool
from tests.mesh import rank_functions as on_rank


def test_an_axis_of_one_is_local() -> None:
    axis = Axis.from_group("tp", None)
    assert axis == Axis.single("tp")
    assert (axis.rank, axis.size, axis.group) == (0, 1, None)
    assert str(axis) == "tp 0/1"
    rows = torch.arange(6).reshape(3, 2)
    with count_collectives() as counts:
        assert all_gather_rows(axis, rows).tolist() == [rows.tolist()]
        assert all_reduce_sum(axis, rows) is rows
        assert all_reduce_max(axis, rows, in_place=True) is rows
        assert gather_json(axis, {"a": (1, 2)}) == [{"a": [1, 2]}]
        preflight(axis, fingerprint="x", facts={})
    assert not counts


def test_groups_that_are_not_ours(pool: RankPool) -> None:
    first, second = pool.run(on_rank.bad_groups, world_size=2)
    assert first[0].startswith("tp_group is 'tp', expected a ProcessGroup that this process belongs to")
    assert "expected a ProcessGroup that this process belongs to" in second[0]
    for texts in (first, second):
        assert texts[1].startswith("tp_group is a DeviceMesh of 2 dims ('dp', 'tp'), expected one dim")
        assert texts[2].startswith("tp_group is not a live process group of this process")
