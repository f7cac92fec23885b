"""Every rule of the registry: policy before capability, complete reasons, lazy loaders."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_engine.errors import LogprobContractError, LossContractError, UnsupportedError
from rl_engine.registry import (
    KernelRegistry,
    OpKind,
    Platform,
    kernel_registry,
)
from tests.contracts.examples import (
    FAST,
    PLAIN,
    Loader,
    contract,
    forbidden,
    logprob_capability,
    loss_capability,
    loss_contract,
    registry,
)

POLICY_ERROR = "pass auto, production, reference, or one of "


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
    text = "backend = 'exact': names no registered logprob backend; pass one of exact_triton, exact_numba, "
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
