"""The report of verify as one HTML page that stands alone: no script, no fonts, nothing fetched.

The plots are SVG written here. Their x axis is the distance in ulp by powers of two: bin 0 holds distance 0,
bin k the distances in [2^(k−1), 2^k).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rl_engine.verify.compare import NUM_BINS
from rl_engine.verify.layouts import SINGLE
from rl_engine.verify.report import LayoutReport, VerifyReport

__all__ = ["render_page"]

# What a dot of the first plot stands for: the tensors of a kind share one.
_KINDS = {
    "loss": ("loss", "policy_loss", "kl"),
    "totals": ("per_sequence_policy", "per_sequence_kl", "per_sequence_active_tokens"),
    "advantages": ("advantages",),
    "gradients": ("logits.grad",),
}
_COLORS = {"loss": "#d1495b", "totals": "#3d7ea6", "advantages": "#8f6bb3", "gradients": "#e08e0b"}
_SAME = "#2f9e63"

_STYLE = """
:root {
  --ink: #1d2430; --soft: #667085; --line: #d5dae1; --page: #fff; --good: #177245; --bad: #b42318;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e9ee; --soft: #98a2b3; --line: #3a4250; --page: #14181f; --good: #4cc38a; --bad: #ff8a80;
  }
}
body {
  font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
}
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { color: var(--soft); margin: .3rem 0; }
strong { color: var(--ink); }
.good { color: var(--good); }
.bad { color: var(--bad); }
.verdict { font-size: 1.15rem; font-weight: 600; }
table { border-collapse: collapse; margin: .5rem 0; }
th, td { border: 1px solid var(--line); padding: .35rem .6rem; text-align: left; vertical-align: top; }
code { font: 13px/1.4 ui-monospace, monospace; }
.wide { overflow-x: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .soft { fill: var(--soft); }
svg line { stroke: var(--line); }
"""


def render_page(report: VerifyReport) -> str:
    """The whole page as text."""
    title, verdict = escape(report.headline()), "good" if report.ok else "bad"
    machine = escape(", ".join(f"{name} {value}" for name, value in report.machine.items()))
    backend = f"{escape(report.backend)}: {escape(report.backends)}"
    shards = "of different widths" if report.uneven else "of equal widths"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>rl-engine verify: {title}</title><style>{_STYLE}</style></head><body>",
        "<h1>rl-engine verify</h1>",
        f"<p class='verdict {verdict}'>{title}</p>",
        f"<p><strong>Batch</strong> {escape(report.batch)}</p>",
        f"<p><strong>Backend</strong> {backend}; vocabulary shards {shards}</p>",
        f"<p><strong>Machine</strong> {machine}; {report.seconds:.1f} s</p>",
        "<h2>Layouts</h2>",
        f"<p>Every bit of loss, totals, advantages and gradients, against {SINGLE}.</p>",
        _matrix(report),
        "<h2>What differs</h2>",
        _differences(report),
        "<h2>Largest distance of each kind of tensor</h2>",
        f"<div class='wide'>{_dot_plot(report)}</div>",
        "<h2>Gradient elements by distance</h2>",
        f"<div class='wide'>{_histogram(report)}</div>",
        "<h2>Cases</h2>",
        _cases(report),
        "<h2>Shards</h2>",
        _shards(report),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of ready-made cells."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{top}</tr>{body}</table></div>"


def _matrix(report: VerifyReport) -> str:
    rows = [
        [f"<strong>dp {dp}</strong>", *(_cell(report.find(tp, dp)) for tp in report.tps)] for dp in report.dps
    ]
    return _table(["", *(f"tp {tp}" for tp in report.tps)], rows)


def _cell(found: LayoutReport | None) -> str:
    if found is None:
        return "—"
    if found.ok:
        return f"<span class='good'>{'reference' if found.layout == SINGLE else '✓ same bits'}</span>"
    distance = f"<br>≤ {found.max_ulp:,} ulp" if found.cases and not found.mismatches else ""
    return f"<span class='bad'>✗ {escape(found.verdict())}{distance}</span>"


def _differences(report: VerifyReport) -> str:
    rows: list[list[str]] = []
    for layout in report.layouts:
        if layout.error is not None:
            text = f"<span class='bad'>{escape(layout.error)}</span>"
            rows.append([str(layout.layout), "", text, "", "", "", ""])
        named = [(f"{m.case}, rank {m.rank} against rank 0", m.what) for m in layout.mismatches]
        named += [(case.name, tensor) for case in layout.cases for tensor in case.different]
        for case, tensor in named:
            index = ", ".join(map(str, tensor.first_index or ()))
            rows.append(
                [
                    str(layout.layout),
                    escape(case),
                    f"<code>{escape(tensor.name)}[{index}]</code>",
                    f"<code>{tensor.actual_bits}</code> {tensor.actual}",
                    f"<code>{tensor.expected_bits}</code> {tensor.expected}",
                    f"{tensor.num_different:,} of {tensor.num_elements:,}",
                    f"{tensor.max_ulp:,}",
                ]
            )
    if not rows:
        return "<p>Nothing.</p>"
    head = ["layout", "case", "first at", "bits and value", f"at {SINGLE}", "elements", "largest ulp"]
    return _table(head, rows)


def _cases(report: VerifyReport) -> str:
    rows = [
        [escape(name), escape(asked), f"{report.losses[name]:.9g}", f"{report.norms[name]:.6g}"]
        for name, asked in report.cases.items()
    ]
    return _table(["case", "asked", f"loss at {SINGLE}", "gradient norm"], rows)


def _shards(report: VerifyReport) -> str:
    def listed(bounds: Sequence[tuple[int, int]]) -> str:
        return "<code>" + " ".join(f"[{start}, {end})" for start, end in bounds) + "</code>"

    rows = [
        [
            str(layout.layout),
            listed(layout.vocab_bounds),
            listed(layout.sequence_bounds),
            f"{layout.seconds:.2f}",
        ]
        for layout in report.layouts
        if layout.error is None
    ]
    return _table(["layout", "columns of each TP rank", "sequences of each DP rank", "seconds"], rows)


_LEFT, _TOP, _ROW, _COLUMN = 110, 34, 24, 46
_MIN_BINS = 6  # so that a plot of equal layouts still has an axis


def _bin_of(distance: int) -> int:
    return min(distance.bit_length(), NUM_BINS - 1)


def _bin_name(index: int) -> str:
    if index <= 1:
        return str(index)
    return f"{1 << (index - 1)}" if index <= 10 else f"2^{index - 1}"


def _frame(layouts: Sequence[LayoutReport], num_bins: int, body: Iterable[str]) -> str:
    """The grid that both plots share: a row a layout, a column a power of two."""
    width = max(_LEFT + num_bins * _COLUMN + 20, 560)  # room for the legend
    bottom = _TOP + len(layouts) * _ROW
    height = bottom + 44
    parts = [f"<svg role='img' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>"]
    for row, layout in enumerate(layouts):
        y = _TOP + row * _ROW + _ROW // 2
        parts.append(f"<text x='{_LEFT - 10}' y='{y + 4}' text-anchor='end'>{layout.layout}</text>")
        parts.append(f"<line x1='{_LEFT}' x2='{width - 20}' y1='{y}' y2='{y}'/>")
    for index in range(num_bins):
        x, name = _LEFT + index * _COLUMN + _COLUMN // 2, _bin_name(index)
        parts.append(f"<text class='soft' x='{x}' y='{bottom + 16}' text-anchor='middle'>{name}</text>")
    label = "distance in ulp: 0, then from each number up to the next"
    parts.append(f"<text class='soft' x='{_LEFT}' y='{bottom + 36}'>{label}</text>")
    return "".join([*parts, *body, "</svg>"])


def _compared(report: VerifyReport) -> list[LayoutReport]:
    return [layout for layout in report.layouts if layout.error is None]


def _dot_plot(report: VerifyReport) -> str:
    layouts, body = _compared(report), list[str]()
    for place, (kind, color) in enumerate(_COLORS.items()):
        x = _LEFT + place * 110
        body.append(f"<circle cx='{x}' cy='14' r='5' fill='{color}'/><text x='{x + 10}' y='18'>{kind}</text>")
    for row, layout in enumerate(layouts):
        y = _TOP + row * _ROW + _ROW // 2
        for place, (kind, names) in enumerate(_KINDS.items()):
            found = [tensor for case in layout.cases for tensor in case.tensors if tensor.name in names]
            distance = max((tensor.max_ulp for tensor in found), default=0)
            # the four dots of a cell stand side by side
            x = _LEFT + _bin_of(distance) * _COLUMN + _COLUMN // 2 + (place - 1.5) * 10
            title = escape(f"{layout.layout}: {kind}, {distance:,} ulp at most")
            dot = f"<circle cx='{x}' cy='{y}' r='5' fill='{_COLORS[kind]}'>"
            body.append(f"{dot}<title>{title}</title></circle>")
    largest = max((layout.max_ulp for layout in layouts), default=0)
    return _frame(layouts, max(_MIN_BINS, _bin_of(largest) + 1), body)


def _histogram(report: VerifyReport) -> str:
    layouts, body = _compared(report), list[str]()
    counts = [_gradient_counts(layout) for layout in layouts]
    last = max((index for line in counts for index, count in enumerate(line) if count), default=0)
    for row, (layout, line) in enumerate(zip(layouts, counts, strict=True)):
        total = max(1, sum(line))
        for index, count in enumerate(line):
            if count == 0:
                continue
            x, y = _LEFT + index * _COLUMN + 2, _TOP + row * _ROW + 2
            color = _SAME if index == 0 else _COLORS["gradients"]
            # by the digits of the count, so that one element of a million is still seen
            strength = 0.25 + 0.75 * len(str(count)) / len(str(total))
            title = escape(f"{layout.layout}: {count:,} of {total:,} elements from {_bin_name(index)} ulp")
            box = f"x='{x}' y='{y}' width='{_COLUMN - 4}' height='{_ROW - 4}' rx='3'"
            body.append(f"<rect {box} fill='{color}' fill-opacity='{strength:.2f}'>")
            body.append(f"<title>{title}</title></rect>")
            middle = f"x='{x + _COLUMN // 2 - 2}' y='{y + 14}' text-anchor='middle'"
            body.append(f"<text {middle}>{_short(count)}</text>")
    return _frame(layouts, max(_MIN_BINS, last + 1), body)


def _gradient_counts(layout: LayoutReport) -> list[int]:
    """Elements of all the layout's gradients, per bin."""
    found = [tensor for case in layout.cases for tensor in case.tensors if tensor.name == "logits.grad"]
    return [sum(tensor.histogram[index] for tensor in found) for index in range(NUM_BINS)]


def _short(count: int) -> str:
    """At most five characters: 999, 12k, 3.4M."""
    if count < 1000:
        return str(count)
    return f"{count / 1000:.0f}k" if count < 1_000_000 else f"{count / 1_000_000:.1f}M"
