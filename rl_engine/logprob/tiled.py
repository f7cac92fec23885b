"""The tiled fp32 tier: one (max, Σ exp) per fixed vocabulary tile, put together in the order of the tiles.

What a rank computes for a tile depends on the tile's columns alone, and every rank then merges all tiles in
the same way: the same bits for every TP degree whose shards are whole tiles. No more is promised. The bits
change with the width of a tile, hence with the padded vocabulary; the exact tiers know no such limits.

Steps of a call, on every rank of the TP group:

1. this shard's tiles, [n, tiles] pairs of fp32; no communication.
2. one all-gather over TP, as transport only: a pair travels as one int64, the target's logit beside them.
3. merge and closing, the same numbers on every rank.
4. backward: each rank writes the gradient of its own shard from lse; no communication.

Roundings (numerics id `tiled-fp32/1`; exp is that of docs/numerics.md section 7, log2 that of section 3, sums
are :func:`halving_sum`; fp32 where nothing else is said, each operation rounded once):

    y_j  = x_j / T                                       padding columns count as −inf
    m_k  = max y_j,  s_k = Σ exp(y_j − m_k)              over tile k; (−inf, +0) where nothing is finite
    M    = max m_k,  S = Σ s_k·exp(m_k − M)              over all tiles; a tile without finite logits adds +0
    lse  = M + ln S                                      in float64, rounded once more for the caller
    logp = y_t − lse                                     likewise; never positive, as S ≥ 1
    p_j  = exp(fl32(y_j − lse))                          the difference in float64
    dx_j = a·(δ_jt − p_j) + b·p_j                        a, b: upstream gradients times fl32(1/T)

Deliberately not done: no float sum of torch (its grouping depends on the number of rows), no collective that
adds floats, no fp32 copy of the logits kept for backward.

Legend: n rows, V_local columns of this rank's shard, K tiles of the whole vocabulary, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_engine.contracts import LogprobContract, MergeKind
from rl_engine.errors import InputError
from rl_engine.logprob.inputs import Rows
from rl_engine.logprob.op import ClosedCall, VocabParallelLogprobOp
from rl_engine.logprob.refusals import require_merge
from rl_engine.mesh import all_gather_rows
from rl_engine.numerics import constants as C
from rl_engine.numerics.exp import exp32
from rl_engine.numerics.words import log2_series

__all__ = ["TiledBackend", "Tiling", "halving_sum", "load", "merge_tiles", "tile_sums"]

# Elements worked at once. exp goes through some hundred float64 passes, which is five times faster on a CPU
# where they stay in its cache (3 MB); elsewhere few and large passes are, at about 100 MB.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 15, 1 << 20


class Tiling(NamedTuple):
    """The tiles of a contract.

    Attributes:
        width: columns of a tile.
        counts: tiles of each TP rank, in rank order; 0 for an empty shard.
    """

    width: int
    counts: tuple[int, ...]

    @classmethod
    def of(cls, contract: LogprobContract) -> Tiling:
        """The tiling that a contract asks for.

        The registry refuses what cannot be tiled before it selects the backend; this is for direct calls. All
        ranks know all bounds, so all raise alike.

        Raises:
            InputError: the contract asks for another merge or for the entropy, or the tiles do not fit.
        """
        build = "ReductionSpec.tiled(num_vocab_tiles=64)"
        require_merge(contract, TiledBackend.backend_id, MergeKind.MAX_SUMEXP_TILES, build=build)
        sharding, tiles = contract.sharding, contract.reduction.num_vocab_tiles
        padded = sharding.padded_vocab_size
        assert tiles is not None
        if padded % tiles:
            raise InputError(
                f"num_vocab_tiles {tiles} does not divide padded_vocab_size {padded}; "
                f"pass a divisor, or pad the vocabulary to {-(-padded // tiles) * tiles}"
            )
        width = padded // tiles
        for rank, (start, end) in enumerate(sharding.vocab_shard_bounds):
            if start % width or end % width:
                raise InputError(
                    f"TP rank {rank} holds [{start}, {end}), expected whole tiles of {width} columns; "
                    f"build the sharding with ShardingSpec.even(..., multiple_of={width})"
                )
        return cls(width, tuple((end - start) // width for start, end in sharding.vocab_shard_bounds))


def halving_sum(values: Tensor) -> Tensor:
    """Sum over the last dimension by elementwise adds of its halves: one order, whatever the other sizes.

    With h the largest power of two below the width, element i + h is added to element i, and again over the
    first h. Equals the same tree over values padded to a power of two with +0, as they are not negative.

    Args:
        values: [..., w] fp32, not negative or NaN, w ≥ 1; overwritten.

    Returns:
        [...] fp32, a view of `values`.

    Example:
        >>> halving_sum(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).tolist()
        [6.0, 15.0]
    """
    width = values.shape[-1]
    while width > 1:
        half = 1 << ((width - 1).bit_length() - 1)
        values[..., : width - half] += values[..., half:width]
        width = half
    return values[..., 0]


def tile_sums(logits: Tensor, *, width: int, real_cols: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Step 1: (max, Σ exp) of every tile of a shard, block by block.

    Args:
        logits: [n, V_local] bf16, fp16 or fp32; V_local is a multiple of `width`.
        width: columns of a tile.
        real_cols: columns before the padding, in [0, V_local].
        temperature: T.

    Returns:
        m [n, tiles] fp32 and s [n, tiles] fp32. The identity (−inf, +0) where a tile holds nothing finite;
        (NaN, 0) or (+inf, 0) where it holds a NaN or +inf.
    """
    n, tiles = logits.shape[0], logits.shape[1] // width
    top = torch.empty(n, tiles, dtype=torch.float32, device=logits.device)
    total = torch.empty_like(top)
    for rows, tile in _blocks(n, tiles, width, logits.device):
        start, stop = tile.start * width, tile.stop * width
        y = _scaled(logits[rows, start:stop], temperature)
        y[:, max(0, real_cols - start) :] = -torch.inf
        y = y.reshape(len(y), -1, width)
        m = y.amax(-1) + 0.0  # −0 and +0 are one maximum
        finite = m.isfinite()
        s = halving_sum(exp32(y - torch.where(finite, m, 0.0)[..., None]))
        top[rows, tile], total[rows, tile] = m, torch.where(finite, s, 0.0)
    return top, total


