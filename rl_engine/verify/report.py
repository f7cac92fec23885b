"""What verify found: as data, as tables for a terminal, as lines of text.

Legend: a layout is equal when every tensor of every case has the bits of tp 1 × dp 1, on every rank.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_engine.verify.compare import TensorComparison
from rl_engine.verify.layouts import SINGLE, Layout

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["CaseReport", "LayoutReport", "ReplicaMismatch", "VerifyReport", "describe_machine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseReport:
    """One case of a layout against the same case of the reference."""

    name: str
    gradient_norm: float
    tensors: tuple[TensorComparison, ...]

    @property
    def different(self) -> tuple[TensorComparison, ...]:
        """The tensors with a differing bit, in the order in which they are named."""
        return tuple(tensor for tensor in self.tensors if not tensor.is_equal)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        tensors = [tensor.to_dict() for tensor in self.tensors]
        return {"name": self.name, "gradient_norm": self.gradient_norm, "tensors": tensors}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMismatch:
    """A rank that holds other bits than rank 0 of the same layout, in an output that is replicated."""

    case: str
    rank: int
    what: TensorComparison

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {"case": self.case, "rank": self.rank, "tensor": self.what.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutReport:
    """One layout against the reference.

    Attributes:
        layout: The layout.
        vocab_bounds: [start, end) of every TP rank.
        sequence_bounds: [start, end) of every DP rank.
        cases: Every case, compared.
        mismatches: Ranks that disagree with rank 0 of this layout.
        error: Why the layout gave no result, None where it did.
        seconds: Its run, start of the process groups included.
    """

    layout: Layout
    vocab_bounds: tuple[tuple[int, int], ...] = ()
    sequence_bounds: tuple[tuple[int, int], ...] = ()
    cases: tuple[CaseReport, ...] = ()
    mismatches: tuple[ReplicaMismatch, ...] = ()
    error: str | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ran, all ranks agree, and every bit is the reference's."""
        return self.error is None and not self.mismatches and not any(case.different for case in self.cases)

    @property
    def max_ulp(self) -> int:
        """The largest distance of any tensor."""
        return max((tensor.max_ulp for case in self.cases for tensor in case.tensors), default=0)

    @property
    def first_difference(self) -> tuple[str, TensorComparison] | None:
        """The first case and tensor that differ."""
        return next(((case.name, case.different[0]) for case in self.cases if case.different), None)

    def verdict(self) -> str:
        """A few words for a cell of the matrix."""
        if self.error is not None:
            return "no result"
        if self.mismatches:
            return f"ranks disagree: {sorted({mismatch.rank for mismatch in self.mismatches})}"
        count = sum(len(case.different) for case in self.cases)
        if count == 0:
            return "same bits"
        of = sum(len(case.tensors) for case in self.cases)
        return f"{count} of {of} tensors differ"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {
            "tp": self.layout.tp,
            "dp": self.layout.dp,
            "ok": self.ok,
            "verdict": self.verdict(),
            "error": self.error,
            "vocab_bounds": [list(bounds) for bounds in self.vocab_bounds],
            "sequence_bounds": [list(bounds) for bounds in self.sequence_bounds],
            "seconds": round(self.seconds, 3),
            "cases": [case.to_dict() for case in self.cases],
            "mismatches": [mismatch.to_dict() for mismatch in self.mismatches],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The outcome of a run of verify.

    Attributes:
        batch: The batch in words.
        backend: What was asked for.
        backends: Who computed: "exact on exact_numba".
        cases: Each case's name and its objective in words.
        norms: Each case's gradient norm at tp 1 × dp 1; never 0.
        losses: Each case's loss at tp 1 × dp 1.
        layouts: Every layout, tp 1 × dp 1 first.
        uneven: Whether vocabulary shards were of different widths.
        machine: Device, transport and versions.
        seconds: The whole run.
    """

    batch: str
    backend: str
    backends: str
    cases: Mapping[str, str]
    norms: Mapping[str, float]
    losses: Mapping[str, float]
    layouts: tuple[LayoutReport, ...]
    uneven: bool
    machine: Mapping[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every layout ran and has the bits of the reference."""
        return all(layout.ok for layout in self.layouts)

    @property
    def num_different(self) -> int:
        """Layouts that are not equal."""
        return sum(not layout.ok for layout in self.layouts)

    @property
    def tps(self) -> tuple[int, ...]:
        """The TP degrees, in order."""
        return tuple(sorted({report.layout.tp for report in self.layouts}))

    @property
    def dps(self) -> tuple[int, ...]:
        """The DP degrees, in order."""
        return tuple(sorted({report.layout.dp for report in self.layouts}))

    def find(self, tp: int, dp: int) -> LayoutReport | None:
        """The report of a layout, None where it was not run."""
        wanted = Layout(tp, dp)
        return next((report for report in self.layouts if report.layout == wanted), None)

    def headline(self) -> str:
        """One line: what holds, or does not."""
        count, tensors = len(self.layouts), len(self.layouts[0].cases[0].tensors)
        if self.ok:
            what = f"{count} layouts, {len(self.cases)} cases, {tensors} tensors each"
            return f"{what}: all bits equal those of {SINGLE}"
        return f"{self.num_different} of {count} layouts do not have the bits of {SINGLE}"

    def difference_lines(self) -> Iterator[str]:
        """One line for each layout that is not equal: the first differing tensor, index and bit patterns."""
        for report in self.layouts:
            if report.error is not None:
                yield f"{report.layout}: no result: {report.error}"
            for mismatch in report.mismatches:
                where = f"{report.layout}, {mismatch.case}: rank {mismatch.rank}"
                yield f"{where} differs from rank 0: {mismatch.what}"
            difference = report.first_difference
            if difference is not None:
                yield f"{report.layout}, {difference[0]}: {difference[1]}"

    def norm_lines(self) -> Iterator[str]:
        """One line for each case: its loss and the norm of its gradient, which shows that there is one."""
        for name, norm in self.norms.items():
            yield f"{name}: loss {self.losses[name]:.9g}, gradient norm {norm:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return {
            "ok": self.ok,
            "headline": self.headline(),
            "batch": self.batch,
            "backend": self.backend,
            "backends": self.backends,
            "uneven_shards": self.uneven,
            "cases": [
                {"name": name, "asked": asked, "loss": self.losses[name], "gradient_norm": self.norms[name]}
                for name, asked in self.cases.items()
            ],
            "layouts": [layout.to_dict() for layout in self.layouts],
            "machine": dict(self.machine),
            "seconds": round(self.seconds, 3),
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), ensure_ascii=False, indent=2)

    def table(self) -> Table:
        """The matrix of layouts for a terminal; needs rich."""
        from rich.table import Table

        table = Table(title=f"bits against {SINGLE}, {self.backends}", title_justify="left")
        table.add_column("", justify="right")
        for tp in self.tps:
            table.add_column(f"tp {tp}")
        for dp in self.dps:
            table.add_row(f"dp {dp}", *(_cell(self.find(tp, dp)) for tp in self.tps))
        return table

    def print(self, console: Console) -> None:
        """The matrix, what differs first, the gradient norms and the verdict; needs rich."""
        console.print(f"batch: {self.batch}", markup=False)
        console.print(self.table())
        for line in self.difference_lines():
            console.print(f"• {line}", markup=False, style="red")
        for line in self.norm_lines():
            console.print(line, markup=False, style="dim")
        console.print(self.headline(), markup=False, style="bold green" if self.ok else "bold red")

    def write_html(self, path: str | Path) -> None:
        """A page that stands alone: the matrix, the distances as a plot, what was run. Loads nothing."""
        from rl_engine.verify.html import render_page

        Path(path).write_text(render_page(self), encoding="utf-8")


def _cell(report: LayoutReport | None) -> str:
    if report is None:
        return "[dim]—[/dim]"
    if report.layout == SINGLE and report.ok:
        return "[green]reference[/green]"
    if report.ok:
        return "[green]✓ same bits[/green]"
    detail = f"\n≤ {report.max_ulp:,} ulp" if report.cases and not report.mismatches else ""
    return f"[red]✗ {report.verdict()}{detail}[/red]"


def describe_machine(device: str, transport: str) -> dict[str, str]:
    """Where a run took place: device, transport, versions."""
    name = torch.cuda.get_device_name(0) if device == "cuda" else platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": f"{device} ({name})",
        "transport": transport,
        "cores": str(cores),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
