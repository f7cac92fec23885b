"""What is asked of a vocab-parallel selected-token logprob: the contract, which describes and never computes.

    selected_logp[t] = logits[t, target[t]] / T − logsumexp(logits[t, :real] / T)          natural log

`LogprobContract` is what a caller asks, `LogprobBackendCapability` is what a backend offers, and
`LogprobBackendCapability.incompatibilities` is every reason why the two do not meet. The parts live in
`reduction`, `sharding` and `mask`; all names are importable from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from rl_engine.contracts._capability import ImplementationKind as ImplementationKind
from rl_engine.contracts._capability import (
    closed_scopes,
    listing,
    outside,
    size_listing,
    strongest_scope,
    too_strong,
)
from rl_engine.contracts._checks import LOGPROB_RULES
from rl_engine.contracts._json import fingerprint, from_mapping, to_mapping
from rl_engine.contracts.dtype import LogitsDtype as LogitsDtype
from rl_engine.contracts.mask import DEFAULT_IGNORE_INDEX as DEFAULT_IGNORE_INDEX
from rl_engine.contracts.mask import MaskMode as MaskMode
from rl_engine.contracts.mask import MaskSpec as MaskSpec
from rl_engine.contracts.reduction import DEFAULT_NUM_VOCAB_TILES as DEFAULT_NUM_VOCAB_TILES
from rl_engine.contracts.reduction import AccDtype as AccDtype
from rl_engine.contracts.reduction import DeterminismScope as DeterminismScope
from rl_engine.contracts.reduction import DowncastAt as DowncastAt
from rl_engine.contracts.reduction import Engine as Engine
from rl_engine.contracts.reduction import MergeAxis as MergeAxis
from rl_engine.contracts.reduction import MergeKind as MergeKind
from rl_engine.contracts.reduction import MergeOrder as MergeOrder
from rl_engine.contracts.reduction import ReductionSpec as ReductionSpec
from rl_engine.contracts.reduction import Transport as Transport
from rl_engine.contracts.sharding import ShardingSpec as ShardingSpec

__all__ = [
    "DEFAULT_IGNORE_INDEX",
    "DEFAULT_NUM_VOCAB_TILES",
    "MAX_TEMPERATURE",
    "MIN_TEMPERATURE",
    "AccDtype",
    "DeterminismScope",
    "DowncastAt",
    "Engine",
    "ImplementationKind",
    "LogitsDtype",
    "LogprobBackendCapability",
    "LogprobContract",
    "LogprobOutputSpec",
    "LogprobRole",
    "MaskMode",
    "MaskSpec",
    "MergeAxis",
    "MergeKind",
    "MergeOrder",
    "MeshAxis",
    "ReductionSpec",
    "ShardingSpec",
    "Transport",
]

#: The range in which ordinary logits stay within the exact domain of the exponent arithmetic.
MIN_TEMPERATURE: Final = 0.01
MAX_TEMPERATURE: Final = 100.0


class LogprobRole(StrEnum):
    """Who asks: the trainer, which needs gradients, or the inference side, which does not."""

    TRAIN = "train"
    INFER = "infer"


class MeshAxis(StrEnum):
    """An axis of the mesh whose ranks compare fingerprints."""

    TP = "tp"
    DP = "dp"
    CP = "cp"


@dataclass(frozen=True, slots=True)
class LogprobOutputSpec:
    """What comes back: selected logp and log-sum-exp, fp32, the same on every rank of the TP group.

    Attributes:
        entropy: Whether the entropy of each row is returned as a third output.
        logp_dtype: Only `fp32`.
        lse_dtype: Only `fp32`.
        entropy_dtype: Only `fp32`.
        replicated_over: Only `tp_vocab`.
    """

    entropy: bool = False
    logp_dtype: AccDtype = AccDtype.FP32
    lse_dtype: AccDtype = AccDtype.FP32
    entropy_dtype: AccDtype = AccDtype.FP32
    replicated_over: MergeAxis = MergeAxis.TP_VOCAB

    def __post_init__(self) -> None:
        rules, put, name = LOGPROB_RULES, object.__setattr__, "LogprobOutputSpec"
        put(
            self,
            "entropy",
            rules.flag(f"{name}.entropy", self.entropy, remedy="pass entropy=True to have it returned"),
        )
        for part in ("logp_dtype", "lse_dtype", "entropy_dtype"):
            put(self, part, rules.member(f"{name}.{part}", getattr(self, part), AccDtype))
        put(self, "replicated_over", rules.member(f"{name}.replicated_over", self.replicated_over, MergeAxis))

    def __str__(self) -> str:
        return "logp, lse, entropy" if self.entropy else "logp, lse"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> LogprobOutputSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOGPROB_RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobContract:
    """A request for selected-token logprobs over a sharded vocabulary; built once per shape of a run.

    Attributes:
        role: Trainer or inference side.
        dtype: The dtype of the logits; a torch dtype is taken too.
        sharding: Who holds which columns.
        mask: Which tokens count; None leaves it to the call, and where the call brings none either, a token
            counts unless its target is the ignore index.
        reduction: The merge over the shards, with the determinism that is asked for.
        output: What comes back.
        export_lse: Always True: the log-sum-exp is part of the result.
        temperature: The logits are divided by it; in [0.01, 100].
        ignore_index: The filler of inactive targets, for contracts without a `MaskSpec`, which brings its
            own.

    Raises:
        LogprobContractError: A field breaks a rule of its own, `ignore_index` lies inside the real
            vocabulary, or it contradicts the mask's.

    Example:
        >>> contract = LogprobContract(role="train", dtype="bf16", sharding=ShardingSpec.even(151936, 0, 4))
        >>> for part in str(contract).split(" | "):
        ...     print(part)
        logprob train bf16
        vocab 151936, tp 0/4 [0, 37984)
        exact_words by packed_all_gather, layout_free
        T 1
        mask by the call, ignore_index -100
        logp, lse
    """

    role: LogprobRole
    dtype: LogitsDtype
    sharding: ShardingSpec
    mask: MaskSpec | None = None
    reduction: ReductionSpec = field(default_factory=ReductionSpec)
    output: LogprobOutputSpec = field(default_factory=LogprobOutputSpec)
    export_lse: bool = True
    temperature: float = 1.0
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        rules, put, name = LOGPROB_RULES, object.__setattr__, "LogprobContract"
        put(self, "role", rules.member(f"{name}.role", self.role, LogprobRole))
        put(self, "dtype", LogitsDtype.parse(self.dtype))
        rules.instance(f"{name}.sharding", self.sharding, ShardingSpec)
        if self.mask is not None:
            rules.instance(f"{name}.mask", self.mask, MaskSpec)
        rules.instance(f"{name}.reduction", self.reduction, ReductionSpec)
        rules.instance(f"{name}.output", self.output, LogprobOutputSpec)
        lse = "the log-sum-exp is always exported; leave export_lse out"
        if not rules.flag(f"{name}.export_lse", self.export_lse, remedy=lse):
            rules.fail(f"{name}.export_lse", self.export_lse, "must be True", lse)
        put(self, "temperature", self._checked_temperature())
        if self.ignore_index is not None:
            remedy = f"pass None, or {DEFAULT_IGNORE_INDEX}"
            put(self, "ignore_index", rules.integer(f"{name}.ignore_index", self.ignore_index, remedy=remedy))
        self._check_ignore_index()

    def _checked_temperature(self) -> float:
        name = "LogprobContract.temperature"
        rule = f"must be a number in [{MIN_TEMPERATURE}, {MAX_TEMPERATURE:g}]"
        remedy = "pass the sampling temperature; 1.0 leaves the logits as they are"
        value = LOGPROB_RULES.number(name, self.temperature, rule=rule, remedy=remedy)
        if not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
            LOGPROB_RULES.fail(name, self.temperature, rule, remedy)
        return value

    def _check_ignore_index(self) -> None:
        rules, name, own = LOGPROB_RULES, "LogprobContract.ignore_index", self.ignore_index
        if self.mask is not None and own is not None and own != self.mask.ignore_index:
            rule = f"differs from mask.ignore_index = {self.mask.ignore_index}"
            rules.fail(name, own, rule, "leave it out: the mask's holds")
        ignored, real = self.resolved_ignore_index, self.sharding.real_vocab_size
        if 0 <= ignored < real:
            rule = f"must not lie in the real vocabulary [0, {real})"
            rules.fail(name, ignored, rule, f"pass a value such as {DEFAULT_IGNORE_INDEX}")

    @property
    def resolved_ignore_index(self) -> int:
        """The ignore index that holds: the mask's, else the contract's, else −100."""
        if self.mask is not None:
            return self.mask.ignore_index
        return DEFAULT_IGNORE_INDEX if self.ignore_index is None else self.ignore_index

    @property
    def num_tokens(self) -> int | None:
        """Tokens of this rank where the contract holds the mask, else None."""
        return None if self.mask is None else self.mask.num_tokens

    def cross_rank_fingerprint(self, axis: MeshAxis | None = None) -> str:
        """SHA-256 of all that must agree between ranks before the first collective.

        Rank-local fields are left out: tp_rank and cp_rank, and with them the local bounds, the number of
        tokens and the mask. The ignore index, the temperature and the bounds of all shards are in.

        Args:
            axis: `tp` for ranks that hold the same tokens: cp_rank, the number of tokens and the mask must
                agree too. `dp`, `cp` and None are the same: what must agree over the whole mesh.

        Returns:
            64 hexadecimal digits.
        """
        return fingerprint(self.agreement_fields(axis))

    def agreement_fields(self, axis: MeshAxis | None = None) -> dict[str, Any]:
        """What `cross_rank_fingerprint` hashes: compare two ranks' to see what they disagree on."""
        name = "LogprobContract.cross_rank_fingerprint axis"
        along = None if axis is None else LOGPROB_RULES.member(name, axis, MeshAxis)
        sharding = self.sharding.to_dict()
        del sharding["tp_rank"]
        if along is not MeshAxis.TP:
            del sharding["cp_rank"]
        fields: dict[str, Any] = {
            "contract": "logprob",
            "role": str(self.role),
            "dtype": str(self.dtype),
            "sharding": sharding,
            "reduction": self.reduction.to_dict(),
            "output": self.output.to_dict(),
            "export_lse": self.export_lse,
            "temperature": self.temperature,
            "ignore_index": self.resolved_ignore_index,
        }
        if along is MeshAxis.TP and self.mask is not None:
            fields["num_tokens"] = self.mask.num_tokens
            fields["active_mask_sha256"] = self.mask.active_mask_sha256
        return fields

    def __str__(self) -> str:
        mask = f"mask by the call, ignore_index {self.resolved_ignore_index}"
        parts = [
            f"logprob {self.role} {self.dtype}",
            str(self.sharding),
            str(self.reduction),
            f"T {self.temperature:g}",
            mask if self.mask is None else str(self.mask),
            str(self.output),
        ]
        return " | ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, parts nested."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> LogprobContract:
        """The contract that `to_dict` described."""
        parts = {
            "sharding": ShardingSpec.from_dict,
            "mask": MaskSpec.from_dict,
            "reduction": ReductionSpec.from_dict,
            "output": LogprobOutputSpec.from_dict,
        }
        return from_mapping(cls, data, LOGPROB_RULES, parts)


