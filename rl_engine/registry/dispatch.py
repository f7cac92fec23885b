"""Capabilities against contracts: the registry, which loads a backend only when it is selected.

A policy is judged before capabilities: `auto` admits every backend, `production` and `reference` one tier,
and a backend id itself alone. Of the admitted ones, the first that nothing stands against is taken, in the
order of priority.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar, cast

from rl_engine.contracts._checks import LOGPROB_RULES, POLICY_WORDS, Rules
from rl_engine.contracts.logprob import LogprobBackendCapability, LogprobContract
from rl_engine.contracts.loss import GRPOLossContract, LossBackendCapability
from rl_engine.errors import UnsupportedError
from rl_engine.registry.builtins import LOGPROB_BACKENDS, LOSS_BACKENDS
from rl_engine.registry.report import (
    CandidateReport,
    Capability,
    Contract,
    DispatchReport,
    OpKind,
    Platform,
    unsupported_text,
)

__all__ = ["KernelRegistry", "ResolvedOp", "kernel_registry"]

Loader = str | Callable[[], Any]
C = TypeVar("C", LogprobBackendCapability, LossBackendCapability)


@dataclass(frozen=True, slots=True)
class ResolvedOp(Generic[C]):
    """An op with what it declares and how it was chosen.

    Attributes:
        op: The op, as its loader returned it; the same object for every call on one platform.
        capability: What its backend declares.
        provenance: How it was chosen.
    """

    op: Any
    capability: C
    provenance: DispatchReport

    @property
    def backend_id(self) -> str:
        """The name of the backend."""
        return self.capability.backend_id


@dataclass(frozen=True, slots=True)
class _Entry:
    capability: Capability | None
    loader: Loader


@dataclass(slots=True)
class _Table:
    """The backends of one op: entries by id and platform, in the order of priority."""

    entries: dict[str, dict[Platform, _Entry]] = field(default_factory=dict[str, dict[Platform, _Entry]])
    loaded: dict[tuple[str, Platform], Any] = field(default_factory=dict[tuple[str, Platform], Any])


def _module_available(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module that was put into sys.modules by hand may have no spec
        return name in sys.modules


class KernelRegistry:
    """Backends of the two ops, with what they declare.

    Args:
        builtins: Whether the backends of this package are registered.
        module_available: Tells whether a required top-level module is installed; without importing it by
            default.

    Example:
        >>> from rl_engine.contracts import LogprobContract, ReductionSpec, ShardingSpec
        >>> shards, merge = ShardingSpec.even(32000, 0, 4), ReductionSpec.tiled()
        >>> contract = LogprobContract(role="train", dtype="bf16", sharding=shards, reduction=merge)
        >>> report = KernelRegistry().explain(contract)
        >>> report.selected_backend
        'tiled_torch'
        >>> report.reasons["naive_torch"][0]
        'merge max_sumexp_tiles is not among shard_lse'
    """

    def __init__(
        self, *, builtins: bool = True, module_available: Callable[[str], bool] = _module_available
    ) -> None:
        self._tables = {op: _Table() for op in OpKind}
        self._module_available = module_available
        self._available: dict[str, bool] = {}
        if builtins:
            for capability, loader, platforms in LOGPROB_BACKENDS:
                self.register_logprob_backend(capability.backend_id, capability, loader, platforms=platforms)
            for declared, loader, platforms in LOSS_BACKENDS:
                self.register_loss_backend(declared.backend_id, declared, loader, platforms=platforms)

    def register_logprob_backend(
        self,
        backend: str,
        capability: LogprobBackendCapability | None,
        loader: Loader,
        *,
        platform: str | None = None,
        platforms: Iterable[str] | None = None,
        prepend: bool = False,
    ) -> None:
        """Declare a logprob backend; nothing is loaded.

        Args:
            backend: Its id; surrounding blanks are dropped.
            capability: What it can do on these platforms, under the same id. None keeps it from ever being
                selected.
            loader: Returns the op when called without arguments, or "module:attribute" naming such a
                callable.
            platform: The one platform that this declaration is for.
            platforms: Several platforms instead; cpu, cuda and rocm where neither is given.
            prepend: Whether it takes the first place in the order of priority, rather than the last. A
                backend that is registered again keeps its place otherwise.

        Raises:
            LogprobContractError: The id is blank or a policy word, the capability is of another type or bears
                another id, the loader is neither callable nor "module:attribute", or a platform is unknown.
        """
        self._register(OpKind.LOGPROB, backend, capability, loader, platform, platforms, prepend)

    def register_loss_backend(
        self,
        backend: str,
        capability: LossBackendCapability | None,
        loader: Loader,
        *,
        platform: str | None = None,
        platforms: Iterable[str] | None = None,
        prepend: bool = False,
    ) -> None:
        """Declare a loss backend; the arguments are those of `register_logprob_backend`.

        Raises:
            LossContractError: As for `register_logprob_backend`.
        """
        self._register(OpKind.LOSS, backend, capability, loader, platform, platforms, prepend)

    def get_logprob_op(
        self, contract: LogprobContract, requested_backend: str = "auto", device: object = None
    ) -> ResolvedOp[LogprobBackendCapability]:
        """The logprob op that serves a contract.

        Args:
            contract: What is asked.
            requested_backend: auto | production | reference, in any case, or a backend id as it was
                registered.
            device: A torch device or its name; the CPU where None.

        Returns:
            The op, its backend's capability, and the report of how it was chosen.

        Raises:
            LogprobContractError: The policy is blank, no string, "deterministic" or unknown, or the contract
                is no logprob contract.
            UnsupportedError: No admitted backend can serve; the reasons of all candidates are in the text and
                in `.reasons`.
        """
        return cast(
            "ResolvedOp[LogprobBackendCapability]",
            self._get(OpKind.LOGPROB, contract, requested_backend, device),
        )

    def get_loss_op(
        self, contract: GRPOLossContract, requested_backend: str = "auto", device: object = None
    ) -> ResolvedOp[LossBackendCapability]:
        """The loss op that serves a contract; the arguments are those of `get_logprob_op`.

        Raises:
            LossContractError: As for `get_logprob_op`.
            UnsupportedError: No admitted backend can serve.
        """
        return cast(
            "ResolvedOp[LossBackendCapability]", self._get(OpKind.LOSS, contract, requested_backend, device)
        )

    def explain(
        self, contract: Contract, *, device: object = None, requested_backend: str = "auto"
    ) -> DispatchReport:
        """How a contract of either kind would be dispatched, without loading a backend.

        Args:
            contract: What is asked.
            device: A torch device or its name; the CPU where None.
            requested_backend: As for `get_logprob_op`.

        Returns:
            Every candidate with everything that stands against it, and which one would be selected, if any.

        Raises:
            ContractError: The policy is blank, no string, "deterministic" or unknown, or the contract is
                none.
        """
        op = OpKind.LOSS if isinstance(contract, GRPOLossContract) else OpKind.LOGPROB
        return self._explain(op, contract, requested_backend, device)

    def backend_ids(self, op: OpKind) -> tuple[str, ...]:
        """The registered backends of an op, "logprob" or "loss", in the order of priority."""
        return tuple(self._tables[LOGPROB_RULES.member("op", op, OpKind)].entries)

    def capabilities(self, op: OpKind, backend: str) -> dict[str, Capability | None]:
        """What a backend of an op declares, by platform.

        Raises:
            ContractError: No such backend is registered.
        """
        kind = LOGPROB_RULES.member("op", op, OpKind)
        entries = self._tables[kind].entries
        if backend not in entries:
            remedy = f"pass one of {', '.join(entries)}"
            kind.rules.fail("backend", backend, f"names no registered {kind} backend", remedy)
        return {str(platform): entry.capability for platform, entry in entries[backend].items()}

    def missing_modules(self, capability: Capability) -> tuple[str, ...]:
        """The modules that a capability requires and that are not installed here; each is looked for once."""
        for name in capability.requires:
            if name not in self._available:  # looking for a module costs more than the rest of a dispatch
                self._available[name] = self._module_available(name)
        return tuple(name for name in capability.requires if not self._available[name])

    def _register(
        self,
        op: OpKind,
        backend: str,
        capability: Capability | None,
        loader: Loader,
        platform: str | None,
        platforms: Iterable[str] | None,
        prepend: bool,
    ) -> None:
        rules, name = op.rules, f"register_{op}_backend"
        backend_id = rules.backend_id(f"{name} backend", backend)
        if capability is not None:
            rules.instance(f"{name} capability", capability, op.capability_type)
            if capability.backend_id != backend_id:
                rule = f"must be the id that is registered, {backend_id!r}"
                rules.fail(
                    f"{name} capability.backend_id", capability.backend_id, rule, "give both the same id"
                )
        _check_loader(rules, f"{name} loader", loader)
        table, entry = self._tables[op], _Entry(capability, loader)
        places = _platforms(rules, name, platform, platforms)
        # Nothing is changed before everything is checked.
        by_platform = table.entries.setdefault(backend_id, {})
        for place in places:
            by_platform[place] = entry
            table.loaded.pop((backend_id, place), None)
        if prepend:
            table.entries = {backend_id: by_platform, **table.entries}

    def _explain(self, op: OpKind, contract: Contract, policy: object, device: object) -> DispatchReport:
        rules, table = op.rules, self._tables[op]
        if not isinstance(contract, op.contract_type):
            wanted, got = op.contract_type.__name__, type(contract).__name__
            nested = isinstance(contract, GRPOLossContract)
            remedy = "pass contract.logprob" if nested else f"build a {wanted}"
            rules.fail("contract", contract, f"must be of type {wanted}, got {got}", remedy)
        requested = self._policy(op, policy)
        platform = _platform_of(rules, device)
        candidates = tuple(
            self._candidate(contract, requested, platform, backend_id, entries)
            for backend_id, entries in table.entries.items()
        )
        selected = next((place for place, candidate in enumerate(candidates) if not candidate.reasons), None)
        passed_over = candidates[:selected]
        was_fallback = selected is not None and any(
            not candidate.excluded_by_policy and candidate.capability is not None and candidate.implements
            for candidate in passed_over
        )
        backend_id = None if selected is None else candidates[selected].backend_id
        return DispatchReport(op, contract, requested, platform, backend_id, was_fallback, candidates)

    def _candidate(
        self,
        contract: Contract,
        requested: str,
        platform: Platform,
        backend_id: str,
        entries: dict[Platform, _Entry],
    ) -> CandidateReport:
        entry = entries.get(platform)
        capability = None if entry is None else entry.capability
        excluded = _excluded_by_policy(requested, backend_id, capability)
        if excluded is not None:
            return CandidateReport(backend_id, capability, True, (excluded,))
        if capability is None:
            declared = ", ".join(place for place, other in entries.items() if other.capability is not None)
            reason = f"declares no capability for platform {platform} (declares: {declared or 'none'})"
            return CandidateReport(backend_id, None, False, (reason,))
        asked = cast(Any, contract)
        missing = (f"module {name} is not installed" for name in self.missing_modules(capability))
        reasons = (*capability.incompatibilities(asked), *missing)
        return CandidateReport(backend_id, capability, False, reasons, capability.implements(asked))

    def _policy(self, op: OpKind, policy: object) -> str:
        rules, name, known = op.rules, "requested_backend", self.backend_ids(op)
        remedy = (
            f"pass auto, production, reference, or one of {', '.join(known) or 'the ids that you register'}"
        )
        if not isinstance(policy, str):
            rules.fail(name, policy, f"must be a string, got {type(policy).__name__}", remedy)
        text = policy.strip()
        if not text:
            rules.fail(name, policy, "must not be blank", remedy)
        word = text.lower()
        if word == "deterministic":
            rule = "is no policy, because determinism is asked for by the contract and never by dispatch"
            spec = "ReductionSpec" if op is OpKind.LOGPROB else "LossReductionSpec"
            rules.fail(
                name, policy, rule, f"pass {spec}(determinism_scope=...) and leave the backend to 'auto'"
            )
        if word in POLICY_WORDS:
            return word
        if text not in known:
            close = difflib.get_close_matches(word, known, n=1)
            hint = f", did you mean {close[0]!r}?" if close else ""
            rules.fail(name, policy, f"names no registered {op} backend{hint}", remedy)
        return text

    def _get(self, op: OpKind, contract: Contract, policy: object, device: object) -> ResolvedOp[Any]:
        report = self._explain(op, contract, policy, device)
        if report.selected_backend is None:
            raise UnsupportedError(unsupported_text(report), reasons=report.reasons)
        backend_id, platform, table = report.selected_backend, report.platform, self._tables[op]
        entry = table.entries[backend_id][platform]
        key = (backend_id, platform)
        if key not in table.loaded:
            table.loaded[key] = _load(op, backend_id, entry.loader)
        return ResolvedOp(table.loaded[key], cast(Any, entry.capability), report)


def _excluded_by_policy(requested: str, backend_id: str, capability: Capability | None) -> str | None:
    """Why the caller's own policy rules a backend out; the one place where either op judges a policy."""
    if requested == "auto":
        return None
    if requested in POLICY_WORDS:
        if capability is None or capability.implementation_kind == requested:
            return None
        return f"policy '{requested}' excludes it: its tier is {capability.implementation_kind}"
    return None if requested == backend_id else f"policy '{requested}' names another backend"