def merge_tiles(top: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Step 3: the tiles of all ranks to one (max, Σ exp) per row.

    Args:
        top: [n, K] fp32 m in the order of the tiles.
        total: [n, K] fp32 s.

    Returns:
        M [n] fp32 and S [n] fp32. A row is good where M is finite: then S ≥ 1.
    """
    m = top.amax(-1)
    finite = top.isfinite()
    distance = torch.where(finite, top, 0.0) - torch.where(m.isfinite(), m, 0.0)[:, None]
    return m, halving_sum(torch.where(finite, total * exp32(distance), 0.0))


def _blocks(num_rows: int, num_units: int, width: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """Blocks of a table of rows × units of `width` elements: several rows, or a part of one."""
    limit = max(1, (_CPU_BLOCK if device.type == "cpu" else _DEVICE_BLOCK) // width)
    across = max(1, min(limit, num_units))
    down = max(1, limit // across)
    for row in range(0, num_rows, down):
        for unit in range(0, num_units, across):
            yield slice(row, min(row + down, num_rows)), slice(unit, min(unit + across, num_units))


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """fl32(x / T), a new tensor. The divisor is a tensor: by a number, CUDA multiplies with a reciprocal."""
    return logits.float() / torch.full((), temperature, dtype=torch.float32, device=logits.device)


def _pack(first: Tensor, second: Tensor) -> Tensor:
    """Two fp32 tensors to one int64 tensor of their bit patterns."""
    return torch.stack([first, second], -1).view(torch.int64)[..., 0]


def _unpack(words: Tensor) -> tuple[Tensor, Tensor]:
    first, second = words.contiguous()[..., None].view(torch.float32).unbind(-1)
    return first, second


class _Exchanged(NamedTuple):
    """What every rank knows after step 2.

    Attributes:
        top: [n, K] fp32.
        total: [n, K] fp32.
        y_target: [n] fp32, the target's logit over T; any value where nobody owns it.
        owned: [n] bool, exactly one rank holds the target.
        agree: 0-dim bool, all ranks had one checksum; None where there is none.
    """

    top: Tensor
    total: Tensor
    y_target: Tensor
    owned: Tensor
    agree: Tensor | None


def _exchange(top: Tensor, total: Tensor, y_target: Tensor, rows: Rows, tiling: Tiling) -> _Exchanged:
    """Step 2, one collective: [n, 1 + tiles] words of a rank, filled up to the rank with the most tiles.

    Column 0 is (target's logit, 1 where it is here). A last row carries the checksum.
    """
    flag = (rows.target_local >= 0).float()
    words = torch.cat([_pack(y_target, flag)[:, None], _pack(top, total)], 1)
    words = torch.nn.functional.pad(words, (0, max(tiling.counts) - top.shape[1]))
    if rows.checksum is not None:
        last = words.new_zeros(1, words.shape[1])
        last[0, :2] = rows.checksum
        words = torch.cat([words, last])
    every = all_gather_rows(rows.axis, words)
    agree = None
    if rows.checksum is not None:
        agree = (every[:, -1] == every[0, -1]).all()
        every = every[:, :-1]
    targets, flags = _unpack(every[:, :, 0])
    owners = (flags == 1.0).to(torch.int64)
    top, total = _unpack(torch.cat([every[r, :, 1 : 1 + count] for r, count in enumerate(tiling.counts)], 1))
    return _Exchanged(
        top=top,
        total=total,
        y_target=targets.gather(0, owners.argmax(0)[None])[0],
        owned=owners.sum(0) == 1,
        agree=agree,
    )


class _TiledRows(torch.autograd.Function):
    """[n, V_local] logits to (logp, lse, good, owned, agree)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, rows: Rows, tiling: Tiling) -> tuple[Tensor | None, ...]:
        temperature = rows.contract.temperature
        top, total = tile_sums(logits, width=tiling.width, real_cols=rows.real_cols, temperature=temperature)
        y_target = torch.zeros_like(rows.target_local, dtype=torch.float32)
        if logits.shape[1] > 0:
            picked = logits.gather(1, rows.target_local.clamp(min=0)[:, None])[:, 0]
            y_target = _scaled(picked, temperature)
        got = _exchange(top, total, y_target, rows, tiling)

        m, s = merge_tiles(got.top, got.total)
        good = m.isfinite()
        j, log2m = log2_series(torch.where(good, s, 1.0).double())
        lse = torch.where(good, m.double() + (j + log2m) * C.LN2_64, torch.nan)
        logp = torch.where(got.owned, (got.y_target.double() - lse).float(), torch.nan)
        logp = torch.where(rows.active, logp, 0.0)

        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.inv_t, ctx.real_cols = temperature, rows.inv_t, rows.real_cols
        ctx.save_for_backward(logits, rows.target_local, rows.active, got.owned, lse)
        ctx.mark_non_differentiable(good, got.owned)
        return logp, lse.float(), good, got.owned, got.agree

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor | None
    ) -> tuple[Tensor | None, None, None]:
        logits, target_local, active, owned, lse = ctx.saved_tensors
        grad_logp, grad_lse = grads[:2]
        if grad_logp is None and grad_lse is None:
            return None, None, None
        zero = torch.zeros_like(lse, dtype=torch.float32)
        a = zero if grad_logp is None else torch.where(active, grad_logp * ctx.inv_t, 0.0)
        a = torch.where(~owned & (a != 0), torch.nan, a)
        b = zero if grad_lse is None else grad_lse * ctx.inv_t
        return _gradient(logits, target_local, lse, a, b, ctx.temperature, ctx.real_cols), None, None


