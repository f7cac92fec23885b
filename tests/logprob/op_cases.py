"""Batches for the logprob op, what the integer oracle says of them, and the op run on one shard.

Shapes: n rows, V columns of the padded vocabulary, V_local of one shard.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from rl_engine.contracts import (
    LogitsDtype,
    LogprobContract,
    LogprobOutputSpec,
    LogprobRole,
    MaskSpec,
    ReductionSpec,
    ShardingSpec,
    Transport,
)
from rl_engine.logprob import VocabParallelLogprobOp
from rl_engine.mesh import Axis
from rl_engine.registry import kernel_registry
from tests.bits import assert_bits_equal
from tests.numerics.cases import TORCH, expect, floats
from tests.oracle import rows
from tests.oracle.ieee import fl32, mul32

BACKENDS = ["exact_torch", "exact_numba"]
TRANSPORTS = [Transport.PACKED_ALL_GATHER, Transport.ALL_REDUCE_MAX_SUM]
MaskBy = Literal["call", "contract", "both", "ignore_index"]
Bounds = tuple[tuple[int, int], ...]
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A batch; `active` is what the mask says, in whatever way it is handed over."""

    logits: Tensor
    targets: Tensor
    active: Tensor
    real: int
    mask_by: MaskBy = "call"
    temperature: float = 1.0
    entropy: bool = False
    grads: tuple[Tensor, Tensor, Tensor]
    """[n] upstream gradients of logp, lse and entropy."""


@dataclass(frozen=True)
class Answer:
    """[n] outputs and the [n, V_local] gradient of the logits."""

    logp: Tensor
    lse: Tensor
    entropy: Tensor | None
    grad: Tensor


def assert_same(actual: Answer, expected: Answer, name: str) -> None:
    assert_bits_equal(actual.logp, expected.logp, f"{name}: logp")
    assert_bits_equal(actual.lse, expected.lse, f"{name}: lse")
    if expected.entropy is None:
        assert actual.entropy is None
    else:
        assert_bits_equal(actual.entropy, expected.entropy, f"{name}: entropy")
    assert_bits_equal(actual.grad, expected.grad, f"{name}: gradient")


def joined(answers: Sequence[Answer]) -> Answer:
    """What the ranks of a TP group say together; each must say the same of the rows."""
    first = answers[0]
    for rank, other in enumerate(answers):
        assert_same(replace(other, grad=first.grad), first, f"rank {rank} against rank 0")
    return replace(first, grad=torch.cat([a.grad for a in answers], 1))


@functools.cache
def standard_case(
    dtype: str, temperature: float = 1.0, entropy: bool = False, mask_by: MaskBy = "call", seed: int = 0
) -> Case:
    """Rows of every kind: ordinary ones, −inf logits, a −0.0 target, and inactive rows that hold garbage."""
    rng = random.Random(f"{dtype} {temperature} {entropy} {seed}")
    real, padded = 23, 29

    def row(sigma: float = 3.0, mean: float = 0.0) -> list[float]:
        return [rng.gauss(mean, sigma) for _ in range(padded)]

    active_rows = [
        (row(), 4),
        ([-1.75] * padded, 22),
        ([x if j in (2, 9, 17) else -INF for j, x in enumerate(row())], 9),
        ([-0.0 if j == 11 else -abs(x) for j, x in enumerate(row())], 11),
        (row(40.0), 0),
        ([-INF if j == 6 else x for j, x in enumerate(row())], 6),
        ([1e4 if j == 13 else x for j, x in enumerate(row())], 13),
        (row(0.01, -200.0), 21),
    ]
    far = 6e4 if dtype == "fp16" else 1e30
    inactive_rows = [
        ([NAN if j % 5 == 3 else x for j, x in enumerate(row())], 1),
        ([INF if j == 20 else x for j, x in enumerate(row())], 10**6),
        (row(), 7),
        ([-INF] * padded, real + 1),
        ([far * (-1) ** j for j in range(padded)], -7),
    ]
    order = list(range(len(active_rows) + len(inactive_rows)))
    rng.shuffle(order)
    every = [*active_rows, *inactive_rows]
    logits = torch.tensor([every[i][0] for i in order], dtype=torch.float64).to(TORCH[dtype])
    # nothing may read the padding
    logits[:, real:] = torch.tensor([NAN, INF, -INF, far, 0.0, 7.0][: padded - real]).to(logits.dtype)
    active = torch.tensor([i < len(active_rows) for i in order])
    targets = torch.tensor([every[i][1] for i in order])
    if mask_by == "ignore_index":
        targets = torch.where(active, targets, -100)
    n = len(order)
    tidy = len(active_rows) + 2  # the inactive row whose lse is a number
    lse_grad = torch.tensor(
        [fl32(rng.gauss(0, 1)) if i < len(active_rows) or i == tidy else 0.0 for i in order]
    )
    grads = [torch.tensor([fl32(rng.gauss(0, 1)) for _ in range(n)]) for _ in range(2)]
    grads[0][torch.tensor(order) == 1] = 0.0
    return Case(
        logits=logits,
        targets=targets,
        active=active,
        real=real,
        mask_by=mask_by,
        temperature=temperature,
        entropy=entropy,
        grads=(grads[0], lse_grad, grads[1]),
    )


# ---------------------------------------------------------------------------------------------- the oracle


