"""What users pass, brought to the shapes of the ops: rows, masks, groups, contracts; and failing together.

Shapes: B sequences of this rank, T token slots, V_local columns of this rank's vocabulary shard, N = B·T.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Real
from operator import index
from typing import Any, NoReturn, SupportsIndex, cast

import torch
from torch import Tensor

from rl_engine.contracts import (
    LogitsDtype,
    LogprobContract,
    LogprobOutputSpec,
    LogprobRole,
    LossReductionSpec,
    ObjectiveSpec,
    ShardingSpec,
    TokenNormalizer,
)
from rl_engine.errors import AgreementError, InputError
from rl_engine.loss.advantages import group_advantages
from rl_engine.mesh import Axis, Claim, guard, preflight_mesh

__all__ = [
    "advantages_by_name",
    "check_specs",
    "check_told_alike",
    "fail_together",
    "flat_advantages_of",
    "flat_mask",
    "flatten_rows",
    "group_names",
    "logprob_contract",
    "refuse_unknown_sequences",
    "sequences_of",
    "shape_of",
]


def check_told_alike(told: list[Any], names: Sequence[str], dp: Axis) -> None:
    """Raise AgreementError, on every rank, where the ranks told each other different values of a name."""
    for name in names:
        values = [t[name] for t in told]
        if len(set(values)) > 1:
            other = next(i for i, v in enumerate(values) if v != values[0])
            raise AgreementError(
                f"ranks of the dp axis disagree on {name}: {dp.describe_rank(0)} has {values[0]}, "
                f"{dp.describe_rank(other)} has "
                f"{values[other]}; every rank must pass the same settings"
            )


def fail_together(error: Exception, *axes: Axis, validate: bool) -> NoReturn:
    """Raise `error` after telling the other ranks, in the preflight that they are at or by the alarm."""
    if validate:
        preflight_mesh([Claim(axis=axis, fingerprint="failed", facts={}) for axis in axes], error=error)
        raise error
    with guard(*axes):
        raise error


def shape_of(value: object) -> object:
    """What a message says a value is: the shape of a tensor, or the type of anything else."""
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__


def flatten_rows(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, int | None]:
    """([N, V_local], [N], B or None for logits without a batch dim)."""
    if not isinstance(logits, Tensor) or not isinstance(targets, Tensor):
        raise InputError(
            f"logits and targets must be torch tensors, got {type(logits).__name__} and "
            f"{type(targets).__name__}"
        )
    if hasattr(logits, "to_local"):
        raise InputError(
            "logits are a DTensor; pass logits.to_local() with the tp_group that shards their last dim"
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


def sequences_of(ids: Tensor, per_sequence: Tensor | None) -> int:
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
            f"{shape_of(per_sequence)}; pass [B, T, V] logits, or [B] rewards"
        )
    return len(per_sequence)


def refuse_unknown_sequences(reduction: LossReductionSpec) -> None:
    """Flat logits with an advantage per token do not say which tokens form a sequence."""
    per_sequence = (TokenNormalizer.PER_SEQUENCE_THEN_MEAN, TokenNormalizer.PER_SEQUENCE_THEN_MEAN_ALL)
    if reduction.token_normalizer in per_sequence:
        raise InputError(
            f"flat logits with one advantage per token do not say where sequences begin, which "
            f"{reduction.token_normalizer} needs; pass [B, T, V] logits, or [B] advantages"
        )


def flat_mask(mask: Tensor, like: Tensor, *, validate: bool) -> Tensor:
    """[N] bool from a 0/1 mask of any dtype."""
    if not isinstance(mask, Tensor) or mask.shape != like.shape:
        raise InputError(
            f"mask must be a tensor {list(like.shape)}, one flag per token, got {shape_of(mask)}"
        )
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


def flat_advantages_of(advantages: Tensor | None, like: Tensor, batch: int) -> Any:
    """[B] or [N] advantages, None where none are given."""
    if advantages is None:
        return None
    if not isinstance(advantages, Tensor) or tuple(advantages.shape) not in ((batch,), tuple(like.shape)):
        raise InputError(f"advantages must be [{batch}] or {list(like.shape)}, got {shape_of(advantages)}")
    return advantages.reshape(-1)


def group_names(group_ids: Tensor | Sequence[int | str] | None, batch: int) -> list[int | str] | None:
    """The group of each local sequence as JSON-able names; None where no ids are given."""
    if group_ids is None:
        return None
    given = cast(object, group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InputError(
            f"group_ids is {given!r}, expected {batch} integers or strings, one per local sequence"
        )
    names = [_group_name(name) for name in cast("Iterable[object]", given)]
    if len(names) != batch:
        raise InputError(f"group_ids must be {batch}, one per local sequence, got {len(names)}")
    return names


def _group_name(name: object) -> int | str:
    if isinstance(name, str):
        return name
    if isinstance(name, bool) or not isinstance(name, SupportsIndex):
        raise InputError(f"group_ids hold {name!r}, expected integers or strings; use .long() or str(...)")
    return index(name)


def advantages_by_name(rewards: list[float], names: list[int | str], objective: ObjectiveSpec) -> Tensor:
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
    for place, name in enumerate(names):
        members.setdefault(name, []).append(place)
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


def check_specs(objective: ObjectiveSpec, reduction: LossReductionSpec) -> None:
    """Raise InputError where the settings are something else than the specs of rl_engine.contracts."""
    for name, value, kind in (
        ("objective", objective, ObjectiveSpec),
        ("reduction", reduction, LossReductionSpec),
    ):
        if not isinstance(value, kind):
            raise InputError(f"{name} is {value!r}, expected a {kind.__name__}; pass {kind.__name__}(...)")


def logprob_contract(
    dtype: LogitsDtype,
    v_local: int,
    tp_rank: int,
    tp_size: int,
    vocab_size: int | None,
    temperature: float,
    ignore_index: int,
    with_entropy: bool,
) -> LogprobContract:
    """The contract of equal shards."""
    numbers = {"temperature": temperature, "ignore_index": ignore_index}
    if vocab_size is not None:
        numbers["vocab_size"] = vocab_size
    for name, value in numbers.items():
        if not isinstance(value, Real):
            raise InputError(f"{name} is {value!r}, expected a number; use int(...) or float(...)")
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
