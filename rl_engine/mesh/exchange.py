"""The exchanges of a step: integer words by gather, sum and maximum; JSON for the front door.

Integers only, so that no transport can round: whatever is a sum of floats is summed as limbs or words
(numerics). The one exception, `all_reduce_float`, belongs to the naive backends and has its place in its
name.

Legend: n rows, K words a row, size ranks on the axis. On an axis of one rank everything is local.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from rl_engine.errors import AgreementError, InputError
from rl_engine.mesh.alarm import ring_alarm
from rl_engine.mesh.axis import Axis
from rl_engine.mesh.transport import gather, native_all_reduce, sync_to_cpu

__all__ = [
    "all_gather_rows",
    "all_reduce_float",
    "all_reduce_max",
    "all_reduce_sum",
    "all_reduce_sum_over",
    "gather_json",
    "gather_texts",
    "guard",
]

# Text that fits beside the header travels in the same collective; longer text costs a second one.
_INLINE_BYTES = 1024
_FAILED = 1


def all_gather_rows(axis: Axis, rows: torch.Tensor, *, kind: str = "all_gather_rows") -> torch.Tensor:
    """Every rank's rows, in axis order. One collective.

    Args:
        axis: The mesh axis.
        rows: [n, K] int64, the same shape on every rank.
        kind: What the counter and the messages call it.

    Returns:
        [size, n, K] int64 on the device of `rows`; the same on every rank.

    Raises:
        InputError: not int64.
        LostRankError: a rank of the axis is gone.
    """
    _require_int64(rows, kind)
    return gather(axis, kind, rows)


def all_reduce_sum(
    axis: Axis, words: torch.Tensor, *, in_place: bool = False, kind: str = "all_reduce_sum"
) -> torch.Tensor:
    """The int64 sum over the axis, exact in any order. One collective.

    Args:
        axis: The mesh axis.
        words: [...] int64, the same shape on every rank.
        in_place: Write the sum into `words`.
        kind: What the counter and the messages call it.

    Returns:
        [...] int64, the same on every rank; `words` itself (untouched) on an axis of one rank.

    Raises:
        InputError: not int64.
        LostRankError: a rank of the axis is gone.
    """
    return _reduce(axis, words, "sum", in_place, kind)


def all_reduce_sum_over(
    axes: Sequence[Axis], words: torch.Tensor, *, kind: str = "all_reduce_sum"
) -> torch.Tensor:
    """The int64 sum over several axes, one after the other: a collective for each of more than one rank.

    Integers add up alike over the axes in any order, or over one group of all their ranks.
    """
    for axis in axes:
        words = all_reduce_sum(axis, words, kind=kind)
    return words


def all_reduce_max(
    axis: Axis, words: torch.Tensor, *, in_place: bool = False, kind: str = "all_reduce_max"
) -> torch.Tensor:
    """The int64 maximum over the axis; as `all_reduce_sum` otherwise."""
    return _reduce(axis, words, "max", in_place, kind)


def all_reduce_float(
    axis: Axis, values: torch.Tensor, op: Literal["sum", "max"], *, kind: str = "all_reduce_float"
) -> torch.Tensor:
    """What the naive backends do: the transport's all-reduce on floats, rounded in whatever order it adds.

    Nothing that claims bits across layouts may call this. One collective; returns a new tensor.

    Args:
        axis: The mesh axis.
        values: [...] float32 or float64.
        op: "sum" or "max".
        kind: What the counter and the messages call it.

    Raises:
        InputError: not a float tensor.
        LostRankError: a rank of the axis is gone.
    """
    if not values.is_floating_point():
        raise InputError(f"{kind} is for floats, got {values.dtype}; integers go through all_reduce_sum")
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    return native_all_reduce(axis, kind, values.clone(), reduce_op)


def gather_json(
    axis: Axis, obj: Any, *, error: BaseException | None = None, kind: str = "gather_json"
) -> list[Any]:
    """Every rank's small JSON value, in axis order; an error of one rank becomes an error of all.

    One collective where every text is at most 1 KiB, else two. A rank that failed its own checks takes part
    with `error=` and must not skip the call.

    Args:
        axis: The mesh axis.
        obj: Anything `json.dumps` takes; ignored where `error` is given.
        error: What this rank failed with, if it did.
        kind: What the counter and the messages call it.

    Returns:
        The values, the same list on every rank.

    Raises:
        BaseException: `error` itself, on the rank that gave it.
        AgreementError: on every other rank, naming the ranks that failed and their texts.
        LostRankError: a rank of the axis is gone.
    """
    text = json.dumps(obj) if error is None else describe_error(error)
    if axis.size == 1:
        if error is not None:
            raise error
        return [json.loads(text)]
    replies = gather_texts(axis, text, failed=error is not None, kind=kind)
    if error is not None:
        raise error
    failures = [f"{axis.describe_rank(i)}: {reply}" for i, (failed, reply) in enumerate(replies) if failed]
    if failures:
        raise AgreementError(f"{kind} over the {axis.name} axis: {'; '.join(failures)}")
    return [json.loads(reply) for _, reply in replies]


def gather_texts(axis: Axis, text: str, *, failed: bool, kind: str) -> list[tuple[bool, str]]:
    """Every rank's (failed, text); two collectives where some text exceeds 1 KiB, else one."""
    payload = text.encode()
    header = torch.tensor([_FAILED if failed else 0, len(payload)], dtype=torch.int64, device="cpu")
    wire = axis.wire_device()
    first = torch.cat([header, _to_words(payload[:_INLINE_BYTES], _INLINE_BYTES)])
    table = sync_to_cpu(axis, kind, gather(axis, kind, first.to(wire)))
    lengths = cast(list[int], table[:, 1].tolist())
    texts = [_to_bytes(row[2:])[:length] for row, length in zip(table, lengths, strict=True)]
    longest = max(lengths)
    if longest > _INLINE_BYTES:
        rest = _to_words(payload[_INLINE_BYTES:], longest - _INLINE_BYTES)
        tail = sync_to_cpu(axis, kind, gather(axis, kind, rest.to(wire)))
        texts = [
            head + _to_bytes(row)[: max(0, length - _INLINE_BYTES)]
            for head, row, length in zip(texts, tail, lengths, strict=True)
        ]
    flags = cast(list[int], table[:, 0].tolist())
    return [(flag == _FAILED, text.decode(errors="replace")) for flag, text in zip(flags, texts, strict=True)]


