"""What is asked of a distributed GRPO loss: the contract, which nests the logprob contract it stands on.

`GRPOLossContract` is what a caller asks, `LossBackendCapability` is what a backend offers, and
`LossBackendCapability.incompatibilities` is every reason why the two do not meet. The parts live in
`objective` and `batch`; all names are importable from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rl_engine.contracts._capability import ImplementationKind as ImplementationKind
from rl_engine.contracts._capability import (
    closed_scopes,
    listing,
    outside,
    size_listing,
    strongest_scope,
    too_strong,
)
from rl_engine.contracts._checks import LOSS_RULES
from rl_engine.contracts._json import fingerprint, from_mapping, to_mapping
from rl_engine.contracts.batch import LossShardingSpec as LossShardingSpec
from rl_engine.contracts.context import ContextSplit as ContextSplit
from rl_engine.contracts.logprob import LogprobContract, LogprobRole, MeshAxis
from rl_engine.contracts.objective import MAX_LOG_RATIO_GUARD as MAX_LOG_RATIO_GUARD
from rl_engine.contracts.objective import AdvantageNormalizer as AdvantageNormalizer
from rl_engine.contracts.objective import AdvantageReplication as AdvantageReplication
from rl_engine.contracts.objective import AdvantageSpec as AdvantageSpec
from rl_engine.contracts.objective import AdvantageVariance as AdvantageVariance
from rl_engine.contracts.objective import ClipSpec as ClipSpec
from rl_engine.contracts.objective import DataParallelReduction as DataParallelReduction
from rl_engine.contracts.objective import KLEstimator as KLEstimator
from rl_engine.contracts.objective import LossReductionSpec as LossReductionSpec
from rl_engine.contracts.objective import ObjectiveSpec as ObjectiveSpec
from rl_engine.contracts.objective import OnEmpty as OnEmpty
from rl_engine.contracts.objective import TokenNormalizer as TokenNormalizer
from rl_engine.contracts.plan import BatchPlan as BatchPlan
from rl_engine.contracts.reduction import AccDtype, DeterminismScope

__all__ = [
    "MAX_LOG_RATIO_GUARD",
    "AdvantageNormalizer",
    "AdvantageReplication",
    "AdvantageSpec",
    "AdvantageVariance",
    "BatchPlan",
    "ClipSpec",
    "ContextSplit",
    "DataParallelReduction",
    "GRPOLossContract",
    "ImplementationKind",
    "KLEstimator",
    "LossBackendCapability",
    "LossOutputSpec",
    "LossReductionSpec",
    "LossReplication",
    "LossShardingSpec",
    "ObjectiveSpec",
    "OnEmpty",
    "TokenNormalizer",
]


class LossReplication(StrEnum):
    """Who holds the result: every rank of the mesh."""

    MESH = "mesh"


@dataclass(frozen=True, slots=True)
class LossOutputSpec:
    """What comes back: fp32 scalars and per-sequence totals, the same on every rank of the mesh.

    Attributes:
        dtype: Only `fp32`.
        replicated_over: Only `mesh`.
    """

    dtype: AccDtype = AccDtype.FP32
    replicated_over: LossReplication = LossReplication.MESH

    def __post_init__(self) -> None:
        rules, put = LOSS_RULES, object.__setattr__
        put(self, "dtype", rules.member("LossOutputSpec.dtype", self.dtype, AccDtype))
        replicated = rules.member("LossOutputSpec.replicated_over", self.replicated_over, LossReplication)
        put(self, "replicated_over", replicated)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> LossOutputSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOSS_RULES)


@dataclass(frozen=True, slots=True)
class GRPOLossContract:
    """A request for a GRPO loss over a mesh. Hashable; built once per shape of a run.

    Attributes:
        logprob: What is asked of the policy's logprobs; its role is `train`.
        sharding: Who holds which sequences, and the groups.
        objective: The formula of a token.
        reduction: How token terms become one number.
        output: What comes back.

    Raises:
        LossContractError: A part has the wrong type, or two parts contradict each other: token count, CP
            axis, determinism scope, role, or a group too small for its advantage formula.

    Example:
        >>> from rl_engine.contracts import ShardingSpec
        >>> logprob = LogprobContract(role="train", dtype="bf16", sharding=ShardingSpec.even(151936))
        >>> batch = LossShardingSpec.even(8, padded_seq_len=16, group_size=4)
        >>> GRPOLossContract(logprob, batch).objective.clip.clip_eps_low
        0.2
    """

    logprob: LogprobContract
    sharding: LossShardingSpec
    objective: ObjectiveSpec = field(default_factory=ObjectiveSpec)
    reduction: LossReductionSpec = field(default_factory=LossReductionSpec)
    output: LossOutputSpec = field(default_factory=LossOutputSpec)

    def __post_init__(self) -> None:
        rules, name = LOSS_RULES, "GRPOLossContract"
        rules.instance(f"{name}.logprob", self.logprob, LogprobContract)
        rules.instance(f"{name}.sharding", self.sharding, LossShardingSpec)
        rules.instance(f"{name}.objective", self.objective, ObjectiveSpec)
        rules.instance(f"{name}.reduction", self.reduction, LossReductionSpec)
        rules.instance(f"{name}.output", self.output, LossOutputSpec)
        self._check_logprob()
        self._check_groups()

    def _check_logprob(self) -> None:
        rules, name, logprob, shards = LOSS_RULES, "GRPOLossContract.logprob", self.logprob, self.sharding
        if logprob.role is not LogprobRole.TRAIN:
            rule = "must be train, because a loss is differentiated"
            rules.fail(
                f"{name}.role", logprob.role, rule, "pass role='train'; torch.no_grad() skips the gradients"
            )
        if logprob.num_tokens is not None and logprob.num_tokens != shards.num_local_tokens:
            slots = shards.num_local_tokens
            rule = (
                f"must be num_local_sequences × padded_seq_len = {shards.num_local_sequences} × "
                f"{shards.padded_seq_len} = {slots}"
                if shards.is_contiguous
                else f"must be the {slots} slots of this rank's segments"
            )
            rules.fail(
                f"{name}.mask.num_tokens", logprob.num_tokens, rule, "pass the mask of this rank's sequences"
            )
        for part in ("cp_rank", "cp_world_size"):
            mine, theirs = getattr(logprob.sharding, part), getattr(shards, part)
            if mine != theirs:
                rule = f"differs from sharding.{part} = {theirs}"
                rules.fail(f"{name}.sharding.{part}", mine, rule, f"pass the same {part} to both shardings")
        asked, kept = self.reduction.determinism_scope, logprob.reduction.determinism_scope
        if not kept.covers(asked):
            rule = f"is stronger than logprob.reduction.determinism_scope = {kept}"
            remedy = f"pass LossReductionSpec(determinism_scope='{kept}'), or a stronger logprob contract"
            rules.fail("GRPOLossContract.reduction.determinism_scope", asked, rule, remedy)

    def _check_groups(self) -> None:
        advantage, sizes = self.objective.advantage, self.sharding.group_sizes
        if min(sizes) < advantage.min_group_size:
            group = sizes.index(min(sizes))
            rule = (
                f"group {group} holds {sizes[group]} sequence, but advantages {advantage.normalizer} need two"
            )
            remedy = "pass AdvantageSpec(normalizer='mean_only'), or larger groups"
            LOSS_RULES.fail(
                "GRPOLossContract.sharding.group_boundaries", self.sharding.group_boundaries, rule, remedy
            )

    def cross_rank_fingerprint(self, axis: MeshAxis | None = None) -> str:
        """SHA-256 of all that must agree between ranks before the first collective.

        Args:
            axis: `tp` for ranks that hold the same tokens and other columns: everything but tp_rank. `dp`,
                `cp` and None are the same: what must agree over the whole mesh, so no rank at all, and
                neither the padded length nor the segments nor the number of tokens nor the mask. It does not
                depend on tp_rank, so that TP siblings make the same claim to their DP peers.

        Returns:
            64 hexadecimal digits.
        """
        return fingerprint(self.agreement_fields(axis))

    def agreement_fields(self, axis: MeshAxis | None = None) -> dict[str, Any]:
        """What `cross_rank_fingerprint` hashes: compare two ranks' to see what they disagree on."""
        name = "GRPOLossContract.cross_rank_fingerprint axis"
        along = None if axis is None else LOSS_RULES.member(name, axis, MeshAxis)
        sharding = self.sharding.to_dict()
        if along is not MeshAxis.TP:
            for local in ("dp_rank", "cp_rank", "padded_seq_len"):
                del sharding[local]
            sharding["segments"] = None if self.sharding.is_contiguous else "each rank's own"
        return {
            "contract": "grpo_loss",
            "logprob": self.logprob.agreement_fields(along),
            "sharding": sharding,
            "objective": self.objective.to_dict(),
            "reduction": self.reduction.to_dict(),
            "output": self.output.to_dict(),
        }

    def __str__(self) -> str:
        return f"grpo {self.sharding} | {self.objective} | {self.reduction} | {self.logprob}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, parts nested."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> GRPOLossContract:
        """The contract that `to_dict` described."""
        parts = {
            "logprob": LogprobContract.from_dict,
            "sharding": LossShardingSpec.from_dict,
            "objective": ObjectiveSpec.from_dict,
            "reduction": LossReductionSpec.from_dict,
            "output": LossOutputSpec.from_dict,
        }
        return from_mapping(cls, data, LOSS_RULES, parts)


