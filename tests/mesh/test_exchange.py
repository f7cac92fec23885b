"""Exchanges between real ranks: integers, exactly, one collective each."""

from __future__ import annotations

import pytest
import torch

from rl_engine.errors import AgreementError, InputError
from rl_engine.mesh import (
    Axis,
    all_gather_rows,
    all_reduce_float,
    all_reduce_max,
    all_reduce_sum,
    gather_json,
)
from rl_engine.mesh.pool import RankPool
from tests.bits import assert_bits_equal
from tests.mesh import rank_functions as on_rank


@pytest.mark.parametrize("size", [2, 3])
def test_values(pool: RankPool, size: int) -> None:
    base = torch.arange(6).reshape(3, 2)
    wrapped = (2**62 * size + 2**63) % 2**64 - 2**63  # int64 wraps, as two's complement does
    for result in pool.run(on_rank.exchange_all, world_size=size):
        assert_bits_equal(result["rows"], torch.stack([base + 100 * rank for rank in range(size)]), "rows")
        assert result["empty"].shape == (size, 0, 5)
        total = torch.tensor([wrapped, -sum(range(size)), 7 * size])
        assert_bits_equal(result["sum"], total, "sum")
        assert_bits_equal(result["in_place"], total, "in place")
        assert_bits_equal(result["max"], torch.tensor([2**62, 0, 7]), "max")
        assert result["float"].tolist() == [0.5 * size]
        assert result["counts"] == {
            ("tp", "all_gather_rows"): 1,
            ("tp", "all_reduce_sum"): 2,
            ("tp", "all_reduce_max"): 1,
            ("tp", "all_reduce_float"): 1,
        }


def test_only_integers() -> None:
    axis = Axis.single("dp")
    for exchange in (all_gather_rows, all_reduce_sum, all_reduce_max):
        with pytest.raises(InputError, match=rf"{exchange.__name__} exchanges int64 words, got torch\.int32"):
            exchange(axis, torch.zeros(2, 2, dtype=torch.int32))
        with pytest.raises(InputError, match=r"exchanges int64 words, got torch\.float32"):
            exchange(axis, torch.zeros(2, 2))
    with pytest.raises(InputError, match=r"all_reduce_float is for floats, got torch\.int64"):
        all_reduce_float(axis, torch.zeros(2, dtype=torch.int64), "sum")


@pytest.mark.parametrize("lengths", [[0, 1, 2], [500, 0, 511], [512, 0, 3], [1, 70000, 5]])
def test_json_of_any_length(pool: RankPool, lengths: list[int]) -> None:
    for texts, counts in pool.run(on_rank.gather_texts_of_lengths, world_size=3, args=(lengths,)):
        assert texts == ["é" * length for length in lengths]
        # json.dumps writes é as six bytes, and two quotes
        assert counts == {("tp", "gather_json"): 1 if max(lengths) * 6 + 2 <= 1024 else 2}


def test_json_with_an_error(pool: RankPool) -> None:
    outcomes = pool.run(on_rank.gather_with_error, world_size=3, args=(1,), expect_errors=True)
    assert outcomes[1].error_type == "InputError"
    for rank in (0, 2):
        assert outcomes[rank].raised(AgreementError)
        assert outcomes[rank].error_message == (
            "gather_json over the tp axis: rank 1 (global rank 1): InputError: no group ids"
        )
    with pytest.raises(InputError, match="alone"):
        gather_json(Axis.single("dp"), None, error=InputError("alone"))
