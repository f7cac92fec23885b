"""The naive loss arithmetic: fp32 sums and means, float all-reduces, as most trainers have it.

Here for comparison; it claims no bits. Formulas, masks and global normalisers are those of the exact one, so
that it is right within fp32. But its bits change with the DP degree, the padding and the device, and it keeps
the known weakness of fp32 means: equal rewards can have advantages other than 0 (7 × 100.1).

Legend: N local tokens, S sequences of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    DataParallelReduction,
    KLEstimator,
    LossReductionSpec,
    ObjectiveSpec,
    TokenNormalizer,
)
from rl_engine.loss.grpo import DistributedGRPOLossOp
from rl_engine.loss.objective import TokenTerms
from rl_engine.loss.sums import LossSums
from rl_engine.mesh import Axis, all_reduce_float, all_reduce_sum_over

__all__ = ["NaiveArithmetic", "load"]


class NaiveArithmetic:
    """The loss in plain fp32, for comparison."""

    backend_id = "naive"
    numerics_id = "none"

    def group_advantages(
        self, rewards: Tensor, group_boundaries: tuple[int, ...], spec: AdvantageSpec
    ) -> Tensor:
        """[S] fp32 rewards to [S] fp32 advantages, group by group with `mean` and `std`."""
        advantages = torch.empty_like(rewards)
        for start, end in pairwise(group_boundaries):
            group = rewards[start:end]
            centred = group - group.mean()
            if spec.normalizer is AdvantageNormalizer.MEAN_STD_POPULATION:
                centred = centred / group.std(correction=0).clamp(min=spec.std_eps)
            elif spec.normalizer is AdvantageNormalizer.MEAN_STD_SAMPLE:
                centred = centred / (group.std() + spec.std_eps)
            advantages[start:end] = centred
        return advantages

    def token_terms(
        self,
        logp: Tensor,
        old: Tensor,
        advantage: Tensor,
        ref: Tensor | None,
        active: Tensor,
        objective: ObjectiveSpec,
    ) -> TokenTerms:
        """Per-token values and derivative, with `torch.exp`; masked tokens are selected away before it."""
        logp, old, advantage = (torch.where(active, v, 0.0) for v in (logp, old, advantage))
        guard, clip = objective.log_ratio_guard, objective.clip

        delta = logp - old
        guarded = delta > guard
        ratio = delta.clamp(max=guard).exp()
        unclipped = ratio * advantage
        clipped = ratio.clamp(1.0 - clip.clip_eps_low, 1.0 + clip.clip_eps_high) * advantage
        surrogate = -torch.minimum(unclipped, clipped)
        gradient = torch.where((unclipped <= clipped) & ~guarded, -unclipped, 0.0)

        kl = None
        if ref is not None:
            d = torch.where(active, ref, 0.0) - logp
            if objective.kl_estimator is KLEstimator.K3_UNBIASED:
                far = d > guard
                guarded = guarded | far
                d = d.clamp(max=guard)
                kl, slope = d.exp() - 1.0 - d, torch.where(far, 0.0, 1.0 - d.exp())
            else:
                kl, slope = -d, torch.ones_like(d)
            gradient = gradient + objective.beta * slope if objective.beta > 0 else gradient
            kl = torch.where(active, kl, 0.0)
        surrogate, gradient = (torch.where(active, v, 0.0) for v in (surrogate, gradient))
        return TokenTerms(surrogate, kl, gradient, guarded & active)

    def token_weights(self, active_tokens: Tensor, reduction: LossReductionSpec, dp_size: int) -> Tensor:
        """[S] fp32 gradient weight of a token of each sequence."""
        mean = reduction.data_parallel_reduction is DataParallelReduction.MEAN
        weight = torch.full_like(active_tokens, dp_size if mean else 1, dtype=torch.float32)
        kind = reduction.token_normalizer
        if kind is TokenNormalizer.GLOBAL_ACTIVE_TOKENS:
            return weight / active_tokens.sum().clamp(min=1)
        if kind is TokenNormalizer.FIXED_CONSTANT:
            return weight / _constant(reduction)
        return weight / active_tokens.clamp(min=1) / _num_sequences(active_tokens, kind)

    def reduce_terms(
        self,
        terms: TokenTerms,
        sequence: Tensor,
        active_tokens: Tensor,
        extra: Tensor,
        *,
        objective: ObjectiveSpec,
        reduction: LossReductionSpec,
        axes: Sequence[Axis],
    ) -> LossSums:
        """Sum per rank with `torch.sum`, then over each axis: one float all-reduce, one of the integers."""
        policy, per_sequence_policy = self._local(terms.surrogate, sequence, active_tokens, reduction)
        if terms.kl is None:
            kl, per_sequence_kl = torch.zeros_like(policy), torch.zeros_like(per_sequence_policy)
        else:
            kl, per_sequence_kl = self._local(terms.kl, sequence, active_tokens, reduction)
        local = torch.cat([policy[None], kl[None], per_sequence_policy, per_sequence_kl])
        summed = local
        for axis in axes:
            summed = all_reduce_float(axis, summed, "sum")
        counts = all_reduce_sum_over(axes, torch.cat([terms.guarded.sum()[None], extra]))

        policy, kl = summed[0], summed[1]
        per_sequence_policy, per_sequence_kl = summed[2:].view(2, -1)
        return LossSums(
            loss=policy + objective.beta * kl if objective.beta > 0 else policy,
            policy_loss=policy,
            kl=kl,
            per_sequence_policy=per_sequence_policy,
            per_sequence_kl=per_sequence_kl,
            num_guarded_tokens=counts[0],
            extra=counts[1:],
        )

    def _local(
        self, values: Tensor, sequence: Tensor, active_tokens: Tensor, reduction: LossReductionSpec
    ) -> tuple[Tensor, Tensor]:
        """This rank's part of the normalised sum, 0-dim, and of the per-sequence totals, [S]."""
        totals = values.new_zeros(len(active_tokens)).index_add(0, sequence, values)
        kind = reduction.token_normalizer
        if kind is TokenNormalizer.GLOBAL_ACTIVE_TOKENS:
            return values.sum() / active_tokens.sum().clamp(min=1), totals
        if kind is TokenNormalizer.FIXED_CONSTANT:
            return values.sum() / _constant(reduction), totals
        means = totals / active_tokens.clamp(min=1)
        return means.sum() / _num_sequences(active_tokens, kind), totals


def _constant(reduction: LossReductionSpec) -> float:
    assert reduction.fixed_normalizer_constant is not None
    return reduction.fixed_normalizer_constant


def _num_sequences(active_tokens: Tensor, kind: TokenNormalizer) -> Tensor:
    """0-dim: the sequences with active tokens, or all of them."""
    counted = active_tokens > 0 if kind is TokenNormalizer.PER_SEQUENCE_THEN_MEAN else active_tokens >= 0
    return counted.sum().clamp(min=1)


def load() -> DistributedGRPOLossOp:
    """The loss on fp32 sums."""
    return DistributedGRPOLossOp(NaiveArithmetic())
