"""What a loss call returns, with where it came from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from rl_engine.contracts import AdvantageSpec, GRPOLossContract

__all__ = ["GRPOLossResult", "LossProvenance"]


@dataclass(frozen=True)
class LossProvenance:
    """Who computed a loss, on what request.

    Attributes:
        loss_backend: Registry id of the loss arithmetic.
        logprob_backend: Registry id of the logprob backend, or None where log-probs were handed in.
        numerics_id: The definition of the roundings, or "none" for backends that claim no bits.
        tp_world_size: TP degree.
        dp_world_size: DP degree.
        contract: What was asked, or None where log-probs were handed in without one.
        advantage: How rewards became advantages, or None where advantages were given.
        active_mask: [N] bool, this rank's active tokens.
        cp_world_size: CP degree.
    """

    loss_backend: str
    logprob_backend: str | None
    numerics_id: str
    tp_world_size: int
    dp_world_size: int
    contract: GRPOLossContract | None
    advantage: AdvantageSpec | None
    active_mask: Tensor = field(repr=False, compare=False)
    cp_world_size: int = 1

    @cached_property
    def active_mask_sha256(self) -> str:
        """SHA-256 of this rank's mask, one byte a token; computed when first read, since it synchronises."""
        return hashlib.sha256(bytes(self.active_mask.cpu().numpy())).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """JSON-stable form, mask digest included."""
        return {
            "loss_backend": self.loss_backend,
            "logprob_backend": self.logprob_backend,
            "numerics_id": self.numerics_id,
            "tp_world_size": self.tp_world_size,
            "dp_world_size": self.dp_world_size,
            "cp_world_size": self.cp_world_size,
            "contract": None if self.contract is None else self.contract.to_dict(),
            "advantage": None if self.advantage is None else self.advantage.to_dict(),
            "active_mask_sha256": self.active_mask_sha256,
        }


@dataclass(frozen=True, eq=False)  # tensors do not compare to one bool
class GRPOLossResult:
    """A loss over the whole mesh; every number is the same on every rank. Unpacks as (loss, policy_loss, kl).

    Shapes: S sequences of the whole batch, in global order.

    Attributes:
        loss: 0-dim fp32; the only field that is differentiable. Its gradient is that of the global loss.
        policy_loss: 0-dim fp32, the normalised surrogate; detached.
        kl: 0-dim fp32, the normalised KL to the reference; 0 where no reference was given; detached.
        advantages: [S] fp32 of the groups' rewards; None where advantages were given.
        per_sequence_policy: [S] fp32, the surrogate summed over each sequence's active tokens.
        per_sequence_kl: [S] fp32, likewise.
        per_sequence_active_tokens: [S] int64.
        num_active_tokens: 0-dim int64; 0 says that loss and gradients are 0 because nothing was active.
        num_guarded_tokens: 0-dim int64, active tokens whose log-ratio met `ObjectiveSpec.log_ratio_guard`.
        provenance: Who computed it.
    """

    loss: Tensor
    policy_loss: Tensor
    kl: Tensor
    advantages: Tensor | None
    per_sequence_policy: Tensor
    per_sequence_kl: Tensor
    per_sequence_active_tokens: Tensor
    num_active_tokens: Tensor
    num_guarded_tokens: Tensor
    provenance: LossProvenance

    def __iter__(self) -> Iterator[Tensor]:
        """(loss, policy_loss, kl)."""
        return iter((self.loss, self.policy_loss, self.kl))
