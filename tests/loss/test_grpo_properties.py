"""Random batches over random meshes of threads: the bits of one rank, and never a rank that waits."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    ClipSpec,
    DataParallelReduction,
    KLEstimator,
    LossReductionSpec,
    ObjectiveSpec,
    TokenNormalizer,
)
from tests.faults.thread_mesh import ThreadMesh, thread_mesh
from tests.logprob.op_cases import cut
from tests.loss.grpo_cases import Batch, Done, Job, Layout, assert_as_alone, assert_replicated, run_job
from tests.numerics.cases import TORCH
from tests.oracle.ieee import fl32

RELAXED = settings(
    max_examples=50,
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


ANYTHING = [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e38, -3e38, 1e-42, 200.0]


class Values:
    """Numbers of a batch from one seed: what hypothesis shrinks is the shape of things."""

    def __init__(self, seed: int, mask: list[bool], sane: bool) -> None:
        self.rng, self.mask, self.sane = random.Random(seed), mask, sane

    def number(self, on: bool, kind: str) -> float:
        rng = self.rng
        if not on or (not self.sane and rng.random() < 0.05):
            return rng.choice(ANYTHING)
        if kind == "reward":
            return rng.choice([0.0, -0.0, 1.0, 0.1, 100.0, 1e8, 1e8 + 8, rng.gauss(0, 2)])
        if kind == "advantage":
            return rng.choice([0.0, rng.gauss(0, 1), rng.gauss(0, 1)])
        return rng.choice([0.0, -0.0, -120.0, -1e-42, *(-abs(rng.gauss(0, 5)) for _ in range(8))])

    def table(self, kind: str, s: int) -> torch.Tensor:
        return torch.tensor([fl32(self.number(on, kind)) for on in self.mask]).view(s, -1 if self.mask else 0)

    def rewards(self, s: int) -> torch.Tensor:
        return torch.tensor([fl32(self.number(True, "reward")) for _ in range(s)])

    def vocabulary(self, s: int, length: int, real: int, padded: int, dtype: str) -> torch.Tensor:
        rows = []
        for on in self.mask:
            row = [self.rng.gauss(0, 3) for _ in range(padded)]
            if not on and self.rng.random() < 0.5:
                row = [self.rng.choice(ANYTHING)] * padded
            if on and not self.sane and self.rng.random() < 0.05:
                row[self.rng.randrange(padded)] = self.rng.choice([math.nan, math.inf, -math.inf])
            rows.append([x if j < real else math.nan for j, x in enumerate(row)])
        return torch.tensor(rows, dtype=torch.float64).to(TORCH[dtype]).view(s, length, padded)


@st.composite
def jobs(draw: st.DrawFn, *, sane: bool = True) -> Job:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    s, length, padded = sum(sizes), draw(st.integers(0, 4)), draw(st.integers(1, 7))
    real, dtype = draw(st.integers(1, padded)), draw(st.sampled_from(["fp32", "bf16"]))
    seed = draw(st.integers(0, 2**32))
    density = draw(st.sampled_from([0.7, 1.0, 0.2, 0.0]))
    mask = [random.Random(f"{seed} {i}").random() < density for i in range(s * length)]
    values = Values(seed, mask, sane)
    stray = [-101, -100, -1, real, padded, 10**6]
    if not sane and length:
        stray_rate = draw(st.sampled_from([0.0, 0.0, 0.1]))
        on = [m and values.rng.random() >= stray_rate for m in mask]
    else:
        on = mask
    ids = [values.rng.randrange(real) if ok else values.rng.choice(stray) for ok in on]
    normalizers = list(AdvantageNormalizer) if min(sizes) > 1 else [AdvantageNormalizer.MEAN_ONLY]
    tp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ref_by = draw(st.sampled_from(["none", "logits", "logps"]))
    kind = draw(st.sampled_from(TokenNormalizer))
    return Job(
        batch=Batch(
            logits=values.vocabulary(s, length, real, padded, dtype),
            ref_logits=values.vocabulary(s, length, real, padded, dtype),
            targets=torch.tensor(ids, dtype=torch.int64).view(s, length),
            old=values.table("logp", s),
            ref=values.table("logp", s),
            active=torch.tensor(mask, dtype=torch.bool).view(s, length),
            rewards=values.rewards(s),
            token_advantages=values.table("advantage", s),
            boundaries=(0, *accumulate(sizes)),
            real=real,
            temperature=draw(st.sampled_from([1.0, 0.5, 2.0])),
        ),
        layout=Layout(
            tp=cut(draw(st.lists(st.integers(0, padded), min_size=tp - 1, max_size=tp - 1)), padded),
            dp=cut(draw(st.lists(st.integers(0, s), min_size=dp - 1, max_size=dp - 1)), s),
            padding=tuple(draw(st.lists(st.integers(0, 2), min_size=dp, max_size=dp))),
        ),
        objective=ObjectiveSpec(
            clip=ClipSpec(draw(st.sampled_from([0.0, 0.2, 0.9])), draw(st.sampled_from([0.0, 0.28, 3.0]))),
            advantage=AdvantageSpec(normalizer=draw(st.sampled_from(normalizers))),
            kl_estimator=draw(st.sampled_from(KLEstimator)),
            beta=0.0 if ref_by == "none" else draw(st.sampled_from([0.0, 0.04, 5.0])),
            log_ratio_guard=draw(st.sampled_from([80.0, 88.0, 1.0])),
        ),
        reduction=LossReductionSpec(
            token_normalizer=kind,
            fixed_normalizer_constant=7.0 if kind is TokenNormalizer.FIXED_CONSTANT else None,
            data_parallel_reduction=draw(st.sampled_from(DataParallelReduction)),
        ),
        ref_by=ref_by,
        advantage_by=draw(st.sampled_from(["rewards", "sequence", "token"])),
        backend=draw(st.sampled_from(["exact_torch", "exact_numba"])),
        validate=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, -2.0, 0.3])),
    )


def on_threads(mesh: ThreadMesh, job: Job) -> list[Done]:
    tp, dp = len(job.layout.tp), len(job.layout.dp)
    return mesh.values(lambda rank, tp_axis, dp_axis: run_job(job, tp_axis, dp_axis), tp=tp, dp=dp)


@given(jobs())
@RELAXED
def test_any_layout_gives_the_bits_of_one_rank(mesh: ThreadMesh, job: Job) -> None:
    if job.validate:
        lone = mesh.run(lambda rank, tp_axis, dp_axis: run_job(job.alone()))[0]
        if (
            lone.error
        ):  # finite values whose product is not: refused in every layout, the same bits unvalidated
            assert "the surrogate, ratio × advantage," in str(lone), str(lone)
            tp, dp = len(job.layout.tp), len(job.layout.dp)
            ends = mesh.run(lambda rank, tp_axis, dp_axis: run_job(job, tp_axis, dp_axis), tp=tp, dp=dp)
            assert all(end.error in ("InputError", "AgreementError") for end in ends), [str(e) for e in ends]
            job = replace(job, validate=False)
    done = on_threads(mesh, job)
    # one rank weighs tokens by itself: what the trainer's average will undo
    if job.reduction.data_parallel_reduction is DataParallelReduction.MEAN and len(job.layout.dp) > 1:
        assert_replicated(done, str(job.layout))
        return
    expected = run_job(job.alone())
    assert_as_alone(done, job, expected)
    assert not done[0].loss.isnan()


@given(jobs(sane=False))
@RELAXED
def test_values_without_meaning_raise_everywhere_or_nowhere(mesh: ThreadMesh, job: Job) -> None:
    """Under validation all ranks raise, or all return the same; what one rank says, the mesh says."""
    job = replace(job, validate=True)
    tp, dp = len(job.layout.tp), len(job.layout.dp)
    ends = mesh.run(lambda rank, tp_axis, dp_axis: run_job(job, tp_axis, dp_axis), tp=tp, dp=dp)
    lone = mesh.run(lambda rank, tp_axis, dp_axis: run_job(job.alone()))[0]
    if lone.error:
        assert lone.error == "InputError", str(lone)
        assert all(end.error in ("InputError", "AgreementError") for end in ends), [str(end) for end in ends]
        assert any(end.error == "InputError" for end in ends), [str(end) for end in ends]
    else:
        assert not any(end.error for end in ends), [str(end) for end in ends]
        assert_replicated([end.value for end in ends], str(job.layout))


@given(jobs(sane=False))
@RELAXED
def test_without_validation_nothing_raises_and_ranks_agree(mesh: ThreadMesh, job: Job) -> None:
    """NaN where a value has no meaning, the same on every rank."""
    job = replace(job, validate=False)
    done = on_threads(mesh, job)
    assert_replicated(done, str(job.layout))
    if job.reduction.data_parallel_reduction is DataParallelReduction.SUM or len(job.layout.dp) == 1:
        expected = run_job(job.alone())
        assert_as_alone(done, job, expected)
