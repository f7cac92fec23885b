"""The naive tier: a vocab-parallel log-softmax as most trainers have it today. It claims no bits.

Here for comparison, so that there is something to show a difference against: fp32 maximum and `torch.sum` per
shard, float all-reduces over TP, `torch.exp` and `torch.log`. Its results lie within 1e-5 of float64, and
change with the TP degree, the number of rows, the device and the instruction set.

    z = x/T − max;  S = all-reduce Σ exp z;  logp = z_t − ln S;  lse = max + ln S          (Shoeybi et al.,
    dx = (a·(δ − p) + b·p)/T,  p = exp(x/T − lse)                                 "Megatron-LM", 2019, §3)

Legend: n rows, V_local columns of this rank's shard.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_engine.contracts import LogprobContract, MergeKind
from rl_engine.logprob.inputs import Rows
from rl_engine.logprob.op import ClosedCall, VocabParallelLogprobOp
from rl_engine.logprob.refusals import require_merge
from rl_engine.mesh import all_gather_rows, all_reduce_float

__all__ = ["NaiveBackend", "load"]


class _NaiveRows(torch.autograd.Function):
    """[n, V_local] logits to (logp, lse, good, owned)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows) -> tuple[Tensor, ...]:
        x = logits[:, : rows.real_cols].float() / rows.contract.temperature
        here = rows.target_local >= 0
        if rows.real_cols > 0:
            top = x.amax(1)
            x_t = torch.where(here, x.gather(1, rows.target_local.clamp(min=0)[:, None])[:, 0], 0.0)
        else:
            top = torch.full_like(rows.target_local, -torch.inf, dtype=torch.float32)
            x_t = torch.zeros_like(top)
        top = all_reduce_float(rows.axis, top, "max")
        z = x - top[:, None]
        sums = torch.stack([z.exp().sum(1), x_t, here.float()])
        total, x_t, owners = all_reduce_float(rows.axis, sums, "sum").unbind(0)

        lse = top + total.log()
        good, owned = lse.isfinite(), owners == 1.0
        lse = torch.where(good, lse, torch.nan)
        logp = torch.where(owned, (x_t - top) - total.log(), torch.nan)
        logp = torch.where(rows.active, torch.where(good, logp, torch.nan), 0.0)

        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.real_cols = rows.contract.temperature, rows.real_cols
        ctx.save_for_backward(logits, rows.target_local, rows.active, owned, lse)
        ctx.mark_non_differentiable(good, owned)
        return logp, lse, good, owned

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, None]:
        logits, target_local, active, owned, lse = ctx.saved_tensors
        grad_logp, grad_lse = grads[:2]
        if grad_logp is None and grad_lse is None:
            return None, None
        a = torch.zeros_like(lse) if grad_logp is None else torch.where(active, grad_logp, 0.0)
        a = torch.where(~owned & (a != 0), torch.nan, a)[:, None]
        b = (torch.zeros_like(lse) if grad_lse is None else grad_lse)[:, None]

        p = (logits[:, : ctx.real_cols].float() / ctx.temperature - lse[:, None]).exp()
        delta = torch.arange(ctx.real_cols, device=logits.device) == target_local[:, None]
        d = (a * (delta.float() - p) + b * p) / ctx.temperature
        out = torch.zeros_like(logits)
        out[:, : ctx.real_cols] = torch.where((a != 0) | (b != 0), d, 0.0).to(out.dtype)
        return out, None


class NaiveBackend:
    """The logprob by fp32 shards and float all-reduces; for comparison."""

    backend_id = "naive_torch"
    numerics_id = "none"

    def check(self, contract: LogprobContract) -> None:
        """Raise InputError where the contract asks for another merge, or for the entropy."""
        require_merge(contract, self.backend_id, MergeKind.SHARD_LSE, build="ReductionSpec.naive()")

    def rows(self, rows: Rows) -> ClosedCall:
        """Forward over checked rows, differentiable; all-reduces over TP, no collective in backward."""
        function = cast(Any, _NaiveRows)
        logp, lse, good, owned = function.apply(rows.logits, rows)
        agree = None
        if rows.checksum is not None:
            every = all_gather_rows(rows.axis, rows.checksum[None])
            agree = (every == every[0]).all()
        return ClosedCall(logp, lse, None, good, owned, agree)


def load() -> VocabParallelLogprobOp:
    """The naive tier, on any device."""
    return VocabParallelLogprobOp(NaiveBackend())
