"""Random batches and shards: every split gives the bits of the whole, which is near float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_engine.mesh import Axis
from tests.faults.thread_mesh import ThreadMesh, thread_mesh
from tests.logprob.op_cases import (
    BACKENDS,
    TRANSPORTS,
    Answer,
    Bounds,
    Case,
    answer_of,
    assert_same,
    cut,
    joined,
    oracle,
)
from tests.numerics.cases import TORCH
from tests.oracle import float64
from tests.oracle.ieee import FORMATS, to_format

RELAXED = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


@pytest.fixture(scope="module")
def mesh() -> Iterator[ThreadMesh]:
    with thread_mesh() as threads:
        yield threads


def number(dtype: str, wild: bool) -> st.SearchStrategy[float]:
    ordinary = st.floats(-40, 40, width=32)
    special = st.sampled_from([0.0, -0.0, -math.inf, 1e4, -1e4, -1e9, 88.0, 3.3895e38, -3.3895e38, 1e-40])
    garbage = st.sampled_from([math.nan, math.inf, -math.nan, 2e6])
    pick = [ordinary, ordinary, ordinary, special, garbage] if wild else [ordinary, ordinary, special]
    return st.one_of(*pick).map(lambda x: to_format(x, FORMATS[dtype]))


@st.composite
def cases(draw: st.DrawFn, *, wild: bool = True) -> Case:
    dtype = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    padded = draw(st.integers(1, 12))
    real = draw(st.integers(1, padded))
    n = draw(st.integers(0, 5))
    row = st.lists(number(dtype, wild), min_size=padded, max_size=padded)
    values = draw(st.lists(row, min_size=n, max_size=n))
    target = (
        st.one_of(st.integers(0, real - 1), st.integers(-2, padded + 1)) if wild else st.integers(0, real - 1)
    )
    grad = st.one_of(st.sampled_from([0.0, -0.0, 1.0]), st.floats(-4, 4, width=32))
    numbers = st.lists(grad, min_size=n, max_size=n).map(lambda v: torch.tensor(v, dtype=torch.float32))
    return Case(
        logits=torch.tensor(values, dtype=torch.float64).reshape(n, padded).to(TORCH[dtype]),
        targets=torch.tensor(draw(st.lists(target, min_size=n, max_size=n)), dtype=torch.int64),
        active=torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool),
        real=real,
        mask_by=draw(st.sampled_from(["call", "contract", "both"])),
        temperature=draw(st.sampled_from([1.0, 0.01, 0.6, 1.7, 100.0])),
        entropy=draw(st.booleans()),
        grads=(draw(numbers), draw(numbers), draw(numbers)),
    )


@st.composite
def split_cases(draw: st.DrawFn) -> tuple[Case, Bounds]:
    case = draw(cases())
    padded = case.logits.shape[1]
    size = draw(st.integers(1, 6))
    return case, cut(draw(st.lists(st.integers(0, padded), min_size=size - 1, max_size=size - 1)), padded)


@given(split_cases(), st.sampled_from(TRANSPORTS), st.booleans())
@RELAXED
def test_any_split_gives_the_bits_of_the_oracle(
    mesh: ThreadMesh, split: tuple[Case, Bounds], transport: object, mixed: bool
) -> None:
    """Without validation: rows without an answer take part. Tiers may be mixed over the ranks."""
    case, bounds = split
    expected = oracle(case)

    def call(rank: int, tp: Axis, dp: Axis) -> Answer:
        backend = BACKENDS[rank % 2] if mixed else "exact_numba"
        return answer_of(case, tp, bounds, backend, transport, validate=False)  # type: ignore[arg-type]

    assert_same(joined(mesh.values(call, tp=len(bounds))), expected, str(bounds))


@given(split_cases(), st.sampled_from(BACKENDS), st.sampled_from(TRANSPORTS))
@RELAXED
def test_validation_raises_on_all_ranks_or_on_none(
    mesh: ThreadMesh, split: tuple[Case, Bounds], backend: str, transport: object
) -> None:
    case, bounds = split
    expected = oracle(case)
    scale_ok = ~(expected.lse.isnan() & case.active)
    owned = (case.targets >= 0) & (case.targets < case.real)
    fine = bool((scale_ok & (owned | ~case.active)).all())

    def call(rank: int, tp: Axis, dp: Axis) -> Answer:
        return answer_of(case, tp, bounds, backend, transport)  # type: ignore[arg-type]

    ends = mesh.run(call, tp=len(bounds))
    assert {end.error for end in ends} == ({""} if fine else {"InputError"}), [str(end) for end in ends]
    if fine:
        assert_same(joined([end.value for end in ends]), expected, str(bounds))


@given(cases(wild=False))
@RELAXED
def test_near_float64(case: Case) -> None:
    """The bound of the numerics page; -inf targets and rows of -inf are left to the other tests."""
    case = replace(case, entropy=True)
    answer = answer_of(case, validate=False, backend="exact_numba")
    for i in range(len(case.logits)):
        row = case.logits[i, : case.real].double().tolist()
        target = int(case.targets[i])
        top = max(row)
        if not case.active[i] or row[target] == -math.inf or abs(top) > 1.4e6 * case.temperature:
            continue
        got = answer.logp[i].item()
        near = float64.logp(row, target, case.temperature)
        distance = float64.mean_distance(row, target, case.temperature)
        ulp = 2.0 ** (math.floor(math.log2(max(abs(near), 2.0**-126))) - 23)
        bound = 0.5 * ulp + 1e-7 + 6e-8 * distance / case.temperature
        if math.isfinite(got):  # beyond fp32 logp is −inf
            assert abs(got - near) <= bound, (got, near, bound)
        entropy = answer.entropy
        assert entropy is not None
        width = max((abs(x - top) for x in row if x > top - 200 * case.temperature), default=0.0)
        assert (
            abs(entropy[i].item() - float64.entropy(row, case.temperature))
            <= 1e-6 + 1e-6 * width / case.temperature
        )
