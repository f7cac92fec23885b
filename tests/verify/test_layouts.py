"""Layouts cut every column and every sequence exactly once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_engine.errors import InputError
from rl_engine.verify import Layout, layout_matrix, parse_degrees

DEGREES = st.integers(1, 9)


def assert_partition(bounds: tuple[tuple[int, int], ...], parts: int, total: int) -> None:
    assert len(bounds) == parts
    assert bounds[0][0] == 0 and bounds[-1][1] == total
    assert all(start <= end for start, end in bounds)
    assert all(left[1] == right[0] for left, right in pairwise(bounds))


@given(DEGREES, st.integers(1, 300), st.sampled_from([None, 1, 8]))
def test_vocab_shards_tile_the_vocabulary(tp: int, vocab: int, multiple_of: int | None) -> None:
    bounds = Layout(tp, 1).vocab_bounds(vocab, multiple_of=multiple_of)
    assert_partition(bounds, tp, vocab)
    if multiple_of is not None:
        assert all(start % multiple_of == 0 or start == vocab for start, _ in bounds)


@given(DEGREES, st.integers(1, 40))
def test_sequence_shards_tile_the_batch(dp: int, sequences: int) -> None:
    bounds = Layout(1, dp).sequence_bounds(sequences)
    assert_partition(bounds, dp, sequences)
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1


def test_shards_are_neither_even_nor_aligned() -> None:
    bounds = Layout(4, 1).vocab_bounds(2112)
    assert len({end - start for start, end in bounds}) == 4
    assert all(start % 2 for start, _ in bounds[1:])


def test_matrix_and_degrees() -> None:
    assert layout_matrix((1, 2, 1), (1, 3)) == (Layout(1, 1), Layout(2, 1), Layout(1, 3), Layout(2, 3))
    assert parse_degrees(" 1, 3,5") == (1, 3, 5)
    for text in ("", "1,", "0,1", "a", "1;2"):
        with pytest.raises(InputError, match=r"--tp is .*, expected positive integers between commas"):
            parse_degrees(text, "--tp")
    with pytest.raises(InputError, match="the dp degree of a layout is 0, expected at least 1"):
        Layout(1, 0)
