"""The front door: three calls that build their contracts themselves.

`selected_logprobs` for log-probs, `grpo_loss` for the whole loss from logits, `policy_loss` for those who
hold log-probs already. Logits and targets are aligned: row t of the logits predicts target t
(`next_token_targets` does the shift).

Shapes: B sequences of this rank, T token slots, V_local columns of this rank's vocabulary shard, N = B·T.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rl_engine.contracts import (
    DEFAULT_IGNORE_INDEX,
    AdvantageNormalizer,
    AdvantageSpec,
    GRPOLossContract,
    LogitsDtype,
    LogprobContract,
    LogprobOutputSpec,
    LogprobRole,
    LossReductionSpec,
    LossShardingSpec,
    ObjectiveSpec,
    ShardingSpec,
    TokenNormalizer,
)
from rl_engine.errors import AgreementError, InputError
from rl_engine.logprob.op import VocabParallelLogprobOp
from rl_engine.loss.advantages import group_advantages
from rl_engine.loss.arithmetic import ExactArithmetic
from rl_engine.loss.evaluate import (
    LossBatch,
    explain_values,
    gather_sequences,
    policy_loss_from_logps,
    report_problems,
)
from rl_engine.loss.grpo import DistributedGRPOLossOp, check_sequences, check_tokens, per_token
from rl_engine.loss.result import GRPOLossResult, LossProvenance
from rl_engine.mesh import Axis, Claim, gather_json, guard, preflight_mesh

__all__ = ["grpo_loss", "next_token_targets", "policy_loss", "selected_logprobs"]

_NO_GROUPS = AdvantageSpec(normalizer=AdvantageNormalizer.MEAN_ONLY)
"""Stands in the contract where advantages come ready-made: allows every group size, and nothing reads it."""


def next_token_targets(input_ids: Tensor, completion_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Targets and mask for the logits of a causal model, where position t predicts token t + 1.

    The ids and the mask, one place to the left: the mask follows the predicted token, not the token that is
    read. The last position predicts nothing: its target is −100 and it is inactive, so that the model's
    logits are passed whole. (A slice `logits[:, :-1]` works too, with `targets[:, :-1]` and so on, and costs
    a copy of the logits.)

    Args:
        input_ids: [B, T] int64 prompt and completion.
        completion_mask: [B, T] 0/1, 1 on the tokens of `input_ids` that were sampled.

    Returns:
        ([B, T] int64 targets, [B, T] bool mask).

    Raises:
        InputError: the shapes differ, or there are fewer than two tokens.

    Example:
        >>> ids = torch.tensor([[10, 11, 12, 13]])
        >>> targets, mask = next_token_targets(ids, torch.tensor([[0, 0, 1, 1]]))
        >>> targets.tolist(), mask.tolist()
        ([[11, 12, 13, -100]], [[False, True, True, False]])
    """
    if input_ids.shape != completion_mask.shape or input_ids.dim() != 2 or input_ids.shape[1] < 2:
        raise InputError(
            f"input_ids and completion_mask must both be [B, T] with T ≥ 2, got {list(input_ids.shape)} and "
            f"{list(completion_mask.shape)}"
        )
    pad = torch.nn.functional.pad
    targets = pad(input_ids[:, 1:], (0, 1), value=DEFAULT_IGNORE_INDEX)
    return targets, pad(completion_mask[:, 1:].bool(), (0, 1), value=False)


