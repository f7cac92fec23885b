"""The logprob op over real ranks: every way to shard the vocabulary gives the oracle's bits."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch

from rl_engine.contracts import Transport
from rl_engine.mesh.pool import RankPool
from tests.bits import assert_bits_equal
from tests.logprob import op_ranks as on_rank
from tests.logprob.op_cases import (
    BACKENDS,
    TRANSPORTS,
    Case,
    assert_same,
    bounds_of,
    joined,
    oracle,
    standard_case,
)
from tests.logprob.op_ranks import Job
from tests.logprob.test_op import BAD_ROWS, bad_case

PREFLIGHT = {("tp", "preflight"): 1}
EXCHANGE = {
    Transport.PACKED_ALL_GATHER: {("tp", "all_gather_rows"): 1},
    Transport.ALL_REDUCE_MAX_SUM: {("tp", "all_reduce_max"): 1, ("tp", "all_reduce_sum"): 1},
}
KINDS = ["even", "uneven", "holes", "tail"]


@functools.cache
def cases() -> list[Case]:
    """Dtypes, temperatures, entropy, ways to hand over the mask, widths of targets, in rotation."""
    dtypes = itertools.cycle(["bf16", "fp32", "fp16"])
    masks = itertools.cycle(["call", "contract", "both", "ignore_index"])
    out = []
    for i in range(12):
        case = standard_case(next(dtypes), (1.0, 0.6)[i // 3 % 2], i % 2 == 0, next(masks), seed=i)
        out.append(replace(case, targets=case.targets.int()) if i % 4 == 1 else case)
    return out


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7])
def test_every_layout_gives_the_bits_of_the_oracle(pool: RankPool, size: int) -> None:
    """Both tiers × both transports × four kinds of shards, each with the next case of the rotation."""
    rotation = itertools.cycle(cases()[size:] + cases()[:size])
    jobs = [
        Job((case := next(rotation)), bounds_of(kind, size, case), backend, transport, validate=True)
        for backend, transport, kind in itertools.product(BACKENDS, TRANSPORTS, KINDS)
    ]
    jobs = [job._replace(validate=i % 5 != 4) for i, job in enumerate(jobs)]
    reports = pool.run(on_rank.run_jobs, world_size=size, args=(jobs,))
    for i, job in enumerate(jobs):
        done = [report[i] for report in reports]
        name = f"tp {size}, {job.bounds}, {job.backend}, {job.transport}, mask by {job.case.mask_by}"
        assert_same(joined([d.answer for d in done]), oracle(job.case), name)
        expected = EXCHANGE[job.transport] | (PREFLIGHT if job.validate else {})
        assert all(d.forward == expected and d.backward == {} for d in done), name


def test_no_rows_at_all(pool: RankPool) -> None:
    case = standard_case("bf16", entropy=True)
    empty = replace(
        case,
        logits=case.logits[:0],
        targets=case.targets[:0],
        active=case.active[:0],
        grads=tuple(g[:0] for g in case.grads),
    )
    jobs = [
        Job(empty, bounds_of("holes", 3, case), backend, transport, validate)
        for backend, transport, validate in itertools.product(BACKENDS, TRANSPORTS, [True, False])
    ]
    for report in pool.run(on_rank.run_jobs, world_size=3, args=(jobs,)):
        for done in report:
            assert done.answer.logp.shape == done.answer.lse.shape == (0,)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_negative_zero_targets_keep_their_sign(pool: RankPool, transport: Transport) -> None:
    """The owner's bits reach every rank as they are, 0x80000000 for −0.0."""
    case = standard_case("fp32")
    kept = case.active.nonzero()[:, 0]
    case = replace(
        case,
        logits=case.logits[kept],
        targets=case.targets[kept],
        active=case.active[kept],
        grads=tuple(g[kept] for g in case.grads),
    )
    job = Job(case, bounds_of("holes", 4, case), "exact_torch", transport)
    own = case.logits.gather(1, case.targets[:, None])[:, 0].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    assert 0x80000000 in own.tolist()
    for report in pool.run(on_rank.target_bits, world_size=4, args=(job,)):
        assert report == own.tolist()


def test_bad_rows_over_ranks(pool: RankPool) -> None:
    """Under validation every rank raises the same, and the group stays in step; without it the row is NaN."""
    jobs = []
    for backend, transport in itertools.product(BACKENDS, TRANSPORTS):
        for kind in BAD_ROWS:
            case = bad_case(kind)
            for validate in (True, False):
                jobs.append(Job(case, bounds_of("holes", 3, case), backend, transport, validate))
    reports = pool.run(on_rank.endings, world_size=3, args=(jobs,))
    for i, job in enumerate(jobs):
        ends = [report[i] for report in reports]
        if job.validate:
            assert {end.error for end in ends} == {"InputError"}, [str(end) for end in ends]
            assert len({end.message for end in ends}) == 1
            assert ends[0].message.startswith("row 1: ")
        else:
            assert {end.error for end in ends} == {""}, [str(end) for end in ends]
            assert_same(joined([end.value for end in ends]), oracle(job.case), str(job.bounds))


def test_inactive_targets_may_differ_between_siblings(pool: RankPool) -> None:
    """What a masked row's target holds is nobody's business, so ranks need not agree on it."""
    case = standard_case("bf16")
    own = [
        replace(case, targets=torch.where(case.active, case.targets, filler)) for filler in (-100, 3, 10**9)
    ]
    jobs = [([Job(mine, bounds_of("even", 3, case), "exact_torch")],) for mine in own]
    reports = pool.run(on_rank.run_jobs, world_size=3, per_rank_args=jobs)
    expected = oracle(case)
    got = joined([report[0].answer for report in reports])
    assert_bits_equal(got.logp, expected.logp, "logp")
    assert_bits_equal(got.lse, expected.lse, "lse")