def _platforms(
    rules: Rules, name: str, one: str | None, several: Iterable[str] | None
) -> tuple[Platform, ...]:
    if one is not None and several is not None:
        rules.fail(f"{name} platform", one, "must be left out when platforms is given", "pass one of them")
    if one is not None:
        return (rules.member(f"{name} platform", one, Platform),)
    if several is None:
        return tuple(Platform)
    chosen = rules.members(f"{name} platforms", several, Platform)
    return tuple(platform for platform in Platform if platform in chosen)


def _platform_of(rules: Rules, device: object) -> Platform:
    """The platform of a device, read by its name; a CUDA device of a ROCm build of torch is ROCm."""
    if device is None:
        return Platform.CPU
    name = str(device).strip().lower().partition(":")[0]
    if name == "cuda":
        version = getattr(sys.modules.get("torch"), "version", None)
        return Platform.CUDA if getattr(version, "hip", None) is None else Platform.ROCM
    if name in ("rocm", "hip"):
        return Platform.ROCM
    if name != "cpu":
        rules.fail("device", device, "must be on one of cpu | cuda | rocm", "pass the device of the logits")
    return Platform.CPU


def _check_loader(rules: Rules, name: str, loader: object) -> None:
    remedy = "pass a function without arguments that returns the op, or its 'module:attribute'"
    if isinstance(loader, str):
        module, _, attribute = loader.partition(":")
        if not attribute.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            rules.fail(name, loader, "must read 'module:attribute'", remedy)
    elif not callable(loader):
        rules.fail(name, loader, f"must be callable, got {type(loader).__name__}", remedy)


def _load(op: OpKind, backend_id: str, loader: Loader) -> Any:
    try:
        if isinstance(loader, str):
            module, _, attribute = loader.partition(":")
            loader = cast("Callable[[], Any]", getattr(importlib.import_module(module), attribute))
        loaded = loader()
    except (ImportError, AttributeError) as error:
        text = f"{op} backend {backend_id} was selected but cannot be loaded: {error}"
        raise UnsupportedError(
            f"{text}; mend it, or request another backend", {backend_id: (str(error),)}
        ) from error
    if loaded is None:
        reason = "its loader returned None instead of the op"
        text = f"{op} backend {backend_id} was selected but cannot be loaded: {reason}"
        raise UnsupportedError(f"{text}; return the op from the loader", {backend_id: (reason,)})
    return loaded


#: The registry that the ops and the front door use.
kernel_registry: Final = KernelRegistry()
