"""The whole loss from logits, with the contract built inside.

Shapes: B sequences of this rank, T token slots, V_local columns of this rank's vocabulary shard, N = B·T.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_engine.api.shapes import (
    advantages_by_name,
    check_specs,
    check_told_alike,
    fail_together,
    flat_advantages_of,
    flat_mask,
    flatten_rows,
    group_names,
    logprob_contract,
    refuse_unknown_sequences,
    sequences_of,
    shape_of,
)
from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    GRPOLossContract,
    LogitsDtype,
    LossReductionSpec,
    LossShardingSpec,
    ObjectiveSpec,
)
from rl_engine.errors import InputError
from rl_engine.loss.grpo import DistributedGRPOLossOp, check_sequences
from rl_engine.loss.result import GRPOLossResult
from rl_engine.mesh import Axis, gather_json

__all__ = ["grpo_loss"]

_NO_GROUPS = AdvantageSpec(normalizer=AdvantageNormalizer.MEAN_ONLY)
"""Stands in the contract where advantages come ready-made: allows every group size, and nothing reads it."""


def grpo_loss(
    logits: Tensor,
    targets: Tensor,
    old_logps: Tensor,
    rewards: Tensor | None = None,
    *,
    mask: Tensor,
    group_ids: Tensor | Sequence[int | str] | None = None,
    group_boundaries: Sequence[int] | None = None,
    advantages: Tensor | None = None,
    ref_logits: Tensor | None = None,
    ref_logps: Tensor | None = None,
    objective: ObjectiveSpec = ObjectiveSpec(),  # noqa: B008 (frozen)
    reduction: LossReductionSpec = LossReductionSpec(),  # noqa: B008 (frozen)
    temperature: float = 1.0,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    dp_group: ProcessGroup | None = None,
    validate: bool = True,
) -> GRPOLossResult:
    """GRPO loss of the whole batch over TP × DP, from logits; the gradient is that of the global loss.

    Collectives: over `dp_group` one gather of sizes and group ids, then those of
    :meth:`rl_engine.loss.DistributedGRPOLossOp.apply`.

    Args:
        logits: [B, T, V_local], or [N, V_local] with N = B·T for B rewards.
        targets: [B, T] or [N] sampled ids, aligned with the logits.
        old_logps: like `targets`, fp32 log-probs at sampling.
        rewards: [B] one per sequence of this rank; groups are then needed.
        mask: like `targets`, 0/1, the active tokens.
        group_ids: [B] the prompt of each sequence: integers or strings, in any order; equal ids on other
            ranks are the same group.
        group_boundaries: Instead: offsets of groups of consecutive sequences over all ranks, (0, …, total).
        advantages: [B] or like `targets`, instead of rewards.
        ref_logits: like `logits`; needed for β > 0 unless `ref_logps` is given.
        ref_logps: like `targets`, instead.
        objective: Clip, advantage, KL.
        reduction: Normaliser, and whether the trainer sums or averages gradients over DP.
        temperature: Sampling temperature; logits are divided by it.
        vocab_size: Real columns over all ranks.
        tp_group: Ranks that split the vocabulary into equal shards.
        dp_group: Ranks that split the sequences; rank order is sequence order.
        validate: Check agreement between ranks and values. The same on every rank.

    Returns:
        The result, the same on every rank; `result.loss.backward()` fills the gradients.

    Raises:
        InputError: Shapes, dtypes or values that do not make sense.
        AgreementError: Ranks disagree, or one of them failed.

    Example:
        >>> logits = torch.zeros(2, 3, 8, requires_grad=True)
        >>> ids, old = torch.ones(2, 3, dtype=torch.long), torch.full((2, 3), -2.0794415)
        >>> rewards, mask = torch.tensor([1.0, 0.0]), torch.ones(2, 3)
        >>> result = grpo_loss(logits, ids, old, rewards, mask=mask, group_ids=[7, 7])
        >>> result.loss.backward()
        >>> result.advantages.tolist()
        [1.0, -1.0]
    """
    tp, dp = Axis.from_group("tp", tp_group), Axis.from_group("dp", dp_group)
    error: Exception | None = None
    told: dict[str, object] = {}
    flat = ids = active = torch.empty(0)
    flat_advantages: Tensor | None = None
    by_name: Tensor | None = None
    batch = 0
    try:
        check_specs(objective, reduction)
        flat, ids, rows = flatten_rows(logits, targets)
        per_sequence = rewards if rewards is not None else advantages
        batch = sequences_of(ids, per_sequence) if rows is None else rows
        if rows is None and rewards is None and batch > 1 and batch == len(ids):
            refuse_unknown_sequences(reduction)
        if (rewards is None) and (group_ids is not None or group_boundaries is not None):
            raise InputError(
                "groups were given without rewards; pass rewards=, or drop the groups next to advantages="
            )
        if rewards is not None and (group_ids is None) == (group_boundaries is None):
            got = "neither" if group_ids is None else "both"
            raise InputError(
                f"{got} of group_ids and group_boundaries given with rewards; pass exactly one of them"
            )
        named = {"old_logps": old_logps, "ref_logps": ref_logps}
        for name, tensor in named.items():
            if (tensor is not None or name == "old_logps") and shape_of(tensor) != list(targets.shape):
                raise InputError(
                    f"{name} must be a tensor {list(targets.shape)} like targets, got {shape_of(tensor)}"
                )
        if ref_logits is not None and shape_of(ref_logits) != list(logits.shape):
            raise InputError(
                f"ref_logits must be a tensor {list(logits.shape)} like logits, got {shape_of(ref_logits)}"
            )
        if ref_logits is not None and ref_logps is not None:
            raise InputError("both ref_logits and ref_logps were given; pass one of them")
        if objective.beta > 0 and ref_logits is None and ref_logps is None:
            raise InputError(
                f"beta is {objective.beta} and no reference was given; pass ref_logits= or ref_logps=, or "
                "beta=0"
            )
        flat_advantages = flat_advantages_of(advantages, targets, batch)
        check_sequences(ids.shape[0], batch, rewards, flat_advantages)
        active = flat_mask(mask, targets, validate=validate)
        names = group_names(group_ids, batch)
        source = "advantages="
        if rewards is not None:
            source = f"rewards with {'group_boundaries' if names is None else 'group_ids'}"
        told = {
            "sequences": batch,
            "source of advantages": source,
            # the contract holds the formula only where the op applies it
            "objective.advantage": None if names is None else json.dumps(objective.advantage.to_dict()),
            "groups": names,
            "rewards": rewards.detach().float().tolist()
            if names is not None and rewards is not None
            else None,
        }
    except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        error = caught
    try:
        told_by_rank = gather_json(dp, told, error=error, kind="grpo_loss")
        check_told_alike(told_by_rank, ("source of advantages", "objective.advantage"), dp)
        counts = [int(t["sequences"]) for t in told_by_rank]
        if sum(counts) == 0:
            raise InputError("the batch holds no sequence on any rank; pass at least one")
        first = sum(counts[: dp.rank])
        boundaries = (0, sum(counts)) if group_boundaries is None else group_boundaries
        if group_ids is not None:
            rewards_all = [float(r) for t in told_by_rank for r in t["rewards"]]
            all_names = [name for t in told_by_rank for name in t["groups"]]
            by_name = advantages_by_name(rewards_all, all_names, objective).to(flat.device)
            flat_advantages, rewards = by_name[first : first + batch], None
        contract = GRPOLossContract(
            logprob_contract(
                LogitsDtype.parse(logits.dtype),
                flat.shape[1],
                tp.rank,
                tp.size,
                vocab_size,
                temperature,
                -100,
                False,
            ),
            LossShardingSpec(
                dp_rank=dp.rank,
                dp_world_size=dp.size,
                num_sequences=sum(counts),
                padded_seq_len=flat.shape[0] // max(1, batch),
                sequence_shard_bounds=tuple(pairwise([sum(counts[:i]) for i in range(dp.size + 1)])),
                group_boundaries=cast("tuple[int, ...]", boundaries),  # any sequence; checked there
            ),
            objective if rewards is not None else dataclasses.replace(objective, advantage=_NO_GROUPS),
            reduction,
        )
    except Exception as caught:  # noqa: BLE001
        # The TP siblings may have passed the gather: they hear of it in the op's preflight.
        fail_together(caught, tp, dp, validate=validate)
    result = DistributedGRPOLossOp().apply(
        flat,
        ids,
        old_logps.reshape(-1),
        rewards,
        contract=contract,
        mask=active,
        ref_local_logits=None if ref_logits is None else ref_logits.reshape(flat.shape),
        ref_logps=None if ref_logps is None else ref_logps.reshape(-1),
        advantages=flat_advantages,
        tp_group=tp_group,
        dp_group=dp_group,
        validate=validate,
    )
    if by_name is None:
        return result
    provenance = dataclasses.replace(result.provenance, advantage=objective.advantage)
    return dataclasses.replace(result, advantages=by_name, provenance=provenance)
