"""The earlier import paths lead to the same objects."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "rl_engine" / "kernels"
LOSS_OPS = "rl_engine.kernels.ops.pytorch.loss"

CONTRACTS = {
    "rl_engine.kernels.logprob_contract": (
        "rl_engine.contracts.logprob",
        "AccDtype DeterminismScope DowncastAt Engine ImplementationKind LogitsDtype LogprobBackendCapability "
        "LogprobContract LogprobOutputSpec LogprobRole MaskMode MaskSpec MergeAxis MergeKind MergeOrder "
        "ReductionSpec ShardingSpec Transport",
    ),
    "rl_engine.kernels.loss_contract": (
        "rl_engine.contracts.loss",
        "AdvantageNormalizer AdvantageSpec AdvantageVariance ClipSpec DataParallelReduction GRPOLossContract "
        "KLEstimator LossBackendCapability LossOutputSpec LossReductionSpec LossShardingSpec ObjectiveSpec "
        "OnEmpty TokenNormalizer",
    ),
}

SAME: list[tuple[str, str, str]] = [
    *((path, name, home) for path, (home, names) in CONTRACTS.items() for name in names.split()),
    ("rl_engine.kernels.logprob_contract", "LogprobContractError", "rl_engine.errors"),
    ("rl_engine.kernels.loss_contract", "LossContractError", "rl_engine.errors"),
    ("rl_engine.kernels.registry", "KernelRegistry", "rl_engine.registry"),
    ("rl_engine.kernels.registry", "kernel_registry", "rl_engine.registry"),
    (f"{LOSS_OPS}.vocab_parallel_logp", "VocabParallelLogprobOp", "rl_engine.logprob"),
    (f"{LOSS_OPS}.distributed_grpo_loss", "DistributedGRPOLossOp", "rl_engine.loss"),
    (f"{LOSS_OPS}.distributed_grpo_loss", "GRPOLossResult", "rl_engine.loss"),
]


@pytest.mark.parametrize(("path", "name", "home"), SAME)
def test_same_object(path: str, name: str, home: str) -> None:
    assert getattr(importlib.import_module(path), name) is getattr(importlib.import_module(home), name)


@pytest.mark.parametrize(
    "path", sorted(KERNELS.rglob("*.py")), ids=lambda path: str(path.relative_to(KERNELS))
)
def test_nothing_but_reexports(path: Path) -> None:
    docstring, *imports = ast.parse(path.read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert all(isinstance(node, ast.ImportFrom) for node in imports)
    assert all(alias.name == alias.asname for node in imports for alias in node.names)  # type: ignore[attr-defined]


def test_every_reexport_is_in_the_table() -> None:
    listed = {(path, name) for path, name, _ in SAME}
    for path in KERNELS.rglob("*.py"):
        module = "rl_engine.kernels." + ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for node in ast.parse(path.read_text()).body[1:]:
            assert isinstance(node, ast.ImportFrom)
            assert {(module, alias.name) for alias in node.names} <= listed
