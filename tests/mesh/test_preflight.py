"""The preflight: every rank of the mesh raises, or none does, and the message says who and what."""

from __future__ import annotations

import pytest

from rl_engine.errors import AgreementError, InputError
from rl_engine.mesh import Axis, preflight
from rl_engine.mesh.pool import RankOutcome, RankPool
from tests.mesh import rank_functions as on_rank


def messages(outcomes: list[RankOutcome]) -> list[str]:
    assert all(outcome.raised(AgreementError) for outcome in outcomes), [str(outcome) for outcome in outcomes]
    return [outcome.error_message for outcome in outcomes]


@pytest.mark.parametrize("size", [2, 4])
def test_agreement_is_one_collective(pool: RankPool, size: int) -> None:
    assert pool.run(on_rank.agree, world_size=size) == [{("tp", "preflight"): 1}] * size


def test_alone() -> None:
    axis = Axis.single("tp")
    preflight(axis, fingerprint="x", facts={})
    with pytest.raises(InputError, match="my own"):
        preflight(axis, fingerprint="x", facts={}, error=InputError("my own"))


def test_a_differing_field_is_named_with_every_value(pool: RankPool) -> None:
    facts = [{"beta": "0.0", "backend": "exact_torch"}, {"beta": "0.04", "backend": "exact_torch"}]
    outcomes = pool.run(on_rank.disagree, world_size=2, args=(facts, {}), expect_errors=True)
    for text in messages(outcomes):
        assert text == (
            "the ranks of the tp axis do not agree, and nothing was computed: "
            "beta: rank 0 (global rank 0) has 0.0, rank 1 (global rank 1) has 0.04; "
            "every rank of this axis must be given the same request"
        )


def test_ranks_with_one_value_are_named_together(pool: RankPool) -> None:
    facts = [{"ignore_index": "-100"}] * 3 + [{"ignore_index": "-1", "mask": "given"}]
    for text in messages(pool.run(on_rank.disagree, world_size=4, args=(facts, {}), expect_errors=True)):
        assert (
            "ignore_index: ranks [0, 1, 2] (global ranks [0, 1, 2]) have -100, rank 3 (global rank 3) has -1"
            in text
        )
        assert (
            "mask: ranks [0, 1, 2] (global ranks [0, 1, 2]) have nothing, rank 3 (global rank 3) has given"
            in text
        )


def test_texts_of_different_lengths_do_not_hang(pool: RankPool) -> None:
    facts = [{"name": "short"}] * 3
    outcomes = pool.run(
        on_rank.disagree, world_size=3, args=(facts, {1: "long " * 9000}, 300), expect_errors=True
    )
    assert outcomes[1].error_type == "InputError"
    for text in messages([outcomes[0], outcomes[2]]):
        assert "name: rank 0 (global rank 0) has short, rank 2 (global rank 2) has short!!!" in text
        assert "rank 1 (global rank 1) failed its own checks: InputError: long long" in text


def test_a_failed_rank_raises_its_own_error(pool: RankPool) -> None:
    facts = [{"beta": "0.0"}] * 3
    outcomes = pool.run(
        on_rank.disagree, world_size=3, args=(facts, {2: "logits are [3, 7]"}), expect_errors=True
    )
    assert outcomes[2].error_type == "InputError"
    assert outcomes[2].error_message == "logits are [3, 7]"
    for text in messages(outcomes[:2]):
        assert "rank 2 (global rank 2) failed its own checks: InputError: logits are [3, 7]" in text
        assert "beta" not in text


def test_several_failures(pool: RankPool) -> None:
    facts = [{"beta": "0.0"}] * 3
    outcomes = pool.run(
        on_rank.disagree, world_size=3, args=(facts, {0: "one", 2: "two"}), expect_errors=True
    )
    assert [outcome.error_message for outcome in (outcomes[0], outcomes[2])] == ["one", "two"]
    (text,) = messages([outcomes[1]])
    assert "InputError: one" in text and "InputError: two" in text


def test_after_a_refusal_the_axis_is_in_step(pool: RankPool) -> None:
    for text in pool.run(on_rank.disagree_then_agree, world_size=3):
        assert "seed: rank 0 (global rank 0) has 0, rank 1 (global rank 1) has 1, rank 2" in text


SAME = ["same"] * 4


def test_mesh_in_agreement(pool: RankPool) -> None:
    pool.run(on_rank.mesh_preflight, world_size=4, args=(2, 2, ["a", "a", "b", "b"], SAME, None))


@pytest.mark.parametrize("failing", [0, 3])
def test_a_local_failure_reaches_the_whole_mesh(pool: RankPool, failing: int) -> None:
    outcomes = pool.run(
        on_rank.mesh_preflight, world_size=4, args=(2, 2, SAME, SAME, failing), expect_errors=True
    )
    assert outcomes[failing].error_message == "my logits are [3, 7]"
    for text in messages([outcome for outcome in outcomes if outcome.rank != failing]):
        assert "my logits are [3, 7]" in text


def test_tp_siblings_that_disagree_stop_the_other_dp_rank(pool: RankPool) -> None:
    prints = ["a", "b", "a", "a"]
    outcomes = pool.run(
        on_rank.mesh_preflight, world_size=4, args=(2, 2, prints, SAME, None), expect_errors=True
    )
    for rank, text in enumerate(messages(outcomes)):
        assert "tp_fact: rank 0 (global rank 0) has a, rank 1 (global rank 1) has b" in text
        assert ("the ranks of the dp axis" in text) == (rank >= 2)


def test_dp_peers_that_disagree_in_one_column_stop_the_other_column(pool: RankPool) -> None:
    prints = [
        "a",
        "a",
        "a",
        "b",
    ]  # rank 1 and 3 are DP peers; rank 2 and 3 TP siblings; rank 0 has no part in it
    outcomes = pool.run(
        on_rank.mesh_preflight, world_size=4, args=(2, 2, SAME, prints, None), expect_errors=True
    )
    for text in messages(outcomes):
        assert "dp_fact: rank 0 (global rank 2) has a, rank 1 (global rank 3) has b" in text


def test_dp_replicas_that_disagree(pool: RankPool) -> None:
    prints = ["a", "a", "b", "b"]
    outcomes = pool.run(
        on_rank.mesh_preflight, world_size=4, args=(2, 2, SAME, prints, None), expect_errors=True
    )
    for rank, text in enumerate(messages(outcomes)):
        column = rank % 2
        expected = f"dp_fact: rank 0 (global rank {column}) has a, rank 1 (global rank {column + 2}) has b"
        assert expected in text


def test_a_field_outside_the_facts(pool: RankPool) -> None:
    outcomes = pool.run(on_rank.disagree_silently, world_size=2, expect_errors=True)
    for text in messages(outcomes):
        assert "a field that is not among the readable facts; digest: rank 0" in text
