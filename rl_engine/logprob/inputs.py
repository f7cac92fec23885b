"""The tensors of a logprob call, held against its contract.

Every tier shares these checks and holds none of its own.

Shapes: n rows (tokens), V_local columns of this rank's shard.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_engine.contracts import LogitsDtype, LogprobContract
from rl_engine.errors import InputError
from rl_engine.mesh import Axis
from rl_engine.numerics.float_mode import require_gradual_underflow
from rl_engine.numerics.words import LossTokens, inverse_temperature, temperature_scale

__all__ = [
    "MaskCache",
    "Rows",
    "active_rows",
    "bit_checksum",
    "check_inputs",
    "prepare_rows",
    "replace_tiles",
]

_TORCH_DTYPES = {
    LogitsDtype.BF16: torch.bfloat16,
    LogitsDtype.FP16: torch.float16,
    LogitsDtype.FP32: torch.float32,
}


@dataclass(frozen=True, slots=True)
class Rows:
    """A checked call, as a backend receives it.

    Attributes:
        logits: [n, V_local] this rank's shard, columns contiguous.
        target_local: [n] int64, the target's column in this shard, −1 where it is not here or not in the
            real vocabulary.
        active: [n] bool.
        contract: what was asked.
        axis: the TP axis.
        real_cols: columns of this shard before the padding.
        scale_l: fl32(log2 e / T).
        inv_t: fl32(1 / T).
        checksum: [2] int64 of targets and mask, which must agree over TP, or None where nothing is validated.
        loss: what the loss knows of each token, for a backend that takes it; None otherwise.
    """

    logits: Tensor
    target_local: Tensor
    active: Tensor
    contract: LogprobContract
    axis: Axis
    real_cols: int
    scale_l: float
    inv_t: float
    checksum: Tensor | None
    loss: LossTokens | None = None


def check_inputs(
    local_logits: Tensor, target_ids: Tensor, contract: LogprobContract, mask: Tensor | None, axis: Axis
) -> None:
    """Hold shapes, dtypes, devices and the TP group against the contract. No collective, no device sync.

    Raises:
        InputError: the tensors, or the group, do not fit the contract, or the CPU flushes subnormals.
    """
    if not isinstance(contract, LogprobContract):
        raise InputError(f"contract is {type(contract).__name__}, expected LogprobContract")
    sharding = contract.sharding
    if not isinstance(local_logits, Tensor) or not isinstance(target_ids, Tensor):
        got = f"{type(local_logits).__name__} and {type(target_ids).__name__}"
        raise InputError(f"logits and target_ids must be torch tensors, got {got}")
    if local_logits.dim() != 2:
        raise InputError(
            f"logits must be [n, V_local], got {list(local_logits.shape)}; flatten with logits.reshape(-1, "
            f"V_local), "
            "or call rl_engine.selected_logprobs, which takes [B, T, V]"
        )
    require_gradual_underflow(local_logits.device)
    n, v_local = local_logits.shape
    expected = _TORCH_DTYPES[contract.dtype]
    if local_logits.dtype is not expected:
        raise InputError(
            f"logits are {local_logits.dtype}, the contract says {expected}; build the contract with "
            f"dtype=LogitsDtype.parse(logits.dtype)"
        )
    if v_local != sharding.local_vocab_size:
        raise InputError(
            f"logits have {v_local} columns, but TP rank {sharding.tp_rank} holds "
            f"[{sharding.local_vocab_start}, {sharding.local_vocab_end}) = {sharding.local_vocab_size}"
        )
    if target_ids.shape != (n,):
        raise InputError(f"target_ids must be [{n}] like the rows of logits, got {list(target_ids.shape)}")
    if target_ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"target_ids are {target_ids.dtype}, expected torch.int64 or torch.int32; use .long()"
        )
    if contract.mask is not None and contract.mask.num_tokens != n:
        raise InputError(
            f"the contract's mask covers {contract.mask.num_tokens} tokens, the logits have {n} rows"
        )
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise InputError(f"mask is {type(mask).__name__}, expected a torch.bool tensor of [{n}]")
        if mask.dtype is not torch.bool:
            raise InputError(f"mask is {mask.dtype}, expected torch.bool; use mask.bool()")
        if mask.shape != (n,):
            raise InputError(f"mask must be [{n}] like the rows of logits, got {list(mask.shape)}")
    for name, tensor in (("target_ids", target_ids), ("mask", mask)):
        if tensor is not None and tensor.device != local_logits.device:
            raise InputError(
                f"{name} is on {tensor.device}, logits on {local_logits.device}; move one of them"
            )
    if axis.size != sharding.tp_world_size or axis.rank != sharding.tp_rank:
        raise InputError(
            f"the contract is for TP rank {sharding.tp_rank} of {sharding.tp_world_size}, the call has rank "
            f"{axis.rank} of {axis.size}; pass tp_group=, or build the sharding from that group"
        )


class MaskCache:
    """The device tensor of the last contract mask seen, so that it is built once and not per call."""

    def __init__(self) -> None:
        self._spec: object | None = None
        self._tensor: Tensor | None = None

    def get(self, contract: LogprobContract, device: torch.device) -> Tensor | None:
        """[n] bool of the contract's mask, or None where it has none."""
        if contract.mask is None:
            return None
        if self._tensor is None or self._spec is not contract.mask or self._tensor.device != device:
            with torch.inference_mode(False):  # a later call may have to save it for its backward
                self._tensor = torch.tensor(contract.mask.active_mask, dtype=torch.bool, device=device)
            self._spec = contract.mask
        return self._tensor


