"""Two tensors by their bits: where they first differ, and how far apart they are.

Distances are in units in the last place (ulp): floats of a format in their order are neighbours at distance
1, −0.0 and +0.0 lie at distance 0 and still differ in their bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["NUM_BINS", "TensorComparison", "compare_bits", "is_same_bits"]

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bin 0 holds distance 0, bin k the distances of k binary digits; fp32 values lie at most 2^32 apart.
NUM_BINS = 34
_CHUNK = 1 << 22  # elements compared at a time, so that the int64 distances of large gradients stay small


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorComparison:
    """How one tensor of a layout stands to the same one of the reference.

    Attributes:
        name: "loss", "advantages", "logits.grad", …
        shape: Of both.
        dtype: Of both, "float32".
        num_elements: Their number.
        num_different: Elements that differ in any bit.
        max_ulp: The largest distance; absolute difference for integers.
        max_abs: The largest absolute difference; NaN where one is infinite or NaN.
        first_index: Index of the first differing element, None where all are equal.
        expected: The reference's value there.
        actual: This layout's value there.
        expected_bits: The reference's bits there, "0x3f800000".
        actual_bits: This layout's bits there.
        histogram: Elements per distance: bin 0 counts distance 0, bin k those in [2^(k−1), 2^k).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_elements: int
    num_different: int
    max_ulp: int
    max_abs: float
    first_index: tuple[int, ...] | None
    expected: str
    actual: str
    expected_bits: str
    actual_bits: str
    histogram: tuple[int, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every bit agrees."""
        return self.num_different == 0

    def __str__(self) -> str:
        if self.is_equal:
            return f"{self.name}: same bits in all {self.num_elements} elements"
        where = f"[{', '.join(map(str, self.first_index or ()))}]" if self.first_index else ""
        return (
            f"{self.name}: {self.num_different} of {self.num_elements} elements differ, "
            f"by {self.max_ulp} ulp at most; the first at {self.name}{where} is "
            f"{self.actual} ({self.actual_bits}), at tp 1 × dp 1 {self.expected} ({self.expected_bits})"
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "equal": self.is_equal,
            "num_elements": self.num_elements,
            "num_different": self.num_different,
            "max_ulp": self.max_ulp,
            "max_abs": self.max_abs if self.max_abs == self.max_abs else None,
            "first_index": None if self.first_index is None else list(self.first_index),
            "expected": self.expected,
            "actual": self.actual,
            "expected_bits": self.expected_bits,
            "actual_bits": self.actual_bits,
            "histogram": list(self.histogram),
        }


def is_same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree in shape, dtype and every bit."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return torch.equal(_integers(left), _integers(right))


def compare_bits(name: str, actual: Tensor, expected: Tensor) -> TensorComparison:
    """Compare two CPU tensors of one shape and dtype.

    Args:
        name: What they are.
        actual: [...] of a layout.
        expected: [...] of the reference.
    """
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    flat = (actual.contiguous().reshape(-1), expected.contiguous().reshape(-1))
    different, largest, gap, first = 0, 0, 0.0, None
    histogram = torch.zeros(NUM_BINS, dtype=torch.int64)
    for start, mine, theirs in _chunks(*flat):
        bits, other = _integers(mine), _integers(theirs)
        if torch.equal(bits, other):
            histogram[0] += mine.numel()
            continue
        unequal = bits != other
        if first is None:
            first = start + int(unequal.nonzero()[0, 0])
        different += int(unequal.sum())
        distance = (_ordered(mine, bits) - _ordered(theirs, other)).abs()
        largest = max(largest, int(distance.max()))
        histogram += torch.bincount(torch.frexp(distance.double()).exponent.long(), minlength=NUM_BINS)[
            :NUM_BINS
        ]
        gaps = (mine.double() - theirs.double())[unequal].abs()
        gap = float("nan") if bool(gaps.isnan().any()) or gap != gap else max(gap, float(gaps.max()))
    texts = ("", "", "", "")
    if first is not None:
        texts = tuple(text for tensor in flat for text in _describe(tensor[first]))
    return TensorComparison(
        name=name,
        shape=tuple(actual.shape),
        dtype=str(actual.dtype).removeprefix("torch."),
        num_elements=actual.numel(),
        num_different=different,
        max_ulp=largest,
        max_abs=gap,
        first_index=None if first is None else _unravel(first, tuple(actual.shape)),
        actual=texts[0],
        actual_bits=texts[1],
        expected=texts[2],
        expected_bits=texts[3],
        histogram=tuple(cast(list[int], histogram.tolist())),
    )


def _chunks(left: Tensor, right: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    for start in range(0, left.numel(), _CHUNK):
        yield start, left[start : start + _CHUNK], right[start : start + _CHUNK]


def _integers(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    if tensor.dtype == torch.bool:
        return tensor.to(torch.int8)
    return tensor.view(_SIGNED[tensor.element_size()])


def _ordered(values: Tensor, bits: Tensor) -> Tensor:
    """int64 numbers that count the values of a format in their order."""
    wide = bits.long()
    if not values.is_floating_point():
        return wide
    sign = 1 << (values.element_size() * 8 - 1)
    return torch.where(wide < 0, -(wide + sign), wide)


def _describe(element: Tensor) -> tuple[str, str]:
    width = element.element_size() * 8
    bits = int(_integers(element.reshape(1))[0]) & ((1 << width) - 1)
    value = element.item()
    return (f"{value:.9g}" if isinstance(value, float) else str(value)), f"0x{bits:0{width // 4}x}"


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place: list[int] = []
    for extent in reversed(shape):
        index, rest = divmod(index, extent)
        place.append(rest)
    return tuple(reversed(place))
