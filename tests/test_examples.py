"""The examples run, and say what they are there to show."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_process_learns() -> None:
    rewards = [
        float(line.split("mean reward ")[1].split()[0])
        for line in run(str(EXAMPLES / "one_process.py")).splitlines()
    ]
    assert rewards[-1] > rewards[0] + 0.3


@pytest.mark.slow
def test_every_mesh_prints_the_same_bits() -> None:
    said: set[str] = set()
    for ranks, tp in ((1, 1), (4, 2), (3, 3)):
        output = run(
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={ranks}",
            "--standalone",
            str(EXAMPLES / "torchrun_mesh.py"),
            "--tp",
            str(tp),
        )
        said.add(output.strip().partition(": ")[2])
    assert len(said) == 1, said
    assert "gradient [0.0, " not in said.pop()