def active_rows(
    target_ids: Tensor, contract: LogprobContract, mask: Tensor | None, cache: MaskCache, *, validate: bool
) -> Tensor:
    """The active rows, [n] bool.

    The mask of the call, else of the contract, else every row whose target is not the ignore index.

    Raises:
        InputError: under `validate`, where call and contract both bring a mask and the two differ.
    """
    from_contract = cache.get(contract, target_ids.device)
    if mask is not None:
        if validate and from_contract is not None:
            wrong = (mask != from_contract).nonzero()
            if len(wrong):
                i = int(wrong[0])
                raise InputError(
                    f"mask differs from the contract's at token {i}: {bool(mask[i])} against "
                    f"{bool(from_contract[i])}; "
                    "give it in one place, or build the contract with mask=None"
                )
        return mask
    if from_contract is not None:
        return from_contract
    return target_ids != contract.resolved_ignore_index


def prepare_rows(
    local_logits: Tensor,
    target_ids: Tensor,
    contract: LogprobContract,
    active: Tensor,
    axis: Axis,
    *,
    validate: bool,
    data: Tensor | None = None,
) -> Rows:
    """Everything a backend needs, from checked inputs; `data` joins the checksum that TP siblings compare."""
    sharding = contract.sharding
    start = sharding.local_vocab_start
    real_cols = min(max(sharding.real_vocab_size - start, 0), sharding.local_vocab_size)
    local = target_ids.to(torch.int64) - start
    target_local = torch.where((local >= 0) & (local < real_cols), local, -1)
    if local_logits.shape[1] > 0 and local_logits.stride(1) != 1:
        local_logits = local_logits.contiguous()
    if active.is_inference():  # a mask made under inference_mode, with the rollouts, cannot be saved
        active = active.clone()
    return Rows(
        logits=local_logits,
        target_local=target_local,
        active=active,
        contract=contract,
        axis=axis,
        real_cols=real_cols,
        scale_l=temperature_scale(contract.temperature),
        inv_t=inverse_temperature(contract.temperature),
        checksum=_checksum(target_ids, active, data) if validate and axis.size > 1 else None,
    )


def bit_checksum(values: Tensor) -> Tensor:
    """0-dim int64: a position-dependent sum of the bit patterns of fp32 values."""
    return (values.contiguous().view(torch.int32).to(torch.int64) * _odd_numbers(values)).sum()


def _odd_numbers(values: Tensor) -> Tensor:
    # multiples of a large prime (2^32 / golden ratio), made odd: sums then wrap through all 64 bits
    return torch.arange(1, len(values) + 1, device=values.device) * (2 * 2654435761) + 1


def _checksum(target_ids: Tensor, active: Tensor, data: Tensor | None) -> Tensor:
    """[2] int64 of the targets of active rows, and of the mask with what `data` stands for."""
    odd = _odd_numbers(target_ids)
    flags = active.to(torch.int64)
    targets = ((target_ids.to(torch.int64) + 1) * odd * flags).sum()
    mask = (flags * odd).sum()
    both = torch.stack([targets, mask if data is None else mask * 31 + data])
    return both ^ (both >> 32)  # the exchange carries the low bits


def replace_tiles(contract: LogprobContract, num_vocab_tiles: int | None) -> LogprobContract:
    """The contract with another tile count, for the tiled backend's call form."""
    if num_vocab_tiles is None or contract.reduction.num_vocab_tiles == num_vocab_tiles:
        return contract
    return dataclasses.replace(
        contract, reduction=dataclasses.replace(contract.reduction, num_vocab_tiles=num_vocab_tiles)
    )
