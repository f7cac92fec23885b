"""The mode of the floating-point unit that every rounding relies on."""

from __future__ import annotations

import torch

from rl_engine.errors import InputError

__all__ = ["require_gradual_underflow"]


def require_gradual_underflow(device: torch.device) -> None:
    """Refuse a CPU that flushes subnormal numbers to zero.

    Raises:
        InputError: `torch.set_flush_denormal(True)`, or something like it, is in force in this thread.
    """
    if device.type != "cpu":
        return
    smallest = torch.full((), 2.0**-126, dtype=torch.float32, device=device)
    if not bool(smallest * 0.5 > 0):
        raise InputError(
            "this process flushes subnormals to zero, and its bits would differ from those of other ranks; "
            "call torch.set_flush_denormal(False) first"
        )
