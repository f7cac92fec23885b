"""The definition compiled for the CPU with numba.

One pass over the logits each way, no temporary of their size. The loops work on bit patterns (bf16 as int16,
fp16 as uint16, fp32 as int32), so that the maximum is an integer maximum (NaN cannot hide from it) and LLVM
vectorises everything. Rows are shared out over torch's thread count by a thread pool; the compiled loops
hold no lock. See docs/numerics.md sections 2 and 4; rl_engine.numerics.reference is the same thing to read.

Shapes: n rows, V_local columns of this rank's shard, K = 6 or 9 partial columns.
"""
# pyright: basic, reportCallIssue=false, reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import torch
from numba import njit
from torch import Tensor

from rl_engine.numerics import constants as C
from rl_engine.numerics import cpu_bits
from rl_engine.numerics.cpu_bits import (
    add,
    bits_float,
    exponent_shift,
    float_bits,
    fma,
    load,
    max_int,
    min_int,
    order_key,
    round_to,
    to_int,
)
from rl_engine.numerics.words import empty_partial, note_target

__all__ = ["gradient", "partial"]

# ---------------------------------------------------------------------------------------------- compilation


@functools.cache
def _cache_dir() -> str:
    """Where compiled kernels are kept: a folder for this very source.

    numba looks at the file of a function alone, and would use a stale kernel after a change to the constants
    or to the operations that it compiled in.
    """
    sources = (__file__, cpu_bits.__file__, C.__file__)
    digest = hashlib.sha256(b"".join(Path(source).read_bytes() for source in sources)).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return str(Path(numba.config.CACHE_DIR or home) / "rl_engine" / digest)


