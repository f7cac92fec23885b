"""The definition in plain torch: readable line by line against docs/numerics.md, on any device, slow.

The work goes in blocks, whose partials merge exactly, so that the float64 temporaries of the emulated fma
stay small.

Shapes: n rows, V_local columns of this rank's shard, K = 6 or 9 partial columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rl_engine.numerics import constants as C
from rl_engine.numerics.exp import exp2_poly, fma32, scale_by_power_of_two
from rl_engine.numerics.words import empty_partial, merge, note_target

__all__ = ["gradient", "partial"]

# Elements worked at once: the emulated fma goes through some hundred float64 passes, which is ten times
# faster where they stay in a CPU's cache; elsewhere few and large passes are.
_CPU_BLOCK, _DEVICE_BLOCK = 1 << 15, 1 << 20


def _blocks(logits: Tensor, real_cols: int) -> Iterator[tuple[slice, slice]]:
    """(rows, columns) that cover [n, real_cols]."""
    size = _CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK
    num_rows, num_cols = logits.shape[0], min(size, real_cols)
    step = max(1, size // max(1, num_cols))
    for row in range(0, num_rows, step):
        for column in range(0, real_cols, size):
            yield slice(row, row + step), slice(column, min(real_cols, column + size))


def partial(
    logits: Tensor, target_local: Tensor, *, scale_l: float, real_cols: int, with_entropy: bool = False
) -> Tensor:
    """This shard's partial of Σ exp over its real columns (section 2).

    Args:
        logits: [n, V_local] bf16, fp16 or fp32.
        target_local: [n] int64, the target's column in this shard, −1 where another rank owns it.
        scale_l: L = fl32(log2 e / T).
        real_cols: columns before the padding, in [0, V_local].
        with_entropy: also the three entropy words.

    Returns:
        [n, K] int64 partials.
    """
    out = empty_partial(logits.shape[0], with_entropy=with_entropy, device=logits.device)
    for rows, columns in _blocks(logits, real_cols):
        piece = empty_partial(len(out[rows]), with_entropy=with_entropy, device=logits.device)
        _partial_rows(logits[rows, columns].float(), scale_l, piece)
        out[rows] = merge(torch.stack([out[rows], piece]))
    note_target(out, logits, target_local)
    return out


def _partial_rows(x: Tensor, scale_l: float, out: Tensor) -> None:
    """Fill `out` [n, K] for fp32 logits x [n, V]; rows with NaN or +inf stay empty but for the flag."""
    nan = x.isnan().any(1)
    posinf = (x == torch.inf).any(1)
    out[:, C.COL_FLAGS] = nan * C.FLAG_NAN + posinf * C.FLAG_POSINF

    # The reference exponent: the smallest multiple of 22 with k_max <= e - 2.
    x_max = x.amax(1)
    t_max = fma32(x_max, scale_l, C.MAGIC)
    over = t_max >= 2.0**24
    ordinary = (t_max >= 2.0**23) & ~over & ~nan & ~posinf
    k_max = (torch.where(ordinary, t_max, C.MAGIC) - C.MAGIC).to(torch.int64)
    e = -((-(k_max + C.SPARE_BITS)) // C.WORD_BITS) * C.WORD_BITS
    out[:, C.COL_EXPONENT] = torch.where(ordinary, e, C.EMPTY_EXPONENT)
    out[:, C.COL_EXPONENT] = torch.where(over & ~nan & ~posinf, C.OVER_EXPONENT, out[:, C.COL_EXPONENT])

    # g = 2^(k - e + r), exact but for the polynomial.
    e_col = e[:, None]
    x_min = ((e_col - C.CLAMP_BITS).double() / scale_l).float()
    x = torch.where(ordinary[:, None], torch.maximum(x, x_min), x_min)
    magic = (C.MAGIC - e_col.double()).float()
    t = fma32(x, scale_l, magic)
    k = t - magic
    r = fma32(x, scale_l, -k)
    k_less_e = (t - C.MAGIC).to(torch.int32)
    g = scale_by_power_of_two(exp2_poly(r), k_less_e)

    digits = _digits(g)
    for i, d in enumerate(digits):
        out[:, C.COL_WORD + i] = torch.where(ordinary, d.sum(1), 0)
    if out.shape[1] == C.ENTROPY_COLUMNS:
        for i, (d, dq) in enumerate(zip(digits, _digits(g * r), strict=True)):
            out[:, C.COL_ENTROPY + i] = torch.where(ordinary, (d * k_less_e + dq).sum(1), 0)


def _digits(g: Tensor) -> list[Tensor]:
    """The three signed digits of fp32 values |g| < 1/2 as int64."""
    digits: list[Tensor] = []
    for magic, magic_bits in zip(C.DIGIT_MAGIC, C.DIGIT_MAGIC_BITS, strict=True):
        b = g + magic
        digits.append((b.view(torch.int32) - magic_bits).to(torch.int64))
        g = g - (b - magic)
    return digits


def gradient(
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
    """Gradient of this shard's logits (section 4). Elementwise, no collective.

    Args:
        logits: [n, V_local] as given to :func:`partial`.
        target_local: [n] int64, −1 where another rank owns the target.
        lse2: [n] float64 from closing; NaN marks a row that is not good.
        grad_logp: [n] fp32 coefficient a, already multiplied by 1/T and zeroed on inactive rows; None counts
            as 0. A row with a coefficient that is not finite gets NaN.
        grad_lse: [n] fp32 coefficient b, already multiplied by 1/T; None counts as 0.
        grad_entropy: [n] fp32 coefficient h, like `grad_logp`; needs `entropy`.
        entropy: [n] fp32, the row's entropy.
        scale_l: L = fl32(log2 e / T).
        real_cols: columns before the padding.
        out: where to write, like `logits`; may be `logits` itself.

    Returns:
        [n, V_local] in the logits' dtype.
    """
    if out is None:
        out = torch.empty_like(logits)
    zero = torch.zeros_like(lse2, dtype=torch.float32)
    a, b, h = (zero if c is None else c for c in (grad_logp, grad_lse, grad_entropy))
    big_h = zero if entropy is None else entropy
    index = torch.arange(real_cols, device=logits.device)
    for rows, columns in _blocks(logits, real_cols):
        delta = (index[columns] == target_local[rows, None]).float()
        d = _gradient_rows(
            logits[rows, columns].float(),
            delta,
            lse2[rows],
            a[rows],
            b[rows],
            h[rows],
            big_h[rows],
            scale_l,
        )
        # one NaN pattern: conversions of NaN to a narrower dtype differ between instruction sets
        out[rows, columns] = d.to(out.dtype).masked_fill_(d.isnan(), torch.nan)
    out[:, real_cols:] = 0
    return out


def _gradient_rows(
    x: Tensor, delta: Tensor, lse2: Tensor, a: Tensor, b: Tensor, h: Tensor, big_h: Tensor, scale_l: float
) -> Tensor:
    bad = ~(lse2 + a + b + h).isfinite()[:, None]
    n = torch.where(lse2.isnan(), 0.0, lse2).round()
    f = (lse2 - n).float()[:, None]
    y = fma32(x, scale_l, -n.float()[:, None]) - f
    tiny = y < C.MIN_LOG2_PROB
    y_safe = torch.where(tiny | bad, 0.0, y)
    t = y_safe + C.MAGIC
    k = t - C.MAGIC
    p = scale_by_power_of_two(exp2_poly(y_safe - k), k.to(torch.int32))
    p = torch.where(tiny, 0.0, p)

    a, b, h, big_h = (c[:, None] for c in (a, b, h, big_h))
    d = torch.where(a != 0, a * (delta - p), 0.0)
    with_b = b * p
    d = torch.where(b != 0, torch.where(a != 0, d + with_b, with_b), d)
    u = fma32(y_safe, C.LN2_32, big_h)
    with_h = torch.where(tiny, 0.0, h * (p * u))
    d = torch.where(h != 0, torch.where((a != 0) | (b != 0), d - with_h, -with_h), d)
    used = (a != 0) | (b != 0) | (h != 0)
    d = torch.where(used & bad, torch.nan, d)
    return torch.where(used, d, 0.0)
