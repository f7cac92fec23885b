"""Selected log-probs on the CPU: rl-engine beside what PyTorch offers, in time and in peak memory.

    python benchmarks/logprob_cpu.py                      every case
    python benchmarks/logprob_cpu.py --rows 64 --json out.jsonl

Each case has one setup function, used for both figures. Times are taken in rounds, every contender once a
round, so that a busy machine slows all of them; a ratio is the median over the rounds. Peak memory is that of
a fresh process, above what it held after the setup.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rl_engine

Run = Callable[[], object]

FORWARD = "forward"
BACKWARD = "backward"
BASELINE = "rl_engine.selected_logprobs"


def make_inputs(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits [rows, vocab] and targets [rows]."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(rows, vocab, dtype=dtype)
    for row in logits:  # row by row, so that no fp32 copy of everything counts as memory
        row.copy_(3 * torch.randn(vocab, generator=generator))
    return logits, torch.randint(vocab, (rows,), generator=generator)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def setup_ours_forward(logits: Tensor, targets: Tensor) -> Run:
    return lambda: rl_engine.selected_logprobs(logits, targets)


def setup_cross_entropy_forward(logits: Tensor, targets: Tensor) -> Run:
    return lambda: cross_entropy(logits, targets)


def setup_logsumexp_forward(logits: Tensor, targets: Tensor) -> Run:
    ready = logits.float()  # the copy is not counted: the row sum alone, in its best case
    return lambda: ready.logsumexp(-1)


def _backward_of(function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> Run:
    leaf = logits.requires_grad_()
    output = function(leaf, targets)
    upstream = torch.linspace(-1.0, 1.0, len(targets))
    return lambda: torch.autograd.grad(output, leaf, upstream, retain_graph=True)


def setup_ours_backward(logits: Tensor, targets: Tensor) -> Run:
    return _backward_of(rl_engine.selected_logprobs, logits, targets)


def setup_cross_entropy_backward(logits: Tensor, targets: Tensor) -> Run:
    return _backward_of(cross_entropy, logits, targets)


def setup_elementwise(logits: Tensor, targets: Tensor) -> Run:
    """The bound of the backward: read every logit once, write as many bytes once."""
    return lambda: logits * 0.5


CASES: dict[str, dict[str, Callable[[Tensor, Tensor], Run]]] = {
    FORWARD: {
        BASELINE: setup_ours_forward,
        "torch.logsumexp, fp32 input": setup_logsumexp_forward,
        "F.cross_entropy in fp32": setup_cross_entropy_forward,
    },
    BACKWARD: {
        BASELINE: setup_ours_backward,
        "one elementwise pass": setup_elementwise,
        "F.cross_entropy in fp32": setup_cross_entropy_backward,
    },
}


def measure_times(
    case: str, rows: int, vocab: int, dtype: torch.dtype, rounds: int
) -> dict[str, dict[str, float]]:
    """Return seconds (the fastest round) and the ratio to ours (the median over rounds) of each contender."""
    runs: dict[str, Run] = {}
    for name, setup in CASES[case].items():
        runs[name] = setup(*make_inputs(rows, vocab, dtype))
        runs[name]()  # warm: compilation, page faults
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    ours = seconds[BASELINE]
    return {
        name: {
            "seconds": min(taken),
            "ratio": statistics.median(t / o for t, o in zip(taken, ours, strict=True)),
        }
        for name, taken in seconds.items()
    }


def memory_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (the peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure_memory_here(case: str, name: str, rows: int, vocab: int, dtype: torch.dtype) -> int:
    """Return the bytes that one run adds at its peak; call it once in a fresh process."""
    setup = CASES[case][name]
    setup(*make_inputs(2, 64, dtype))()  # compilation and imports, on a small input
    run = setup(*make_inputs(rows, vocab, dtype))
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak afresh
    before = memory_bytes("VmRSS")
    run()
    return max(0, memory_bytes("VmHWM") - before)


def measure_memory(case: str, name: str, rows: int, vocab: int, dtype: str) -> int:
    command = [sys.executable, __file__, "--rows", str(rows), "--vocab", str(vocab), "--dtype", dtype]
    done = subprocess.run([*command, "--memory", case, name], capture_output=True, text=True, check=True)
    return int(done.stdout)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="append one JSON object a line to this file")
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "NAME"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    dtype: torch.dtype = getattr(torch, options.dtype)
    shape = (options.rows, options.vocab)
    if options.memory:
        print(measure_memory_here(*options.memory, *shape, dtype))
        return
    mebibytes = options.rows * options.vocab * dtype.itemsize / 2**20
    table = Table(
        title=f"[{options.rows}, {options.vocab}] {options.dtype}, logits {mebibytes:.0f} MiB, "
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
        f"torch {torch.__version__}",
        title_justify="left",
    )
    for column in ("", "", "ms", "time / ours", "added peak MiB"):
        table.add_column(column, justify="left" if not column else "right")
    records: list[dict[str, object]] = []
    for case, contenders in CASES.items():
        times = measure_times(case, *shape, dtype, options.rounds)
        for name in contenders:
            added = measure_memory(case, name, *shape, options.dtype)
            figures = times[name]
            table.add_row(
                case,
                name,
                f"{figures['seconds'] * 1e3:.1f}",
                f"{figures['ratio']:.2f}",
                f"{added / 2**20:.0f}",
            )
            records.append(
                {
                    "case": case,
                    "name": name,
                    "rows": options.rows,
                    "vocab": options.vocab,
                    "dtype": options.dtype,
                    "threads": torch.get_num_threads(),
                    "torch": torch.__version__,
                    **figures,
                    "added_peak_bytes": added,
                }
            )
        table.add_section()
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