@contextmanager
def guard(*axes: Axis) -> Generator[None]:
    """Around a step's collectives: whatever leaves the block by an exception rings the alarm of every axis.

    Between the preflight and the last collective of a step the ranks wait for each other. A rank that
    leaves there (out of memory, a lost sibling on another axis) would let the others wait for the group's
    whole timeout. With the guard they raise within a second, and its groups are finished. So an exception
    that every rank raises alike (a check of replicated results) belongs outside of it, after the last
    collective.
    """
    try:
        yield
    except BaseException as exc:
        for axis in axes:
            ring_alarm(axis, describe_error(exc))
        raise


def describe_error(error: BaseException) -> str:
    """The type and text of an error in one line, such as "InputError: the text"."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _reduce(
    axis: Axis, words: torch.Tensor, op: Literal["sum", "max"], in_place: bool, kind: str
) -> torch.Tensor:
    _require_int64(words, kind)
    if axis.size == 1 or words.numel() == 0:
        return words
    if axis.device_types().get(words.device.type, "gloo") == "gloo":
        # The direct exchange, added here: transport.py says why.
        every = gather(axis, kind, words)
        total = every.sum(0) if op == "sum" else every.amax(0)
        return words.copy_(total) if in_place else total
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    return native_all_reduce(axis, kind, words if in_place else words.clone(), reduce_op)


def _require_int64(words: torch.Tensor, kind: str) -> None:
    if words.dtype != torch.int64:
        raise InputError(
            f"{kind} exchanges int64 words, got {words.dtype}; floats travel as limbs or as bits"
        )


def _to_words(payload: bytes, num_bytes: int) -> torch.Tensor:
    """[ceil(num_bytes / 8)] int64, the payload padded with zeros."""
    padded = payload.ljust(-(-num_bytes // 8) * 8, b"\0")
    return torch.frombuffer(bytearray(padded), dtype=torch.int64)


def _to_bytes(words: torch.Tensor) -> bytes:
    return words.contiguous().numpy().tobytes()
