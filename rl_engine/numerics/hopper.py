"""The definition as CUDA C++ kernels for bf16 logits on Hopper GPUs; everything else goes to the Triton tier.

What they gain over it: a bf16 logit has 65536 possible values, so a row's exponentials need not be computed
one by one. Most logits are only *counted*, by bit pattern, in a histogram in shared memory, and the digits of
each pattern are computed once a row and multiplied by its count. Integer sums make that the same words as
adding one by one; with floating-point sums it would be another number. The rest is computed as before: the
two ways load different units of a multiprocessor.

:func:`loss_rows` goes on from there: with what the loss needs of a token known beforehand, the row is closed
and overwritten by its gradient while it is still in shared memory, so that logits are read once.

Shapes: n rows, V_local columns of this rank's shard.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor

from rl_engine.numerics import constants as C
from rl_engine.numerics import gpu, nvrtc
from rl_engine.numerics.gpu import close, gradient
from rl_engine.numerics.words import LossTokens

__all__ = ["LossRows", "close", "fits_loss_rows", "gradient", "loss_rows", "partials", "resume_gradient"]

_BINADES: Final = 34
_NUM_BINS: Final = _BINADES * 256 + 2
_LOWEST_BINADE: Final = -26
_FORWARD: Final = {"THREADS": 256, "BLOCKS": 4, "COUNTED": 3}
_MIN_COLUMNS: Final = 32768
"""Below this, evaluating the histogram outweighs what it saves."""
_MIN_BLOCKS: Final = 1024
"""Rows are split until about this many blocks run."""
_LOSS: Final = {"THREADS": 512, "BLOCKS": 1, "COUNTED": 3, "LOOKED_UP": 2, "LAG": 1}
_PIECE: Final = 128
_STATIC_SHARED: Final = 4096
"""What the loss kernel keeps beside the row and the histogram, with room to spare."""


def _first_bin(scale_l: float) -> int:
    """Rotated bit pattern just below the first binade, 2^-26 at T = 1; the range moves with T."""
    return ((127 + _LOWEST_BINADE + math.floor(math.log2(C.LOG2E / scale_l) + 1e-6)) << 8) - 1


def _readable(logits: Tensor) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 8 == 0 and logits.stride(1) == 1
    return logits.dtype is torch.bfloat16 and aligned


def partials(
    logits: Tensor,
    target_local: Tensor,
    *,
    scale_l: float,
    real_cols: int,
    with_entropy: bool = False,
    min_columns: int = _MIN_COLUMNS,
) -> Tensor:
    """[R, n, K] int64 partials of one shard; one launch. As :func:`rl_engine.numerics.gpu.partials`.

    Args:
        logits: [n, V_local] on a CUDA device, columns contiguous, rows at any stride.
        target_local: [n] int64.
        scale_l: L.
        real_cols: columns before the padding.
        with_entropy: also the entropy words; by the Triton tier.
        min_columns: shards narrower than this go to the Triton tier; shows in no bit.

    Returns:
        Partials to be merged.
    """
    num_rows = logits.shape[0]
    if with_entropy or num_rows == 0 or real_cols < min_columns or not _readable(logits):
        return gpu.partials(
            logits, target_local, scale_l=scale_l, real_cols=real_cols, with_entropy=with_entropy
        )
    splits = min(-(-_MIN_BLOCKS // num_rows), max(1, real_cols // min_columns))
    split_cols = -(-real_cols // (8 * splits)) * 8
    splits = -(-real_cols // split_cols)
    out = torch.empty(splits, num_rows, C.PARTIAL_COLUMNS, dtype=torch.int64, device=logits.device)
    names = ("words.cuh", "forward.cu")
    kernel = nvrtc.compile_kernel(logits.device, names, "forward_bf16", _NUM_BINS * 4, **_FORWARD)
    with torch.cuda.device(logits.device):
        kernel(
            (num_rows, splits),
            _FORWARD["THREADS"],
            logits,
            target_local,
            out,
            ctypes.c_int64(logits.stride(0)),
            ctypes.c_int(num_rows),
            ctypes.c_int(real_cols),
            ctypes.c_int(split_cols),
            ctypes.c_float(scale_l),
            ctypes.c_float(1.0 / scale_l),
            ctypes.c_int(_first_bin(scale_l)),
        )
    return out


class LossRows(NamedTuple):
    """Closed rows, with the gradient of the loss.

    Attributes:
        lse2: [n] float64.
        logp: [n] fp32, +0 on inactive rows.
        good: [n] bool.
        owned: [n] bool.
        upstream: [n] fp32, the gradient of the loss in each row's logp that `gradient` was made with.
        gradient: [n, V_local] bf16, of the loss in the logits.
    """

    lse2: Tensor
    logp: Tensor
    good: Tensor
    owned: Tensor
    upstream: Tensor
    gradient: Tensor


class _Objective(ctypes.Structure):
    _fields_ = (
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
        ("guard", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("inv_t", ctypes.c_float),
        ("kl", ctypes.c_int),
        ("kl_slope", ctypes.c_int),
    )


def _cluster(num_cols: int, limit: int) -> int:
    """Blocks over which a row is spread, so that it fits their shared memory; 0 where none does."""
    for blocks in (1, 2, 4):
        vectors = -(-num_cols // 8 // blocks)
        counted = vectors * 8 <= 65535 / 0.8  # a bin's count has 16 bits, and 3 logits of 4 are counted
        if counted and -(-vectors // 32) * 512 + _NUM_BINS * 4 + _STATIC_SHARED <= limit:
            return blocks
    return 0


def _shared_memory(device: torch.device) -> int:
    """Bytes that one block may have."""
    properties = cast(Any, torch.cuda).get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def fits_loss_rows(logits: Tensor, real_cols: int) -> bool:
    """Whether :func:`loss_rows` serves these logits: bf16, whole 16-byte pieces that fit a cluster."""
    if not logits.is_cuda or logits.shape[0] == 0 or not _readable(logits):
        return False
    if nvrtc.missing_reason(torch.cuda.get_device_capability(logits.device)) is not None:
        return False
    whole = real_cols % 8 == 0 and logits.shape[1] % 8 == 0
    limit = _shared_memory(logits.device)
    return whole and real_cols >= _MIN_COLUMNS and _cluster(logits.shape[1], limit) > 0


def loss_rows(
    logits: Tensor, target_local: Tensor, tokens: LossTokens, *, scale_l: float, inv_t: float, real_cols: int
) -> LossRows:
    """Log-probs of whole rows and the gradient of the loss, reading the logits once; one launch.

    Args:
        logits: [n, V] bf16 that :func:`fits_loss_rows`; the whole vocabulary.
        target_local: [n] int64.
        tokens: the loss.
        scale_l: L.
        inv_t: 1/T.
        real_cols: columns before the padding.

    Returns:
        The bits of partials, close, the loss and gradient one after the other.
    """
    num_rows, num_cols = logits.shape
    device = logits.device
    blocks = _cluster(num_cols, _shared_memory(device))
    vectors = math.ceil(num_cols / 8 / blocks / 32) * 32
    segment = -(-vectors // _LOSS["THREADS"]) * 32
    defines = _LOSS | {"CLUSTER": blocks, "PIECES": -(-segment // _PIECE)}
    names = ("words.cuh", "closing.cuh", "fused.cu")
    kernel = nvrtc.compile_kernel(device, names, "fused_bf16", vectors * 16 + _NUM_BINS * 4, **defines)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=device)
    lse2 = torch.empty(num_rows, dtype=torch.float64, device=device)
    logp, upstream = (torch.empty(num_rows, device=device) for _ in range(2))
    good, owned = (torch.empty(num_rows, dtype=torch.bool, device=device) for _ in range(2))
    kl = 0 if tokens.ref is None else 3 if tokens.k3 else 1
    objective = _Objective(tokens.low, tokens.high, tokens.guard, tokens.beta, inv_t, kl, tokens.beta > 0)
    with torch.cuda.device(device):
        clusters = min(num_rows, kernel.max_clusters(_LOSS["THREADS"], blocks))
        kernel(
            (clusters * blocks, 1),
            _LOSS["THREADS"],
            logits,
            out,
            target_local,
            tokens.old,
            tokens.advantage,
            tokens.old if tokens.ref is None else tokens.ref,
            tokens.active,
            tokens.weight,
            lse2,
            logp,
            upstream,
            good,
            owned,
            ctypes.c_int64(logits.stride(0)),
            ctypes.c_int64(out.stride(0)),
            ctypes.c_int(num_rows),
            ctypes.c_int(real_cols),
            ctypes.c_int(num_cols),
            ctypes.c_int(vectors),
            ctypes.c_float(scale_l),
            ctypes.c_float(1.0 / scale_l),
            ctypes.c_int(_first_bin(scale_l)),
            objective,
        )
    return LossRows(lse2, logp, good, owned, upstream, out)


def resume_gradient(
    rows: LossRows,
    logits: Tensor,
    target_local: Tensor,
    *,
    grad_logp: Tensor,
    upstream: Tensor,
    scale_l: float,
    real_cols: int,
) -> Tensor:
    """The gradient in the logits for the upstream gradients that came; no work for rows that met theirs.

    Args:
        rows: from :func:`loss_rows`, whose gradient is completed in place.
        logits: [n, V] as they were.
        target_local: [n] int64.
        grad_logp: [n] fp32, a of section 4.
        upstream: [n] fp32, the gradient in logp before it became a.
        scale_l: L.
        real_cols: columns before the padding.

    Returns:
        `rows.gradient`.
    """
    gpu.gradient_where_changed(
        logits,
        target_local,
        rows.lse2,
        grad_logp=grad_logp,
        upstream=upstream,
        expected=rows.upstream,
        scale_l=scale_l,
        real_cols=real_cols,
        out=rows.gradient,
    )
    return rows.gradient
