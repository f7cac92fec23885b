"""The loss from log-probs that the caller holds already.

Shapes: B sequences of this rank, T token slots.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_engine.api.shapes import check_specs, check_told_alike, flat_advantages_of, flat_mask, shape_of
from rl_engine.contracts import LossReductionSpec, ObjectiveSpec
from rl_engine.errors import InputError
from rl_engine.loss.arithmetic import ExactArithmetic
from rl_engine.loss.evaluate import explain_values, policy_loss_from_logps, report_problems
from rl_engine.loss.grpo import check_sequences, check_tokens, per_token
from rl_engine.loss.result import GRPOLossResult, LossProvenance
from rl_engine.loss.sequences import TokenBatch, gather_sequences
from rl_engine.mesh import Axis, gather_json, guard

__all__ = ["policy_loss"]


def policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    ref_logps: Tensor | None = None,
    objective: ObjectiveSpec = ObjectiveSpec(),  # noqa: B008 (frozen)
    reduction: LossReductionSpec = LossReductionSpec(),  # noqa: B008 (frozen)
    dp_group: ProcessGroup | None = None,
    validate: bool = True,
) -> GRPOLossResult:
    """The loss from log-probs you already hold; differentiable in `logps`, with the global loss's gradient.

    Collectives over `dp_group`: one gather of sizes and settings, two all-reduces of int64.

    Args:
        logps: [B, T] fp32 live log-probs.
        old_logps: [B, T] fp32; constants, also when `logps` itself is passed.
        advantages: [B] or [B, T] fp32; constants.
        mask: [B, T] 0/1, the active tokens.
        ref_logps: [B, T] fp32 reference log-probs; needed for β > 0.
        objective: Clip and KL; its advantage part is not used.
        reduction: Normaliser, and whether the trainer sums or averages gradients over DP.
        dp_group: Ranks that split the sequences; rank order is sequence order.
        validate: Check values; agreement on the settings is always checked. The same on every rank.

    Returns:
        The result, the same on every rank.

    Raises:
        InputError: Shapes, dtypes or values that do not make sense.
        AgreementError: Ranks disagree, or one of them failed.

    Example:
        >>> logps = torch.tensor([[-0.5, -1.0]], requires_grad=True)
        >>> result = policy_loss(logps, logps.detach(), torch.tensor([1.0]), mask=torch.ones(1, 2))
        >>> result.loss.backward()
        >>> result.loss.item(), logps.grad.tolist()
        (-1.0, [[-0.5, -0.5]])
    """
    dp = Axis.from_group("dp", dp_group)
    error: Exception | None = None
    told: dict[str, object] = {}
    active = old = ref = values = torch.empty(0)
    try:
        check_specs(objective, reduction)
        if not isinstance(logps, Tensor) or logps.dim() != 2:
            raise InputError(f"logps must be [B, T], one row per sequence, got {shape_of(logps)}")
        b, t = logps.shape
        active = flat_mask(mask, logps, validate=validate)
        for name, tensor in {"old_logps": old_logps, "ref_logps": ref_logps}.items():
            if (tensor is not None or name == "old_logps") and shape_of(tensor) != [b, t]:
                raise InputError(f"{name} must be a tensor {[b, t]} like logps, got {shape_of(tensor)}")
        old = old_logps.reshape(-1)
        ref = None if ref_logps is None else ref_logps.reshape(-1)
        check_tokens(b * t, logps.device, logps=logps.reshape(-1), old_logps=old, ref_logps=ref)
        flat_advantages = flat_advantages_of(advantages, logps, b)
        check_sequences(b * t, b, None, flat_advantages)
        if objective.beta > 0 and ref_logps is None:
            raise InputError(
                f"beta is {objective.beta} and no reference was given; pass ref_logps=, or beta=0"
            )
        values = flat_advantages
        told = {
            "sequences": b,
            "objective": json.dumps(objective.to_dict()),
            "reduction": json.dumps(reduction.to_dict()),
            "reference": ref_logps is not None,
        }
    except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        error = caught
    told_by_rank = gather_json(dp, told, error=error, kind="policy_loss")
    check_told_alike(told_by_rank, ("objective", "reduction", "reference"), dp)
    counts = [int(t["sequences"]) for t in told_by_rank]
    b, t = logps.shape
    first, total = sum(counts[: dp.rank]), sum(counts)
    if total == 0:
        raise InputError("the batch holds no sequence on any rank; pass at least one")
    with guard(dp):
        batch = TokenBatch(
            old=old.detach(),
            active=active,
            sequence=torch.arange(b * t, device=logps.device) // max(1, t) + first,
            own_sequences=torch.arange(first, first + b, device=logps.device),
            num_sequences=total,
        )
        token_advantages = per_token(values, batch)
        reference = None if ref is None else ref.detach()
        flat_logps = logps.reshape(-1)
        arithmetic = ExactArithmetic()
        gathered = gather_sequences(None, batch, (dp,))
        evaluated = policy_loss_from_logps(
            flat_logps,
            batch,
            gathered,
            token_advantages,
            reference,
            None,
            boundaries=(0, total),
            objective=objective,
            reduction=reduction,
            arithmetic=arithmetic,
            provenance=LossProvenance(
                loss_backend=arithmetic.backend_id,
                logprob_backend=None,
                numerics_id=arithmetic.numerics_id,
                tp_world_size=1,
                dp_world_size=dp.size,
                contract=None,
                advantage=None,
                active_mask=active.clone(),
            ),
            axes=(dp,),
        )
    report_problems(
        evaluated,
        gathered,
        lambda: explain_values(
            batch,
            [
                ("old_logps", batch.old),
                ("ref_logps", reference),
                ("advantages", token_advantages),
                ("policy logps", flat_logps.detach()),
                ("the surrogate, ratio × advantage,", evaluated.surrogate),
            ],
        ),
        reduction=reduction,
        validate=validate,
        axes=(dp,),
    )
    return evaluated.result
