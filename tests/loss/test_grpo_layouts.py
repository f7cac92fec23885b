"""The GRPO loss over real meshes: whoever holds what, the bits are those of one rank."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    ClipSpec,
    DataParallelReduction,
    KLEstimator,
    LossReductionSpec,
    ObjectiveSpec,
    OnEmpty,
    TokenNormalizer,
)
from rl_engine.mesh.pool import RankPool
from tests.bits import assert_bits_equal
from tests.loss import grpo_cases as on_rank
from tests.loss.grpo_cases import (
    AdvantageBy,
    Batch,
    Done,
    Job,
    Layout,
    RefBy,
    assert_as_alone,
    assert_replicated,
    layout_of,
    make_batch,
    offsets,
    run_job,
    sequences_of,
    whole_gradient,
    with_garbage,
)
from tests.loss.test_grpo import NORMALIZERS, reduction_of

MESHES = [(tp, dp) for tp, dp in itertools.product([1, 2, 3], [1, 2, 3]) if (tp, dp) != (1, 1)]
REFERENCES: list[tuple[RefBy, float]] = [("none", 0.0), ("logits", 0.04), ("logps", 0.04), ("logits", 0.0)]
ADVANTAGES: list[AdvantageBy] = ["rewards", "rewards", "sequence", "token"]


@functools.cache
def batches() -> list[Batch]:
    sizes = [(3, 4, 2), (2, 2, 2, 2), (9,), (2, 5, 3)]
    return [
        make_batch(i, sizes=sizes[i % 4], dtype=("fp32", "bf16")[i % 2], temperature=(1.0, 0.6)[i // 2 % 2])
        for i in range(4)
    ]


@functools.cache
def alone(index: int) -> Done:
    return run_job(jobs_for(1, 1)[index].alone())


def jobs_for(tp: int, dp: int) -> list[Job]:
    """Twelve jobs, the same for every mesh but for the layout: even shards first, then random ones."""
    out = []
    for i in range(12):
        batch = batches()[i % 4]
        ref_by, beta = REFERENCES[i // 2 % 4]
        objective = ObjectiveSpec(
            clip=ClipSpec(0.2, (0.2, 0.28)[i % 2]),
            advantage=AdvantageSpec(normalizer=list(AdvantageNormalizer)[i % 3]),
            kl_estimator=list(KLEstimator)[i // 3 % 2],
            beta=beta,
        )
        out.append(
            Job(
                batch=batch,
                layout=layout_of(batch, tp, dp, seed=i // 3),
                objective=objective,
                reduction=reduction_of(NORMALIZERS[(i + i // 4) % 4]),
                ref_by=ref_by,
                advantage_by=ADVANTAGES[(i + i // 4) % 4],
                backend=("auto", "exact_torch")[i // 4 % 2],
                validate=i % 5 != 4,
                scale=(1.0, -0.75)[i % 2],
            )
        )
    return out


def expected_counts(job: Job, tp: int, dp: int, dp_rank: int) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    if job.validate:
        counts |= {(name, "preflight"): 1 for name, size in (("tp", tp), ("dp", dp)) if size > 1}
    if dp > 1:
        counts[("dp", "all_reduce_sum")] = 2
    start, end = job.layout.dp[dp_rank]
    # a rank without tokens has no rows to exchange but the one that compares what TP siblings hold
    if tp > 1 and (end > start or job.validate):
        counts[("tp", "all_gather_rows")] = 2 if job.ref_by == "logits" else 1
    return counts


@pytest.mark.parametrize(("tp", "dp"), MESHES)
def test_every_mesh_gives_the_bits_of_one_rank(pool: RankPool, tp: int, dp: int) -> None:
    jobs = jobs_for(tp, dp)
    reports = pool.run(on_rank.run_jobs, world_size=tp * dp, args=(tp, dp, jobs))
    for index, job in enumerate(jobs):
        done = [report[index] for report in reports]
        name = (
            f"job {index}: {job.layout}, {job.reduction}, ref {job.ref_by}, advantages by {job.advantage_by}"
        )
        expected = alone(index)
        assert float(expected.grad[job.batch.active].double().norm()) > 1e-4, "a test of zeros shows nothing"
        assert (expected.advantages is None) == (job.advantage_by != "rewards")
        assert_as_alone(done, job, expected)
        for rank, d in enumerate(done):
            assert d.forward == expected_counts(job, tp, dp, rank // tp), f"{name}, rank {rank}: {d.forward}"
            assert d.backward == {}, name


@pytest.mark.parametrize("dp", [2, 3])
def test_gradients_that_are_averaged_over_dp(pool: RankPool, dp: int) -> None:
    """A trainer that averages gets the gradient of the whole batch; the reported loss is not scaled."""
    jobs = []
    for i, normalizer in enumerate(TokenNormalizer):
        batch = batches()[i]
        reduction = reduction_of(normalizer, data_parallel_reduction=DataParallelReduction.MEAN)
        layout = layout_of(batch, 2, dp, seed=i)
        jobs.append(
            Job(
                batch=batch,
                layout=layout,
                objective=ObjectiveSpec(beta=0.04),
                ref_by="logits",
                reduction=reduction,
            )
        )
    reports = pool.run(on_rank.run_jobs, world_size=2 * dp, args=(2, dp, jobs))
    for index, job in enumerate(jobs):
        done = [report[index] for report in reports]
        summed = replace(job, reduction=reduction_of(job.reduction.token_normalizer)).alone()
        expected = run_job(summed)
        assert_replicated(done, str(job.layout))
        for part in ("loss", "policy_loss", "kl", "per_sequence_policy"):
            assert_bits_equal(getattr(done[0], part), getattr(expected, part), part)
        averaged = whole_gradient(done, job).double() / dp
        if dp == 2:
            assert_bits_equal(averaged.to(expected.grad.dtype), expected.grad, "averaged gradient")
        ulp = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7}[expected.grad.dtype]
        assert torch.allclose(averaged, expected.grad.double(), rtol=ulp, atol=1e-12)


def test_nobody_has_an_active_token(pool: RankPool) -> None:
    """Zeros on every rank, or the same error on every rank; also where a rank has no sequence."""
    batch = make_batch(30)
    batch = with_garbage(replace(batch, active=torch.zeros_like(batch.active)), 30)
    for strict in (False, True):
        jobs = [
            Job(
                batch=batch,
                layout=Layout(tp=((0, 6), (6, 14)), dp=((0, 9), (9, 9)), padding=(0, 2)),
                objective=ObjectiveSpec(beta=0.04),
                ref_by="logits",
                reduction=reduction_of(normalizer, on_empty=OnEmpty.ERROR if strict else OnEmpty.ZERO),
                validate=validate,
            )
            for normalizer in TokenNormalizer
            for validate in (True, False)
        ]
        if not strict:
            reports = pool.run(on_rank.run_jobs, world_size=4, args=(2, 2, jobs))
            for index, job in enumerate(jobs):
                done = [report[index] for report in reports]
                assert_as_alone(done, job, run_job(job.alone()))
                assert done[0].loss.item() == 0.0 and done[0].num_active_tokens.item() == 0
        else:
            outcomes = pool.run(on_rank.run_jobs, world_size=4, args=(2, 2, jobs[:1]), expect_errors=True)
            for outcome in outcomes:
                assert outcome.error_type == "InputError"
                assert outcome.error_message.startswith("no token of the whole batch is active")


def test_one_rank_has_everything(pool: RankPool) -> None:
    """Five tokens here, one there, none elsewhere: every token weighs the same, unlike a mean of means."""
    batch = make_batch(31, sizes=(2, 2), density=1.0)
    active = torch.zeros_like(batch.active)
    active[0], active[3, 0] = True, True
    batch = with_garbage(replace(batch, active=active), 31)
    jobs = [
        Job(batch=batch, layout=Layout(tp=((0, 14),), dp=offsets(sizes), padding=(0, 1, 0)))
        for sizes in ((3, 1, 0), (0, 3, 1), (1, 0, 3), (0, 0, 4), (4, 0, 0))
    ]
    reports = pool.run(on_rank.run_jobs, world_size=3, args=(1, 3, jobs))
    for index, job in enumerate(jobs):
        assert sequences_of(job.layout.dp) == [end - start for start, end in job.layout.dp]
        assert_as_alone([report[index] for report in reports], job, run_job(job.alone()))


def test_reduction_is_in_the_contract() -> None:
    assert LossReductionSpec(data_parallel_reduction="mean") != LossReductionSpec()  # type: ignore[arg-type]
