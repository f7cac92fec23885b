"""The definition as Triton kernels for CUDA devices.

One pass over the logits forward, one backward, no temporary of their size. Kernels first, then launchers,
which have the call forms of :mod:`rl_engine.numerics.reference`. A row may be split over several programs:
partials merge exactly, so neither that nor any block size shows in a bit.

What keeps the bits: every fused operation is an explicit `tl.fma`, all other fusion is off
(`enable_fp_fusion=False`), no fp32 division is used, and sums are of integers.

Shapes: n rows, V_local columns of this rank's shard, R partials of a row, K = 6 or 9 partial columns.
"""
# pyright: basic, reportMissingImports=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rl_engine.numerics import constants as C
from rl_engine.numerics.words import ClosedRows

__all__ = ["close", "gradient", "gradient_where_changed", "partials"]

_P0, _P1, _P2, _P3, _P4, _P5, _P6 = (tl.constexpr(c) for c in C.EXP2_POLY)
_MAGIC = tl.constexpr(C.MAGIC)
_EMPTY = tl.constexpr(C.EMPTY_EXPONENT)
_OVER = tl.constexpr(C.OVER_EXPONENT)
_MAX_E = tl.constexpr(C.MAX_EXPONENT)
_CLAMP = tl.constexpr(float(C.CLAMP_BITS))
_B0, _B1, _B2 = (tl.constexpr(m) for m in C.DIGIT_MAGIC)
_N0, _N1, _N2 = (tl.constexpr(m) for m in C.DIGIT_MAGIC_BITS)
_OWNED = tl.constexpr(C.FLAG_OWNED)
_POSINF = tl.constexpr(C.FLAG_POSINF)
_LN2_32 = tl.constexpr(C.LN2_32)
_LN2_64 = tl.constexpr(C.LN2_64)
_TINY = tl.constexpr(C.MIN_LOG2_PROB)
_SQRT2 = tl.constexpr(C.SQRT2)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8, _L9, _L10 = (tl.constexpr(c) for c in C.LOG2_POLY)
_RINT_64 = tl.constexpr(
    6755399441055744.0
)  # 1.5·2^52: adding and subtracting it rounds float64 to an integer


# ---------------------------------------------------------------------------------------------- pieces


@triton.jit
def _poly(r):
    p = tl.fma(r, _P6, _P5)
    p = tl.fma(p, r, _P4)
    p = tl.fma(p, r, _P3)
    p = tl.fma(p, r, _P2)
    p = tl.fma(p, r, _P1)
    return tl.fma(p, r, _P0)


@triton.jit
def _scale(p, shift):
    return (p.to(tl.int32, bitcast=True) + (shift << 23)).to(tl.float32, bitcast=True)