def selected_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    tp_group: ProcessGroup | None = None,
    with_entropy: bool = False,
    validate: bool = True,
) -> Any:
    """Log-probabilities of the chosen tokens, the same bits for every sharding of the vocabulary.

    Equals `torch.log_softmax(logits / temperature, -1).gather(-1, targets)`, with 0 where inactive, without
    the [N, V] copies. Collectives over `tp_group`: a preflight under `validate`, one packed all-gather; none
    in backward.

    Args:
        logits: [B, T, V_local] or [N, V_local] bf16, fp16 or fp32; never modified.
        targets: [B, T] or [N] token ids, aligned with the logits.
        mask: like `targets`, 0/1, the active tokens; None: all.
        temperature: In [0.01, 100].
        ignore_index: Tokens with this target are inactive too.
        vocab_size: Real columns over all ranks; what lies behind is padding. None: all.
        tp_group: Ranks that split the vocabulary into equal shards; use the op with a contract for unequal
            ones.
        with_entropy: Also return the entropy of each row in nats.
        validate: Check agreement between ranks and values.

    Returns:
        fp32 log-probs like `targets`, or (log-probs, entropy); differentiable.

    Raises:
        InputError: Shapes, dtypes or values that have no log-probability.
        AgreementError: Ranks of `tp_group` disagree, or one of them failed.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, -0.5]])
        >>> round(selected_logprobs(logits, torch.tensor([1])).item(), 6)
        -1.619617
    """
    tp = Axis.from_group("tp", tp_group)
    try:
        flat, ids, _ = _flatten(logits, targets)
        active = None
        if mask is not None:
            active = _flat_mask(mask, targets, validate=validate) & (ids != ignore_index)
        contract = _logprob_contract(
            LogitsDtype.parse(logits.dtype),
            flat.shape[1],
            tp.rank,
            tp.size,
            vocab_size,
            temperature,
            ignore_index,
            with_entropy,
        )
    except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        _fail_together(caught, tp, validate=validate)
    out = VocabParallelLogprobOp()(
        flat, ids, contract=contract, mask=active, tp_group=tp_group, validate=validate
    )
    logp = out[0].view(targets.shape)
    return (logp, out[2].view(targets.shape)) if with_entropy else logp


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
        validate: Check agreement between ranks and values.

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
        flat, ids, rows = _flatten(logits, targets)
        per_sequence = rewards if rewards is not None else advantages
        batch = _sequences_of(ids, per_sequence) if rows is None else rows
        if rows is None and rewards is None and batch > 1 and batch == len(ids):
            _refuse_unknown_sequences(reduction)
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
            if (tensor is not None or name == "old_logps") and _shape(tensor) != list(targets.shape):
                raise InputError(
                    f"{name} must be a tensor {list(targets.shape)} like targets, got {_shape(tensor)}"
                )
        if ref_logits is not None and _shape(ref_logits) != list(logits.shape):
            raise InputError(
                f"ref_logits must be a tensor {list(logits.shape)} like logits, got {_shape(ref_logits)}"
            )
        flat_advantages = _flat_advantages(advantages, targets, batch)
        check_sequences(ids.shape[0], batch, rewards, flat_advantages)
        active = _flat_mask(mask, targets, validate=validate)
        names = _group_names(group_ids, batch)
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
        _check_told_alike(told_by_rank, ("source of advantages", "objective.advantage"), dp)
        counts = [int(t["sequences"]) for t in told_by_rank]
        if sum(counts) == 0:
            raise InputError("the batch holds no sequence on any rank; pass at least one")
        first = sum(counts[: dp.rank])
        boundaries: tuple[int, ...] = (
            (0, sum(counts)) if group_boundaries is None else tuple(group_boundaries)
        )
        if group_ids is not None:
            rewards_all = [float(r) for t in told_by_rank for r in t["rewards"]]
            all_names = [name for t in told_by_rank for name in t["groups"]]
            by_name = _advantages_by_name(rewards_all, all_names, objective).to(flat.device)
            flat_advantages, rewards = by_name[first : first + batch], None
        contract = GRPOLossContract(
            _logprob_contract(
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
                group_boundaries=boundaries,
            ),
            objective if rewards is not None else dataclasses.replace(objective, advantage=_NO_GROUPS),
            reduction,
        )
    except Exception as caught:  # noqa: BLE001
        # The TP siblings may have passed the gather: they hear of it in the op's preflight.
        _fail_together(caught, tp, dp, validate=validate)
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
    return result if by_name is None else dataclasses.replace(result, advantages=by_name)


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
        validate: Check values; agreement on the settings is always checked.

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
        if not isinstance(logps, Tensor) or logps.dim() != 2:
            raise InputError(f"logps must be [B, T], one row per sequence, got {_shape(logps)}")
        b, t = logps.shape
        active = _flat_mask(mask, logps, validate=validate)
        for name, tensor in {"old_logps": old_logps, "ref_logps": ref_logps}.items():
            if (tensor is not None or name == "old_logps") and _shape(tensor) != [b, t]:
                raise InputError(f"{name} must be a tensor {[b, t]} like logps, got {_shape(tensor)}")
        old = old_logps.reshape(-1)
        ref = None if ref_logps is None else ref_logps.reshape(-1)
        check_tokens(b * t, logps.device, logps=logps.reshape(-1), old_logps=old, ref_logps=ref)
        flat_advantages = _flat_advantages(advantages, logps, b)
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
    _check_told_alike(told_by_rank, ("objective", "reduction", "reference"), dp)
    counts = [int(t["sequences"]) for t in told_by_rank]
    b, t = logps.shape
    first, total = sum(counts[: dp.rank]), sum(counts)
    if total == 0:
        raise InputError("the batch holds no sequence on any rank; pass at least one")
    with guard(dp):
        batch = LossBatch(
            old=old.detach(),
            active=active,
            sequence=torch.arange(b * t, device=logps.device) // max(1, t) + first,
            first_sequence=first,
            num_sequences=total,
        )
        token_advantages = per_token(values, batch)
        reference = None if ref is None else ref.detach()
        flat_logps = logps.reshape(-1)
        arithmetic = ExactArithmetic()
        gathered = gather_sequences(None, batch, dp)
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
                arithmetic.backend_id, None, arithmetic.numerics_id, 1, dp.size, None, active_mask=active
            ),
            dp=dp,
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
            ],
        ),
        reduction=reduction,
        validate=validate,
        axes=(dp,),
    )
    return evaluated.result


