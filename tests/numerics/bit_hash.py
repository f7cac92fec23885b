"""Hashes of the bits of a tier on inputs made of integers: equal on every machine, or something is wrong.

Run as a program, it prints those of the tiers named as JSON, so that a test can run it under other settings.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys

import numpy as np
import torch
from torch import Tensor

from rl_engine.numerics import accumulator, exp, words

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def digest(*tensors: Tensor) -> str:
    """SHA-256 of the bytes of several tensors, 16 digits of it."""
    sha = hashlib.sha256()
    for value in tensors:
        data = value.detach().contiguous()
        sha.update(data.view(torch.uint8).numpy().tobytes() if data.numel() else b"")
    return sha.hexdigest()[:16]


def integers(count: int, seed: int) -> np.ndarray:
    """Unsigned 32-bit integers of a linear congruential generator (the high half of 64 bits)."""
    state, out = np.uint64(seed), np.empty(count, np.uint32)
    factor, step = np.uint64(6364136223846793005), np.uint64(1442695040888963407)
    with np.errstate(over="ignore"):
        for i in range(count):
            state = state * factor + step
            out[i] = state >> np.uint64(32)
    return out


def logits(num_rows: int, num_cols: int, dtype: str) -> Tensor:
    """[n, V] logits in ±20 on a grid of 2^-12, one peak in each row, every seventh column −inf."""
    raw = integers(num_rows * num_cols, 1).astype(np.int64) % 163840 - 81920
    x = torch.from_numpy(raw).reshape(num_rows, num_cols).double() / 4096
    x[torch.arange(num_rows), torch.arange(num_rows)] += 12
    x[:, 6::7] = -torch.inf
    x[num_rows // 2 :] *= 0.25
    return x.to(TORCH[dtype])


def hashes(tier: str, dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")) -> dict[str, str]:
    """Hash of every kind of result."""
    impl = importlib.import_module(f"rl_engine.numerics.{tier}")
    out: dict[str, str] = {}
    n, size = 12, 2053
    target = torch.arange(n) * 7 % size
    target += target % 7 == 6  # away from the −inf columns
    for dtype in dtypes:
        x = logits(n, size, dtype)
        for temperature in (1.0, 0.6):
            scale = words.temperature_scale(temperature)
            part = impl.partial(x, target, scale_l=scale, real_cols=size, with_entropy=True)
            closed = words.close_rows(part, scale)
            a, b, h = (torch.from_numpy(integers(n, s) % 4001 - 2000.0).float() / 2048 for s in (2, 3, 4))
            name = f"{dtype}, T = {temperature}"
            out[f"partial {name}"] = digest(part)
            assert closed.entropy is not None
            out[f"closed {name}"] = digest(closed.lse2, closed.logp, closed.lse, closed.entropy)
            for kind, (c_b, c_h) in (("logp", (None, None)), ("all", (b, h))):
                grad = impl.gradient(
                    x,
                    target,
                    closed.lse2,
                    grad_logp=a,
                    grad_lse=c_b,
                    grad_entropy=c_h,
                    entropy=closed.entropy,
                    scale_l=scale,
                    real_cols=size,
                )
                out[f"gradient {kind} {name}"] = digest(grad)
    patterns = torch.from_numpy(integers(20011, 5).astype(np.int64))
    anything = (patterns - 2**31).to(torch.int32).view(torch.float32)
    anything = torch.where(anything.isfinite(), anything, 1.0)
    moderate = (patterns - 2**31).double().div(2**24).float()
    for function in (exp.exp32, exp.phi32, exp.expm1_32):
        out[function.__name__] = digest(function(moderate), function(moderate / 128), function(anything))
    acc = accumulator.accumulate(anything, torch.arange(len(anything)) % 101, 101)
    out["limbs"] = digest(accumulator.normalise(acc))
    out["sums"] = digest(accumulator.close_fp32(acc), accumulator.close_fp64(acc))
    return out


if __name__ == "__main__":
    json.dump({name: hashes(name) for name in sys.argv[1:]}, sys.stdout)
