"""Comparison by bits: what differs first, and by how many ulp."""

from __future__ import annotations

import math

import pytest
import torch

from rl_engine.verify.compare import NUM_BINS, compare_bits, is_same_bits


def test_equal() -> None:
    value = torch.tensor([1.0, float("nan"), -0.0])
    found = compare_bits("x", value.clone(), value)
    assert found.is_equal and found.max_ulp == 0 and found.first_index is None
    assert found.histogram == (3, *[0] * (NUM_BINS - 1))
    assert str(found) == "x: same bits in all 3 elements"
    assert compare_bits("x", torch.empty(0, 4), torch.empty(0, 4)).is_equal


def test_the_first_difference_is_named() -> None:
    expected = torch.ones(2, 3)
    actual = expected.clone()
    actual[1, 0] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    actual[1, 2] = -1.0
    found = compare_bits("grad", actual, expected)
    assert (found.num_different, found.first_index) == (2, (1, 0))
    assert (found.actual_bits, found.expected_bits) == ("0x3f800001", "0x3f800000")
    assert found.max_ulp == 2 * 0x3F800000
    assert found.max_abs == 2.0
    assert found.histogram[0] == 4 and found.histogram[1] == 1 and found.histogram[31] == 1
    assert str(found).startswith("grad: 2 of 6 elements differ, by 2,130,706,432".replace(",", "")[:28])
    assert "the first at grad[1, 0] is 1.00000012 (0x3f800001), at tp 1 × dp 1 1 (0x3f800000)" in str(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_zeros_of_both_signs_differ_at_distance_0(dtype: torch.dtype) -> None:
    found = compare_bits("x", torch.tensor([-0.0], dtype=dtype), torch.tensor([0.0], dtype=dtype))
    assert not found.is_equal
    assert (found.max_ulp, found.max_abs, found.actual, found.expected) == (0, 0.0, "-0", "0")


def test_distance_crosses_zero() -> None:
    tiny = torch.tensor([1, -(2**31) + 2], dtype=torch.int32).view(torch.float32)
    assert compare_bits("x", tiny[:1], tiny[1:]).max_ulp == 3


def test_the_farthest_values_have_a_bin() -> None:
    ends = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)  # NaNs at both ends
    found = compare_bits("x", ends[:1], ends[1:])
    assert sum(found.histogram) == 1
    assert math.isnan(found.max_abs)
    assert found.to_dict()["max_abs"] is None


def test_integers_and_scalars() -> None:
    found = compare_bits("n", torch.tensor(7), torch.tensor(4))
    assert (found.max_ulp, found.first_index, found.actual, found.expected) == (3, (), "7", "4")
    assert "the first at n is 7 (0x0000000000000007)" in str(found)
    assert not is_same_bits(torch.tensor(7), torch.tensor([7]))
    assert not is_same_bits(torch.tensor(7), torch.tensor(7.0))
    assert is_same_bits(torch.tensor([True, False]), torch.tensor([True, False]))


def test_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_engine.verify.compare._CHUNK", 4)
    expected = torch.arange(11.0)
    actual = expected.clone()
    actual[[6, 10]] += 1
    found = compare_bits("x", actual, expected)
    assert (found.num_different, found.first_index, found.max_abs) == (2, (6,), 1.0)
    assert sum(found.histogram) == 11
