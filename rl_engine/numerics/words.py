"""Partials of the exact sum of exponentials: how they merge, how a row is closed.

A partial is a row of int64 (docs/numerics.md, section 2): reference exponent e, three words, flags, the bits
of the target logit, and three entropy words where asked for. Everything here is per row, never per logit;
every tier shares it.

Shapes: R partials of one row, n rows, K = 6 or 9 columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_engine.numerics import constants as C
from rl_engine.numerics.bits import fp32_bits, from_fp32_bits

__all__ = [
    "ClosedRows",
    "LossTokens",
    "close_rows",
    "empty_partial",
    "inverse_temperature",
    "log2_series",
    "merge",
    "note_target",
    "raise_exponent",
    "temperature_scale",
]


def temperature_scale(temperature: float) -> float:
    """L = fl32(log2 e / T), as a Python float that fp32 represents exactly."""
    return float(np.float32(C.LOG2E / temperature))


def inverse_temperature(temperature: float) -> float:
    """fl32(1 / T), as a Python float that fp32 represents exactly."""
    return float(np.float32(1.0 / temperature))


class ClosedRows(NamedTuple):
    """What a row's merged partial says.

    Attributes:
        lse2: [n] float64, log2 of the sum of 2^(x·L); NaN where the row is not good.
        logp: [n] fp32, natural log-probability of the target; NaN where not good or not owned.
        lse: [n] fp32, natural log-sum-exp of the logits over T.
        entropy: [n] fp32 in nats, or None.
        good: [n] bool, no NaN, no +inf, and |e| in the domain.
        owned: [n] bool, exactly one rank holds the target inside the real vocabulary.
    """

    lse2: Tensor
    logp: Tensor
    lse: Tensor
    entropy: Tensor | None
    good: Tensor
    owned: Tensor


def empty_partial(num_rows: int, *, with_entropy: bool, device: torch.device | None = None) -> Tensor:
    """[n, K] int64 partials of no logits: the identity of :func:`merge`."""
    columns = C.ENTROPY_COLUMNS if with_entropy else C.PARTIAL_COLUMNS
    out = torch.zeros(num_rows, columns, dtype=torch.int64, device=device)
    out[:, C.COL_EXPONENT] = C.EMPTY_EXPONENT
    return out


def note_target(partial: Tensor, logits: Tensor, target_local: Tensor) -> None:
    """Write into [n, K] partials which rows' targets are here, and their logits by bit pattern.

    Args:
        partial: [n, K] int64, changed in place.
        logits: [n, V_local] of any of the three dtypes.
        target_local: [n] int64, the target's column in this shard, −1 where another rank owns it.
    """
    owned = target_local >= 0
    if logits.shape[1]:
        x_t = logits.detach().gather(1, target_local.clamp(min=0)[:, None])[:, 0].float()
        partial[:, C.COL_TARGET] = torch.where(owned, fp32_bits(x_t), 0)
    partial[:, C.COL_FLAGS] += torch.where(owned, C.FLAG_OWNED, 0)


def raise_exponent(partial: Tensor, exponent: Tensor) -> Tensor:
    """The same partials with reference exponent `exponent` ≥ their own; the lowest words fall off.

    Args:
        partial: [..., K] int64.
        exponent: [...] int64.

    Returns:
        [..., K] int64, a new tensor.
    """
    out = partial.clone()
    steps = (exponent - partial[..., C.COL_EXPONENT]) // C.WORD_BITS
    words = partial[..., C.COL_WORD : C.COL_WORD + C.NUM_WORDS]
    shifted = [_word_or_zero(words, i - steps) for i in range(C.NUM_WORDS)]
    out[..., C.COL_EXPONENT] = exponent
    out[..., C.COL_WORD : C.COL_WORD + C.NUM_WORDS] = torch.stack(shifted, -1)
    if partial.shape[-1] == C.ENTROPY_COLUMNS:
        entropy = partial[..., C.COL_ENTROPY :]
        for i in range(C.NUM_WORDS):
            drop = torch.where(shifted[i] != 0, C.WORD_BITS * steps, 0)
            out[..., C.COL_ENTROPY + i] = _word_or_zero(entropy, i - steps) - drop * shifted[i]
    return out


def _word_or_zero(words: Tensor, index: Tensor) -> Tensor:
    picked = words.gather(-1, index.clamp(0, C.NUM_WORDS - 1)[..., None])[..., 0]
    return torch.where(index >= 0, picked, 0)


def merge(partials: Tensor) -> Tensor:
    """Merge the partials of each row; any order and any grouping give the same result.

    Args:
        partials: [R, n, K] int64.

    Returns:
        [n, K] int64.
    """
    exponent = partials[..., C.COL_EXPONENT].amax(0)
    raised = raise_exponent(partials, exponent.expand(partials.shape[:-1]))
    out = raised.sum(0)
    out[:, C.COL_EXPONENT] = exponent
    return out


def _carry(words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    w0, w1, w2 = words.unbind(-1)
    mask = (1 << C.WORD_BITS) - 1
    w1 = w1 + (w2 >> C.WORD_BITS)
    w0 = w0 + (w1 >> C.WORD_BITS)
    return w0, w1 & mask, w2 & mask


def _words_to_float(words: Tensor) -> Tensor:
    w0, w1, w2 = (w.double() for w in _carry(words))  # each below 2^53: exact
    return (w0 * 2.0**C.WORD_BITS + w1) + w2 * 2.0**-C.WORD_BITS


def log2_series(s: Tensor) -> tuple[Tensor, Tensor]:
    """log2 of positive float64 as (integer part j, log2 of a mantissa in [√½, √2]); section 3 step 3."""
    bits = s.view(torch.int64)
    j = ((bits >> 52) - 1023).double()
    m = ((bits & ((1 << 52) - 1)) | (1023 << 52)).view(torch.float64)
    large = m > C.SQRT2
    m = torch.where(large, m * 0.5, m)
    j = torch.where(large, j + 1.0, j)
    u = (m - 1.0) / (m + 1.0)
    q = u * u
    poly = torch.full_like(u, C.LOG2_POLY[-1])
    for c in reversed(C.LOG2_POLY[:-1]):
        poly = poly * q + c  # two eager operations: rounded separately
    return j, u * poly


def close_rows(partial: Tensor, scale_l: float) -> ClosedRows:
    """Close merged partials into log-probabilities; section 3 and 5.

    Args:
        partial: [n, K] int64, merged over all ranks.
        scale_l: L, from :func:`temperature_scale`.

    Returns:
        The closed rows; masking is the caller's.
    """
    e = partial[:, C.COL_EXPONENT]
    flags = partial[:, C.COL_FLAGS]
    good = ((flags & (C.FLAG_OWNED - 1)) == 0) & (e.abs() <= C.MAX_EXPONENT)
    owned = (flags // C.FLAG_OWNED) == 1
    total = _words_to_float(partial[:, C.COL_WORD : C.COL_WORD + C.NUM_WORDS])
    j, log2m = log2_series(torch.where(good, total, 1.0))
    lse2 = (e.double() + j - 44.0) + log2m
    lse2 = torch.where(good, lse2, torch.nan)
    lse = (lse2 * C.LN2_64).float()

    target = partial[:, C.COL_TARGET]
    x_t = from_fp32_bits(target)
    v = ((x_t.double() * scale_l - lse2) * C.LN2_64).float()
    v = torch.where(owned, v, torch.nan)
    logp = torch.where((v < 0) | v.isnan(), v, 0.0)

    entropy = None
    if partial.shape[1] == C.ENTROPY_COLUMNS:
        mean_z = _words_to_float(partial[:, C.COL_ENTROPY :]) / torch.where(good, total, 1.0)
        h = ((((j - 44.0) + log2m) - mean_z) * C.LN2_64).float()
        h = torch.where(good, h, torch.nan)
        entropy = torch.where((h > 0) | h.isnan(), h, 0.0)
    return ClosedRows(lse2, logp, lse, entropy, good, owned)


class LossTokens(NamedTuple):
    """What the loss knows of each token before its log-prob, and the formula (docs/numerics.md, section 7).

    Attributes:
        old: [n] fp32.
        advantage: [n] fp32.
        ref: [n] fp32, or None without a KL term.
        active: [n] bool.
        weight: [n] fp32, of the token in the gradient.
        low: lower bound of the clipped ratio.
        high: upper bound.
        guard: of log-ratios.
        beta: KL coefficient.
        k3: whether the KL estimator is k3, else k1.
    """

    old: Tensor
    advantage: Tensor
    ref: Tensor | None
    active: Tensor
    weight: Tensor
    low: float
    high: float
    guard: float
    beta: float
    k3: bool
