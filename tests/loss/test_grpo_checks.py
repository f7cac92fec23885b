"""What the loss op refuses, alone and on one rank of a mesh: each with its text, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_engine.contracts import (
    AdvantageSpec,
    ClipSpec,
    GRPOLossContract,
    LossReductionSpec,
    LossShardingSpec,
    MaskSpec,
    ObjectiveSpec,
)
from rl_engine.errors import InputError, LogprobContractError, RLEngineError
from rl_engine.loss import DistributedGRPOLossOp
from rl_engine.mesh import Axis
from rl_engine.registry import kernel_registry
from tests.bits import assert_bits_equal
from tests.faults.thread_mesh import thread_mesh
from tests.loss.grpo_cases import Job, Layout, call_of, make_batch, run_job

TP, DP = Axis.single("tp"), Axis.single("dp")
Call = dict[str, Any]
N = 4 * 6
"""Tokens of the first DP rank of the mesh: four sequences, five tokens each, one slot of padding."""


def job() -> Job:
    return Job(
        batch=make_batch(60),
        layout=Layout(tp=((0, 8), (8, 14)), dp=((0, 4), (4, 9)), padding=(1, 1)),
        objective=ObjectiveSpec(beta=0.04),
        ref_by="logits",
    )


def put(**changes: Any) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        for name, value in changes.items():
            call[name] = value(call[name]) if callable(value) else value

    return change


def sharding(**changes: Any) -> Callable[[Call], None]:
    def change(call: Call) -> None:
        contract: GRPOLossContract = call["contract"]
        call["contract"] = replace(contract, sharding=replace(contract.sharding, **changes))

    return change


def context_parallel(call: Call) -> None:
    contract: GRPOLossContract = call["contract"]
    call["contract"] = replace(
        contract,
        logprob=replace(contract.logprob, sharding=replace(contract.logprob.sharding, cp_world_size=2)),
        sharding=replace(contract.sharding, cp_world_size=2),
    )


def given(value: Tensor) -> Callable[[Call], None]:
    return put(rewards=None, advantages=value)


WRONG: dict[str, tuple[Callable[[Call], None], str]] = {
    "no contract": (put(contract=None), "contract is NoneType, expected GRPOLossContract"),
    "the logprob's contract": (
        put(contract=lambda c: c.logprob),
        "contract is LogprobContract, expected GRPOLossContract",
    ),
    "too few rows": (
        put(
            **{
                name: (lambda x: x[:-1])
                for name in ("policy_local_logits", "action_ids", "old_logps", "mask", "ref_local_logits")
            }
        ),
        r"logits have 23 rows, the contract gives DP rank 0 4 sequences × 6 tokens = 24",
    ),
    "logits in three dims": (
        put(policy_local_logits=lambda x: x.view(4, 6, -1)),
        r"logits must be \[n, V_local\], got \[4, 6, \d+\]",
    ),
    "logits of another dtype": (
        put(policy_local_logits=lambda x: x.bfloat16()),
        "logits are torch.bfloat16, the contract says torch.float32",
    ),
    "logits of another width": (
        put(policy_local_logits=lambda x: x[:, 1:]),
        r"logits have \d+ columns, but TP rank",
    ),
    "ids of another length": (put(action_ids=lambda x: x[1:]), r"target_ids must be \[24\]"),
    "a mask of ints": (put(mask=lambda x: x.int()), "mask is torch.int32, expected torch.bool"),
    "old log-probs missing": (
        put(old_logps=None),
        "old_logps is NoneType, expected a torch tensor",
    ),
    "old log-probs of another length": (
        put(old_logps=lambda x: x[1:]),
        r"old_logps must be \[24\], one per token, got",
    ),
    "float64 old log-probs": (
        put(old_logps=lambda x: x.double()),
        "old_logps is torch.float64, expected torch.float32",
    ),
    "old log-probs elsewhere": (
        put(old_logps=lambda x: x.to("meta")),
        "old_logps is on meta, the rest on cpu",
    ),
    "no rewards": (put(rewards=None), "neither of rewards and advantages given; pass exactly one of them"),
    "rewards beside advantages": (
        put(advantages=torch.zeros(4)),
        "both of rewards and advantages given; pass exactly",
    ),
    "rewards per token": (
        put(rewards=torch.zeros(N)),
        r"rewards must be \[4\] \(one per local sequence\), got \[24\]",
    ),
    "rewards in a list": (put(rewards=[0.0] * 4), "rewards is list, expected a torch tensor"),
    "complex rewards": (
        put(rewards=torch.zeros(4, dtype=torch.complex64)),
        "rewards is torch.complex64, expected a real",
    ),
    "advantages of no shape": (given(torch.zeros(())), r"advantages must be \[4\] or \[24\] .* got \[\]"),
    "advantages in two dims": (
        given(torch.zeros(4, 6)),
        r"advantages must be \[4\] or \[24\] .* got \[4, 6\]",
    ),
    "no reference": (
        put(ref_local_logits=None),
        "beta is 0.04 and no reference was given; pass ref_local_logits= or",
    ),
    "two references": (
        put(ref_logps=torch.zeros(N)),
        "both ref_local_logits and ref_logps were given; pass one",
    ),
    "a reference of another dtype": (
        put(ref_local_logits=lambda x: x.half()),
        "ref_local_logits are .* torch.float16, exp",
    ),
    "a reference of another shape": (
        put(ref_local_logits=lambda x: x[:-1]),
        r"ref_local_logits are \[23, \d+\] .* expected",
    ),
    "reference log-probs of another length": (
        put(ref_local_logits=None, ref_logps=torch.zeros(3)),
        r"ref_logps must be \[24\], one per token, got \[3\]",
    ),
    "context parallel": (
        context_parallel,
        "the contract is for CP rank 0 of 2, the call has rank 0 of 1; pass cp_group=",
    ),
    "an unknown backend": (
        put(logprob_backend="exact_numbra"),
        "names no registered logprob backend, did you mean",
    ),
    "a backend of another merge": (
        put(logprob_backend="tiled_torch"),
        "exact_words is not among max_sumexp_tiles",
    ),
}


def call_on(tp: Axis, dp: Axis, one: Job) -> Call:
    leaf, call = call_of(one, tp, dp)
    return {"policy_local_logits": leaf, **call}


def alone() -> Job:
    """The four sequences of the first DP rank of the mesh, by themselves."""
    whole = job()
    batch = whole.batch
    first = {
        name: getattr(batch, name)[:4]
        for name in ("logits", "ref_logits", "targets", "old", "ref", "active", "rewards", "token_advantages")
    }
    own = replace(batch, **first, boundaries=(0, 4))
    return replace(whole, batch=own, layout=Layout(tp=((0, 14),), dp=((0, 4),), padding=(1,)))


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("what", list(WRONG))
def test_a_call_that_does_not_fit(what: str, validate: bool) -> None:
    change, match = WRONG[what]
    call = call_on(TP, DP, alone())
    change(call)
    with pytest.raises(RLEngineError, match=match):
        DistributedGRPOLossOp().apply(**(call | {"validate": validate}))


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("what", list(WRONG))
def test_one_rank_with_a_wrong_call_stops_the_mesh(what: str, victim: int) -> None:
    change, match = WRONG[what]

    def run(rank: int, tp: Axis, dp: Axis) -> None:
        call = call_on(tp, dp, job())
        if rank == victim:
            change(call)
        DistributedGRPOLossOp().apply(**call)

    with thread_mesh() as mesh:
        ends = mesh.run(run, tp=2, dp=2)
    shown = [str(end) for end in ends]
    for rank, end in enumerate(ends):
        assert end.error == "AgreementError" if rank != victim else end.error.endswith("Error"), shown
        with pytest.raises(InputError, match=match):
            raise InputError(end.message)


def test_the_calls_that_they_come_from_are_sound() -> None:
    assert DistributedGRPOLossOp().apply(**call_on(TP, DP, alone())).loss.isfinite()
    with thread_mesh() as mesh:
        values = mesh.values(
            lambda rank, tp, dp: DistributedGRPOLossOp().apply(**call_on(tp, dp, job())).loss.item(),
            tp=2,
            dp=2,
        )
    assert len(set(values)) == 1


def test_a_contract_for_another_place() -> None:
    call = call_on(TP, DP, alone())
    contract: GRPOLossContract = call["contract"]
    for dp_rank, bounds in ((0, ((0, 4), (4, 4))), (1, ((0, 0), (0, 4)))):
        spec = LossShardingSpec(dp_rank, 2, 4, 6, bounds, (0, 4))
        match = rf"the contract is for DP rank {dp_rank} of 2, the call has rank 0 of 1; pass dp_group="
        with pytest.raises(InputError, match=match):
            DistributedGRPOLossOp().apply(**(call | {"contract": replace(contract, sharding=spec)}))


def test_the_mask_may_be_the_contracts() -> None:
    one = alone()
    call = call_on(TP, DP, one)
    contract: GRPOLossContract = call["contract"]
    mask = call["mask"]
    masked = replace(contract, logprob=replace(contract.logprob, mask=MaskSpec(N, tuple(mask.tolist()))))
    result = DistributedGRPOLossOp().apply(**(call | {"contract": masked, "mask": None}))
    assert_bits_equal(result.loss, run_job(one).loss, "loss")
    DistributedGRPOLossOp().apply(**(call | {"contract": masked}))
    other = mask.clone()
    other[0] = ~other[0]
    with pytest.raises(InputError, match="mask differs from the contract's at token 0"):
        DistributedGRPOLossOp().apply(**(call | {"contract": masked, "mask": other}))
    by_filler = torch.where(mask, call["action_ids"], -100)
    result = DistributedGRPOLossOp().apply(**(call | {"action_ids": by_filler, "mask": None}))
    assert_bits_equal(result.loss, run_job(one).loss, "loss, masked by the ignore index")


def test_every_loss_backend_serves_context_parallelism() -> None:
    call = call_on(TP, DP, alone())
    context_parallel(call)
    reasons = kernel_registry.explain(call["contract"]).reasons
    assert reasons["exact"] == ()
    assert not any("cp_world_size" in reason for reason in reasons["naive"])


def test_a_policy_word_that_is_none() -> None:
    with pytest.raises(
        LogprobContractError, match="determinism is asked for by the contract and never by dispatch"
    ):
        DistributedGRPOLossOp().apply(**(call_on(TP, DP, alone()) | {"logprob_backend": "deterministic"}))


DISAGREE: dict[str, tuple[Callable[[Call], None], str]] = {
    "beta": (
        put(contract=lambda c: replace(c, objective=ObjectiveSpec(beta=0.05))),
        r"objective.beta: rank 0 \(global rank 0\) has 0.04, rank 1 \(global rank 1\) has 0.05",
    ),
    "the clip": (
        put(contract=lambda c: replace(c, objective=ObjectiveSpec(ClipSpec(0.2, 0.3), beta=0.04))),
        "objective.clip.clip_eps_high: rank 0",
    ),
    "the advantage": (
        put(
            contract=lambda c: replace(
                c, objective=ObjectiveSpec(advantage=AdvantageSpec(std_eps=1e-4), beta=0.04)
            )
        ),
        "objective.advantage.std_eps: rank 0",
    ),
    "the guard": (
        put(contract=lambda c: replace(c, objective=ObjectiveSpec(log_ratio_guard=60.0, beta=0.04))),
        "objective.log_ratio_guard: rank 0",
    ),
    "the normaliser": (
        put(
            contract=lambda c: replace(
                c,
                reduction=LossReductionSpec("fixed_constant", fixed_normalizer_constant=4.0),  # type: ignore[arg-type]
            )
        ),
        "reduction.fixed_normalizer_constant: rank 0 .* has None, rank 1 .* has 4.0",
    ),
    "the groups": (
        sharding(group_boundaries=(0, 3, 9)),
        r"sharding.group_boundaries: rank 0 .* has \[0, 3, 7, 9\]",
    ),
    "the sequences": (
        sharding(
            sequence_shard_bounds=((0, 4), (4, 9)), padded_seq_len=6, num_sequences=9, group_boundaries=(0, 9)
        ),
        "sharding.group_boundaries",
    ),
    "the temperature": (
        put(contract=lambda c: replace(c, logprob=replace(c.logprob, temperature=0.9))),
        "logprob.temperature: rank 0 .* has 1.0, rank 1 .* has 0.9",
    ),
    "the ignore index": (
        put(contract=lambda c: replace(c, logprob=replace(c.logprob, ignore_index=-1))),
        "logprob.ignore_index: rank 0 .* has -100, rank 1 .* has -1",
    ),
    "the backend": (put(logprob_backend="exact_torch"), "backend_id: rank 0 .*exact_numba.*exact_torch"),
    "what the reference is": (
        put(ref_local_logits=None, ref_logps=torch.zeros(N)),
        "reference logits: rank 0 .* has True, rank 1 .* has False; reference logps",
    ),
    "rewards or advantages": (
        put(rewards=None, advantages=torch.zeros(4)),
        "rewards: rank 0 .* has True, rank 1 .* has False",
    ),
}


@pytest.mark.parametrize("what", list(DISAGREE))
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_that_disagree(what: str, tp: int, dp: int) -> None:
    change, match = DISAGREE[what]
    bounds = ((0, 4), (4, 9)) if dp == 2 else ((0, 9),)
    one = replace(
        job(),
        layout=Layout(tp=((0, 8), (8, 14))[:tp] if tp == 2 else ((0, 14),), dp=bounds, padding=(1,) * dp),
    )

    def run(rank: int, tp_axis: Axis, dp_axis: Axis) -> None:
        call = call_on(tp_axis, dp_axis, one)
        if rank == 1:
            n, s = len(call["old_logps"]), len(call["rewards"])
            if "sequences" in what and dp == 1:
                call["contract"] = replace(
                    call["contract"], sharding=replace(call["contract"].sharding, group_boundaries=(0, 9))
                )
            else:
                change(call)
            # as many as this rank has
            if call.get("ref_logps") is not None:
                call["ref_logps"] = torch.zeros(n)
            if call.get("advantages") is not None:
                call["advantages"] = torch.zeros(s)
        DistributedGRPOLossOp().apply(**call)

    with thread_mesh() as mesh:
        ends = mesh.run(run, tp=tp, dp=dp)
    for rank, end in enumerate(ends):
        assert end.error == "AgreementError", [str(e) for e in ends]
        if rank < 2:
            with pytest.raises(InputError, match=match):
                raise InputError(end.message)
