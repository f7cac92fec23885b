"""Golden hashes: the same bits on every machine, under every instruction set of its libraries.

The hashes of PROTOTYPE were computed twice before this package existed: by a prototype on a CPU with AVX-512,
and by a Triton kernel on an H200. The hashes of BITS are of the definition as it stands: a
change to any of them is a change of numerics, and needs a new numerics id.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_engine.numerics import words
from tests.bits import assert_bits_equal
from tests.numerics import bit_hash, cases

ROOT = Path(__file__).resolve().parents[2]
PROTOTYPE = {"bf16": "fd2ef4288472da28", "fp32": "b349f81930c97fe7"}
BITS = {
    "partial bf16, T = 1.0": "113b5d2973df5123",
    "closed bf16, T = 1.0": "5323e568061b2db7",
    "gradient logp bf16, T = 1.0": "9e07cc4a93f72861",
    "gradient all bf16, T = 1.0": "79624d970e7a70ac",
    "partial bf16, T = 0.6": "a71c1ee8e0074cb1",
    "closed bf16, T = 0.6": "f22fd1d3681f6759",
    "gradient logp bf16, T = 0.6": "dbd9350b141c173a",
    "gradient all bf16, T = 0.6": "72525b7fd3ca77f7",
    "partial fp16, T = 1.0": "bce0c727cbace80e",
    "closed fp16, T = 1.0": "a694ce4203949645",
    "gradient logp fp16, T = 1.0": "7b7f2389139394f3",
    "gradient all fp16, T = 1.0": "88b11e10fd965d2e",
    "partial fp16, T = 0.6": "759dbb026726511d",
    "closed fp16, T = 0.6": "0d3d03372275fcdc",
    "gradient logp fp16, T = 0.6": "660d72b66af90a2c",
    "gradient all fp16, T = 0.6": "4db81d04c9850e26",
    "partial fp32, T = 1.0": "5eea53cd78a7e6cd",
    "closed fp32, T = 1.0": "089b1bcbf8d529ff",
    "gradient logp fp32, T = 1.0": "cf60daf8292aa4c0",
    "gradient all fp32, T = 1.0": "0b4f85b4c68cd890",
    "partial fp32, T = 0.6": "96cbacc50a280550",
    "closed fp32, T = 0.6": "a9a951203ec351c9",
    "gradient logp fp32, T = 0.6": "2e9116e04d333ddf",
    "gradient all fp32, T = 0.6": "b77882b70846f0c1",
    "exp32": "b729b0052f183136",
    "phi32": "d124a83ad12409f9",
    "expm1_32": "f59845f9088af8f0",
    "limbs": "d7146d7ac9c2cd0c",
    "sums": "19f4884cfbdde3bc",
}


def prototype_logits() -> Tensor:
    """48 rows × 151,936: gaussian, one peak, −inf, wide, narrow, −1e9."""
    rng = np.random.RandomState(7)
    x = torch.from_numpy((rng.standard_normal((48, 151936)) * 3).astype(np.float32))
    x[1, 5] = 30.0
    x[2, :1000] = -torch.inf
    x[3] *= 10
    x[4] = x[4] * 0.01 - 50
    x[5, ::2] = -1e9
    return x


def prototype_hash(partials: Tensor) -> str:
    """SHA-256 over float32 e and int64 words, 16 digits."""
    e, w = partials[:, 0].float(), partials[:, 1:4].contiguous()
    return hashlib.sha256(e.numpy().tobytes() + w.numpy().tobytes()).hexdigest()[:16]


def test_words_of_the_prototype() -> None:
    x = prototype_logits()
    rows = [0, 1, 2, 3, 4, 5, 47]
    scale = words.temperature_scale(1.0)
    for dtype, expected in PROTOTYPE.items():
        y = x.to(cases.TORCH[dtype])
        none = torch.full((48,), -1)
        got = cases.implementation("cpu").partial(y, none, scale_l=scale, real_cols=151936)
        assert prototype_hash(got) == expected
        reference = cases.implementation("reference")
        some = reference.partial(y[rows], none[rows], scale_l=scale, real_cols=151936)
        assert_bits_equal(some, got[rows], f"reference, {dtype}")


@pytest.mark.parametrize("tier", cases.IMPLEMENTATIONS)
def test_hashes(tier: str) -> None:
    assert bit_hash.hashes(tier) == BITS


@pytest.mark.parametrize(
    ("tiers", "setting"),
    [
        pytest.param(cases.IMPLEMENTATIONS, {"ATEN_CPU_CAPABILITY": "default"}, id="aten-default"),
        pytest.param(
            cases.IMPLEMENTATIONS,
            {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
            id="mkl-avx2",
        ),
        pytest.param(["cpu"], {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}, id="numba-generic"),
    ],
)
def test_hashes_under_other_instruction_sets(tiers: list[str], setting: dict[str, str]) -> None:
    """A fresh process whose libraries see another machine; the last has no fused operation in hardware."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.numerics.bit_hash", *tiers],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **setting},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(tiers, BITS)