def _gradient(
    logits: Tensor,
    target_local: Tensor,
    lse: Tensor,
    a: Tensor,
    b: Tensor,
    temperature: float,
    real_cols: int,
) -> Tensor:
    """Step 4, with the selections of docs/numerics.md section 4.

    A coefficient of 0 leaves its term out; padding columns and rows without a coefficient get +0; rows that
    are not good, or whose coefficient is not finite, get NaN in every real column.

    Args:
        logits: [n, V_local] as given to the forward.
        target_local: [n] int64, −1 where another rank owns the target.
        lse: [n] float64, NaN where the row is not good.
        a: [n] fp32 coefficient of logp, over T, 0 on inactive rows, NaN where nobody owns the target.
        b: [n] fp32 coefficient of lse, over T.
        temperature: T.
        real_cols: columns before the padding.

    Returns:
        [n, V_local] in the logits' dtype.
    """
    out = torch.zeros_like(logits)
    used = (a != 0) | (b != 0)  # NaN counts as used
    bad = ~(lse.isfinite() & a.isfinite() & b.isfinite())
    columns = torch.arange(real_cols, device=logits.device)
    for rows, cols in _blocks(logits.shape[0], real_cols, 1, logits.device):
        y = _scaled(logits[rows, cols], temperature)
        p = exp32((y.double() - lse[rows, None]).float())
        delta = (columns[cols] == target_local[rows, None]).float()
        a_rows, b_rows = a[rows, None], b[rows, None]
        d = torch.where(a_rows != 0, a_rows * (delta - p), 0.0)
        with_b = b_rows * p
        d = torch.where(b_rows != 0, torch.where(a_rows != 0, d + with_b, with_b), d)
        d = torch.where(bad[rows, None], torch.nan, d)
        out[rows, cols] = torch.where(used[rows, None], d, 0.0).to(out.dtype)
    return out


class TiledBackend:
    """The logprob by fp32 tiles: the same bits for every TP degree whose shards are whole tiles."""

    backend_id = "tiled_torch"
    numerics_id = "tiled-fp32/1"

    def check(self, contract: LogprobContract) -> None:
        """Raise InputError where the contract asks for something else, or the tiles do not fit it."""
        Tiling.of(contract)

    def rows(self, rows: Rows) -> ClosedCall:
        """Forward over checked rows, differentiable; one all-gather over TP, no collective in backward."""
        function = cast(Any, _TiledRows)
        logp, lse, good, owned, agree = function.apply(rows.logits, rows, Tiling.of(rows.contract))
        return ClosedCall(logp, lse, None, good, owned, agree)


def load() -> VocabParallelLogprobOp:
    """The tiled tier in plain torch, on any device."""
    return VocabParallelLogprobOp(TiledBackend())
