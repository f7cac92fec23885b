"""One rank calls the front door wrongly: that rank is told what, every other one who and what, and nobody
waits.

Every entry of the tables runs over a mesh of threads, which meets more strictly than a transport; some of
each kind run over real ranks that stay alive afterwards.
"""

from __future__ import annotations

import re

import pytest

from rl_engine.mesh.pool import RankPool
from tests.faults.alive import PATIENCE, Ending
from tests.faults.api_calls import (
    GRPO_OWN,
    GRPO_TOGETHER,
    POLICY_OWN,
    POLICY_TOGETHER,
    SELECTED_OWN,
    SELECTED_TOGETHER,
    SIBLINGS,
    TABLES,
    run_grpo,
    run_policy,
    run_selected,
    spoiled_on_ranks,
)
from tests.faults.thread_mesh import thread_mesh

OURS = {
    "InputError",
    "AgreementError",
    "LogprobContractError",
    "LossContractError",
    "UnsupportedError",
    # what Python itself says of an argument of the wrong type: the others hear of it all the same
    "TypeError",
    "AttributeError",
}


DIFFERS = ("an active target beyond the vocabulary", "a NaN old log-prob")
"""Values that TP siblings compare: they can only be told that this rank's differ."""


def assert_all_raised(ends: list[Ending], victim: int, match: str, *, own: bool) -> None:
    shown = [str(end) for end in ends]
    assert all(end.error in OURS for end in ends), shown
    assert re.search(match, ends[victim].message, re.DOTALL), shown
    for rank, end in enumerate(ends):
        if own and rank != victim:
            assert end.error == "AgreementError" or end.message == ends[victim].message, shown
            assert re.search(match, end.message, re.DOTALL), "the others hear what it was: " + str(shown)


@pytest.mark.parametrize("what", list(GRPO_OWN))
@pytest.mark.parametrize("victim", [0, 3])
def test_grpo_loss_wrong_on_one_rank(what: str, victim: int) -> None:
    change, match = GRPO_OWN[what]
    with thread_mesh() as mesh:
        ends = mesh.run(lambda rank, tp, dp: run_grpo(tp, dp, change if rank == victim else None), tp=2, dp=2)
    assert_all_raised(ends, victim, match, own=what not in DIFFERS)


@pytest.mark.parametrize("what", list(GRPO_TOGETHER))
@pytest.mark.parametrize(("tp", "dp", "victim"), [(2, 2, 1), (2, 2, 2), (1, 2, 1), (2, 1, 1), (1, 3, 2)])
def test_grpo_loss_other_than_the_others(what: str, tp: int, dp: int, victim: int) -> None:
    change, match = GRPO_TOGETHER[what]
    if dp == 1 and what.startswith("boundaries"):
        match = ".*"  # two sequences: some of these boundaries are right by themselves
    with thread_mesh() as mesh:
        ends = mesh.run(
            lambda rank, tp_axis, dp_axis: run_grpo(tp_axis, dp_axis, change if rank == victim else None),
            tp=tp,
            dp=dp,
        )
    assert_all_raised(ends, victim, match, own=False)


@pytest.mark.parametrize(
    ("what", "dp"),
    # alone a DP rank has one group
    [(what, dp) for what in SIBLINGS for dp in (1, 2) if (what, dp) != ("other groups", 1)],
)
@pytest.mark.parametrize("victim", [0, 1])
def test_tp_siblings_with_another_batch(what: str, victim: int, dp: int) -> None:
    change, match = SIBLINGS[what]
    with thread_mesh() as mesh:
        ends = mesh.run(
            lambda rank, tp, dp: run_grpo(tp, dp, change if rank == victim else None), tp=2, dp=dp
        )
    assert_all_raised(ends, victim, match, own=False)


@pytest.mark.parametrize("what", list(POLICY_OWN))
@pytest.mark.parametrize("victim", [0, 1])
def test_policy_loss_wrong_on_one_rank(what: str, victim: int) -> None:
    change, match = POLICY_OWN[what]
    with thread_mesh() as mesh:
        ends = mesh.run(lambda rank, tp, dp: run_policy(dp, change if rank == victim else None), dp=2)
    assert_all_raised(ends, victim, match, own=True)


@pytest.mark.parametrize("what", list(POLICY_TOGETHER))
def test_policy_loss_other_than_the_others(what: str) -> None:
    change, match = POLICY_TOGETHER[what]
    with thread_mesh() as mesh:
        ends = mesh.run(lambda rank, tp, dp: run_policy(dp, change if rank == 2 else None), dp=3)
    assert_all_raised(ends, 2, match, own=True)


@pytest.mark.parametrize("what", list(SELECTED_OWN))
@pytest.mark.parametrize("victim", [0, 1])
def test_selected_logprobs_wrong_on_one_rank(what: str, victim: int) -> None:
    change, match = SELECTED_OWN[what]
    with thread_mesh() as mesh:
        ends = mesh.run(lambda rank, tp, dp: run_selected(tp, change if rank == victim else None), tp=2)
    # a value that is wrong on one rank alone is a disagreement first
    assert all(end.error in OURS for end in ends), [str(end) for end in ends]
    if what != "an active target beyond the vocabulary":
        assert_all_raised(ends, victim, match, own=True)


@pytest.mark.parametrize("what", list(SELECTED_TOGETHER))
def test_selected_logprobs_other_than_the_others(what: str) -> None:
    change, match = SELECTED_TOGETHER[what]
    with thread_mesh() as mesh:
        ends = mesh.run(lambda rank, tp, dp: run_selected(tp, change if rank == 1 else None), tp=2)
    assert_all_raised(ends, 1, match, own=True)


# ------------------------------------------------------------------------------------------- on real ranks

REAL = [
    ("grpo", "logits without a vocabulary"),
    ("grpo", "float64 logits"),
    ("grpo", "a mask of halves"),
    ("grpo", "no groups"),
    ("grpo", "a reward of NaN"),
    ("grpo", "the vocabulary"),
    ("grpo", "the width of the logits"),
    ("grpo", "advantages on one rank"),
    ("grpo", "no reference"),
    ("grpo", "beta"),
    ("grpo", "no old log-probs"),
    ("siblings", "one sequence less"),
    ("siblings", "other old log-probs"),
    ("siblings", "another target"),
    ("policy", "a NaN log-prob"),
    ("policy", "no mask"),
    ("policy", "beta"),
    ("selected", "temperature"),
    ("selected", "ignore_index"),
    ("selected", "one sequence less"),
    ("selected", "float64 logits"),
]


@pytest.mark.parametrize(("front", "what"), REAL)
def test_real_ranks_all_raise_within_seconds(pool: RankPool, front: str, what: str) -> None:
    size = 2 if front in ("policy", "selected") else 4
    victim = 1
    ends: list[Ending] = pool.run(spoiled_on_ranks, world_size=size, args=(front, what, victim))
    shown = [str(end) for end in ends]
    assert all(end.error in OURS for end in ends), shown
    assert all(end.seconds < PATIENCE / 2 for end in ends), shown
    assert re.search(TABLES[front][what][1], ends[victim].message, re.DOTALL), shown


def test_the_calls_that_all_of_them_come_from_are_sound(pool: RankPool) -> None:
    with thread_mesh() as mesh:
        losses = mesh.values(lambda rank, tp, dp: run_grpo(tp, dp, None), tp=2, dp=2)
        assert len({loss.item() for loss in losses}) == 1 and losses[0].item() != 0.0
        mesh.values(lambda rank, tp, dp: run_policy(dp, None), dp=3)
        mesh.values(lambda rank, tp, dp: run_selected(tp, None), tp=2)
