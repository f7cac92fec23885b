"""Every rule of the registry: policy before capability, complete reasons, lazy loaders."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_engine.contracts import LogprobOutputSpec, LossReductionSpec, MaskSpec, ReductionSpec, ShardingSpec
from rl_engine.errors import LogprobContractError, LossContractError, UnsupportedError
from rl_engine.registry import (
    LOGPROB_PRIORITY,
    LOSS_PRIORITY,
    KernelRegistry,
    OpKind,
    Platform,
    ResolvedOp,
    kernel_registry,
)
from tests.contracts.examples import contract, logprob_capability, loss_capability, loss_contract, shards

POLICY_ERROR = "pass auto, production, reference, or one of "


class Loader:
    """Counts its calls and returns an op of its own."""

    def __init__(self, name: str = "op") -> None:
        self.calls, self.op = 0, SimpleNamespace(name=name)

    def __call__(self) -> object:
        self.calls += 1
        return self.op


def forbidden() -> object:
    pytest.fail("a backend was loaded")


def registry(
    *backends: tuple[str, dict[str, Any]], loader: Callable[[], object] = forbidden
) -> KernelRegistry:
    """A registry of logprob backends that differ from one that can do everything."""
    result = KernelRegistry(builtins=False)
    for backend_id, changes in backends:
        result.register_logprob_backend(backend_id, logprob_capability(backend_id, **changes), loader)
    return result


FAST = ("fast", {"implementation_kind": "production"})
PLAIN = ("plain", {})


# --- policies


@pytest.mark.parametrize(
    ("policy", "selected"),
    [
        ("auto", "fast"),
        ("production", "fast"),
        ("reference", "plain"),
        ("plain", "plain"),
        ("fast", "fast"),
        ("AUTO", "fast"),
        (" Reference ", "plain"),
        ("PRODUCTION", "fast"),
        (" plain\n", "plain"),
    ],
)
def test_policy_selects(policy: str, selected: str) -> None:
    report = registry(FAST, PLAIN).explain(contract(), requested_backend=policy)
    assert report.selected_backend == selected
    assert not report.was_fallback


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("", "requested_backend = '': must not be blank; " + POLICY_ERROR + "fast, plain"),
        ("  ", "requested_backend = '  ': must not be blank"),
        (None, "requested_backend = None: must be a string, got NoneType; " + POLICY_ERROR),
        (3, "requested_backend = 3: must be a string, got int"),
        (True, "requested_backend = True: must be a string, got bool"),
        (
            "slow",
            "requested_backend = 'slow': names no registered {op} backend; " + POLICY_ERROR + "fast, plain",
        ),
        ("Fast", "'Fast': names no registered {op} backend, did you mean 'fast'?; " + POLICY_ERROR),
        ("plane", "'plane': names no registered {op} backend, did you mean 'plain'?"),
        ("deterministic", "'deterministic': is no policy, because determinism is asked for by the contract"),
        ("Deterministic", "pass {spec}(determinism_scope=...) and leave the backend to 'auto'"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("op", ["logprob", "loss"])
def test_bad_policies_are_contract_errors(op: str, policy: Any, text: str) -> None:
    both = registry(FAST, PLAIN)
    for backend_id in ("fast", "plain"):
        both.register_loss_backend(backend_id, loss_capability(backend_id), forbidden)
    spec, error, call = {
        "logprob": ("ReductionSpec", LogprobContractError, lambda: both.get_logprob_op(contract(), policy)),
        "loss": ("LossReductionSpec", LossContractError, lambda: both.get_loss_op(loss_contract(), policy)),
    }[op]
    with pytest.raises(error, match=re.escape(text.format(op=op, spec=spec))):
        call()


def test_policy_is_judged_before_capability() -> None:
    # `plain` could not serve either, but the caller never wanted it: one reason, the caller's own
    both = registry(FAST, ("plain", {"dtypes": "fp32", "tp_world_sizes": {1}}))
    report = both.explain(contract(), requested_backend="production")
    assert report.reasons["plain"] == ("policy 'production' excludes it: its tier is reference",)
    assert both.explain(contract(), requested_backend="fast").reasons["plain"] == (
        "policy 'fast' names another backend",
    )
    assert [candidate.excluded_by_policy for candidate in report.candidates] == [False, True]


@pytest.mark.parametrize("policy", ["reference", "plain"])
def test_what_the_policy_excludes_is_no_fallback(policy: str) -> None:
    report = registry(FAST, PLAIN).explain(contract(), requested_backend=policy)
    assert (report.selected_backend, report.was_fallback) == ("plain", False)


def test_passing_over_a_candidate_is_a_fallback() -> None:
    report = registry(("fast", {"dtypes": "fp32"}), PLAIN).explain(contract())
    assert (report.selected_backend, report.was_fallback) == ("plain", True)
    assert report.reasons == {"fast": ("dtype bf16 is not among fp32",), "plain": ()}
    assert "plain, a fallback" in str(report)


def test_another_merge_is_no_fallback() -> None:
    # the contract names the merge, so a backend of another merge was never asked
    tiled = ("tiled", {"merges": "max_sumexp_tiles"})
    report = registry(tiled, PLAIN).explain(contract())
    assert (report.selected_backend, report.was_fallback) == ("plain", False)
    assert report.reasons["tiled"] == ("merge exact_words is not among max_sumexp_tiles",)


def test_a_requested_backend_never_falls_back() -> None:
    both = registry(("fast", {"dtypes": "fp32"}), PLAIN)
    with pytest.raises(UnsupportedError, match="under 'fast'") as caught:
        both.get_logprob_op(contract(), "fast")
    assert caught.value.reasons == {
        "fast": ("dtype bf16 is not among fp32",),
        "plain": ("policy 'fast' names another backend",),
    }


# --- no conforming candidate


def test_unsupported_error_says_everything() -> None:
    single = registry(
        ("single", {"tp_world_sizes": {1}, "dtypes": ["fp32"]}),
        ("padless", {"supports_vocab_padding": False}),
    )
    with pytest.raises(UnsupportedError, match="no logprob backend can serve") as caught:
        single.get_logprob_op(contract(), "reference", device="cuda:3")
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value).splitlines() == [
        "no logprob backend can serve on cuda under 'reference': role train, dtype bf16, tp 2, cp 1, "
        "vocab 6 real / 8 padded",
        "  single (reference): dtype bf16 is not among fp32; tp_world_size 2 is not among 1",
        "  padless (reference): no vocabulary padding, but 2 columns are padding",
        "  change what the reasons name, or request another backend; explain(contract) gives this as data",
    ]
    assert list(caught.value.reasons) == ["single", "padless"]
    assert len(caught.value.reasons["single"]) == 2


def test_unsupported_loss_names_the_mesh() -> None:
    losses = KernelRegistry(builtins=False)
    losses.register_loss_backend("one", loss_capability("one", dp_world_sizes={1}), forbidden)
    with pytest.raises(
        UnsupportedError, match=re.escape("tp 2, cp 1, vocab 6 real / 8 padded, dp 2")
    ) as caught:
        losses.get_loss_op(loss_contract())
    assert caught.value.reasons == {"one": ("dp_world_size 2 is not among 1",)}


def test_an_empty_registry_serves_nothing() -> None:
    empty = KernelRegistry(builtins=False)
    with pytest.raises(UnsupportedError, match="no logprob backend can serve") as caught:
        empty.get_logprob_op(contract())
    assert caught.value.reasons == {}
    with pytest.raises(LogprobContractError, match="or one of the ids that you register"):
        empty.get_logprob_op(contract(), "mine")


def test_without_a_capability_never_selected() -> None:
    silent = KernelRegistry(builtins=False)
    silent.register_logprob_backend("silent", None, forbidden)
    for policy in ("auto", "reference", "silent"):
        with pytest.raises(UnsupportedError, match="silent") as caught:
            silent.get_logprob_op(contract(), policy)
        assert caught.value.reasons == {
            "silent": ("declares no capability for platform cpu (declares: none)",)
        }


def test_missing_modules_are_reasons() -> None:
    looked_for: list[str] = []

    def available(name: str) -> bool:
        looked_for.append(name)
        return name == "there"

    own = KernelRegistry(builtins=False, module_available=available)
    capability = logprob_capability("needy", requires=("there", "gone", "lost"), dtypes="fp32")
    own.register_logprob_backend("needy", capability, forbidden)
    for _ in range(2):
        assert own.explain(contract()).reasons["needy"] == (
            "dtype bf16 is not among fp32",
            "module gone is not installed",
            "module lost is not installed",
        )
    assert looked_for == ["there", "gone", "lost"]
    assert own.missing_modules(capability) == ("gone", "lost")


def test_modules_are_looked_for_without_importing() -> None:
    own = KernelRegistry(builtins=False)
    sys.modules.pop("this", None)
    own.register_logprob_backend(
        "zen", logprob_capability("zen", requires=("this", "no_such_module_")), forbidden
    )
    assert own.explain(contract()).reasons["zen"] == ("module no_such_module_ is not installed",)
    assert "this" not in sys.modules


def test_a_module_without_a_spec_counts_by_its_presence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "specless_", SimpleNamespace(__spec__=None))
    own = registry(("needy", {"requires": ("specless_",)}))
    assert own.explain(contract()).selected_backend == "needy"


# --- registration


def test_order_and_prepend() -> None:
    own = registry(PLAIN, FAST)
    assert own.backend_ids(OpKind.LOGPROB) == ("plain", "fast")
    own.register_logprob_backend("first", logprob_capability("first"), forbidden, prepend=True)
    assert own.backend_ids("logprob") == ("first", "plain", "fast")  # type: ignore[arg-type]
    own.register_logprob_backend("fast", logprob_capability("fast"), forbidden)
    assert own.backend_ids(OpKind.LOGPROB) == ("first", "plain", "fast")
    own.register_logprob_backend("fast", logprob_capability("fast"), forbidden, prepend=True)
    assert own.backend_ids(OpKind.LOGPROB) == ("fast", "first", "plain")
    assert own.explain(contract()).selected_backend == "fast"


def test_registering_again_replaces() -> None:
    own, old, new = KernelRegistry(builtins=False), Loader("old"), Loader("new")
    own.register_logprob_backend("mine", logprob_capability("mine"), old)
    assert own.get_logprob_op(contract()).op is old.op
    own.register_logprob_backend("mine", logprob_capability("mine", dtypes=["fp32", "bf16"]), new)
    resolved = own.get_logprob_op(contract())
    assert resolved.op is new.op
    assert resolved.capability.dtypes == {"fp32", "bf16"}
    assert own.backend_ids(OpKind.LOGPROB) == ("mine",)


def test_platforms_declare_different_capabilities() -> None:
    own = KernelRegistry(builtins=False)
    anywhere, on_cuda = logprob_capability("mine"), logprob_capability("mine", dtypes="bf16")
    own.register_logprob_backend("mine", anywhere, forbidden, platforms=("cpu", "rocm"))
    own.register_logprob_backend("mine", on_cuda, forbidden, platform="cuda")
    wide = contract(dtype="fp32")
    assert own.explain(wide, device="cpu").selected_backend == "mine"
    assert own.explain(wide, device="rocm").selected_backend == "mine"
    assert own.explain(wide, device="cuda").reasons["mine"] == ("dtype fp32 is not among bf16",)
    assert own.capabilities(OpKind.LOGPROB, "mine") == {"cpu": anywhere, "rocm": anywhere, "cuda": on_cuda}
    # replacing one platform leaves the others
    own.register_logprob_backend("mine", anywhere, forbidden, platform="cuda")
    assert own.explain(wide, device="cuda").selected_backend == "mine"


def test_other_platforms_are_no_candidates_and_no_fallback() -> None:
    own = registry(PLAIN)
    own.register_logprob_backend(
        "gpu", logprob_capability("gpu"), forbidden, platforms=["cuda"], prepend=True
    )
    report = own.explain(contract(), device="cpu")
    assert report.reasons["gpu"] == ("declares no capability for platform cpu (declares: cuda)",)
    assert (report.selected_backend, report.was_fallback) == ("plain", False)
    assert own.explain(contract(), device="cuda").selected_backend == "gpu"
    with pytest.raises(UnsupportedError, match="declares no capability for platform cpu"):
        own.get_logprob_op(contract(), "gpu")


REGISTRATIONS: list[tuple[str, dict[str, Any], str]] = [
    ("blank", {"backend": " "}, "register_logprob_backend backend = ' ': must not be blank"),
    ("type", {"backend": None}, "register_logprob_backend backend = None: must be a string, got NoneType"),
    (
        "policy word",
        {"backend": "Auto"},
        "register_logprob_backend backend = 'Auto': must not shadow a policy word",
    ),
    (
        "deterministic",
        {"backend": "deterministic"},
        "must not shadow a policy word (auto, production, reference, determ",
    ),
    (
        "other id",
        {"backend": "yours"},
        "capability.backend_id = 'mine': must be the id that is registered, 'yours'; give",
    ),
    (
        "capability",
        {"capability": loss_capability()},
        "must be of type LogprobBackendCapability, got LossBackendCapability",
    ),
    (
        "loader",
        {"loader": 3},
        "register_logprob_backend loader = 3: must be callable, got int; pass a function without",
    ),
    (
        "loader text",
        {"loader": "module.attribute"},
        "loader = 'module.attribute': must read 'module:attribute'; pass a",
    ),
    ("loader parts", {"loader": "a b:c"}, "loader = 'a b:c': must read 'module:attribute'"),
    (
        "platform",
        {"platform": "tpu"},
        "register_logprob_backend platform = 'tpu': must be one of cpu | cuda | rocm",
    ),
    (
        "platforms",
        {"platforms": ["cpu", "mps"]},
        "register_logprob_backend platforms = 'mps': must be one of cpu | cuda",
    ),
    (
        "no platform",
        {"platforms": []},
        "platforms = []: must name at least one member; choose from cpu | cuda | rocm",
    ),
    (
        "both",
        {"platform": "cpu", "platforms": ["cuda"]},
        "platform = 'cpu': must be left out when platforms is given",
    ),
]


@pytest.mark.parametrize(
    ("changes", "text"), [pytest.param(changes, text, id=name) for name, changes, text in REGISTRATIONS]
)
def test_registration_rules(changes: dict[str, Any], text: str) -> None:
    own = KernelRegistry(builtins=False)
    arguments: dict[str, Any] = {"backend": "mine", "capability": logprob_capability(), "loader": forbidden}
    with pytest.raises(LogprobContractError, match=re.escape(text)):
        own.register_logprob_backend(**arguments | changes)
    assert own.backend_ids(OpKind.LOGPROB) == ()


def test_loss_registration_raises_loss_errors() -> None:
    own = KernelRegistry(builtins=False)
    with pytest.raises(LossContractError, match="register_loss_backend backend = 'auto'"):
        own.register_loss_backend("auto", loss_capability(), forbidden)
    with pytest.raises(LossContractError, match="must be of type LossBackendCapability"):
        own.register_loss_backend("mine", logprob_capability(), forbidden)  # type: ignore[arg-type]


def test_ids_are_stripped_everywhere() -> None:
    own = KernelRegistry(builtins=False)
    own.register_logprob_backend("  mine ", logprob_capability(" mine"), forbidden)
    assert own.explain(contract(), requested_backend=" mine ").selected_backend == "mine"


def test_lookups_of_the_unknown() -> None:
    with pytest.raises(LogprobContractError, match=re.escape("op = 'sum': must be one of logprob | loss")):
        kernel_registry.backend_ids("sum")  # type: ignore[arg-type]
    text = "backend = 'exact': names no registered logprob backend; pass one of exact_numba, exact_torch"
    with pytest.raises(LogprobContractError, match=re.escape(text)):
        kernel_registry.capabilities(OpKind.LOGPROB, "exact")


# --- devices


@pytest.mark.parametrize(
    ("device", "platform"),
    [
        (None, "cpu"),
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
        ("cuda", "cuda"),
        ("CUDA:1", "cuda"),
        (torch.device("cuda", 3), "cuda"),
        ("rocm", "rocm"),
        ("hip:0", "rocm"),
    ],
    ids=repr,
)
def test_devices(device: object, platform: str) -> None:
    assert registry(PLAIN).explain(contract(), device=device).platform is Platform(platform)


def test_cuda_of_a_rocm_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert registry(PLAIN).explain(contract(), device="cuda:0").platform is Platform.ROCM
    monkeypatch.delitem(sys.modules, "torch")
    assert registry(PLAIN).explain(contract(), device="cuda:0").platform is Platform.CUDA


@pytest.mark.parametrize("device", ["mps", "meta", "tpu:0", 0, ""], ids=repr)
def test_unknown_devices(device: object) -> None:
    with pytest.raises(
        LogprobContractError, match=re.escape(f"device = {device!r}: must be on one of cpu | cuda | rocm")
    ):
        registry(PLAIN).explain(contract(), device=device)
    with pytest.raises(LossContractError, match="must be on one of cpu"):
        kernel_registry.get_loss_op(loss_contract(), device=device)


# --- loading


def test_loaded_once_per_platform() -> None:
    own, loader = KernelRegistry(builtins=False), Loader()
    own.register_logprob_backend("mine", logprob_capability("mine"), loader)
    first, second = own.get_logprob_op(contract()), own.get_logprob_op(contract(dtype="fp32"), device="cpu")
    assert first.op is second.op is loader.op
    assert loader.calls == 1
    own.get_logprob_op(contract(), device="cuda")
    assert loader.calls == 2


def test_only_the_selected_backend_is_loaded() -> None:
    own, loader = registry(("fast", {"dtypes": "fp32"})), Loader()
    own.register_logprob_backend("plain", logprob_capability("plain"), loader)
    own.register_logprob_backend("spare", logprob_capability("spare"), forbidden)
    assert own.get_logprob_op(contract()).backend_id == "plain"


def test_loaders_by_name() -> None:
    own = KernelRegistry(builtins=False)
    own.register_loss_backend("mine", loss_capability("mine"), "collections:OrderedDict")
    assert own.get_loss_op(loss_contract()).op == {}


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ("no_such_module_:load", "No module named 'no_such_module_'"),
        ("collections:no_such_loader", "has no attribute 'no_such_loader'"),
        (lambda: None, "its loader returned None instead of the op"),
    ],
    ids=["module", "attribute", "nothing"],
)
def test_a_broken_loader_is_an_error_and_no_fallback(loader: Any, text: str) -> None:
    own = KernelRegistry(builtins=False)
    own.register_logprob_backend("broken", logprob_capability("broken"), loader)
    own.register_logprob_backend("spare", logprob_capability("spare"), forbidden)
    with pytest.raises(
        UnsupportedError, match="logprob backend broken was selected but cannot be loaded"
    ) as caught:
        own.get_logprob_op(contract())
    assert text in str(caught.value)
    assert text in caught.value.reasons["broken"][0]


def test_errors_inside_a_loader_come_through() -> None:
    def loader() -> object:
        raise ZeroDivisionError("inside")

    own = registry(PLAIN, loader=loader)
    with pytest.raises(ZeroDivisionError, match="inside"):
        own.get_logprob_op(contract())


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
        (contract(), "cuda", "exact_torch"),
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
