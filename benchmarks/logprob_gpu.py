"""Selected log-probs on a CUDA device: rl-engine beside what people use, in time and in peak memory.

    python benchmarks/logprob_gpu.py                      every case
    python benchmarks/logprob_gpu.py --rows 2048 --dtype float32 --json out.jsonl

Contenders that are not installed are left out and named. Each has one setup function, used for both figures.
gradients are per token (reduction "none"), so that all compute the same thing. The limit is what the copy
bandwidth, measured first in the same run, allows: the logits read once, and for the backward read again and
written once.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rl_engine

Function = Callable[[Tensor, Tensor], Tensor]


def ours() -> Function:
    return lambda logits, targets: rl_engine.selected_logprobs(logits, targets, validate=False)


def trl() -> Function:
    """The kernel file alone: the package around it imports a trainer's dependencies."""
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("trl")
    path = Path(package.origin).parent / "kernels" / "logprob_entropy.py"
    spec = importlib.util.spec_from_file_location("trl_logprob_entropy", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda logits, targets: module.selective_log_softmax_and_entropy(logits[None], targets[None])[0][0]


def fla() -> Function:
    from fla.modules.fused_cross_entropy import cross_entropy_loss

    return lambda logits, targets: -cross_entropy_loss(logits, targets)[0]


def liger() -> Function:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return lambda logits, targets: -liger_cross_entropy(logits, targets, reduction="none")


def eager() -> Function:
    return lambda logits, targets: -F.cross_entropy(logits.float(), targets, reduction="none")


def compiled() -> Function:
    return torch.compile(eager())


CONTENDERS: dict[str, Callable[[], Function]] = {
    "rl_engine.selected_logprobs": ours,
    "TRL selective_log_softmax_and_entropy": trl,
    "fla cross_entropy_loss": fla,
    "torch.compile(F.cross_entropy in fp32)": compiled,
    "F.cross_entropy in fp32": eager,
    "Liger liger_cross_entropy": liger,  # last: its gradient overwrites the logits
}


def copy_bandwidth() -> float:
    """Bytes per millisecond, read plus written, of a copy of 2 GiB."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    sink = torch.empty_like(source)
    return 2 * 2**31 / median_ms(lambda: sink.copy_(source))


def median_ms(run: Callable[[], object]) -> float:
    return triton.testing.do_bench(run, warmup=25, rep=150, return_mode="median")


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes that one run adds at its peak."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(function: Function, logits: Tensor, targets: Tensor, upstream: Tensor) -> dict[str, float]:
    def forward() -> Tensor:
        with torch.no_grad():
            return function(logits, targets)

    leaf = logits.detach().requires_grad_()

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(leaf, targets), leaf, upstream)

    rows = slice(0, 64)
    exact = torch.log_softmax(logits[rows].double(), -1).gather(1, targets[rows, None])[:, 0]
    error = (forward()[rows].double() - exact).abs().max().item()
    both()
    return {
        "forward_ms": median_ms(forward),
        "forward_peak_bytes": peak_bytes(forward),
        "both_ms": median_ms(both),
        "both_peak_bytes": peak_bytes(both),
        "max_abs_error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--json", type=Path, help="append one JSON object a line to this file")
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    bandwidth = copy_bandwidth()
    torch.manual_seed(0)
    logits = torch.empty(options.rows, options.vocab, dtype=dtype, device="cuda")
    for part in logits.split(1024):
        part.copy_(3 * torch.randn(part.shape, device="cuda"))
    targets = torch.randint(options.vocab, (options.rows,), device="cuda")
    upstream = torch.randn(options.rows, device="cuda")
    size = logits.numel() * logits.element_size()
    limits = {"forward_ms": size / bandwidth, "both_ms": 3 * size / bandwidth}

    device = torch.cuda.get_device_name()
    title = (
        f"[{options.rows}, {options.vocab}] {options.dtype}, {size / 2**20:.0f} MiB, {device}, "
        f"torch {torch.__version__}, triton {triton.__version__}, copy {bandwidth / 1e9:.2f} TB/s"
    )
    table = Table(title=title, title_justify="left")
    headings = ("", "forward ms", "/ limit", "peak MiB", "fwd+bwd ms", "/ limit", "peak MiB", "max error")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    missing: list[str] = []
    for name, load in CONTENDERS.items():
        try:
            function = load()
        except ImportError as absent:
            missing.append(f"{name} ({absent.name or absent})")
            continue
        figures = measure(function, logits, targets, upstream)
        table.add_row(
            name,
            f"{figures['forward_ms']:.3f}",
            f"{figures['forward_ms'] / limits['forward_ms']:.2f}",
            f"{figures['forward_peak_bytes'] / 2**20:.0f}",
            f"{figures['both_ms']:.3f}",
            f"{figures['both_ms'] / limits['both_ms']:.2f}",
            f"{figures['both_peak_bytes'] / 2**20:.0f}",
            f"{figures['max_abs_error']:.1e}",
        )
        if options.json:
            record = {
                "name": name,
                "rows": options.rows,
                "vocab": options.vocab,
                "dtype": options.dtype,
                "device": device,
                "torch": torch.__version__,
                "triton": triton.__version__,
                "copy_bytes_per_ms": bandwidth,
                **figures,
            }
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if missing:
        print("not installed:", ", ".join(missing))


if __name__ == "__main__":
    main()