@dataclass(frozen=True, slots=True)
class LossBackendCapability:
    """What a loss backend can do, beyond the logprob backend that it stands on.

    Attributes:
        backend_id: Its name, under the rules of `LogprobBackendCapability.backend_id`.
        token_normalizers: Ways to turn token sums into a loss.
        kl_estimators: KL estimators.
        advantage_normalizers: Group advantages.
        determinism_scopes: The strongest scope, or several; the weaker ones are added.
        dp_world_sizes: DP degrees that it serves; None for any.
        cp_world_sizes: CP degrees that it serves; None for any.
        supports_variable_group_sizes: Whether groups may differ in size.
        supports_asymmetric_clip: Whether the two clip bounds may differ.
        data_parallel_reductions: How the trainer's gradients may be reduced over DP.
        implementation_kind: Its tier.
        requires: Top-level modules that must be installed; the registry looks for them.

    Raises:
        LossContractError: A field is outside its closed set, empty or of the wrong type.
    """

    backend_id: str
    token_normalizers: frozenset[TokenNormalizer]
    kl_estimators: frozenset[KLEstimator]
    advantage_normalizers: frozenset[AdvantageNormalizer]
    determinism_scopes: frozenset[DeterminismScope] = frozenset({DeterminismScope.FIXED_TOPOLOGY})
    dp_world_sizes: frozenset[int] | None = None
    cp_world_sizes: frozenset[int] | None = None
    supports_variable_group_sizes: bool = True
    supports_asymmetric_clip: bool = True
    data_parallel_reductions: frozenset[DataParallelReduction] = frozenset(DataParallelReduction)
    implementation_kind: ImplementationKind = ImplementationKind.REFERENCE
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules, put, name = LOSS_RULES, object.__setattr__, "LossBackendCapability"
        put(self, "backend_id", rules.backend_id(f"{name}.backend_id", self.backend_id))
        for part, kind in (
            ("token_normalizers", TokenNormalizer),
            ("kl_estimators", KLEstimator),
            ("advantage_normalizers", AdvantageNormalizer),
            ("data_parallel_reductions", DataParallelReduction),
        ):
            put(self, part, rules.members(f"{name}.{part}", getattr(self, part), kind))
        scopes = closed_scopes(rules, f"{name}.determinism_scopes", self.determinism_scopes)
        put(self, "determinism_scopes", scopes)
        put(self, "dp_world_sizes", rules.sizes(f"{name}.dp_world_sizes", self.dp_world_sizes))
        put(self, "cp_world_sizes", rules.sizes(f"{name}.cp_world_sizes", self.cp_world_sizes))
        tier = rules.member(f"{name}.implementation_kind", self.implementation_kind, ImplementationKind)
        put(self, "implementation_kind", tier)
        put(self, "requires", rules.modules(f"{name}.requires", self.requires))
        for flag in ("supports_variable_group_sizes", "supports_asymmetric_clip"):
            rules.flag(f"{name}.{flag}", getattr(self, flag), remedy="pass True or False")

    @property
    def strongest_scope(self) -> DeterminismScope:
        """The scope that covers all others which the backend has."""
        return strongest_scope(self.determinism_scopes)

    def implements(self, contract: GRPOLossContract) -> bool:
        """Whether the backend computes this kind of loss at all; there is one kind."""
        LOSS_RULES.instance("LossBackendCapability.implements contract", contract, GRPOLossContract)
        return True

    def supports(self, contract: GRPOLossContract) -> bool:
        """Whether nothing stands against serving the contract."""
        return not self.incompatibilities(contract)

    def incompatibilities(self, contract: GRPOLossContract) -> tuple[str, ...]:
        """Every reason why the backend cannot serve the contract, not only the first; empty where it can."""
        LOSS_RULES.instance("LossBackendCapability.incompatibilities contract", contract, GRPOLossContract)
        objective, reduction, shards = contract.objective, contract.reduction, contract.sharding
        reasons = outside("token_normalizer", reduction.token_normalizer, self.token_normalizers)
        reasons += outside("kl_estimator", objective.kl_estimator, self.kl_estimators)
        reasons += outside("advantage normalizer", objective.advantage.normalizer, self.advantage_normalizers)
        reasons += too_strong(reduction.determinism_scope, self.determinism_scopes)
        reasons += outside("dp_world_size", shards.dp_world_size, self.dp_world_sizes)
        reasons += outside("cp_world_size", shards.cp_world_size, self.cp_world_sizes)
        if shards.has_variable_group_sizes and not self.supports_variable_group_sizes:
            sizes = listing(frozenset(shards.group_sizes))
            reasons.append(f"groups must be of one size, but sizes are {sizes}")
        if objective.clip.is_asymmetric and not self.supports_asymmetric_clip:
            reasons.append(f"clip bounds must be equal, but are {objective.clip}")
        offered = self.data_parallel_reductions
        reasons += outside("data_parallel_reduction", reduction.data_parallel_reduction, offered)
        return tuple(reasons)

    def __str__(self) -> str:
        tier, sizes = self.implementation_kind, size_listing(self.dp_world_sizes)
        return f"{self.backend_id} ({tier}): up to {self.strongest_scope}, dp {sizes}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types; sets as sorted lists."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> LossBackendCapability:
        """The capability that `to_dict` described."""
        return from_mapping(cls, data, LOSS_RULES)