@dataclass(frozen=True, slots=True)
class LogprobBackendCapability:
    """What a logprob backend can do.

    Attributes:
        backend_id: Its name; stripped, not blank, and no policy word (auto, production, reference,
            deterministic).
        roles: Trainer, inference side, or both.
        dtypes: Dtypes of logits that it reads.
        tp_world_sizes: TP degrees that it serves; None for any.
        cp_world_sizes: CP degrees that it serves; None for any.
        supports_vocab_padding: Whether padding columns may exist.
        mask_modes: How it learns which tokens count.
        exports_vocab_lse: Whether it returns the log-sum-exp.
        determinism_scopes: The strongest scope, or several; the weaker ones are added.
        implementation_kind: Its tier.
        merges: Merges that it implements.
        transports: Collectives that it can merge through.
        exports_entropy: Whether it can return the entropy.
        requires_tile_alignment: Whether the vocabulary and every shard must consist of whole tiles.
        supports_empty_shards: Whether a rank may hold no column.
        requires: Top-level modules that must be installed; the registry looks for them.

    Raises:
        LogprobContractError: A field is outside its closed set, empty or of the wrong type.
    """

    backend_id: str
    roles: frozenset[LogprobRole]
    dtypes: frozenset[LogitsDtype]
    tp_world_sizes: frozenset[int] | None = None
    cp_world_sizes: frozenset[int] | None = None
    supports_vocab_padding: bool = True
    mask_modes: frozenset[MaskMode] = frozenset(MaskMode)
    exports_vocab_lse: bool = True
    determinism_scopes: frozenset[DeterminismScope] = frozenset({DeterminismScope.FIXED_TOPOLOGY})
    implementation_kind: ImplementationKind = ImplementationKind.REFERENCE
    merges: frozenset[MergeKind] = frozenset({MergeKind.MAX_SUMEXP_TILES})
    transports: frozenset[Transport] = frozenset({Transport.PACKED_ALL_GATHER})
    exports_entropy: bool = False
    requires_tile_alignment: bool = False
    supports_empty_shards: bool = True
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        rules, put, name = LOGPROB_RULES, object.__setattr__, "LogprobBackendCapability"
        put(self, "backend_id", rules.backend_id(f"{name}.backend_id", self.backend_id))
        put(self, "roles", rules.members(f"{name}.roles", self.roles, LogprobRole))
        where, lone = f"{name}.dtypes", isinstance(self.dtypes, str)
        dtypes = (self.dtypes,) if lone else rules.iterable(where, self.dtypes, "dtypes")
        if not dtypes:
            rules.fail(where, self.dtypes, "must name at least one member", "choose from bf16 | fp16 | fp32")
        put(self, "dtypes", frozenset(LogitsDtype.parse(dtype) for dtype in dtypes))
        put(self, "tp_world_sizes", rules.sizes(f"{name}.tp_world_sizes", self.tp_world_sizes))
        put(self, "cp_world_sizes", rules.sizes(f"{name}.cp_world_sizes", self.cp_world_sizes))
        put(self, "mask_modes", rules.members(f"{name}.mask_modes", self.mask_modes, MaskMode))
        scopes = closed_scopes(rules, f"{name}.determinism_scopes", self.determinism_scopes)
        put(self, "determinism_scopes", scopes)
        kind = rules.member(f"{name}.implementation_kind", self.implementation_kind, ImplementationKind)
        put(self, "implementation_kind", kind)
        put(self, "merges", rules.members(f"{name}.merges", self.merges, MergeKind))
        put(self, "transports", rules.members(f"{name}.transports", self.transports, Transport))
        put(self, "requires", rules.modules(f"{name}.requires", self.requires))
        for flag in (
            "supports_vocab_padding",
            "exports_vocab_lse",
            "exports_entropy",
            "requires_tile_alignment",
            "supports_empty_shards",
        ):
            rules.flag(f"{name}.{flag}", getattr(self, flag), remedy="pass True or False")

    @property
    def strongest_scope(self) -> DeterminismScope:
        """The scope that covers all others which the backend has."""
        return strongest_scope(self.determinism_scopes)

    def implements(self, contract: LogprobContract) -> bool:
        """Whether the backend computes the merge that the contract names, whatever else stands against it."""
        return contract.reduction.merge in self.merges

    def supports(self, contract: LogprobContract) -> bool:
        """Whether nothing stands against serving the contract."""
        return not self.incompatibilities(contract)

    def incompatibilities(self, contract: LogprobContract) -> tuple[str, ...]:
        """Every reason why the backend cannot serve the contract, not only the first; empty where it can."""
        LOGPROB_RULES.instance(
            "LogprobBackendCapability.incompatibilities contract", contract, LogprobContract
        )
        shards, reduction, reasons = contract.sharding, contract.reduction, list[str]()
        reasons += outside("role", contract.role, self.roles)
        reasons += outside("dtype", contract.dtype, self.dtypes)
        reasons += outside("tp_world_size", shards.tp_world_size, self.tp_world_sizes)
        reasons += outside("cp_world_size", shards.cp_world_size, self.cp_world_sizes)
        reasons += outside("merge", reduction.merge, self.merges)
        if self.implements(contract):  # another merge has transports of its own
            reasons += outside("transport", reduction.transport, self.transports)
        reasons += too_strong(reduction.determinism_scope, self.determinism_scopes)
        if shards.num_padding_columns and not self.supports_vocab_padding:
            reasons.append(f"no vocabulary padding, but {shards.num_padding_columns} columns are padding")
        if shards.has_empty_shards and not self.supports_empty_shards:
            empty = [rank for rank, (start, end) in enumerate(shards.vocab_shard_bounds) if start == end]
            reasons.append(f"no empty shards, but rank {empty[0]} holds no column")
        reasons += self._tile_reasons(contract)
        reasons += self._mask_reasons(contract)
        if contract.export_lse and not self.exports_vocab_lse:
            reasons.append("does not export the log-sum-exp")
        if contract.output.entropy and not self.exports_entropy:
            reasons.append("does not export the entropy")
        return tuple(reasons)

    def _tile_reasons(self, contract: LogprobContract) -> list[str]:
        tiles, shards = contract.reduction.num_vocab_tiles, contract.sharding
        if not self.requires_tile_alignment or tiles is None:
            return []
        padded = shards.padded_vocab_size
        if padded % tiles:
            return [f"num_vocab_tiles {tiles} does not divide padded_vocab_size {padded}"]
        width = padded // tiles
        unaligned = [
            f"rank {rank} holds [{start}, {end})"
            for rank, (start, end) in enumerate(shards.vocab_shard_bounds)
            if start % width or end % width
        ]
        if not unaligned:
            return []
        return [
            f"vocab shards must consist of whole tiles of {width} columns: {unaligned[0]}; "
            f"ShardingSpec.even(..., multiple_of={width}) builds such shards"
        ]

    def _mask_reasons(self, contract: LogprobContract) -> list[str]:
        if MaskMode.EXPLICIT_ACTIVE_MASK in self.mask_modes or contract.mask is None:
            return []
        inactive = contract.mask.num_tokens - contract.mask.active_token_count
        if not inactive:
            return []
        return [f"understands only ignore_index, but {inactive} tokens are inactive by the mask"]

    def __str__(self) -> str:
        return (
            f"{self.backend_id} ({self.implementation_kind}): {listing(self.merges)}, "
            f"up to {self.strongest_scope}, {listing(self.dtypes)}, tp {size_listing(self.tp_world_sizes)}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types; sets as sorted lists."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> LogprobBackendCapability:
        """The capability that `to_dict` described."""
        return from_mapping(cls, data, LOGPROB_RULES)
