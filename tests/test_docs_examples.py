"""The examples of the documentation run and print what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples(page: Path) -> str:
    """The interactive examples of a page, at their own line numbers; fences and prose are blanked out."""
    text = page.read_text()
    keep = [False] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        if ">>> " in block[1]:
            start, stop = (text.count("\n", 0, block.start(1)), text.count("\n", 0, block.end(1)))
            keep[start:stop] = [True] * (stop - start)
    return "\n".join(line if kept else "" for line, kept in zip(text.split("\n"), keep, strict=True))


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if ">>> " in examples(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_examples(page: Path) -> None:
    test = doctest.DocTestParser().get_doctest(examples(page), {}, page.name, str(page), 0)
    assert test.examples
    output: list[str] = []
    result = doctest.DocTestRunner(verbose=False, optionflags=FLAGS).run(test, out=output.append)
    assert result.failed == 0, "".join(output)


def test_the_pages_with_examples_are_found() -> None:
    assert {"contracts.md", "dispatch.md", "errors.md"} <= {page.name for page in PAGES}
