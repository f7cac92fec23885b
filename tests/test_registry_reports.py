"""What the registry reports, and how it dispatches to the backends of this package."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest

from rl_engine.contracts import LogprobOutputSpec, LossReductionSpec, MaskSpec, ReductionSpec, ShardingSpec
from rl_engine.errors import LogprobContractError, LossContractError, UnsupportedError
from rl_engine.registry import (
    LOGPROB_PRIORITY,
    LOSS_PRIORITY,
    KernelRegistry,
    OpKind,
    ResolvedOp,
    kernel_registry,
)
from tests.contracts.examples import (
    FAST,
    PLAIN,
    Loader,
    contract,
    forbidden,
    logprob_capability,
    loss_contract,
    registry,
    shards,
)

# --- reports


def test_explain_and_provenance_are_the_same() -> None:
    own = registry(("fast", {"dtypes": "fp32"}), PLAIN, loader=Loader())
    resolved = own.get_logprob_op(contract(), "Auto", "cpu")
    assert isinstance(resolved, ResolvedOp)
    assert resolved.provenance == own.explain(contract(), requested_backend="auto", device=None)
    assert resolved.provenance.requested_backend == "auto"
    assert resolved.capability == logprob_capability("plain")


def test_explain_raises_nothing_where_nobody_can_serve() -> None:
    report = registry(("fast", {"dtypes": "fp32"})).explain(contract())
    assert report.selected_backend is None
    assert not report.was_fallback
    assert "nobody" in str(report)


def test_report_as_text() -> None:
    own = registry(FAST, PLAIN)
    own.register_logprob_backend("gpu", logprob_capability("gpu"), forbidden, platform="cuda")
    own.register_logprob_backend(
        "other", logprob_capability("other", roles="infer", dtypes="fp32"), forbidden
    )
    request = contract()
    assert str(own.explain(request)).splitlines() == [
        "logprob on cpu under 'auto': fast",
        f"  asked: {request}",
        "  fast (production): selected",
        "  plain (reference): could serve",
        "  gpu (undeclared): declares no capability for platform cpu (declares: cuda)",
        "  other (reference): role train is not among infer; dtype bf16 is not among fp32",
    ]


def test_report_as_json() -> None:
    own = registry(("fast", {"dtypes": "fp32"}), PLAIN)
    own.register_logprob_backend("gpu", logprob_capability("gpu"), forbidden, platform="cuda")
    request = contract(mask=MaskSpec(2, [True, False]))
    data = json.loads(json.dumps(own.explain(request).to_dict(), allow_nan=False))
    assert data["selected_backend"] == "plain"
    assert data["was_fallback"] is True
    assert data["platform"] == "cpu"
    assert data["summary"] == str(request)
    assert data["contract"] == request.to_dict()
    assert [row["backend_id"] for row in data["candidates"]] == ["fast", "plain", "gpu"]
    assert data["candidates"][0]["reasons"] == ["dtype bf16 is not among fp32"]
    assert data["candidates"][1]["capability"] == logprob_capability("plain").to_dict()
    assert data["candidates"][2]["implementation_kind"] is None


def test_reports_are_frozen() -> None:
    report = registry(PLAIN).explain(contract())
    with pytest.raises(dataclasses.FrozenInstanceError, match="selected_backend"):
        report.selected_backend = "other"  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [None, "logprob", shards()], ids=["None", "str", "part"])
def test_contracts_of_the_wrong_type(wrong: Any) -> None:
    with pytest.raises(LogprobContractError, match="must be of type LogprobContract, got"):
        kernel_registry.get_logprob_op(wrong)
    with pytest.raises(LossContractError, match="must be of type GRPOLossContract, got"):
        kernel_registry.get_loss_op(wrong)
    with pytest.raises(LogprobContractError, match="must be of type LogprobContract, got"):
        kernel_registry.explain(wrong)


def test_a_loss_contract_is_no_logprob_contract() -> None:
    with pytest.raises(LogprobContractError, match=r"got GRPOLossContract; pass contract\.logprob"):
        kernel_registry.get_logprob_op(loss_contract())  # type: ignore[arg-type]


# --- the backends of this package


def test_builtin_order() -> None:
    fresh = KernelRegistry()
    assert fresh.backend_ids(OpKind.LOGPROB) == LOGPROB_PRIORITY
    assert fresh.backend_ids(OpKind.LOSS) == LOSS_PRIORITY


def builtins(*missing: str) -> KernelRegistry:
    return KernelRegistry(module_available=lambda name: name not in missing)


@pytest.mark.parametrize(
    ("request_", "device", "selected"),
    [
        (contract(), "cpu", "exact_numba"),
        (contract(), "cuda", "exact_triton"),
        (contract(), "rocm", "exact_torch"),
        (contract(output=LogprobOutputSpec(entropy=True)), "cpu", "exact_numba"),
        (contract(reduction=ReductionSpec.exact("all_reduce_max_sum")), "cpu", "exact_numba"),  # type: ignore[arg-type]
        (contract(sharding=ShardingSpec.even(6, 0, 4)), "cpu", "exact_numba"),
        (contract(reduction=ReductionSpec.tiled(4)), "cpu", "tiled_torch"),
        (contract(reduction=ReductionSpec.naive()), "cuda", "naive_torch"),
        (loss_contract(), "cpu", "exact"),
    ],
    ids=["cpu", "cuda", "rocm", "entropy", "two collectives", "empty shard", "tiled", "naive", "loss"],
)
def test_builtin_choice(request_: Any, device: str, selected: str) -> None:
    report = builtins().explain(request_, device=device)
    assert report.selected_backend == selected
    assert not report.was_fallback


def test_without_numba_the_reference_is_a_fallback_that_says_so() -> None:
    report = builtins("numba").explain(contract())
    assert (report.selected_backend, report.was_fallback) == ("exact_torch", True)
    assert report.reasons["exact_numba"] == ("module numba is not installed",)
    with pytest.raises(UnsupportedError, match="module numba is not installed"):
        builtins("numba").get_logprob_op(contract(), "production")


def test_without_triton_the_reference_on_cuda_is_a_fallback_that_says_so() -> None:
    report = builtins("triton").explain(contract(), device="cuda")
    assert (report.selected_backend, report.was_fallback) == ("exact_torch", True)
    assert report.reasons["exact_triton"] == ("module triton is not installed",)


def test_tiled_says_what_it_cannot_do() -> None:
    request = contract(
        reduction=ReductionSpec.tiled(4), sharding=shards(vocab_shard_bounds=((0, 3), (3, 8))), dtype="fp32"
    )
    report = builtins().explain(request)
    assert report.selected_backend is None
    assert report.reasons["tiled_torch"][0].startswith(
        "vocab shards must consist of whole tiles of 2 columns: rank 0"
    )


def test_naive_loss_by_name() -> None:
    request = loss_contract(
        logprob=contract(reduction=ReductionSpec.naive()),
        reduction=LossReductionSpec(determinism_scope="fixed_topology"),
    )
    assert builtins().explain(request, requested_backend="naive").selected_backend == "naive"
    assert builtins().explain(loss_contract()).reasons["naive"] == (
        "determinism_scope layout_free is stronger than fixed_topology",
    )


def test_explaining_imports_neither_torch_nor_a_backend() -> None:
    code = """
import importlib.util, sys
package = type(sys)("rl_engine")  # the package without its front door, which may import anything
package.__path__ = list(importlib.util.find_spec("rl_engine").submodule_search_locations)
sys.modules["rl_engine"] = package
from rl_engine.contracts import GRPOLossContract, LogprobContract, LossShardingSpec, ShardingSpec
from rl_engine.registry import kernel_registry
logprob = LogprobContract(role="train", dtype="bf16", sharding=ShardingSpec.even(8))
loss = GRPOLossContract(logprob, LossShardingSpec.even(4, padded_seq_len=2))
for request in (logprob, loss):
    assert str(kernel_registry.explain(request, device="cuda"))
heavy = [name for name in sys.modules if name.split(".")[0] in {"torch", "numpy", "numba", "triton"}]
rooms = [name for name in sys.modules if name.startswith(("rl_engine.logprob", "rl_engine.loss"))]
assert not heavy and not rooms, (heavy, rooms)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