def _check_told_alike(told: list[Any], names: Sequence[str], dp: Axis) -> None:
    for name in names:
        values = [t[name] for t in told]
        if len(set(values)) > 1:
            other = next(i for i, v in enumerate(values) if v != values[0])
            raise AgreementError(
                f"ranks of the dp axis disagree on {name}: {dp.describe_rank(0)} has {values[0]}, "
                f"{dp.describe_rank(other)} has "
                f"{values[other]}; every rank must pass the same settings"
            )


def _fail_together(error: Exception, *axes: Axis, validate: bool) -> NoReturn:
    """Raise `error` after telling the other ranks, in the preflight that they are at or by the alarm."""
    if validate:
        preflight_mesh([Claim(axis=axis, fingerprint="failed", facts={}) for axis in axes], error=error)
        raise error
    with guard(*axes):
        raise error


def _shape(value: object) -> object:
    """What a message says a value is: the shape of a tensor, or the type of anything else."""
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _flatten(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """([N, V_local], [N], B or None for logits without a batch dim)."""
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise InputError(
            f"logits and targets must be torch tensors, got {type(logits).__name__} and "
            f"{type(targets).__name__}"
        )
    if logits.dim() not in (2, 3) or targets.shape != logits.shape[:-1]:
        raise InputError(
            f"logits must be [B, T, V] or [N, V] with targets of the same leading shape, got "
            f"{list(logits.shape)} and "
            f"{list(targets.shape)}; next_token_targets shifts ids and mask to match a causal model's logits"
        )
    if logits.shape[-1] == 0:
        raise InputError("logits have no columns; use the ops with a contract for shards that are empty")
    batch = logits.shape[0] if logits.dim() == 3 else None
    return logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), batch


def _sequences_of(ids: Tensor, per_sequence: Tensor | None) -> int:
    """B for flat logits: one reward or advantage a sequence."""
    if isinstance(per_sequence, Tensor) and per_sequence.shape == (0,) and len(ids) == 0:
        return 0
    if (
        not isinstance(per_sequence, Tensor)
        or per_sequence.dim() != 1
        or len(per_sequence) == 0
        or len(ids) % len(per_sequence)
    ):
        raise InputError(
            f"flat logits of {len(ids)} rows need one reward or advantage per sequence, a number that "
            f"divides the rows; got "
            f"{_shape(per_sequence)}; pass [B, T, V] logits, or [B] rewards"
        )
    return len(per_sequence)


def _refuse_unknown_sequences(reduction: LossReductionSpec) -> None:
    """Flat logits with an advantage per token do not say which tokens form a sequence."""
    per_sequence = (TokenNormalizer.PER_SEQUENCE_THEN_MEAN, TokenNormalizer.PER_SEQUENCE_THEN_MEAN_ALL)
    if reduction.token_normalizer in per_sequence:
        raise InputError(
            f"flat logits with one advantage per token do not say where sequences begin, which "
            f"{reduction.token_normalizer} needs; pass [B, T, V] logits, or [B] advantages"
        )