def _kernel(function):
    """Compile without the interpreter's lock, and keep the result on disk where that is possible."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = _cache_dir()
    try:
        return njit(nogil=True, boundscheck=False, cache=True)(function)
    except RuntimeError:  # no folder that can be written to
        return njit(nogil=True, boundscheck=False)(function)
    finally:
        numba.config.CACHE_DIR = before


# ---------------------------------------------------------------------------------------------- constants

_f32 = np.float32
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = (_f32(c) for c in C.EXP2_POLY)
_MAGIC = _f32(C.MAGIC)
_B0, _B1, _B2 = (_f32(m) for m in C.DIGIT_MAGIC)
_N0, _N1, _N2 = (np.int32(-m) for m in C.DIGIT_MAGIC_BITS)
_LN2 = _f32(C.LN2_32)
_TINY = _f32(C.MIN_LOG2_PROB)
_ZERO = _f32(0.0)
_ONE = _f32(1.0)
_BLOCK = 1008
"""Columns between two looks at the reference exponent: ≤ 1023 so that int32 lanes hold the digits, 63
vectors of 16."""


# ---------------------------------------------------------------------------------------------- forward


@njit(inline="always")
def _poly(r):
    p = fma(r, _P6, _P5)
    p = fma(p, r, _P4)
    p = fma(p, r, _P3)
    p = fma(p, r, _P2)
    p = fma(p, r, _P1)
    return fma(p, r, _P0)


@_kernel
def _block_words(row, start, stop, scale_l, magic, x_min):
    """The three digit sums of row[start:stop] for one reference exponent."""
    a0 = np.int32(0)
    a1 = np.int32(0)
    a2 = np.int32(0)
    for j in range(start, stop):
        x = load(row[j])
        x = x if x > x_min else x_min
        t = fma(x, scale_l, magic)
        r = fma(x, scale_l, magic - t)
        g = bits_float(add(exponent_shift(float_bits(t)), float_bits(_poly(r))))
        b = g + _B0
        a0 = add(a0, add(float_bits(b), _N0))
        g = g - (b - _B0)
        b = g + _B1
        a1 = add(a1, add(float_bits(b), _N1))
        g = g - (b - _B1)
        a2 = add(a2, add(float_bits(g + _B2), _N2))
    return np.int64(a0), np.int64(a1), np.int64(a2)


@_kernel
def _block_entropy_words(row, start, stop, scale_l, magic, x_min):
    """Like `_block_words`, with the entropy words behind them."""
    a0 = np.int64(0)
    a1 = np.int64(0)
    a2 = np.int64(0)
    h0 = np.int64(0)
    h1 = np.int64(0)
    h2 = np.int64(0)
    for j in range(start, stop):
        x = load(row[j])
        x = x if x > x_min else x_min
        t = fma(x, scale_l, magic)
        r = fma(x, scale_l, magic - t)
        k = to_int(t - _MAGIC)
        g = bits_float(add(exponent_shift(float_bits(t)), float_bits(_poly(r))))
        q = g * r
        b = g + _B0
        d = add(float_bits(b), _N0)
        g = g - (b - _B0)
        bq = q + _B0
        a0 += d
        h0 += np.int64(d) * k + add(float_bits(bq), _N0)
        q = q - (bq - _B0)
        b = g + _B1
        d = add(float_bits(b), _N1)
        g = g - (b - _B1)
        bq = q + _B1
        a1 += d
        h1 += np.int64(d) * k + add(float_bits(bq), _N1)
        q = q - (bq - _B1)
        d = add(float_bits(g + _B2), _N2)
        a2 += d
        h2 += np.int64(d) * k + add(float_bits(q + _B2), _N2)
    return a0, a1, a2, h0, h1, h2


@_kernel
def _key_range(row, start, stop):
    """Smallest and largest order key of row[start:stop]."""
    low = order_key(row[start])
    high = low
    for j in range(start, stop):
        key = order_key(row[j])
        low = min_int(low, key)
        high = max_int(high, key)
    return low, high


@_kernel
def _partial_rows(bits, first, last, scale_l, real_cols, key_neginf, key_posinf, unkey, with_entropy, out):
    """Fill out[first:last] with partials; `unkey` is one element, by which a key becomes a pattern."""
    for i in range(first, last):
        row = bits[i]
        e = C.EMPTY_EXPONENT
        w0 = np.int64(0)
        w1 = np.int64(0)
        w2 = np.int64(0)
        h0 = np.int64(0)
        h1 = np.int64(0)
        h2 = np.int64(0)
        flags = 0
        over = False
        for start in range(0, real_cols, _BLOCK):
            stop = min(real_cols, start + _BLOCK)
            low, high = _key_range(row, start, stop)
            if low < key_neginf or high > key_posinf:
                flags |= C.FLAG_NAN
            if high >= key_posinf:
                # a NaN above +inf does not hide an infinity in the same block
                for j in range(start, stop):
                    if order_key(row[j]) == key_posinf:
                        flags |= C.FLAG_POSINF
                        break
            if flags != 0 or over:
                continue
            unkey[0] = high
            unkey[0] = order_key(unkey[0])  # the key map is its own inverse
            t = fma(load(unkey[0]), scale_l, _MAGIC)
            if t < _f32(8388608.0):
                continue  # nothing but an empty partial
            if t >= _f32(16777216.0):
                over = True
                continue
            k_max = np.int64(t - _MAGIC)
            block_e = -((-(k_max + C.SPARE_BITS)) // C.WORD_BITS) * C.WORD_BITS
            if block_e > e:
                steps = (block_e - e) // C.WORD_BITS
                if e == C.EMPTY_EXPONENT or steps >= 3:
                    w0, w1, w2 = np.int64(0), np.int64(0), np.int64(0)
                    h0, h1, h2 = np.int64(0), np.int64(0), np.int64(0)
                elif steps == 2:
                    h0, h1, h2 = np.int64(0), np.int64(0), h0 - 2 * C.WORD_BITS * w0
                    w0, w1, w2 = np.int64(0), np.int64(0), w0
                else:
                    h0, h1, h2 = np.int64(0), h0 - C.WORD_BITS * w0, h1 - C.WORD_BITS * w1
                    w0, w1, w2 = np.int64(0), w0, w1
                e = block_e
            elif block_e + 3 * C.WORD_BITS <= e:
                continue  # every digit of this block lies below the last word
            magic = _f32(C.MAGIC - e)
            x_min = _f32(np.float64(e - C.CLAMP_BITS) / np.float64(scale_l))
            if with_entropy:
                a0, a1, a2, b0, b1, b2 = _block_entropy_words(row, start, stop, scale_l, magic, x_min)
                h0 += b0
                h1 += b1
                h2 += b2
            else:
                a0, a1, a2 = _block_words(row, start, stop, scale_l, magic, x_min)
            w0 += a0
            w1 += a1
            w2 += a2
        if flags != 0 or over:
            e = C.OVER_EXPONENT if flags == 0 else C.EMPTY_EXPONENT
            w0, w1, w2 = np.int64(0), np.int64(0), np.int64(0)
            h0, h1, h2 = np.int64(0), np.int64(0), np.int64(0)
        out[i, 0] = e
        out[i, 1] = w0
        out[i, 2] = w1
        out[i, 3] = w2
        out[i, 4] = flags
        if with_entropy:
            out[i, 6] = h0
            out[i, 7] = h1
            out[i, 8] = h2


# ---------------------------------------------------------------------------------------------- backward


@njit(inline="always")
def _probability(y):
    t = y + _MAGIC
    k = t - _MAGIC
    p = bits_float(add(exponent_shift(float_bits(t)), float_bits(_poly(y - k))))
    return _ZERO if y < _TINY else p


@_kernel
def _logp_gradient_row(row, out, stop, target, scale_l, n, f, a):
    """a·(δ − p), the row without lse or entropy gradients."""
    negative_n = -n
    like = row[0]
    for j in range(stop):
        y = fma(load(row[j]), scale_l, negative_n) - f
        out[j] = round_to(a * (_ZERO - _probability(y)), like)
    return


@_kernel
def _element_gradient(x, delta, scale_l, n, f, a, b, h, entropy):
    y = fma(x, scale_l, -n) - f
    p = _probability(y)
    d = _ZERO
    if a != _ZERO:
        d = a * (delta - p)
    if b != _ZERO:
        d = d + b * p if a != _ZERO else b * p
    if h != _ZERO:
        term = h * (p * fma(y, _LN2, entropy)) if y >= _TINY else _ZERO
        d = d - term if (a != _ZERO or b != _ZERO) else -term
    return d


@_kernel
def _gradient_rows(bits, out, first, last, target, lse2, a, b, h, entropy, scale_l, real_cols, nan_pattern):
    for i in range(first, last):
        row = bits[i]
        dst = out[i]
        zero = round_to(_ZERO, bits[i, 0])
        used = a[i] != _ZERO or b[i] != _ZERO or h[i] != _ZERO
        begin = 0
        if used and not np.isfinite(lse2[i] + a[i] + b[i] + h[i]):
            for j in range(real_cols):
                dst[j] = nan_pattern
            begin = real_cols
        elif used:
            n64 = np.rint(lse2[i])
            n = _f32(n64)
            f = _f32(lse2[i] - n64)
            t = target[i]
            at_target = _ZERO
            if t >= 0:  # before the row is written: the output may be the input
                at_target = _element_gradient(load(row[t]), _ONE, scale_l, n, f, a[i], b[i], h[i], entropy[i])
            if b[i] == _ZERO and h[i] == _ZERO:
                _logp_gradient_row(row, dst, real_cols, t, scale_l, n, f, a[i])
            else:
                for j in range(real_cols):
                    d = _element_gradient(load(row[j]), _ZERO, scale_l, n, f, a[i], b[i], h[i], entropy[i])
                    dst[j] = round_to(d, zero)
            if t >= 0:
                dst[t] = round_to(at_target, zero)
            begin = real_cols
        for j in range(begin, dst.shape[0]):
            dst[j] = zero


# ---------------------------------------------------------------------------------------------- torch side

_VIEWS: dict[torch.dtype, tuple[torch.dtype, type[np.generic], int, int]] = {
    # logits dtype: (torch view, numpy view, key of -inf, key of +inf)
    torch.bfloat16: (torch.int16, np.int16, ~0x7F80, 0x7F80),
    torch.float16: (torch.int16, np.uint16, ~0x7C00, 0x7C00),
    torch.float32: (torch.int32, np.int32, ~0x7F800000, 0x7F800000),
}
_NAN_PATTERN = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00, torch.float32: 0x7FC00000}


def _bits(tensor: Tensor) -> np.ndarray:
    view, numpy_view, _, _ = _VIEWS[tensor.dtype]
    return tensor.detach().view(view).numpy().view(numpy_view)


@functools.cache
def _workers(process_id: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="rl_engine")


def _over_rows(num_rows: int, work: Callable[[int, int], None]) -> None:
    """Call work(first, last) over all rows, on as many threads as torch would use."""
    threads = min(torch.get_num_threads(), num_rows)
    if threads <= 1:
        work(0, num_rows)
        return
    bounds = [num_rows * i // threads for i in range(threads + 1)]
    pool = _workers(os.getpid())
    pending = [pool.submit(work, bounds[i], bounds[i + 1]) for i in range(1, threads)]
    work(bounds[0], bounds[1])
    for task in pending:
        task.result()


def partial(
    logits: Tensor, target_local: Tensor, *, scale_l: float, real_cols: int, with_entropy: bool = False
) -> Tensor:
    """This shard's partial of Σ exp over its real columns; as :func:`rl_engine.numerics.reference.partial`.

    Args:
        logits: [n, V_local] bf16, fp16 or fp32 on the CPU; columns contiguous, rows at any stride.
        target_local: [n] int64, the target's column in this shard, −1 where another rank owns it.
        scale_l: L = fl32(log2 e / T).
        real_cols: columns before the padding, in [0, V_local].
        with_entropy: also the three entropy words.

    Returns:
        [n, K] int64 partials.
    """
    num_rows = logits.shape[0]
    out = empty_partial(num_rows, with_entropy=with_entropy, device=logits.device)
    if num_rows and logits.shape[1]:
        _, _, key_neginf, key_posinf = _VIEWS[logits.dtype]
        bits, rows = _bits(logits), out.numpy()

        def work(first: int, last: int) -> None:
            unkey = np.zeros(1, dtype=bits.dtype)
            _partial_rows(
                bits, first, last, _f32(scale_l), real_cols, key_neginf, key_posinf, unkey, with_entropy, rows
            )

        _over_rows(num_rows, work)
    note_target(out, logits, target_local)
    return out


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
    """Gradient of this shard's logits; as :func:`rl_engine.numerics.reference.gradient`.

    Args:
        logits: [n, V_local] as given to :func:`partial`.
        target_local: [n] int64, −1 where another rank owns the target.
        lse2: [n] float64 from closing; NaN marks a row that is not good.
        grad_logp: [n] fp32 coefficient a, already multiplied by 1/T and zeroed on inactive rows; None
            counts as 0.
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
    num_rows = logits.shape[0]
    if num_rows == 0 or logits.shape[1] == 0:
        return out
    zero = torch.zeros(num_rows, dtype=torch.float32, device=logits.device)
    a, b, h, big_h = (
        (zero if c is None else c.detach()).contiguous().numpy()
        for c in (grad_logp, grad_lse, grad_entropy, entropy)
    )
    source, dest = _bits(logits), _bits(out)
    nan_pattern = source.dtype.type(_NAN_PATTERN[logits.dtype])
    target, lse2_rows = target_local.contiguous().numpy(), lse2.contiguous().numpy()

    def work(first: int, last: int) -> None:
        _gradient_rows(
            source,
            dest,
            first,
            last,
            target,
            lse2_rows,
            a,
            b,
            h,
            big_h,
            _f32(scale_l),
            real_cols,
            nan_pattern,
        )

    _over_rows(num_rows, work)
    return out
