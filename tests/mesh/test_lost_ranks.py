"""A rank is gone: every survivor raises within seconds, whichever collective it was in.

The survivors of these tests keep their processes and connections for a while after their error, so that
nobody is told by a neighbour's end. The process groups' own timeout is 30 s; the promise is 10 s.
"""

from __future__ import annotations

import time

import pytest

from rl_engine.errors import AgreementError
from rl_engine.mesh.pool import RankPool
from tests.mesh import rank_functions as on_rank
from tests.mesh.rank_functions import HOLD, Lost

EXCHANGES = [
    "preflight",
    "all_gather_rows",
    "all_reduce_sum",
    "all_reduce_max",
    "gather_json",
    # the transport's own all-reduce: those that are no neighbours of the dead rank hear the alarm
    "all_reduce_float",
]


def survivors(
    pool: RankPool, size: int, function: object, args: tuple[object, ...], victim: int
) -> list[Lost]:
    """What the survivors saw, each of them an error long before any other survivor let go."""
    outcomes = pool.run(function, world_size=size, args=args, expect_errors=True)  # type: ignore[arg-type]
    assert outcomes[victim].kind == "died"
    seen: list[Lost] = [outcome.value for outcome in outcomes if outcome.rank != victim]
    assert [lost.error for lost in seen] == ["LostRankError"] * (size - 1), [
        str(outcome) for outcome in outcomes
    ]
    return seen


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_every_survivor_raises(pool: RankPool, exchange: str) -> None:
    for lost in survivors(pool, 4, on_rank.lose_rank, (2, exchange), victim=2):
        assert lost.seconds < HOLD
        assert f"{exchange} over the tp axis (global ranks [0, 1, 2, 3])" in lost.text
        assert "a rank of this group died or left the step, look at its log first" in lost.text


@pytest.mark.parametrize(("size", "victim"), [(3, 0), (4, 3)])
def test_any_rank_may_die(pool: RankPool, size: int, victim: int) -> None:
    for lost in survivors(pool, size, on_rank.lose_rank, (victim, "preflight"), victim):
        assert lost.seconds < HOLD


@pytest.mark.parametrize("victim", [0, 3])
def test_a_dead_rank_ends_the_step_of_the_whole_mesh(pool: RankPool, victim: int) -> None:
    seen = survivors(pool, 4, on_rank.lose_rank_of_mesh, (victim, True), victim)
    assert all(lost.seconds < HOLD for lost in seen)
    # One of the three shares no group with the dead rank: a sibling's alarm told it.
    assert any("left the step: LostRankError" in lost.text for lost in seen)


def test_without_the_guard_the_far_rank_waits(pool: RankPool) -> None:
    """What the guard is for: rank 3 shares no group with the dead rank 0, and its siblings live on."""
    outcomes = pool.run(
        on_rank.lose_rank_of_mesh, world_size=4, args=(0, False), expect_errors=True, grace=HOLD + 0.5
    )
    assert [outcome.kind for outcome in outcomes] == ["died", "value", "value", "hung"]


def test_a_rank_that_leaves_a_step_alive(pool: RankPool) -> None:
    seen: list[Lost] = pool.run(on_rank.leave_step, world_size=4, args=(1,))
    assert [lost.error for lost in seen] == ["LostRankError", "MemoryError", "LostRankError", "LostRankError"]
    for lost in seen:
        assert "out of memory" in lost.text
        assert lost.seconds < HOLD


@pytest.mark.parametrize("victim", [1, 2])
def test_death_before_the_preflight_of_a_mesh(pool: RankPool, victim: int) -> None:
    started = time.monotonic()
    same = ["same"] * 4
    outcomes = pool.run(
        on_rank.mesh_preflight, world_size=4, args=(2, 2, same, same, None, victim), expect_errors=True
    )
    assert outcomes[victim].kind == "died"
    for outcome in outcomes:
        assert outcome.rank == victim or outcome.raised(AgreementError), str(outcome)
    assert time.monotonic() - started < 8


def test_a_broken_axis_says_so_at_once(pool: RankPool) -> None:
    outcomes = pool.run(on_rank.use_broken_axis, world_size=3, expect_errors=True)
    for rank in (0, 2):
        assert "the tp group broke earlier and cannot be used again (preflight over" in outcomes[rank].value


def test_a_straggler_is_waited_for(pool: RankPool) -> None:
    waits = pool.run(on_rank.late_rank, world_size=2, args=(1.8,))
    assert waits[0] > 1.5 > waits[1]