def _flat_mask(mask: Tensor, like: Tensor, *, validate: bool) -> Tensor:
    """[N] bool from a 0/1 mask of any dtype."""
    if not isinstance(mask, Tensor) or mask.shape != like.shape:
        raise InputError(f"mask must be a tensor {list(like.shape)}, one flag per token, got {_shape(mask)}")
    if mask.device != like.device:
        raise InputError(f"mask is on {mask.device}, the rest on {like.device}; move it there")
    flat = mask.reshape(-1)
    if flat.dtype is torch.bool:
        return flat
    if validate and bool(((flat != 0) & (flat != 1)).any()):
        wrong = flat[(flat != 0) & (flat != 1)][0].item()
        raise InputError(
            f"mask holds {wrong}, expected 0 or 1; token weights are not part of this loss, use (mask > 0)"
        )
    return flat != 0


def _flat_advantages(advantages: Tensor | None, like: Tensor, batch: int) -> Any:
    """[B] or [N] advantages, None where none are given."""
    if advantages is None:
        return None
    if not isinstance(advantages, Tensor) or tuple(advantages.shape) not in ((batch,), tuple(like.shape)):
        raise InputError(f"advantages must be [{batch}] or {list(like.shape)}, got {_shape(advantages)}")
    return advantages.reshape(-1)


def _group_names(group_ids: Tensor | Sequence[int | str] | None, batch: int) -> list[int | str] | None:
    if group_ids is None:
        return None
    names = cast("list[int | str]", group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids))
    if len(names) != batch or not all(isinstance(name, (int, str)) for name in names):
        raise InputError(
            f"group_ids must be {batch} integers or strings, one per local sequence, got {names[:8]!r}…"
        )
    return names


def _advantages_by_name(rewards: list[float], names: list[int | str], objective: ObjectiveSpec) -> Tensor:
    """[S] advantages of the whole batch; members of a group in sequence order, groups anywhere."""
    values = torch.tensor(rewards, dtype=torch.float32, device="cpu")
    if not bool(values.isfinite().all()):
        i = int((~values.isfinite()).nonzero()[0, 0])
        raise InputError(
            f"reward of sequence {i} is {rewards[i]}, expected a finite number; look at the reward "
            f"function, or drop the sequence"
        )
    if any(isinstance(name, str) for name in names) != all(isinstance(name, str) for name in names):
        raise InputError(
            f"group_ids over all ranks mix integers and strings ({names[:8]!r}…), which are never equal; use "
            f"one of the two on every rank"
        )
    members: dict[int | str, list[int]] = {}
    for index, name in enumerate(names):
        members.setdefault(name, []).append(index)
    smallest = min(members, key=lambda name: len(members[name]))
    if len(members[smallest]) < objective.advantage.min_group_size:
        raise InputError(
            f"group {smallest!r} has {len(members[smallest])} sequence, advantages by "
            f"{objective.advantage.normalizer} need "
            f"{objective.advantage.min_group_size}; pass AdvantageSpec(normalizer='mean_only'), or sample "
            f"more completions"
        )
    order = torch.tensor([i for group in members.values() for i in group], device="cpu")
    sizes = [len(group) for group in members.values()]
    boundaries = tuple(sum(sizes[:g]) for g in range(len(sizes) + 1))
    advantages = torch.empty_like(values)
    advantages[order] = group_advantages(values[order], boundaries, objective.advantage)
    return advantages


@lru_cache(maxsize=256)
def _logprob_contract(
    dtype: LogitsDtype,
    v_local: int,
    tp_rank: int,
    tp_size: int,
    vocab_size: int | None,
    temperature: float,
    ignore_index: int,
    with_entropy: bool,
) -> LogprobContract:
    padded = v_local * tp_size
    return LogprobContract(
        role=LogprobRole.TRAIN,
        dtype=dtype,
        sharding=ShardingSpec(
            tp_rank=tp_rank,
            tp_world_size=tp_size,
            vocab_shard_bounds=tuple((v_local * i, v_local * (i + 1)) for i in range(tp_size)),
            real_vocab_size=padded if vocab_size is None else vocab_size,
            padded_vocab_size=padded,
        ),
        output=LogprobOutputSpec(entropy=with_entropy),
        temperature=temperature,
        ignore_index=ignore_index,
    )
