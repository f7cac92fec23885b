"""The loss from log-probs: the part that every front door and every op shares.

Steps, on every rank, after the callers' checks and preflight:

1. one all-reduce(SUM) of int64 over DP, one over CP: rewards and active-token counts of every sequence
   (:mod:`rl_engine.loss.sequences`).
2. advantages of every group, on every rank; advantages that were given stay where they are.
3. token terms and their gradient weights; no communication.
4. one all-reduce(SUM) of int64 over DP, one over CP: the exact sums, with the count of ranks that found a
   problem in their values.
5. with `validate`: one read. A problem anywhere becomes an error on every rank of the mesh.

Shapes: N local tokens, S sequences of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from rl_engine.contracts import LossReductionSpec, ObjectiveSpec, OnEmpty
from rl_engine.errors import InputError, RLEngineError
from rl_engine.loss.arithmetic import LossArithmetic
from rl_engine.loss.result import GRPOLossResult, LossProvenance
from rl_engine.loss.sequences import GatheredSequences, TokenBatch
from rl_engine.loss.sums import LossSums, attach_gradient
from rl_engine.mesh import Axis, Claim, preflight_mesh

__all__ = ["Evaluated", "explain_values", "policy_loss_from_logps", "report_problems"]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of step 3 and 4, and what step 5 reads."""

    result: GRPOLossResult
    sums: LossSums
    token_advantages: Tensor
    surrogate: Tensor
    local_problem: Tensor


def policy_loss_from_logps(
    logp: Tensor,
    batch: TokenBatch,
    gathered: GatheredSequences,
    token_advantages: Tensor | None,
    ref: Tensor | None,
    extra_problem: Tensor | None,
    *,
    boundaries: tuple[int, ...],
    objective: ObjectiveSpec,
    reduction: LossReductionSpec,
    arithmetic: LossArithmetic,
    provenance: LossProvenance,
    axes: Sequence[Axis],
) -> Evaluated:
    """Steps 2 to 4.

    Args:
        logp: [N] fp32 live log-probs, differentiable.
        batch: This rank's tokens.
        gathered: From :func:`gather_sequences`.
        token_advantages: [N] fp32 advantages that were given, None to compute them from the rewards.
        ref: [N] fp32 reference log-probs.
        extra_problem: 0-dim bool of the logprob calls.
        boundaries: Group offsets of the rewards.
        objective: The formula.
        reduction: The normaliser.
        arithmetic: Exact or naive.
        provenance: Goes into the result.
        axes: DP and CP.

    Returns:
        The result, not yet validated.
    """
    counts = gathered.active_tokens
    advantages = None
    if token_advantages is None:
        advantages = arithmetic.group_advantages(gathered.rewards, boundaries, objective.advantage)
        token_advantages = advantages[batch.sequence]
    live = logp.detach()
    terms = arithmetic.token_terms(live, batch.old, token_advantages, ref, batch.active, objective)
    weights = arithmetic.token_weights(counts, reduction, math.prod(axis.size for axis in axes))
    problem = (batch.active & ~(live.isfinite() & batch.old.isfinite() & token_advantages.isfinite())).any()
    problem = problem | ~terms.surrogate.isfinite().all()  # a huge advantage times a huge ratio
    if ref is not None:
        problem = problem | (batch.active & ~ref.isfinite()).any()
    if extra_problem is not None:
        problem = problem | extra_problem
    sums = arithmetic.reduce_terms(
        terms,
        batch.sequence,
        counts,
        problem.to(torch.int64)[None],
        objective=objective,
        reduction=reduction,
        axes=axes,
    )
    result = GRPOLossResult(
        loss=attach_gradient(sums.loss, logp, terms, batch.sequence, weights),
        policy_loss=sums.policy_loss,
        kl=sums.kl,
        advantages=advantages,
        per_sequence_policy=sums.per_sequence_policy,
        per_sequence_kl=sums.per_sequence_kl,
        per_sequence_active_tokens=counts,
        num_active_tokens=counts.sum(),
        num_guarded_tokens=sums.num_guarded_tokens,
        provenance=provenance,
    )
    return Evaluated(result, sums, token_advantages, terms.surrogate, problem)


def report_problems(
    evaluated: Evaluated,
    gathered: GatheredSequences,
    explain_local: Callable[[], RLEngineError | None],
    *,
    reduction: LossReductionSpec,
    validate: bool,
    axes: tuple[Axis, ...],
) -> None:
    """Step 5: read once, and raise on every rank of the mesh if any rank has a problem.

    Args:
        evaluated: From :func:`policy_loss_from_logps`.
        gathered: What every rank knows of every sequence.
        explain_local: Finds the error of this rank, if it has one; called on every rank once any has a
            problem.
        reduction: For `on_empty`.
        validate: Whether to look at values at all.
        axes: TP, DP, CP.

    Raises:
        InputError: A value that has no meaning, or a sequence that is not held once, named; or nothing
            active under `on_empty="error"`.
        AgreementError: Another rank of the mesh has such a value.
    """
    must_have_tokens = reduction.on_empty is OnEmpty.ERROR
    if not (validate or must_have_tokens):
        return
    bad_rewards = ~gathered.rewards.isfinite()
    flags = [
        evaluated.sums.extra[0],
        gathered.num_problems(),
        bad_rewards.sum(),
        evaluated.result.num_active_tokens,
    ]
    read = cast("list[int]", torch.stack(flags).tolist())
    num_problems, num_bad_sequences, num_bad_rewards, num_active = read
    error: RLEngineError | None = None
    if validate and num_bad_sequences:
        error = gathered.explain()
    elif validate and num_bad_rewards:
        i = int(bad_rewards.nonzero()[0, 0])
        error = InputError(
            f"reward of sequence {i} is {float(gathered.rewards[i])}, expected a finite number; look at the "
            f"reward function, or drop the sequence from the batch"
        )
    if validate and num_problems:
        # Where TP siblings hold other data, each of them counts a problem: so every rank of the mesh comes
        # here, although only some may see a bad reward or an empty batch.
        if error is None and bool(evaluated.local_problem):
            error = explain_local()
            assert error is not None
        claims = [Claim(axis=axis, fingerprint="values", facts={}) for axis in axes]
        preflight_mesh(claims, error=error)
    if error is not None:  # without a problem the rewards are those of every rank
        raise error
    if must_have_tokens and num_active == 0:
        raise InputError(
            "no token of the whole batch is active; the contract says on_empty='error': pass a mask with "
            "active tokens, or "
            "on_empty='zero' for a loss of 0"
        )


def explain_values(batch: TokenBatch, named: Sequence[tuple[str, Tensor | None]]) -> InputError | None:
    """The first active token whose value has no meaning, as an error; None where all have.

    Args:
        batch: This rank's tokens.
        named: [N] fp32 values, each with what a message calls them.
    """
    for name, values in named:
        if values is None:
            continue
        bad = cast("list[int]", (batch.active & ~values.isfinite()).nonzero()[:, 0].tolist())
        if bad:
            i = bad[0]
            return InputError(
                f"{name} of token {i} (sequence {int(batch.sequence[i])}) is {float(values[i])} where the "
                f"mask is active, expected a finite number ({len(bad)} such tokens); mask the token out, or "
                f"repair {name}"
            )
    return None
