"""What the loss is, as a formula: clipping, advantages, KL and the normalisation of token sums.

ratio_t     = exp(logp_t − old_t)
surrogate_t = −min(ratio_t · A, clip(ratio_t, 1 − clip_eps_low, 1 + clip_eps_high) · A)
loss        = normalise(Σ surrogate) + beta · normalise(Σ KL)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rl_engine.contracts._checks import LOSS_RULES
from rl_engine.contracts._json import from_mapping, to_mapping
from rl_engine.contracts.reduction import DeterminismScope

__all__ = [
    "MAX_LOG_RATIO_GUARD",
    "AdvantageNormalizer",
    "AdvantageReplication",
    "AdvantageSpec",
    "AdvantageVariance",
    "ClipSpec",
    "DataParallelReduction",
    "KLEstimator",
    "LossReductionSpec",
    "ObjectiveSpec",
    "OnEmpty",
    "TokenNormalizer",
]

#: exp overflows fp32 above 88.72.
MAX_LOG_RATIO_GUARD: Final = 88.0


class KLEstimator(StrEnum):
    """The per-token estimate of KL(policy ‖ reference), with d = ref_logp − logp.

    `k3_unbiased` is exp(d) − d − 1, never negative; `k1_log_ratio` is −d.
    """

    K3_UNBIASED = "k3_unbiased"
    K1_LOG_RATIO = "k1_log_ratio"


class AdvantageNormalizer(StrEnum):
    """How the rewards r of a group become advantages.

    `mean_std_population` is (r − mean) / max(std, std_eps) with the biased standard deviation; `mean_only` is
    r − mean; `mean_std_sample` is (r − mean) / (std + std_eps) with Bessel's correction.
    """

    MEAN_STD_POPULATION = "mean_std_population"
    MEAN_ONLY = "mean_only"
    MEAN_STD_SAMPLE = "mean_std_sample"


class AdvantageVariance(StrEnum):
    """How the variance is computed: from deviations of the exact mean."""

    TWO_PASS = "two_pass"


class AdvantageReplication(StrEnum):
    """Who holds the advantages: every rank computes every group."""

    ALL_RANKS = "all_ranks"


class TokenNormalizer(StrEnum):
    """What token sums are divided by.

    `global_active_tokens`: the active tokens of the whole batch. `per_sequence_then_mean`: each sequence by
    its own active tokens, then the mean over the sequences that have any; `per_sequence_then_mean_all`: over
    all sequences, those without an active token counted as 0. `fixed_constant`: a constant.
    """

    GLOBAL_ACTIVE_TOKENS = "global_active_tokens"
    PER_SEQUENCE_THEN_MEAN = "per_sequence_then_mean"
    PER_SEQUENCE_THEN_MEAN_ALL = "per_sequence_then_mean_all"
    FIXED_CONSTANT = "fixed_constant"


class DataParallelReduction(StrEnum):
    """What the trainer does to gradients over DP: add them, or average them, which the op makes up for."""

    SUM = "sum"
    MEAN = "mean"


class OnEmpty(StrEnum):
    """What a batch without an active token gives: loss 0 with zero gradients, or an error."""

    ZERO = "zero"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ClipSpec:
    """The interval [1 − clip_eps_low, 1 + clip_eps_high] that the ratio is clipped to.

    Attributes:
        clip_eps_low: In [0, 1).
        clip_eps_high: Not negative.

    Raises:
        LossContractError: A bound is out of range or no finite number.
    """

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.2

    def __post_init__(self) -> None:
        for name, rule in (
            ("clip_eps_low", "must be a number in [0, 1)"),
            ("clip_eps_high", "must be a number >= 0"),
        ):
            field, value = f"ClipSpec.{name}", getattr(self, name)
            remedy = f"pass {name}=0.2, or the bound of your recipe as an offset from 1"
            number = LOSS_RULES.number(field, value, rule=rule, remedy=remedy)
            if number < 0 or (name == "clip_eps_low" and number >= 1):
                LOSS_RULES.fail(field, value, rule, remedy)
            object.__setattr__(self, name, number)

    @property
    def is_asymmetric(self) -> bool:
        """Whether the two bounds differ."""
        return self.clip_eps_low != self.clip_eps_high

    def __str__(self) -> str:
        return f"clip −{self.clip_eps_low:g} +{self.clip_eps_high:g}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> ClipSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOSS_RULES)


@dataclass(frozen=True, slots=True)
class AdvantageSpec:
    """Group advantages.

    Attributes:
        normalizer: The formula.
        variance: Only `two_pass`.
        std_eps: The floor of the standard deviation, or what is added to it; see the normaliser. Positive.
        replication: Only `all_ranks`.

    Raises:
        LossContractError: A field is outside its closed set, or `std_eps` is not positive and finite.
    """

    normalizer: AdvantageNormalizer = AdvantageNormalizer.MEAN_STD_POPULATION
    variance: AdvantageVariance = AdvantageVariance.TWO_PASS
    std_eps: float = 1e-6
    replication: AdvantageReplication = AdvantageReplication.ALL_RANKS

    def __post_init__(self) -> None:
        rules, put, name = LOSS_RULES, object.__setattr__, "AdvantageSpec"
        put(self, "normalizer", rules.member(f"{name}.normalizer", self.normalizer, AdvantageNormalizer))
        put(self, "variance", rules.member(f"{name}.variance", self.variance, AdvantageVariance))
        put(self, "replication", rules.member(f"{name}.replication", self.replication, AdvantageReplication))
        rule, remedy = "must be a number > 0", "pass std_eps=1e-6"
        eps = rules.number(f"{name}.std_eps", self.std_eps, rule=rule, remedy=remedy)
        if eps <= 0:
            rules.fail(f"{name}.std_eps", self.std_eps, rule, remedy)
        put(self, "std_eps", eps)

    @property
    def min_group_size(self) -> int:
        """The smallest group that the formula makes sense for: a standard deviation needs two members."""
        return 1 if self.normalizer is AdvantageNormalizer.MEAN_ONLY else 2

    def __str__(self) -> str:
        if self.normalizer is AdvantageNormalizer.MEAN_ONLY:
            return f"advantages {self.normalizer}"
        return f"advantages {self.normalizer} eps {self.std_eps:g}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> AdvantageSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOSS_RULES)


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """The objective of a token.

    Attributes:
        clip: The clip interval of the ratio.
        advantage: How rewards become advantages.
        kl_estimator: The KL estimate; reported whenever the reference is given.
        beta: Weight of the KL term, not negative. 0 needs no reference, more than 0 requires one.
        log_ratio_guard: Upper bound on logp − old and ref − logp before exp; in (0, 88], so that exp stays
            finite in fp32.

    Raises:
        LossContractError: A field is out of range, or a part has the wrong type.

    Example:
        >>> print(ObjectiveSpec(beta=0.04))
        clip −0.2 +0.2, advantages mean_std_population eps 1e-06, 0.04·k3_unbiased
    """

    clip: ClipSpec = ClipSpec()
    advantage: AdvantageSpec = AdvantageSpec()
    kl_estimator: KLEstimator = KLEstimator.K3_UNBIASED
    beta: float = 0.0
    log_ratio_guard: float = 80.0

    def __post_init__(self) -> None:
        rules, put, name = LOSS_RULES, object.__setattr__, "ObjectiveSpec"
        rules.instance(f"{name}.clip", self.clip, ClipSpec)
        rules.instance(f"{name}.advantage", self.advantage, AdvantageSpec)
        put(self, "kl_estimator", rules.member(f"{name}.kl_estimator", self.kl_estimator, KLEstimator))
        rule, remedy = "must be a number >= 0", "pass beta=0.0 for no KL term"
        beta = rules.number(f"{name}.beta", self.beta, rule=rule, remedy=remedy)
        if beta < 0:
            rules.fail(f"{name}.beta", self.beta, rule, remedy)
        put(self, "beta", beta)
        rule, remedy = f"must be a number in (0, {MAX_LOG_RATIO_GUARD:g}]", "pass log_ratio_guard=80.0"
        guard = rules.number(f"{name}.log_ratio_guard", self.log_ratio_guard, rule=rule, remedy=remedy)
        if not 0 < guard <= MAX_LOG_RATIO_GUARD:
            rules.fail(f"{name}.log_ratio_guard", self.log_ratio_guard, rule, remedy)
        put(self, "log_ratio_guard", guard)

    @property
    def requires_reference(self) -> bool:
        """Whether the loss cannot be computed without the reference."""
        return self.beta > 0

    def __str__(self) -> str:
        return f"{self.clip}, {self.advantage}, {self.beta:g}·{self.kl_estimator}"

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types, parts nested."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> ObjectiveSpec:
        """The spec that `to_dict` described."""
        parts = {"clip": ClipSpec.from_dict, "advantage": AdvantageSpec.from_dict}
        return from_mapping(cls, data, LOSS_RULES, parts)


@dataclass(frozen=True, slots=True)
class LossReductionSpec:
    """How token terms become one number.

    Attributes:
        token_normalizer: What sums are divided by.
        fixed_normalizer_constant: The divisor of `fixed_constant`, positive; None for the others.
        data_parallel_reduction: What the trainer does to gradients over DP. The reported loss is the same for
            both.
        on_empty: What a batch without an active token gives.
        determinism_scope: The promise that is asked for.

    Raises:
        LossContractError: A field is outside its closed set, or the constant does not go with the normaliser.
    """

    token_normalizer: TokenNormalizer = TokenNormalizer.GLOBAL_ACTIVE_TOKENS
    fixed_normalizer_constant: float | None = None
    data_parallel_reduction: DataParallelReduction = DataParallelReduction.SUM
    on_empty: OnEmpty = OnEmpty.ZERO
    determinism_scope: DeterminismScope = DeterminismScope.LAYOUT_FREE

    def __post_init__(self) -> None:
        rules, put, name = LOSS_RULES, object.__setattr__, "LossReductionSpec"
        put(
            self,
            "token_normalizer",
            rules.member(f"{name}.token_normalizer", self.token_normalizer, TokenNormalizer),
        )
        put(self, "fixed_normalizer_constant", self._checked_constant())
        reduction = rules.member(
            f"{name}.data_parallel_reduction", self.data_parallel_reduction, DataParallelReduction
        )
        put(self, "data_parallel_reduction", reduction)
        put(self, "on_empty", rules.member(f"{name}.on_empty", self.on_empty, OnEmpty))
        scope = rules.member(f"{name}.determinism_scope", self.determinism_scope, DeterminismScope)
        put(self, "determinism_scope", scope)

    def _checked_constant(self) -> float | None:
        field, value = "LossReductionSpec.fixed_normalizer_constant", self.fixed_normalizer_constant
        if self.token_normalizer is not TokenNormalizer.FIXED_CONSTANT:
            if value is not None:
                rule = f"must be None, because token_normalizer={self.token_normalizer} counts tokens"
                LOSS_RULES.fail(field, value, rule, "pass token_normalizer='fixed_constant' to divide by it")
            return None
        rule, remedy = (
            "must be a number > 0 for token_normalizer=fixed_constant",
            "pass the divisor, e.g. 1024.0",
        )
        number = LOSS_RULES.number(field, value, rule=rule, remedy=remedy)
        if number <= 0:
            LOSS_RULES.fail(field, value, rule, remedy)
        return number

    def __str__(self) -> str:
        constant = "" if self.fixed_normalizer_constant is None else f"({self.fixed_normalizer_constant:g})"
        return (
            f"{self.token_normalizer}{constant}, dp {self.data_parallel_reduction}, {self.determinism_scope}"
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON types."""
        return to_mapping(self)

    @classmethod
    def from_dict(cls, data: object) -> LossReductionSpec:
        """The spec that `to_dict` described."""
        return from_mapping(cls, data, LOSS_RULES)
