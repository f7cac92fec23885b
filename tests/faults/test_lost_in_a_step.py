"""A rank dies or fails inside a loss: every survivor raises within seconds, and says why.

The survivors keep their process groups open until all of them are back (alive.py), so that none is helped by
the end of another; the groups' own timeout is 30 s.
"""

from __future__ import annotations

import pytest

from rl_engine.mesh.pool import RankOutcome, RankPool
from tests.faults import killed as on_rank
from tests.faults.alive import Ending

BOUND = 8.0
"""Seconds: the project promises ten."""


def survivors(outcomes: list[RankOutcome], victim: int) -> list[Ending]:
    assert outcomes[victim].kind == "died", str(outcomes[victim])
    assert outcomes[victim].error_message == "died with signal SIGKILL"
    rest = [outcome for outcome in outcomes if outcome.rank != victim]
    assert all(outcome.kind == "value" for outcome in rest), [str(outcome) for outcome in outcomes]
    return [outcome.value for outcome in rest]


def assert_lost(ends: list[Ending]) -> None:
    shown = [str(end) for end in ends]
    # who heard of it in a preflight, from somebody who saw it, raises an AgreementError that says so
    assert all(end.error in ("LostRankError", "AgreementError") for end in ends), shown
    assert all(end.seconds < BOUND for end in ends), shown
    # what a user is told first: which group, and where to look
    assert any(
        "a rank of this group died or left the step, look at its log first" in end.message for end in ends
    )
    assert all("LostRankError" in f"{end.error} {end.message}" for end in ends), shown


@pytest.mark.parametrize(("victim", "number"), [(0, 0), (0, 1), (3, 2), (0, 3), (3, 4)])
def test_death_at_every_exchange_of_the_loss(pool: RankPool, victim: int, number: int) -> None:
    """The gather of the front door, the rewards, both log-probs, the sums."""
    outcomes = pool.run(
        on_rank.kill_in_loss, world_size=4, args=(victim, number), expect_errors=True, grace=15
    )
    assert_lost(survivors(outcomes, victim))


def test_the_loss_has_no_more_exchanges(pool: RankPool) -> None:
    outcomes = pool.run(on_rank.kill_in_loss, world_size=4, args=(1, 5), expect_errors=True, grace=15)
    assert outcomes[1].error_message == "the loss has no exchange of number 5"


@pytest.mark.parametrize("victim", [1, 2])
def test_death_inside_the_backend(pool: RankPool, victim: int) -> None:
    outcomes = pool.run(on_rank.kill_in_backend, world_size=4, args=(victim,), expect_errors=True, grace=15)
    assert_lost(survivors(outcomes, victim))


@pytest.mark.parametrize("front", ["policy", "selected"])
def test_death_on_one_axis(pool: RankPool, front: str) -> None:
    outcomes = pool.run(on_rank.kill_in_op, world_size=3, args=(1, front), expect_errors=True, grace=15)
    assert_lost(survivors(outcomes, 1))


@pytest.mark.parametrize(
    ("where", "validate"), [*((where, True) for where in on_rank.FAILURES), ("in the backend", False)]
)
def test_a_rank_that_fails_by_itself(pool: RankPool, where: str, validate: bool) -> None:
    """Out of memory on one rank: it keeps its own error, the others hear its text."""
    ends: list[Ending] = pool.run(on_rank.fail_in_loss, world_size=4, args=(2, where, validate))
    shown = [str(end) for end in ends]
    assert ends[2].error == "MemoryError", shown
    for rank in (0, 1, 3):
        assert ends[rank].error == "LostRankError", shown
        assert ends[rank].seconds < BOUND, shown
        assert "MemoryError: out of memory" in ends[rank].message, shown


@pytest.mark.parametrize("validate", [True, False])
def test_a_rank_that_fails_in_the_logprob_op(pool: RankPool, validate: bool) -> None:
    ends: list[Ending] = pool.run(on_rank.fail_in_op, world_size=2, args=(0, validate))
    assert [end.error for end in ends] == ["MemoryError", "LostRankError"]
    assert "MemoryError: out of memory" in ends[1].message and ends[1].seconds < BOUND


def test_a_wrong_call_without_validation(pool: RankPool) -> None:
    ends: list[Ending] = pool.run(on_rank.wrong_shape_without_validation, world_size=4, args=(3,))
    shown = [str(end) for end in ends]
    assert ends[3].error == "InputError", shown
    assert all(
        end.error in ("LostRankError", "AgreementError") and end.seconds < BOUND for end in ends[:3]
    ), shown


def test_refused_steps_can_be_tried_again(pool: RankPool) -> None:
    """Whatever was refused, by the preflight or by the values, no rank is left behind in an exchange."""
    reports = pool.run(on_rank.steps_after_refusals, world_size=4)
    for i, what in enumerate(on_rank.REFUSED):
        shown = [str(ends[i]) for ends, _ in reports]
        assert all(ends[i].error in ("InputError", "AgreementError") for ends, _ in reports), (what, shown)
    assert len({loss for _, loss in reports}) == 1
