"""The exact tiers of the logprob: partial words per shard, one merge, one closing; elementwise backward.

Steps of a call, on every rank of the TP group:

1. `partial`: this shard's words, [n, K] int64; no communication.
2. one exchange over TP: by default a packed all-gather of the words, merged locally; or an all-reduce(MAX)
   of the reference exponents, then an all-reduce(SUM) of the rest (`Transport.ALL_REDUCE_MAX_SUM`).
3. `close_rows`: logp, lse and entropy, the same numbers on every rank.
4. backward: each rank writes the gradient of its own shard from lse2; no communication.

Deliberately not done: no fp32 copy of the logits is made or saved, no collective adds floats.

The derivative: with p_j = exp(x_j/T − lse), ∂logp/∂x_j = (δ_jt − p_j)/T, ∂lse/∂x_j = p_j/T, and
∂H/∂x_j = −p_j (ln p_j + H)/T, since H = −Σ p ln p and Σ_j ∂p_j/∂x_i = 0.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_engine.contracts import LogprobContract, MergeKind, Transport
from rl_engine.logprob.inputs import Rows
from rl_engine.logprob.op import ClosedCall, VocabParallelLogprobOp
from rl_engine.logprob.refusals import require_merge
from rl_engine.mesh import Axis, all_gather_rows, all_reduce_max, all_reduce_sum
from rl_engine.numerics import constants as C
from rl_engine.numerics.words import ClosedRows, close_rows, merge, raise_exponent

__all__ = ["ExactBackend", "WordTier", "load_exact_numba", "load_exact_torch"]


class WordTier(Protocol):
    """One implementation of docs/numerics.md sections 2 to 5: see :mod:`rl_engine.numerics.reference`."""

    def partials(
        self,
        logits: Tensor,
        target_local: Tensor,
        *,
        scale_l: float,
        real_cols: int,
        with_entropy: bool = False,
    ) -> Tensor:
        """[R, n, K] int64 partials of one shard, in R pieces of each row."""
        ...

    def close(self, partials: Tensor, scale_l: float) -> ClosedRows:
        """Merge [R, n, K] partials and close them."""
        ...

    def gradient(
        self,
        logits: Tensor,
        target_local: Tensor,
        lse2: Tensor,
        *,
        grad_logp: Tensor | None,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        entropy: Tensor | None,
        scale_l: float,
        real_cols: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """[n, V_local] gradient of one shard."""
        ...


class TorchWords:
    """A tier whose partials are one piece, merged and closed in torch.

    Args:
        module: with `partial` and `gradient`, as in :mod:`rl_engine.numerics.reference`.
    """

    def __init__(self, module: ModuleType) -> None:
        self._partial: Any = module.partial
        self.gradient: Any = module.gradient

    def partials(
        self,
        logits: Tensor,
        target_local: Tensor,
        *,
        scale_l: float,
        real_cols: int,
        with_entropy: bool = False,
    ) -> Tensor:
        """[1, n, K] int64."""
        partial: Tensor = self._partial(
            logits, target_local, scale_l=scale_l, real_cols=real_cols, with_entropy=with_entropy
        )
        return partial[None]

    def close(self, partials: Tensor, scale_l: float) -> ClosedRows:
        """Merge and close."""
        return close_rows(_one(partials), scale_l)


def _one(partials: Tensor) -> Tensor:
    """[R, n, K] to the merged [n, K]."""
    return partials[0] if len(partials) == 1 else merge(partials)


def _exchange(partials: Tensor, axis: Axis, transport: Transport) -> Tensor:
    """The pieces of all ranks of the axis, [R', n, K], or one merged piece: the same on every rank."""
    if axis.size == 1:
        return partials
    partial = _one(partials)
    if transport is Transport.PACKED_ALL_GATHER:
        return all_gather_rows(axis, partial)
    exponent = all_reduce_max(axis, partial[:, C.COL_EXPONENT].contiguous())
    raised = raise_exponent(partial, exponent)
    raised[:, C.COL_EXPONENT] = 0
    total = all_reduce_sum(axis, raised)
    total[:, C.COL_EXPONENT] = exponent
    return total[None]


def _append_checksum(partials: Tensor, checksum: Tensor) -> Tensor:
    """One more row that adds up to the sums and sums of squares of the ranks' checksums."""
    row = torch.zeros(len(partials), 1, partials.shape[2], dtype=torch.int64, device=partials.device)
    # 30 bits: their squares add up within int64 over 8 ranks, and wrap alike beyond
    small = checksum & 0x3FFFFFFF
    row[0, 0, C.COL_WORD : C.COL_WORD + 2] = small
    row[0, 0, C.COL_WORD + 2 : C.COL_WORD + 4] = small * small
    return torch.cat([partials, row], 1)


def _checksums_agree(row: Tensor, size: int) -> Tensor:
    """0-dim bool: all ranks had the same checksums, which is when n·Σc² = (Σc)² (Cauchy–Schwarz)."""
    sums, squares = row[C.COL_WORD : C.COL_WORD + 2], row[C.COL_WORD + 2 : C.COL_WORD + 4]
    return (squares * size == sums * sums).all()


class _ExactRows(torch.autograd.Function):
    """[n, V_local] logits to (logp, lse, entropy, good, owned, agree); the module header derives backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows, tier: WordTier) -> tuple[Tensor | None, ...]:
        with_entropy = rows.contract.output.entropy
        if rows.loss is not None and not with_entropy and rows.axis.size == 1:
            return _forward_with_loss(ctx, logits, rows, tier)
        partials = tier.partials(
            logits,
            rows.target_local,
            scale_l=rows.scale_l,
            real_cols=rows.real_cols,
            with_entropy=with_entropy,
        )
        agree = None
        if rows.checksum is not None:
            partials = _append_checksum(partials, rows.checksum)
        pieces = _exchange(partials, rows.axis, rows.contract.reduction.transport)
        if rows.checksum is not None:
            agree = _checksums_agree(pieces[:, -1].sum(0), rows.axis.size)
            pieces = pieces[:, :-1]
        closed = tier.close(pieces, rows.scale_l)
        logp = torch.where(rows.active, closed.logp, 0.0)
        entropy = None if closed.entropy is None else torch.where(rows.active, closed.entropy, 0.0)

        ctx.set_materialize_grads(False)
        ctx.loss_rows = None
        ctx.tier, ctx.scale_l, ctx.inv_t, ctx.real_cols = tier, rows.scale_l, rows.inv_t, rows.real_cols
        ctx.save_for_backward(logits, rows.target_local, rows.active, closed.owned, closed.lse2, entropy)
        ctx.mark_non_differentiable(closed.good, closed.owned)
        return logp, closed.lse, entropy, closed.good, closed.owned, agree

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        logits, target_local, active, owned, lse2, entropy = ctx.saved_tensors
        grad_logp, grad_lse, grad_entropy = grads[:3]
        if grad_logp is None and grad_lse is None and grad_entropy is None:
            return None, None, None

        def coefficient(grad: Tensor | None, active_only: bool) -> Tensor | None:
            if grad is None:
                return None
            scaled = grad * ctx.inv_t
            return torch.where(active, scaled, 0.0) if active_only else scaled

        a = coefficient(grad_logp, active_only=True)
        if a is not None:  # a row whose target nobody owns has logp NaN: so is its gradient
            a = torch.where(~owned & (a != 0), torch.nan, a)
        if ctx.loss_rows is not None and a is not None and grad_lse is None:
            d = ctx.tier.resume_gradient(
                ctx.loss_rows,
                logits,
                target_local,
                grad_logp=a,
                upstream=grad_logp,
                scale_l=ctx.scale_l,
                real_cols=ctx.real_cols,
            )
            ctx.loss_rows = None  # given away: a second backward computes its own
            return d, None, None
        d = ctx.tier.gradient(
            logits,
            target_local,
            lse2,
            grad_logp=a,
            grad_lse=coefficient(grad_lse, active_only=False),
            grad_entropy=coefficient(grad_entropy, active_only=True),
            entropy=entropy,
            scale_l=ctx.scale_l,
            real_cols=ctx.real_cols,
        )
        return d, None, None


def _forward_with_loss(ctx: Any, logits: Tensor, rows: Rows, tier: Any) -> tuple[Tensor | None, ...]:
    """The same numbers, with the gradient of the loss made while the row is at hand, for backward to give."""
    done = tier.loss_rows(
        logits,
        rows.target_local,
        rows.loss,
        scale_l=rows.scale_l,
        inv_t=rows.inv_t,
        real_cols=rows.real_cols,
    )
    ctx.set_materialize_grads(False)
    ctx.loss_rows = done
    ctx.tier, ctx.scale_l, ctx.inv_t, ctx.real_cols = tier, rows.scale_l, rows.inv_t, rows.real_cols
    ctx.save_for_backward(logits, rows.target_local, rows.active, done.owned, done.lse2, None)
    lse = (done.lse2 * C.LN2_64).float()
    ctx.mark_non_differentiable(done.good, done.owned)
    return done.logp, lse, None, done.good, done.owned, None


class ExactBackend:
    """The logprob by exact words on one tier.

    Args:
        backend_id: the registry's name of it.
        tier: an implementation of the word arithmetic.
    """

    numerics_id = C.NUMERICS_ID

    def __init__(self, backend_id: str, tier: WordTier) -> None:
        self.backend_id = backend_id
        self.tier = tier

    def check(self, contract: LogprobContract) -> None:
        """Raise InputError where the contract asks for another merge."""
        build = "ReductionSpec.exact()"
        require_merge(contract, self.backend_id, MergeKind.EXACT_WORDS, build=build, entropy=True)

    def takes_loss(self, logits: Tensor, real_cols: int, axis: Axis) -> bool:
        """Whether rows may carry what the loss needs, so that its gradient comes from the same visit."""
        fits = getattr(self.tier, "fits_loss_rows", None)
        return fits is not None and axis.size == 1 and logits.requires_grad and fits(logits, real_cols)

    def rows(self, rows: Rows) -> ClosedCall:
        """Forward over checked rows, differentiable; one exchange over TP, none in backward."""
        function = cast(Any, _ExactRows)
        return ClosedCall(*function.apply(rows.logits, rows, self.tier))


def load_exact_torch() -> VocabParallelLogprobOp:
    """The readable tier in plain torch, on any device."""
    from rl_engine.numerics import reference

    return VocabParallelLogprobOp(ExactBackend("exact_torch", TorchWords(reference)))


def load_exact_numba() -> VocabParallelLogprobOp:
    """The compiled tier for CPUs."""
    from rl_engine.numerics import cpu

    return VocabParallelLogprobOp(ExactBackend("exact_numba", TorchWords(cpu)))


def load_exact_triton() -> VocabParallelLogprobOp:
    """The Triton tier for CUDA devices, with the CUDA C++ kernels for bf16 where the device has them."""
    from rl_engine.numerics import gpu, hopper, nvrtc

    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    tier = gpu if nvrtc.missing_reason(capability) else hopper
    return VocabParallelLogprobOp(ExactBackend("exact_triton", cast(Any, tier)))
