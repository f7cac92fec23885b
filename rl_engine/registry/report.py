"""The answer of a dispatch as data: what was asked, who was considered, and what stands against each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rl_engine.contracts._checks import LOGPROB_RULES, LOSS_RULES, Rules
from rl_engine.contracts.logprob import ImplementationKind, LogprobBackendCapability, LogprobContract
from rl_engine.contracts.loss import GRPOLossContract, LossBackendCapability

__all__ = [
    "CandidateReport",
    "Capability",
    "Contract",
    "DispatchReport",
    "OpKind",
    "Platform",
    "unsupported_text",
]

Contract = LogprobContract | GRPOLossContract
Capability = LogprobBackendCapability | LossBackendCapability


class OpKind(StrEnum):
    """The two ops that backends are registered for."""

    LOGPROB = "logprob"
    LOSS = "loss"

    @property
    def rules(self) -> Rules:
        """The validators that raise this op's contract error."""
        return LOGPROB_RULES if self is OpKind.LOGPROB else LOSS_RULES

    @property
    def contract_type(self) -> type[Contract]:
        """The contract that asks for this op."""
        return LogprobContract if self is OpKind.LOGPROB else GRPOLossContract

    @property
    def capability_type(self) -> type[Capability]:
        """The capability that a backend of this op declares."""
        return LogprobBackendCapability if self is OpKind.LOGPROB else LossBackendCapability


class Platform(StrEnum):
    """Where a backend runs."""

    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"


@dataclass(frozen=True, slots=True)
class CandidateReport:
    """One backend's standing towards one contract.

    Attributes:
        backend_id: Its name.
        capability: What it declares for the platform; None where it declares nothing.
        excluded_by_policy: Whether the caller's own policy rules it out.
        reasons: Everything that stands against it; empty where it could serve.
        implements: Whether it computes the merge that the contract names at all.
    """

    backend_id: str
    capability: Capability | None
    excluded_by_policy: bool
    reasons: tuple[str, ...]
    implements: bool = True

    @property
    def implementation_kind(self) -> ImplementationKind | None:
        """Its tier, where it declares one."""
        return None if self.capability is None else self.capability.implementation_kind

    def to_dict(self) -> dict[str, Any]:
        """The standing as JSON types."""
        kind = self.implementation_kind
        return {
            "backend_id": self.backend_id,
            "implementation_kind": None if kind is None else str(kind),
            "excluded_by_policy": self.excluded_by_policy,
            "reasons": list(self.reasons),
            "capability": None if self.capability is None else self.capability.to_dict(),
        }


@dataclass(frozen=True, slots=True)
class DispatchReport:
    """How a contract was, or would be, dispatched: the answer of `explain`, and the provenance of an op.

    Attributes:
        op: What was asked for.
        contract: The contract.
        requested_backend: The caller's policy or backend id.
        platform: The platform that was resolved from the device.
        selected_backend: The backend that serves; None where none can.
        was_fallback: Whether a backend of higher priority was passed over for a reason that is not the
            caller's own: it is admitted by the policy, declared for the platform and computes the contract's
            merge, but cannot serve.
        candidates: Every registered backend, in the order of priority.
    """

    op: OpKind
    contract: Contract
    requested_backend: str
    platform: Platform
    selected_backend: str | None
    was_fallback: bool
    candidates: tuple[CandidateReport, ...]

    @property
    def reasons(self) -> dict[str, tuple[str, ...]]:
        """Everything that stands against each candidate, by backend id."""
        return {candidate.backend_id: candidate.reasons for candidate in self.candidates}

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types; reading it computes the digest of a mask that the contract holds."""
        return {
            "op": str(self.op),
            "summary": str(self.contract),
            "contract": self.contract.to_dict(),
            "requested_backend": self.requested_backend,
            "platform": str(self.platform),
            "selected_backend": self.selected_backend,
            "was_fallback": self.was_fallback,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
        }

    def __str__(self) -> str:
        chosen = self.selected_backend or "nobody"
        fallback = ", a fallback" if self.was_fallback else ""
        head = f"{self.op} on {self.platform} under '{self.requested_backend}': {chosen}{fallback}"
        return "\n".join([head, f"  asked: {self.contract}", *self.candidate_lines()])

    def candidate_lines(self) -> list[str]:
        """One line for each candidate: its verdict, or everything that stands against it."""
        lines: list[str] = []
        for candidate in self.candidates:
            kind = candidate.implementation_kind or "undeclared"
            verdict = "selected" if candidate.backend_id == self.selected_backend else "could serve"
            lines.append(f"  {candidate.backend_id} ({kind}): {'; '.join(candidate.reasons) or verdict}")
        return lines


def unsupported_text(report: DispatchReport) -> str:
    """What `UnsupportedError` says: the contract as dispatch sees it, each candidate with its reasons."""
    contract = report.contract
    logprob = contract.logprob if isinstance(contract, GRPOLossContract) else contract
    shards = logprob.sharding
    asked = (
        f"role {logprob.role}, dtype {logprob.dtype}, tp {shards.tp_world_size}, cp {shards.cp_world_size}, "
        f"vocab {shards.real_vocab_size} real / {shards.padded_vocab_size} padded"
    )
    if isinstance(contract, GRPOLossContract):
        asked += f", dp {contract.sharding.dp_world_size}"
    head = (
        f"no {report.op} backend can serve on {report.platform} under '{report.requested_backend}': {asked}"
    )
    remedy = "change what the reasons name, or request another backend; explain(contract) gives this as data"
    return "\n".join([head, *report.candidate_lines(), f"  {remedy}"])