@functools.lru_cache(maxsize=64)
def oracle(case: Case) -> Answer:
    """The answer by the integer oracle, row by row."""
    scale = rows.temperature_scale(case.temperature)
    inv_t = rows.inverse_temperature(case.temperature)
    logp: list[float] = []
    lse: list[float] = []
    entropy: list[float] = []
    grad: list[Tensor] = []
    dtype = {v: k for k, v in TORCH.items()}[case.logits.dtype]
    upstream = zip(*(g.tolist() for g in case.grads), strict=True)
    parts = zip(case.logits, case.targets.tolist(), case.active.tolist(), upstream, strict=True)
    for x, target, active, (a, b, h) in parts:
        values = floats(x)
        closed = rows.close(
            rows.partial(values, target, scale=scale, real=case.real, entropy=case.entropy), scale
        )
        row_lse = closed.lse
        logp.append(closed.logp if active else 0.0)
        lse.append(row_lse)
        entropy.append((closed.entropy or 0.0) if active else 0.0)
        a, b = (mul32(a, inv_t) if active else 0.0), mul32(b, inv_t)
        h = mul32(h, inv_t) if active and case.entropy else 0.0
        if a != 0.0 and not closed.owned:
            a = NAN
        if a != a or (not closed.good and (a != 0.0 or b != 0.0 or h != 0.0)):
            row_grad = [NAN] * case.real + [0.0] * (len(values) - case.real)
        else:
            row_grad = rows.gradient(
                values,
                target,
                lse2=closed.lse2,
                a=a,
                b=b,
                h=h,
                entropy=entropy[-1],
                scale=scale,
                real=case.real,
                dtype=dtype,
            )
        grad.append(expect(row_grad, dtype))
    return Answer(
        expect(logp, "fp32"),
        expect(lse, "fp32"),
        expect(entropy, "fp32") if case.entropy else None,
        torch.stack(grad) if grad else torch.zeros_like(case.logits),
    )


# -------------------------------------------------------------------------------------------------- the op


def contract_of(
    case: Case,
    bounds: Bounds | None = None,
    rank: int = 0,
    transport: Transport = Transport.PACKED_ALL_GATHER,
    role: LogprobRole = LogprobRole.TRAIN,
) -> LogprobContract:
    n, padded = case.logits.shape
    bounds = ((0, padded),) if bounds is None else bounds
    in_contract = case.mask_by in ("contract", "both")
    return LogprobContract(
        role=role,
        dtype=LogitsDtype.parse(case.logits.dtype),
        sharding=ShardingSpec(rank, len(bounds), bounds, case.real, padded),
        mask=MaskSpec(n, tuple(case.active.tolist())) if in_contract else None,
        reduction=ReductionSpec(transport=transport),
        output=LogprobOutputSpec(entropy=case.entropy),
        temperature=case.temperature,
    )


def group_of(axis: Axis) -> Any:
    """What an op takes for an axis: its process group, or the axis itself where its ranks are threads."""
    return axis.group if axis.group is not None or axis.size == 1 else axis


def outputs_of(
    case: Case,
    leaf: Tensor,
    axis: Axis | None = None,
    bounds: Bounds | None = None,
    backend: str = "exact_torch",
    transport: Transport = Transport.PACKED_ALL_GATHER,
    validate: bool = True,
) -> tuple[Tensor, ...]:
    """The op's forward over `leaf`, this rank's columns."""
    axis = Axis.single("tp") if axis is None else axis
    contract = contract_of(case, bounds, axis.rank, transport)
    op: VocabParallelLogprobOp = kernel_registry.get_logprob_op(contract, backend).op
    mask = case.active if case.mask_by in ("call", "both") else None
    return op(leaf, case.targets, contract=contract, mask=mask, tp_group=group_of(axis), validate=validate)


def backward_of(case: Case, outputs: tuple[Tensor, ...], leaf: Tensor) -> Tensor:
    """The gradient of `leaf` under the upstream gradients of the case."""
    (grad,) = torch.autograd.grad(outputs, leaf, case.grads[: len(outputs)])
    return grad


def answer_of(
    case: Case,
    axis: Axis | None = None,
    bounds: Bounds | None = None,
    backend: str = "exact_torch",
    transport: Transport = Transport.PACKED_ALL_GATHER,
    validate: bool = True,
) -> Answer:
    """Forward and backward on this rank's shard."""
    start, end = (0, case.logits.shape[1]) if bounds is None or axis is None else bounds[axis.rank]
    leaf = case.logits[:, start:end].clone().requires_grad_()
    kept = leaf.detach().clone()
    outputs = outputs_of(case, leaf, axis, bounds, backend, transport, validate)
    grad = backward_of(case, outputs, leaf)
    assert_bits_equal(leaf, kept, "the logits after the call", nan_payload=True)
    detached = [out.detach() for out in outputs]
    return Answer(detached[0], detached[1], detached[2] if case.entropy else None, grad)


# -------------------------------------------------------------------------------------------------- shards


def cut(points: Sequence[int], padded: int) -> Bounds:
    """Shards between sorted cut points."""
    edges = [0, *sorted(points), padded]
    return tuple(itertools.pairwise(edges))


def bounds_of(kind: str, size: int, case: Case, seed: int = 0) -> Bounds:
    """Shards: even, uneven (random cuts), holes (empty ones), tail (one rank has nothing but padding)."""
    real, padded = case.real, case.logits.shape[1]
    if kind == "even":
        return tuple(ShardingSpec.even(real, 0, size, padded_vocab_size=padded).vocab_shard_bounds)
    rng = random.Random(f"{kind} {size} {seed}")
    if kind == "uneven":
        return cut(rng.sample(range(1, padded), size - 1), padded)
    if kind == "holes":
        points = rng.sample(range(1, padded), max(1, size // 3))
        return cut([rng.choice([0, *points, padded]) for _ in range(size - 1)], padded)
    assert kind == "tail"
    return cut([*rng.sample(range(1, real), max(0, size - 2)), real][: size - 1], padded)
