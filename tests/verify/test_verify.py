"""Verify on real ranks: exact layouts are equal, the usual way is not, and nothing is proven by zeros."""

from __future__ import annotations

import dataclasses
import io
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rl_engine.contracts import LossReductionSpec, ObjectiveSpec
from rl_engine.errors import ContractError, DeterminismError, InputError
from rl_engine.mesh.pool import RankPool, RankPoolError
from rl_engine.verify import Case, Layout, LossBatch, VerifyReport, default_cases, layout_matrix, verify


@pytest.fixture(scope="module")
def batch() -> LossBatch:
    return LossBatch.generate(group_sizes=(3, 2, 3), seq_len=8, vocab_size=301, padded_vocab_size=320)


@pytest.fixture(scope="module")
def naive(pool: RankPool) -> VerifyReport:
    """The usual way, on fp32 logits, where no rounding of the gradient hides anything."""
    big = LossBatch.generate(dtype=torch.float32)
    return verify(big, layout_matrix((1, 2), (1, 2)), backend="naive", pool=pool)


def test_exact_layouts_are_equal(batch: LossBatch, pool: RankPool) -> None:
    told: list[tuple[int, int, str]] = []
    layouts = layout_matrix((1, 3), (1, 2, 3))
    report = verify(batch, layouts, pool=pool, progress=lambda *what: told.append(what))
    assert report.ok, list(report.difference_lines())
    assert list(report.difference_lines()) == []
    assert [found.layout for found in report.layouts] == list(layouts)
    assert set(report.cases) == {
        f"{mean}, β {beta}" for mean in ("token mean", "sequence mean") for beta in ("0", "0.04")
    }
    assert all(norm > 0 for norm in report.norms.values())
    assert report.headline() == "6 layouts, 4 cases, 10 tensors each: all bits equal those of tp 1 × dp 1"
    assert [done for done, _, _ in told] == list(range(7))
    # what was run is what was promised: uneven shards, a straddled group, an empty sequence
    assert report.layouts[1].vocab_bounds == Layout(3, 1).vocab_bounds(320)
    assert not {start for start, _ in report.layouts[-1].sequence_bounds} <= set(batch.group_boundaries)


@pytest.mark.parametrize("backend", ["reference", "exact_torch"])
def test_backend_by_name(batch: LossBatch, pool: RankPool, backend: str) -> None:
    report = verify(
        batch,
        [Layout(2, 2)],
        backend=backend,
        objective=ObjectiveSpec(beta=0.04),
        reduction=LossReductionSpec(token_normalizer="per_sequence_then_mean_all"),  # type: ignore[arg-type]
        pool=pool,
    )
    assert report.ok
    assert report.backends == "exact on exact_torch"
    assert [found.layout for found in report.layouts] == [Layout(1, 1), Layout(2, 2)]
    assert list(report.cases) == ["per_sequence_then_mean_all, β 0.04"]


def test_even_shards(batch: LossBatch, pool: RankPool) -> None:
    report = verify(batch, [Layout(4, 1)], uneven=False, cases=default_cases(batch)[:1], pool=pool)
    assert report.ok and not report.uneven
    assert report.layouts[1].vocab_bounds == ((0, 80), (80, 160), (160, 240), (240, 320))


def test_tiles_are_aligned(batch: LossBatch, pool: RankPool) -> None:
    report = verify(batch, [Layout(2, 2)], backend="tiled", cases=default_cases(batch)[:1], pool=pool)
    assert report.ok, list(report.difference_lines())
    assert report.backends == "exact on tiled_torch"


def test_the_usual_way_differs(naive: VerifyReport) -> None:
    assert not naive.ok
    assert naive.backends == "naive on naive_torch"
    assert naive.num_different == 3
    for found in naive.layouts[1:]:
        difference = found.first_difference
        assert difference is not None
        _, tensor = difference
        assert tensor.actual_bits != tensor.expected_bits
        assert tensor.first_index is not None
    assert naive.layouts[1].max_ulp > 1
    lines = list(naive.difference_lines())
    assert lines[0].startswith("tp 2 × dp 1, token mean, β 0: ")
    assert "elements differ, by" in lines[0] and "(0x" in lines[0]
    assert naive.headline() == "3 of 4 layouts do not have the bits of tp 1 × dp 1"


