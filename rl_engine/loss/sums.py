"""From token terms to the global loss: exact sums token → sequence → mesh, and the weight of every token.

One all-reduce(SUM) of integers over DP, and one over CP, whatever the ranks own: an accumulator per sequence
and quantity, with the counts that ride along. Sequences may be split over ranks in any way, or padded in any
way, without a bit changing.

Shapes: N local tokens, S sequences of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_engine.contracts import DataParallelReduction, LossReductionSpec, ObjectiveSpec, TokenNormalizer
from rl_engine.loss.objective import TokenTerms
from rl_engine.mesh import Axis, all_reduce_sum_over
from rl_engine.numerics import constants as C
from rl_engine.numerics.accumulator import accumulate, close_fp32, close_fp64, normalise

__all__ = ["LossSums", "attach_gradient", "close_sums", "reduce_terms", "sequence_sums", "token_weights"]


class LossSums(NamedTuple):
    """The loss and its parts, the same on every rank.

    Attributes:
        loss: 0-dim fp32, policy_loss + β·kl rounded once.
        policy_loss: 0-dim fp32.
        kl: 0-dim fp32, 0 without a reference.
        per_sequence_policy: [S] fp32 sums of the surrogate over each sequence's active tokens.
        per_sequence_kl: [S] fp32, likewise.
        num_guarded_tokens: 0-dim int64.
        extra: [E] int64, the sums over all ranks of what the caller sent along.
    """

    loss: Tensor
    policy_loss: Tensor
    kl: Tensor
    per_sequence_policy: Tensor
    per_sequence_kl: Tensor
    num_guarded_tokens: Tensor
    extra: Tensor


def token_weights(active_tokens: Tensor, reduction: LossReductionSpec, dp_size: int) -> Tensor:
    """The weight of a token of each sequence in the gradient.

    Args:
        active_tokens: [S] int64 active tokens of each sequence of the whole batch.
        reduction: The normaliser, and what the trainer does with gradients over DP.
        dp_size: DP × CP degree, the ranks that hold other tokens.

    Returns:
        [S] fp32; what it holds for sequences without active tokens does not matter.
    """
    factor = float(dp_size) if reduction.data_parallel_reduction is DataParallelReduction.MEAN else 1.0
    kind = reduction.token_normalizer
    if kind is TokenNormalizer.GLOBAL_ACTIVE_TOKENS:
        divisor = active_tokens.sum().clamp(min=1).expand_as(active_tokens).double()
    elif kind is TokenNormalizer.FIXED_CONSTANT:
        assert reduction.fixed_normalizer_constant is not None
        divisor = torch.full_like(active_tokens, reduction.fixed_normalizer_constant, dtype=torch.float64)
    else:
        divisor = (active_tokens.clamp(min=1) * _num_sequences(active_tokens, kind)).double()
    # tensor by tensor: a number divided by a tensor is computed as a reciprocal times the number
    return (torch.full_like(divisor, factor) / divisor).float()


def _num_sequences(active_tokens: Tensor, kind: TokenNormalizer) -> Tensor:
    if kind is TokenNormalizer.PER_SEQUENCE_THEN_MEAN:
        return (active_tokens > 0).sum().clamp(min=1)
    return torch.full_like(active_tokens.sum(), len(active_tokens))


def _normalised(acc: Tensor, active_tokens: Tensor, reduction: LossReductionSpec) -> Tensor:
    """0-dim float64: the sum of [S, 14] accumulators under the normaliser; 0 where nothing is active."""
    kind = reduction.token_normalizer
    total_tokens = active_tokens.sum()
    if kind is TokenNormalizer.GLOBAL_ACTIVE_TOKENS:
        value = close_fp64(acc.sum(0)) / total_tokens.clamp(min=1).double()
    elif kind is TokenNormalizer.FIXED_CONSTANT:
        assert reduction.fixed_normalizer_constant is not None
        total = close_fp64(acc.sum(0))
        value = total / torch.full_like(total, reduction.fixed_normalizer_constant)
    else:
        means = (close_fp64(acc) / active_tokens.clamp(min=1).double()).float()
        total = close_fp64(accumulate(means, torch.zeros_like(active_tokens), 1))[0]
        value = total / _num_sequences(active_tokens, kind).double()
    return torch.where(total_tokens > 0, value, 0.0)


def sequence_sums(terms: TokenTerms, place: Tensor, num_places: int) -> list[Tensor]:
    """The exact sums of this rank's tokens, to be added up as integers.

    Args:
        terms: This rank's tokens.
        place: [N] int64 in [0, num_places): which sum each token belongs to, by its sequence.
        num_places: Number of sums.

    Returns:
        [num_places, 14] int64 of the surrogate, and the same of the KL where there is a reference.
    """
    values = [terms.surrogate] if terms.kl is None else [terms.surrogate, terms.kl]
    return [normalise(accumulate(v, place, num_places)) for v in values]


def reduce_terms(
    terms: TokenTerms,
    sequence: Tensor,
    active_tokens: Tensor,
    extra: Tensor,
    *,
    objective: ObjectiveSpec,
    reduction: LossReductionSpec,
    axes: Sequence[Axis],
) -> LossSums:
    """Sum the terms of all ranks exactly. One collective per axis: an all-reduce(SUM) of int64.

    Args:
        terms: This rank's tokens.
        sequence: [N] int64, the global sequence of each token.
        active_tokens: [S] int64 over the whole batch.
        extra: [E] int64 to be summed over the ranks in the same collective.
        objective: For β.
        reduction: The normaliser.
        axes: Those over which ranks hold other tokens: DP, CP.

    Returns:
        The same on every rank.
    """
    num_sequences = len(active_tokens)
    accs = sequence_sums(terms, sequence, num_sequences)
    guarded = terms.guarded.sum()[None]
    packed = all_reduce_sum_over(axes, torch.cat([*(a.flatten() for a in accs), guarded, extra]))
    size = num_sequences * C.ACC_COLUMNS
    accs = [packed[i * size : (i + 1) * size].view(num_sequences, C.ACC_COLUMNS) for i in range(len(accs))]
    rest = packed[len(accs) * size :]
    return close_sums(accs, active_tokens, rest[0], rest[1:], objective=objective, reduction=reduction)


def close_sums(
    accs: Sequence[Tensor],
    active_tokens: Tensor,
    num_guarded_tokens: Tensor,
    extra: Tensor,
    *,
    objective: ObjectiveSpec,
    reduction: LossReductionSpec,
) -> LossSums:
    """The loss of complete sums.

    Args:
        accs: [S, 14] int64 of the surrogate; and of the KL where there is a reference.
        active_tokens: [S] int64 over the whole batch.
        num_guarded_tokens: 0-dim int64, passed on.
        extra: [E] int64, passed on.
        objective: For β.
        reduction: The normaliser.

    Returns:
        The same wherever the sums are the same.
    """
    per_sequence = [close_fp32(a) for a in accs]
    totals = [_normalised(a, active_tokens, reduction) for a in accs]
    if len(accs) == 1:
        per_sequence.append(torch.zeros_like(per_sequence[0]))
        totals.append(torch.zeros_like(totals[0]))
    policy, kl = totals
    loss = policy if objective.beta == 0 else policy + kl * objective.beta
    return LossSums(
        loss=loss.float(),
        policy_loss=policy.float(),
        kl=kl.float(),
        per_sequence_policy=per_sequence[0],
        per_sequence_kl=per_sequence[1],
        num_guarded_tokens=num_guarded_tokens,
        extra=extra,
    )


class _Attach(torch.autograd.Function):
    """A value that is known, with a gradient in logp that is known: d loss / d logp = coefficient."""

    @staticmethod
    def forward(ctx: Any, logp: Tensor, value: Tensor, coefficient: Tensor) -> Tensor:
        ctx.save_for_backward(coefficient)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None]:
        (coefficient,) = ctx.saved_tensors
        return torch.where(coefficient != 0, grads[0] * coefficient, 0.0), None, None


def attach_gradient(
    loss: Tensor, logp: Tensor, terms: TokenTerms, sequence: Tensor, weights: Tensor
) -> Tensor:
    """The loss as a differentiable function of logp; its gradient is each token's term times its weight.

    Args:
        loss: 0-dim fp32.
        logp: [N] fp32 live log-probs.
        terms: With the derivative of each token's term.
        sequence: [N] int64.
        weights: [S] fp32 from :func:`token_weights`.

    Returns:
        0-dim fp32.
    """
    coefficient = terms.gradient * weights[sequence]
    function = cast(Any, _Attach)
    return function.apply(logp, loss, torch.where(terms.gradient != 0, coefficient, 0.0))
