"""The comparison helper must itself be able to fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.bits import assert_bits_equal


def test_minus_zero_is_not_zero() -> None:
    with pytest.raises(
        AssertionError, match=r"x: 1 of 2 elements differ.*\(1,\): -0.0 = 0x80000000.*0x00000000"
    ):
        assert_bits_equal(torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0]), "x")


def test_counts_ulps_through_zero() -> None:
    tiny = torch.tensor([1, -(2**31) + 1], dtype=torch.int32).view(torch.float32)
    with pytest.raises(AssertionError, match="at most 2 ulp"):
        assert_bits_equal(tiny[:1], tiny[1:], "x")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64])
def test_dtypes(dtype: torch.dtype) -> None:
    value = torch.arange(6).to(dtype).reshape(2, 3)
    assert_bits_equal(value, value.clone(), "x")
    assert_bits_equal(value.t(), value.t().contiguous(), "x")
    other = value.clone()
    other[1, 2] += 1
    with pytest.raises(AssertionError, match=r"first at \(1, 2\)"):
        assert_bits_equal(value, other, "x")


def test_nan_payload_is_open_unless_asked() -> None:
    nans = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    assert_bits_equal(nans[:1], nans[1:], "x")
    with pytest.raises(AssertionError, match="0xffc00000"):
        assert_bits_equal(nans[:1], nans[1:], "x", nan_payload=True)
    with pytest.raises(AssertionError, match="1 of 1"):
        assert_bits_equal(nans[:1], torch.tensor([float("inf")]), "x")


def test_shape_dtype_and_numpy() -> None:
    with pytest.raises(AssertionError, match="dtype"):
        assert_bits_equal(torch.zeros(1), torch.zeros(1, dtype=torch.float64), "x")
    with pytest.raises(AssertionError, match="shape"):
        assert_bits_equal(torch.zeros(1, 2), torch.zeros(2), "x")
    assert_bits_equal(torch.zeros(2, 2), np.zeros((2, 2), np.float32), "x")
    assert_bits_equal(torch.tensor(1.5), np.float32(1.5), "scalar")
    assert_bits_equal(torch.zeros(0), torch.zeros(0), "empty")
    assert_bits_equal(torch.tensor([True]), np.array([True]), "bool")
