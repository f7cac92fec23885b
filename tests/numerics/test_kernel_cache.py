"""Compiled kernels are kept for one version of their sources, and do without a cache where none can be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from rl_engine.numerics import reference

_SUM = """
import torch
from rl_engine.numerics import cpu
partial = cpu.partial(torch.zeros(1, 4), torch.tensor([0]), scale_l=1.4426950216293335, real_cols=4)
print(partial.tolist())
"""


def run_with(environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SUM], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def expected() -> str:
    logits, target = torch.zeros(1, 4), torch.tensor([0])
    partial = reference.partial(logits, target, scale_l=1.4426950216293335, real_cols=4)
    return f"{partial.tolist()}\n"


def test_kernels_are_kept_under_the_digest_of_their_sources(tmp_path: Path) -> None:
    assert run_with({"XDG_CACHE_HOME": str(tmp_path)}) == expected()
    (kept,) = (tmp_path / "rl_engine").iterdir()
    assert len(kept.name) == 16 and list(kept.rglob("*.nbi"))
    assert run_with({"XDG_CACHE_HOME": str(tmp_path)}) == expected()
    assert list((tmp_path / "rl_engine").iterdir()) == [kept]


def test_a_folder_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    assert run_with({"XDG_CACHE_HOME": str(blocked)}) == expected()