@triton.jit
def _max2(a, b, PACKED: tl.constexpr):
    """NaN-propagating maximum, two narrow elements an instruction where the dtype allows it."""
    if PACKED and a.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif PACKED and a.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nan_max(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _row_max(x):
    return tl.reduce(x.to(tl.float32), 0, _nan_max)


@triton.jit
def _settle(t_top, inv_l):
    """For the largest logit, as t = fma(x, L, MAGIC): (e, magic, x_min, the t beyond which e must rise)."""
    k = (t_top - _MAGIC).to(tl.int32)
    # 22·⌈(k + 2)/22⌉, on a positive number so that truncation is floor
    e = ((k + 2 + 21 + 4400000) // 22 - 200000) * 22
    ef = e.to(tl.float32)
    return e, _MAGIC - ef, (ef - _CLAMP) * inv_l, _MAGIC + (ef - 2.0)


@triton.jit
def _digits(x, scale_l, magic, x_min):
    """The three digit patterns of logits x, their magic constants still in, and t, r, g for the entropy."""
    x = tl.maximum(x.to(tl.float32), x_min)
    t = tl.fma(x, scale_l, magic)
    r = tl.fma(x, scale_l, magic - t)
    g = _scale(_poly(r), t.to(tl.int32, bitcast=True))
    b0 = g + _B0
    g1 = g - (b0 - _B0)
    b1 = g1 + _B1
    b2 = (g1 - (b1 - _B1)) + _B2
    return (
        b0.to(tl.int32, bitcast=True),
        b1.to(tl.int32, bitcast=True),
        b2.to(tl.int32, bitcast=True),
        t,
        r,
        g,
    )


@triton.jit
def _entropy_digits(d0, d1, d2, t, r, g):
    """int64 terms of the three entropy words of one tile."""
    k = (t - _MAGIC).to(tl.int32)
    q = g * r
    b0 = q + _B0
    q1 = q - (b0 - _B0)
    b1 = q1 + _B1
    b2 = (q1 - (b1 - _B1)) + _B2
    h0 = (d0 - _N0) * k + (b0.to(tl.int32, bitcast=True) - _N0)
    h1 = (d1 - _N1) * k + (b1.to(tl.int32, bitcast=True) - _N1)
    h2 = (d2 - _N2) * k + (b2.to(tl.int32, bitcast=True) - _N2)
    return h0.to(tl.int64), h1.to(tl.int64), h2.to(tl.int64)


@triton.jit
def _four_tiles(x0, x1, x2, x3, scale_l, magic, x_min, a0, a1, a2):
    """Add the digits of four tiles, their magic constants taken off at once, modulo 2^32."""
    p0, p1, p2, _t, _r, _g = _digits(x0, scale_l, magic, x_min)
    q0, q1, q2, _t, _r, _g = _digits(x1, scale_l, magic, x_min)
    a0 += p0 + q0
    a1 += p1 + q1
    a2 += p2 + q2
    p0, p1, p2, _t, _r, _g = _digits(x2, scale_l, magic, x_min)
    q0, q1, q2, _t, _r, _g = _digits(x3, scale_l, magic, x_min)
    a0 += p0 + q0 - (4 * _N0 - 4294967296)
    a1 += p1 + q1 - (4 * _N1 - 4294967296)
    a2 += p2 + q2 - (4 * _N2 - 4294967296)
    return a0, a1, a2


@triton.jit
def _one_tile(x, scale_l, magic, x_min, a0, a1, a2, h0, h1, h2, ENTROPY: tl.constexpr):
    """Add the digits of one tile, and the entropy terms where asked for."""
    p0, p1, p2, t, r, g = _digits(x, scale_l, magic, x_min)
    a0 += p0 - _N0
    a1 += p1 - _N1
    a2 += p2 - _N2
    if ENTROPY:
        u0, u1, u2 = _entropy_digits(p0, p1, p2, t, r, g)
        h0 += u0
        h1 += u1
        h2 += u2
    return a0, a1, a2, h0, h1, h2


@triton.jit
def _raise(steps, a0, a1, a2, h0, h1, h2, ENTROPY: tl.constexpr):
    """All words `steps` places down, the entropy words relative to the new exponent."""
    a0, a1, a2 = _shift_words(steps, a0, a1, a2)
    if ENTROPY:
        h0, h1, h2 = _shift_words(steps, h0, h1, h2)
        drop = tl.minimum(steps, 3) * 22
        h0 -= a0.to(tl.int64) * drop
        h1 -= a1.to(tl.int64) * drop
        h2 -= a2.to(tl.int64) * drop
    return a0, a1, a2, h0, h1, h2


@triton.jit
def _shift_words(steps, a0, a1, a2):
    """The words `steps` places down."""
    z = a0 * 0
    if steps == 1:
        a2 = a1
        a1 = a0
        a0 = z
    elif steps == 2:
        a2 = a0
        a1 = z
        a0 = z
    else:
        a0 = z
        a1 = z
        a2 = z
    return a0, a1, a2


# ---------------------------------------------------------------------------------------------- forward


@triton.jit
def _partial_kernel(
    logits,  # [n, V_local] bf16 | fp16 | fp32, IN
    target_local,  # [n] int64, IN, −1 where not owned
    out,  # [R, n, K] int64, OUT
    num_rows,
    real_cols,
    split_cols,  # columns of one program, a multiple of 8·BLOCK
    row_stride,
    scale_l,
    inv_l,  # about 1 / L: shows in no bit
    COLUMNS: tl.constexpr,
    ENTROPY: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    base = logits + row * row_stride
    lanes = tl.arange(0, BLOCK)
    begin = split * split_cols
    end = tl.minimum(begin + split_cols, real_cols)

    e = tl.full((), _EMPTY, tl.int32)
    seen = tl.full((), -float("inf"), tl.float32)
    zero = tl.zeros((BLOCK,), tl.int32)
    a0 = zero
    a1 = zero
    a2 = zero
    h0 = zero.to(tl.int64)
    h1 = h0
    h2 = h0
    # Set when e first rises; until then the digits are of no meaning, and rising from the empty exponent
    # drops them.
    magic = tl.full((), _MAGIC, tl.float32)
    x_min = tl.full((), 0.0, tl.float32)
    rise_above = tl.full((), 8388607.5, tl.float32)
    full = begin + tl.maximum(end - begin, 0) // (8 * BLOCK) * (8 * BLOCK)
    for start in range(begin, full, 8 * BLOCK):
        x0 = tl.load(base + start + lanes)
        x1 = tl.load(base + start + BLOCK + lanes)
        x2 = tl.load(base + start + 2 * BLOCK + lanes)
        x3 = tl.load(base + start + 3 * BLOCK + lanes)
        x4 = tl.load(base + start + 4 * BLOCK + lanes)
        x5 = tl.load(base + start + 5 * BLOCK + lanes)
        x6 = tl.load(base + start + 6 * BLOCK + lanes)
        x7 = tl.load(base + start + 7 * BLOCK + lanes)
        left = _max2(_max2(x0, x1, PACKED), _max2(x2, x3, PACKED), PACKED)
        right = _max2(_max2(x4, x5, PACKED), _max2(x6, x7, PACKED), PACKED)
        top = _row_max(_max2(left, right, PACKED))
        seen = tl.maximum(seen, top, propagate_nan=tl.PropagateNan.ALL)
        t_top = tl.fma(top, scale_l, _MAGIC)
        if (t_top > rise_above) & (t_top < 16777216.0):
            e_new, magic, x_min, rise_above = _settle(t_top, inv_l)
            a0, a1, a2, h0, h1, h2 = _raise((e_new - e) // 22, a0, a1, a2, h0, h1, h2, ENTROPY)
            e = e_new
        if ENTROPY:
            for i in tl.static_range(4):
                x = x0 if i == 0 else x1 if i == 1 else x2 if i == 2 else x3
                a0, a1, a2, h0, h1, h2 = _one_tile(x, scale_l, magic, x_min, a0, a1, a2, h0, h1, h2, True)
            for i in tl.static_range(4):
                x = x4 if i == 0 else x5 if i == 1 else x6 if i == 2 else x7
                a0, a1, a2, h0, h1, h2 = _one_tile(x, scale_l, magic, x_min, a0, a1, a2, h0, h1, h2, True)
        else:
            a0, a1, a2 = _four_tiles(x0, x1, x2, x3, scale_l, magic, x_min, a0, a1, a2)
            a0, a1, a2 = _four_tiles(x4, x5, x6, x7, scale_l, magic, x_min, a0, a1, a2)
    for start in range(full, end, BLOCK):
        x0 = tl.load(base + start + lanes, mask=start + lanes < end, other=-float("inf"))
        top = _row_max(x0)
        seen = tl.maximum(seen, top, propagate_nan=tl.PropagateNan.ALL)
        t_top = tl.fma(top, scale_l, _MAGIC)
        if (t_top > rise_above) & (t_top < 16777216.0):
            e_new, magic, x_min, rise_above = _settle(t_top, inv_l)
            a0, a1, a2, h0, h1, h2 = _raise((e_new - e) // 22, a0, a1, a2, h0, h1, h2, ENTROPY)
            e = e_new
        a0, a1, a2, h0, h1, h2 = _one_tile(x0, scale_l, magic, x_min, a0, a1, a2, h0, h1, h2, ENTROPY)

    nan = seen != seen
    posinf = seen == float("inf")
    over = tl.fma(seen, scale_l, _MAGIC) >= 16777216.0
    usable = ~(nan | over | (e == _EMPTY))
    keep = usable.to(tl.int64)
    dst = out + (split.to(tl.int64) * num_rows + row) * COLUMNS
    tl.store(dst, tl.where(over & ~posinf, _OVER, tl.where(usable, e, _EMPTY)).to(tl.int64))
    tl.store(dst + 1, tl.sum(a0.to(tl.int64)) * keep)
    tl.store(dst + 2, tl.sum(a1.to(tl.int64)) * keep)
    tl.store(dst + 3, tl.sum(a2.to(tl.int64)) * keep)
    target = tl.load(target_local + row)
    owned = (target >= begin) & (target < end)
    x_t = tl.load(base + target, mask=owned, other=0.0).to(tl.float32)
    bits = x_t.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    flags = nan.to(tl.int64) + posinf.to(tl.int64) * _POSINF + owned.to(tl.int64) * _OWNED
    tl.store(dst + 4, flags)
    tl.store(dst + 5, tl.where(owned, bits, 0))
    if ENTROPY:
        tl.store(dst + 6, tl.sum(h0) * keep)
        tl.store(dst + 7, tl.sum(h1) * keep)
        tl.store(dst + 8, tl.sum(h2) * keep)


@triton.jit
def _carried(w0, w1, w2):
    """Three words to float64: carry-normalised, then two roundings (section 3, steps 1 and 2)."""
    w1 += w2 >> 22
    w0 += w1 >> 22
    high = w0.to(tl.float64) * 4194304.0 + (w1 & 0x3FFFFF).to(tl.float64)
    return high + (w2 & 0x3FFFFF).to(tl.float64) * 2.384185791015625e-07


@triton.jit(do_not_specialize=["num_rows", "num_partials"])
def _close_kernel(
    partials,  # [R, n, K] int64, IN
    lse2_out,  # [n] float64, OUT
    logp_out,  # [n] fp32, OUT
    lse_out,  # [n] fp32, OUT
    entropy_out,  # [n] fp32, OUT
    good_out,  # [n] bool, OUT
    owned_out,  # [n] bool, OUT
    num_rows,
    num_partials,
    scale_l,
    COLUMNS: tl.constexpr,
    ENTROPY: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    stride = num_rows.to(tl.int64) * COLUMNS
    first = partials + rows.to(tl.int64) * COLUMNS
    e = tl.full((ROWS,), _EMPTY, tl.int64)
    for i in range(num_partials):
        e = tl.maximum(e, tl.load(first + i * stride, mask=inside, other=_EMPTY))
    zero = tl.zeros((ROWS,), tl.int64)
    w0 = zero
    w1 = zero
    w2 = zero
    h0 = zero
    h1 = zero
    h2 = zero
    flags = zero
    target = zero
    for i in range(num_partials):
        src = first + i * stride
        steps = (e - tl.load(src, mask=inside, other=_EMPTY)) // 22
        v0 = tl.load(src + 1, mask=inside, other=0)
        v1 = tl.load(src + 2, mask=inside, other=0)
        v2 = tl.load(src + 3, mask=inside, other=0)
        s0 = tl.where(steps == 0, v0, zero)
        s1 = tl.where(steps == 0, v1, tl.where(steps == 1, v0, zero))
        s2 = tl.where(steps == 0, v2, tl.where(steps == 1, v1, tl.where(steps == 2, v0, zero)))
        w0 += s0
        w1 += s1
        w2 += s2
        flags += tl.load(src + 4, mask=inside, other=0)
        target += tl.load(src + 5, mask=inside, other=0)
        if ENTROPY:
            u0 = tl.load(src + 6, mask=inside, other=0)
            u1 = tl.load(src + 7, mask=inside, other=0)
            u2 = tl.load(src + 8, mask=inside, other=0)
            drop = tl.minimum(steps, 3) * 22
            h0 += tl.where(steps == 0, u0, zero) - drop * s0
            h1 += tl.where(steps == 0, u1, tl.where(steps == 1, u0, zero)) - drop * s1
            h2 += (
                tl.where(steps == 0, u2, tl.where(steps == 1, u1, tl.where(steps == 2, u0, zero))) - drop * s2
            )

    good = ((flags & (_OWNED - 1)) == 0) & (e <= _MAX_E) & (e >= -_MAX_E)
    owned = (flags >> 42) == 1
    total = tl.where(good, _carried(w0, w1, w2), 1.0)
    bits = total.to(tl.int64, bitcast=True)
    j = ((bits >> 52) - 1023).to(tl.float64)
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    large = m > _SQRT2
    m = tl.where(large, m * 0.5, m)
    j = tl.where(large, j + 1.0, j)
    u = (m - 1.0) / (m + 1.0)
    q = u * u
    poly = u * 0.0 + _L10
    poly = poly * q + _L9
    poly = poly * q + _L8
    poly = poly * q + _L7
    poly = poly * q + _L6
    poly = poly * q + _L5
    poly = poly * q + _L4
    poly = poly * q + _L3
    poly = poly * q + _L2
    poly = poly * q + _L1
    poly = poly * q + _L0
    log2m = u * poly
    lse2 = ((e.to(tl.float64) + j) - 44.0) + log2m
    nan = float("nan")
    lse2 = tl.where(good, lse2, nan)
    x_t = target.to(tl.int32).to(tl.float32, bitcast=True)
    v = ((x_t.to(tl.float64) * scale_l.to(tl.float64) - lse2) * _LN2_64).to(tl.float32)
    v = tl.where(owned, v, nan)
    tl.store(lse2_out + rows, lse2, mask=inside)
    tl.store(logp_out + rows, tl.where((v < 0) | (v != v), v, 0.0), mask=inside)
    tl.store(lse_out + rows, (lse2 * _LN2_64).to(tl.float32), mask=inside)
    tl.store(good_out + rows, good, mask=inside)
    tl.store(owned_out + rows, owned, mask=inside)
    if ENTROPY:
        mean_z = _carried(h0, h1, h2) / total
        h = ((((j - 44.0) + log2m) - mean_z) * _LN2_64).to(tl.float32)
        h = tl.where(good, h, nan)
        tl.store(entropy_out + rows, tl.where((h > 0) | (h != h), h, 0.0), mask=inside)


# ---------------------------------------------------------------------------------------------- backward


@triton.jit
def _slope(
    x,
    delta,
    scale_l,
    n,
    f,
    a,
    b,
    h,
    big_h,
    HAS_LOGP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
):
    """Section 4 for fp32 logits x, `delta` 1 at the target; a coefficient that is 0 leaves its term out."""
    y = tl.fma(x, scale_l, n * -1.0) - f
    # at −127 the exponent field comes out as 0, and with it +0
    y = tl.where(y < _TINY, -127.0, y)
    t = y + _MAGIC
    p = _scale(_poly(y - (t - _MAGIC)), t.to(tl.int32, bitcast=True))
    if HAS_LOGP and not (HAS_LSE or HAS_ENTROPY):
        return a * (delta - p)
    d = p * 0.0
    some = False
    if HAS_LOGP:
        d = tl.where(a != 0, a * (delta - p), d)
        some = a != 0
    if HAS_LSE:
        with_b = b * p
        d = tl.where(b != 0, tl.where(some, d + with_b, with_b), d)
        some = some | (b != 0)
    if HAS_ENTROPY:
        with_h = tl.where(p == 0.0, 0.0, h * (p * tl.fma(y, _LN2_32, big_h)))
        d = tl.where(h != 0, tl.where(some, d - with_h, with_h * -1.0), d)
    return d


@triton.jit
def _gradient_kernel(
    logits,  # [n, V_local] bf16 | fp16 | fp32, IN
    out,  # [n, V_local], OUT; may be logits
    target_local,  # [n] int64, IN
    lse2_in,  # [n] float64, IN
    grad_logp,  # [n] fp32, IN
    grad_lse,  # [n] fp32, IN
    grad_entropy,  # [n] fp32, IN
    entropy,  # [n] fp32, IN
    real_cols,
    num_cols,
    row_stride,
    out_stride,
    scale_l,
    HAS_LOGP: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * (BLOCK * TILES)
    lanes = tl.arange(0, BLOCK)
    src = logits + row * row_stride
    dst = out + row * out_stride
    a = 0.0
    b = 0.0
    h = 0.0
    big_h = 0.0
    if HAS_LOGP:
        a = tl.load(grad_logp + row)
    if HAS_LSE:
        b = tl.load(grad_lse + row)
    if HAS_ENTROPY:
        h = tl.load(grad_entropy + row)
        big_h = tl.load(entropy + row)
    used = (a != 0) | (b != 0) | (h != 0)
    last = first + BLOCK * TILES
    lse2 = tl.load(lse2_in + row)
    check = lse2 + a + b + h
    bad = used & ~((check - check) == 0.0)
    if used & ~bad:
        target = tl.load(target_local + row)
        n64 = (lse2 + _RINT_64) - _RINT_64
        n = n64.to(tl.float32)
        f = (lse2 - n64).to(tl.float32)
        for tile in tl.static_range(TILES):
            start = first + tile * BLOCK
            cols = start + lanes
            # one branch a tile, not one comparison an element: most tiles are whole and hold no target
            if (last <= real_cols) & ((target < start) | (target >= start + BLOCK)):
                x = tl.load(src + cols).to(tl.float32)
                d = _slope(x, 0.0, scale_l, n, f, a, b, h, big_h, HAS_LOGP, HAS_LSE, HAS_ENTROPY)
                tl.store(dst + cols, d.to(out.dtype.element_ty))
            else:
                x = tl.load(src + cols, mask=cols < real_cols, other=0.0).to(tl.float32)
                delta = tl.where(cols == target, 1.0, 0.0)
                d = _slope(x, delta, scale_l, n, f, a, b, h, big_h, HAS_LOGP, HAS_LSE, HAS_ENTROPY)
                d = tl.where(cols < real_cols, d, 0.0)
                tl.store(dst + cols, d.to(out.dtype.element_ty), mask=cols < num_cols)
    else:
        fill = tl.where(bad, float("nan"), 0.0)
        for tile in tl.static_range(TILES):
            cols = first + tile * BLOCK + lanes
            d = tl.where(cols < real_cols, fill, 0.0)
            tl.store(dst + cols, d.to(out.dtype.element_ty), mask=cols < num_cols)


@triton.jit
def _changed_kernel(
    logits,  # [n, V_local] bf16 | fp16 | fp32, IN
    out,  # [n, V_local], IN and OUT
    target_local,  # [n] int64, IN
    lse2_in,  # [n] float64, IN
    grad_logp,  # [n] fp32, IN
    upstream,  # [n] fp32, IN
    expected,  # [n] fp32, IN
    real_cols,
    num_cols,
    row_stride,
    out_stride,
    scale_l,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    came = tl.load(upstream + row)
    known = tl.load(expected + row)
    if (came != known) & ((came == came) | (known == known)):
        a = tl.load(grad_logp + row)
        lse2 = tl.load(lse2_in + row)
        target = tl.load(target_local + row)
        n64 = (lse2 + _RINT_64) - _RINT_64
        n = n64.to(tl.float32)
        f = (lse2 - n64).to(tl.float32)
        check = lse2 + a
        bad = (a != 0) & ~((check - check) == 0.0)
        fill = tl.where(bad, float("nan"), 0.0)
        for start in range(0, num_cols, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * row_stride + cols, mask=cols < real_cols, other=0.0).to(tl.float32)
            delta = tl.where(cols == target, 1.0, 0.0)
            d = _slope(x, delta, scale_l, n, f, a, 0.0, 0.0, 0.0, True, False, False)
            d = tl.where(bad | (a == 0), fill, d)
            d = tl.where(cols < real_cols, d, 0.0)
            tl.store(out + row * out_stride + cols, d.to(out.dtype.element_ty), mask=cols < num_cols)


# ---------------------------------------------------------------------------------------------- launchers

_FORWARD_BLOCK, _FORWARD_WARPS = 512, 2
_BACKWARD_BLOCK, _BACKWARD_TILES, _BACKWARD_WARPS = 2048, 4, 4
_MIN_PROGRAMS = 1024
"""Rows are split until about this many programs run: eight a multiprocessor on a large device."""
_MIN_BLOCK = 512
"""2^18 columns over this many lanes are 512 additions a lane, within the 1023 that an int32 lane holds."""


def _num_splits(num_rows: int, real_cols: int, block: int) -> tuple[int, int]:
    """(splits of a row, columns of one split)."""
    unit = 8 * block
    wanted = max(1, -(-_MIN_PROGRAMS // max(1, num_rows)))
    units = max(1, -(-real_cols // unit))
    per_split = -(-units // min(wanted, units))
    return -(-units // per_split), per_split * unit


def partials(
    logits: Tensor,
    target_local: Tensor,
    *,
    scale_l: float,
    real_cols: int,
    with_entropy: bool = False,
    block: int = _FORWARD_BLOCK,
    warps: int = _FORWARD_WARPS,
    packed: bool = True,
    splits: int | None = None,
) -> Tensor:
    """[R, n, K] int64 partials of one shard, R splits of each row; one launch.

    Args:
        logits: [n, V_local] on a CUDA device, columns contiguous, rows at any stride.
        target_local: [n] int64.
        scale_l: L.
        real_cols: columns before the padding.
        with_entropy: also the entropy words.
        block: columns of a tile, at least 512; shows in no bit.
        warps: of a program; shows in no bit.
        packed: use the two-element maximum of narrow dtypes; shows in no bit.
        splits: of a row; None chooses by the number of rows.

    Returns:
        Partials to be merged.
    """
    assert block >= _MIN_BLOCK
    num_rows = logits.shape[0]
    columns = C.ENTROPY_COLUMNS if with_entropy else C.PARTIAL_COLUMNS
    if splits is None:
        num_splits, split_cols = _num_splits(num_rows, real_cols, block)
    else:
        unit = 8 * block
        split_cols = max(1, -(-real_cols // (splits * unit))) * unit
        num_splits = max(1, -(-real_cols // split_cols))
    out = torch.empty(num_splits, num_rows, columns, dtype=torch.int64, device=logits.device)
    if num_rows:
        with torch.cuda.device(logits.device):
            _partial_kernel[(num_rows, num_splits)](
                logits,
                target_local,
                out,
                num_rows,
                real_cols,
                split_cols,
                logits.stride(0),
                scale_l,
                1.0 / scale_l,
                COLUMNS=columns,
                ENTROPY=with_entropy,
                PACKED=packed,
                BLOCK=block,
                num_warps=warps,
                enable_fp_fusion=False,
            )
    return out


def close(partials: Tensor, scale_l: float) -> ClosedRows:
    """Merge [R, n, K] partials and close them, as in rl_engine.numerics.words; one launch."""
    num_partials, num_rows, columns = partials.shape
    device = partials.device
    with_entropy = columns == C.ENTROPY_COLUMNS
    lse2 = torch.empty(num_rows, dtype=torch.float64, device=device)
    logp, lse, entropy = (torch.empty(num_rows, device=device) for _ in range(3))
    good, owned = (torch.empty(num_rows, dtype=torch.bool, device=device) for _ in range(2))
    rows = 64
    if num_rows:
        with torch.cuda.device(device):
            _close_kernel[(triton.cdiv(num_rows, rows),)](
                partials.contiguous(),
                lse2,
                logp,
                lse,
                entropy,
                good,
                owned,
                num_rows,
                num_partials,
                scale_l,
                COLUMNS=columns,
                ENTROPY=with_entropy,
                ROWS=rows,
                num_warps=2,
                enable_fp_fusion=False,
            )
    return ClosedRows(lse2, logp, lse, entropy if with_entropy else None, good, owned)


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
    block: int = _BACKWARD_BLOCK,
    tiles: int = _BACKWARD_TILES,
    warps: int = _BACKWARD_WARPS,
) -> Tensor:
    """Gradient of one shard; one launch. As :func:`rl_engine.numerics.reference.gradient`."""
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    num_rows, num_cols = logits.shape
    if num_rows == 0 or num_cols == 0:
        return out
    coefficients: list[Any] = [
        lse2 if c is None else c.contiguous() for c in (grad_logp, grad_lse, grad_entropy, entropy)
    ]
    with torch.cuda.device(logits.device):
        _gradient_kernel[(num_rows, triton.cdiv(num_cols, block * tiles))](
            logits,
            out,
            target_local,
            lse2,
            *coefficients,
            real_cols,
            num_cols,
            logits.stride(0),
            out.stride(0),
            scale_l,
            HAS_LOGP=grad_logp is not None,
            HAS_LSE=grad_lse is not None,
            HAS_ENTROPY=grad_entropy is not None,
            BLOCK=block,
            TILES=tiles,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return out


def gradient_where_changed(
    logits: Tensor,
    target_local: Tensor,
    lse2: Tensor,
    *,
    grad_logp: Tensor,
    upstream: Tensor,
    expected: Tensor,
    scale_l: float,
    real_cols: int,
    out: Tensor,
) -> None:
    """Write again the rows of `out` whose upstream gradient is not the one they were made with; one launch.

    The rest costs one comparison a row, so that nobody has to ask the device whether they agree.

    Args:
        logits: [n, V_local].
        target_local: [n] int64.
        lse2: [n] float64.
        grad_logp: [n] fp32, a of section 4.
        upstream: [n] fp32, the gradient in logp that came.
        expected: [n] fp32, the one that `out` was made with.
        scale_l: L.
        real_cols: columns before the padding.
        out: [n, V_local] gradient, a row of which follows from `expected`.
    """
    num_rows, num_cols = logits.shape
    if num_rows == 0 or num_cols == 0:
        return
    with torch.cuda.device(logits.device):
        _changed_kernel[(num_rows,)](
            logits,
            out,
            target_local,
            lse2,
            grad_logp.contiguous(),
            upstream.contiguous(),
            expected,
            real_cols,
            num_cols,
            logits.stride(0),
            out.stride(0),
            scale_l,
            BLOCK=_BACKWARD_BLOCK,
            num_warps=_BACKWARD_WARPS,
            enable_fp_fusion=False,
        )
