"""The blocks of README and quickstart that a first-time user pastes run as they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(import torch\n.*?)^```$", re.DOTALL | re.MULTILINE)
SNIPPETS = [
    pytest.param(block, id=f"{page.name}-{index}")
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
    for index, block in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")))
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs_and_fills_the_gradient(snippet: str) -> None:
    names: dict[str, object] = {}
    exec(compile(snippet, "snippet", "exec"), names)
    logits = names["logits"]
    assert isinstance(logits, torch.Tensor)
    assert logits.grad is not None
    assert int((logits.grad != 0).sum()) > 0


def test_every_page_contributed() -> None:
    assert len(SNIPPETS) == 3
