"""Comparison of tensors by their bits: -0.0 is not 0.0, and one unit in the last place is a failure."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# significand bits of the formats, without the hidden one: what separates NaN from infinity
_FRACTION = {"torch.bfloat16": 7, "torch.float16": 10, "torch.float32": 23, "torch.float64": 52}


def _bits(value: Any) -> tuple[np.ndarray, str]:
    """The unsigned integer view and the name of the dtype, the same name for torch and numpy."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        if tensor.dtype == torch.bool:
            return tensor.numpy().view(np.uint8), "torch.bool"
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
        return tensor.view(signed).numpy().view(_UNSIGNED[tensor.element_size()]), str(tensor.dtype)
    array = np.asarray(value, order="C")
    bits = array.reshape(-1).view(_UNSIGNED[array.dtype.itemsize]).reshape(array.shape)
    return bits, f"torch.{array.dtype.name}"


def _order(bits: int, width: int) -> int:
    """A number that counts the floats of a format in order, so that differences are ulps."""
    sign = 1 << (width - 1)
    return sign - bits if bits & sign else bits


def _pattern(bits: int, width: int) -> str:
    return f"0x{bits:0{width // 4}x}"


def assert_bits_equal(actual: Any, expected: Any, name: str = "value", *, nan_payload: bool = False) -> None:
    """Fail unless two tensors or arrays have the same shape, dtype and bits.

    Args:
        actual: torch tensor or numpy array of any dtype.
        expected: the same; the kind may differ.
        name: what the values are, for the message.
        nan_payload: compare the bits of NaNs too. IEEE leaves them open (the x86 NaN is negative, the one of
            a GPU is not), so by default every NaN equals every NaN and nothing else.
    """
    left, left_dtype = _bits(actual)
    right, right_dtype = _bits(expected)
    assert left_dtype == right_dtype, f"{name}: dtype {left_dtype}, expected {right_dtype}"
    assert left.shape == right.shape, f"{name}: shape {left.shape}, expected {right.shape}"
    differ = left != right
    width = left.dtype.itemsize * 8
    fraction = _FRACTION.get(left_dtype)
    if fraction is not None and not nan_payload:
        infinity = left.dtype.type(((1 << (width - 1 - fraction)) - 1) << fraction)
        magnitude = left.dtype.type((1 << (width - 1)) - 1)
        differ &= ~(((left & magnitude) > infinity) & ((right & magnitude) > infinity))
    if not differ.any():
        return
    where = np.argwhere(differ)
    index = tuple(int(i) for i in where[0])
    distances = [
        abs(_order(int(left[tuple(i)]), width) - _order(int(right[tuple(i)]), width)) for i in where[:10000]
    ]
    unit = "ulp" if fraction is not None else "units"

    def shown(value: Any) -> Any:
        item = value[index]
        return item.item() if hasattr(item, "item") else item

    raise AssertionError(
        f"{name}: {len(where)} of {left.size} elements differ, by at most {max(distances)} {unit}; first at "
        f"{index}: {shown(actual)!r} = {_pattern(int(left[index]), width)}, expected {shown(expected)!r} = "
        f"{_pattern(int(right[index]), width)}"
    )
