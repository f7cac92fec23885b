"""Imports between the rooms of the package go one way.

    errors ← contracts ← registry ← numerics ← mesh ← logprob ← loss ← api ← verify / integrations ← cli

A room may import itself and every room to its left; `kernels` only re-exports and nobody imports it.
Imports inside functions count as well: laziness saves time, it does not turn an arrow round. Loaders in the
registry are strings on purpose, since it names rooms to its right without importing them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "rl_engine"
ROOT = Path(__file__).resolve().parent.parent / PACKAGE

LEVELS: dict[str, int] = {
    "errors": 0,
    "contracts": 1,
    "registry": 2,
    "numerics": 3,
    "mesh": 4,
    "logprob": 5,
    "loss": 6,
    "api": 7,
    "kernels": 8,
    "verify": 8,
    "integrations": 8,
    "cli": 9,
}
TORCH_FREE = ("errors", "contracts", "registry")
# The rooms that may drive torch.distributed: mesh for the ops, verify and cli because they start ranks.
MAY_USE_DISTRIBUTED = ("mesh", "verify", "cli")


def modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(path: Path, *, type_checking: bool = True, functions: bool = True) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of each import; a `from a import b` yields `a.b`."""
    pending: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]) if base else ".".join(parent)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not functions:
            continue
        elif is_type_checking(node) and not type_checking:
            assert isinstance(node, ast.If)
            pending.extend(node.orelse)
        else:
            pending.extend(ast.iter_child_nodes(node))


@pytest.mark.parametrize("path", modules(), ids=module_name)
def test_imports_only_rooms_to_the_left(path: Path) -> None:
    room = room_of(path)
    assert room in LEVELS, f"{path}: the room {room!r} has no place in LEVELS"
    wrong: list[str] = []
    for line, name in imports(path):
        parts = name.split(".")
        if parts[0] != PACKAGE or len(parts) < 2 or parts[1] == room:
            continue
        target = parts[1]
        if target.startswith("__"):
            continue
        # `from rl_engine import name`: a public name, which lives in the front door or left of it
        level = LEVELS.get(target, LEVELS["api"])
        if level >= LEVELS[room] or target == "kernels":
            wrong.append(f"line {line}: {room} imports {name}")
    assert not wrong, f"{module_name(path)} imports against the direction: {'; '.join(wrong)}"


@pytest.mark.parametrize("path", [path for path in modules() if room_of(path) in TORCH_FREE], ids=module_name)
def test_contracts_and_registry_import_without_torch(path: Path) -> None:
    heavy = [
        f"line {line}: {name}"
        for line, name in imports(path, type_checking=False, functions=False)
        if name.split(".")[0] in {"torch", "numba", "numpy", "triton"}
    ]
    assert not heavy, f"{module_name(path)} must be importable without tensors: {'; '.join(heavy)}"


@pytest.mark.parametrize(
    "path", [path for path in modules() if room_of(path) not in MAY_USE_DISTRIBUTED], ids=module_name
)
def test_only_the_mesh_talks_to_torch_distributed(path: Path) -> None:
    wrong = [
        f"line {line}: {name}"
        for line, name in imports(path, type_checking=False)
        # a process group is a type that callers hand in; passing it on is no talking
        if name.startswith("torch.distributed") and name != "torch.distributed.ProcessGroup"
    ]
    assert not wrong, f"{module_name(path)} reaches around the mesh room: {'; '.join(wrong)}"