def test_report_as_json(naive: VerifyReport) -> None:
    data = json.loads(naive.to_json())
    assert data["ok"] is False
    assert [(layout["tp"], layout["dp"], layout["ok"]) for layout in data["layouts"]] == [
        (1, 1, True),
        (2, 1, False),
        (1, 2, False),
        (2, 2, False),
    ]
    assert data["cases"][0]["gradient_norm"] > 0
    tensor = data["layouts"][1]["cases"][0]["tensors"][-1]
    assert tensor["name"] == "logits.grad" and sum(tensor["histogram"]) == tensor["num_elements"]


def test_report_on_a_terminal(naive: VerifyReport) -> None:
    console = Console(file=io.StringIO(), width=140)
    naive.print(console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("reference", "✗", "tensors differ", "gradient norm", "3 of 4 layouts", "0x", "dp 2", "tp 2"):
        assert part in text


class Page(HTMLParser):
    """Every tag is closed, and nothing is asked of anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        assert not {"src", "href", "onclick"} & {name for name, _ in attrs}

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_report_as_a_page(naive: VerifyReport, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    naive.write_html(path)
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.tags.count("svg") == 2
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert "3 of 4 layouts do not have the bits of tp 1 × dp 1" in text
    assert "gradients, " in text and "elements from" in text


def test_zeros_prove_nothing(batch: LossBatch, pool: RankPool) -> None:
    flat = dataclasses.replace(batch, rewards=torch.full_like(batch.rewards, 0.35))
    with pytest.raises(DeterminismError, match="the gradient of case 'token mean, β 0' is all zeros"):
        verify(flat, [Layout(2, 1)], pool=pool)


def test_nan_proves_nothing(batch: LossBatch, pool: RankPool) -> None:
    old = batch.old_logps.clone()
    old[batch.mask] = float("nan")
    with pytest.raises((DeterminismError, RankPoolError), match=r"nan|NaN"):
        verify(dataclasses.replace(batch, old_logps=old), [Layout(2, 1)], pool=pool)


def test_a_layout_without_a_result_is_a_failure(batch: LossBatch, pool: RankPool, tmp_path: Path) -> None:
    class Broken(RankPool):
        def run(self, fn: Any, *, world_size: int, **options: Any) -> Any:
            if world_size == 4:
                raise RankPoolError("rank 3 died with signal SIGKILL, of 4 ranks", [])
            return pool.run(fn, world_size=world_size, **options)

    layouts = [Layout(2, 1), Layout(2, 2)]
    report = verify(batch, layouts, cases=default_cases(batch)[:1], pool=Broken(4))
    assert not report.ok
    assert report.layouts[1].ok
    assert report.layouts[2].verdict() == "no result"
    assert list(report.difference_lines()) == [
        "tp 2 × dp 2: no result: rank 3 died with signal SIGKILL, of 4 ranks"
    ]
    console = Console(file=io.StringIO(), width=140)
    report.print(console)
    assert "✗ no result" in console.file.getvalue()  # type: ignore[attr-defined]
    report.write_html(tmp_path / "report.html")
    assert "rank 3 died with signal SIGKILL" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert json.loads(report.to_json())["layouts"][2]["error"].startswith("rank 3 died")


def test_arguments_that_do_not_go_together(batch: LossBatch, pool: RankPool) -> None:
    alone = dataclasses.replace(batch, ref_logits=None)
    case = Case(name="kl", objective=ObjectiveSpec(beta=0.1), reduction=LossReductionSpec())
    averaged = LossReductionSpec(data_parallel_reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"case 'kl' has beta 0.1 and the batch no ref_logits"):
        verify(alone, [], cases=[case], pool=pool)
    with pytest.raises(InputError, match="pass cases= with at least one case"):
        verify(batch, [], cases=[], pool=pool)
    with pytest.raises(InputError, match="pass cases= with at least one case"):
        verify(batch, [], cases=[case], reduction=averaged, pool=pool)
    with pytest.raises(InputError, match="data_parallel_reduction='mean', which scales each rank's gradient"):
        verify(batch, [], reduction=averaged, pool=pool)
    with pytest.raises(
        InputError, match=r"the layouts need 20 ranks and the pool has 16; pass RankPool\(20\)"
    ):
        verify(batch, [Layout(5, 4)], pool=pool)
    with pytest.raises(ContractError, match="no_such_backend"):
        verify(batch, [], backend="no_such_backend", pool=pool)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="device is 'cuda' and this machine has no GPU"):
            verify(batch, [], device="cuda", pool=pool)
