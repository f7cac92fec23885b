"""The rank pool: values come back, failures are told apart, nothing hangs."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from rl_engine.errors import InputError
from rl_engine.mesh.pool import RankPool, RankPoolError
from tests.bits import assert_bits_equal
from tests.mesh import rank_functions as on_rank


def test_arguments_and_values(pool: RankPool) -> None:
    values = pool.run(on_rank.hello, world_size=3, args=("word",), per_rank_args=[(10,), (11,), (12,)])
    assert values == [(rank, 3, "word", 10 + rank, 1) for rank in range(3)]


def test_workers_are_used_again(pool: RankPool) -> None:
    first = pool.run(on_rank.pid_and_sum, world_size=2)
    second = pool.run(on_rank.pid_and_sum, world_size=2)
    assert first == second
    assert [total for _, total in first] == [1, 1]
    assert pool.run(on_rank.pid_and_sum, world_size=1)[0][1] == 0


def test_tensors_come_back_by_value(pool: RankPool) -> None:
    tensor = torch.tensor([[0.0, -0.0, 1.5], [float("nan"), float("inf"), 2.0]])
    (back,) = pool.run(on_rank.send_back, world_size=1, args=(tensor,))
    assert_bits_equal(back["same"], tensor, "same")
    assert_bits_equal(back["view"], tensor[1:, ::2], "view")
    assert_bits_equal(back["bf16"], tensor.to(torch.bfloat16), "bf16")
    assert not back["same"].is_shared()


@pytest.mark.parametrize(("tp", "dp", "cp"), [(4, 1, 1), (2, 2, 1), (1, 2, 2), (3, 1, 2)])
def test_grid(pool: RankPool, tp: int, dp: int, cp: int) -> None:
    reports = pool.run(on_rank.grid, world_size=tp * dp * cp, args=(tp, dp, cp))
    for rank, report in enumerate(reports):
        place = {"tp": rank % tp, "cp": rank // tp % cp, "dp": rank // (tp * cp)}
        strides = {"tp": 1, "cp": tp, "dp": tp * cp}
        for name, size in (("tp", tp), ("cp", cp), ("dp", dp)):
            axis_rank, axis_size, ranks, gathered = report[name]
            first = rank - place[name] * strides[name]
            expected = tuple(first + i * strides[name] for i in range(size))
            assert (axis_rank, axis_size, ranks) == (place[name], size, expected)
            assert gathered == list(expected)


def test_an_error_names_its_rank(pool: RankPool) -> None:
    with pytest.raises(
        RankPoolError, match=r"rank 1 raised InputError: the text of rank 1, of 3 ranks"
    ) as caught:
        pool.run(on_rank.raise_on, world_size=3, args=(1,))
    assert "raise_on" in "".join(caught.value.__notes__)
    kinds = [outcome.kind for outcome in caught.value.outcomes]
    assert kinds == ["value", "error", "value"]
    assert caught.value.outcomes[1].raised(InputError)
    assert caught.value.outcomes[1].raised(ValueError)
    assert not caught.value.outcomes[1].raised(RankPoolError)


@pytest.mark.parametrize(("how", "text"), [("kill", "signal SIGKILL"), ("exit", "exit code 3")])
def test_a_death_is_noticed_at_once(pool: RankPool, how: str, text: str) -> None:
    started = time.monotonic()
    outcomes = pool.run(on_rank.die_on, world_size=3, args=(1, how), expect_errors=True)
    assert time.monotonic() - started < 8
    assert outcomes[1].kind == "died"
    assert outcomes[1].error_message == f"died with {text}"
    assert (outcomes[1].signal is signal.SIGKILL) == (how == "kill")
    assert [outcomes[rank].kind for rank in (0, 2)] == ["error", "error"]
    # the dead worker is replaced
    assert [total for _, total in pool.run(on_rank.pid_and_sum, world_size=3)] == [3, 3, 3]


def test_a_death_is_the_headline(pool: RankPool) -> None:
    with pytest.raises(
        RankPoolError, match=r"rank 2 died with signal SIGKILL, of 3 ranks \(2 more: ranks \[0, 1\]"
    ):
        pool.run(on_rank.die_on, world_size=3, args=(2, "kill"))


def test_a_hanging_rank_is_killed_with_its_stack(pool: RankPool) -> None:
    outcomes = pool.run(on_rank.sleep_on, world_size=2, args=(1,), timeout=1.5, expect_errors=True)
    assert outcomes[0].value == "fine"
    assert outcomes[1].kind == "hung"
    assert "sleep_on" in outcomes[1].error_traceback
    assert [total for _, total in pool.run(on_rank.pid_and_sum, world_size=2)] == [1, 1]


def test_what_cannot_be_sent(pool: RankPool) -> None:
    with pytest.raises(InputError, match="cannot be sent to the ranks"):
        pool.run(lambda context: context, world_size=1)
    with pytest.raises(InputError, match="world_size is 99, expected 1 … 16"):
        pool.run(on_rank.hello, world_size=99)
    with pytest.raises(InputError, match="per_rank_args has 1 entries, expected one for each of 2 ranks"):
        pool.run(on_rank.hello, world_size=2, per_rank_args=[("a", 1)])
    with pytest.raises(InputError, match="max_ranks is 0"):
        RankPool(0)
    (outcome,) = pool.run(on_rank.unpicklable, world_size=1, expect_errors=True)
    assert outcome.kind == "error"
    assert "pickle" in outcome.error_message


def test_closing_ends_every_worker() -> None:
    with RankPool(2) as ranks:
        ranks.run(on_rank.pid_and_sum, world_size=2)
        processes = [worker.process for worker in ranks._workers.values()]
        assert all(process.is_alive() for process in processes)
    assert not any(process.is_alive() for process in processes)
