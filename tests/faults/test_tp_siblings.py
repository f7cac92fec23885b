"""TP siblings that were given other data: all ranks of the mesh raise, on every backend, whatever else is
wrong.

The order of the checks matters here. A rank that raises on what it alone sees, before the exchange in which
the others wait, would leave them waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_engine.contracts import (
    AdvantageSpec,
    GRPOLossContract,
    LogprobContract,
    LossReductionSpec,
    LossShardingSpec,
    ObjectiveSpec,
    ReductionSpec,
    ShardingSpec,
)
from rl_engine.loss import DistributedGRPOLossOp
from rl_engine.mesh import Axis
from tests.faults.thread_mesh import thread_mesh
from tests.loss.grpo_cases import Job, Layout, call_of, make_batch

NAN, INF = float("nan"), float("inf")


def spoil(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(call: dict[str, Any]) -> None:
        call[name] = call[name].clone()
        change(call[name])

    return apply


def put(index: int, value: float) -> Callable[[torch.Tensor], Any]:
    return lambda tensor: tensor.__setitem__(index, value)


OTHER: dict[str, Callable[[dict[str, Any]], None]] = {
    "a NaN old log-prob": spoil("old_logps", put(0, NAN)),
    "another old log-prob": spoil("old_logps", put(0, -1.0)),
    "a NaN reward": spoil("rewards", put(0, NAN)),
    "another reward": spoil("rewards", put(0, 7.0)),
    "another target": spoil("action_ids", lambda t: t.__setitem__(0, (t[0] + 1) % 11)),
    "a stray target": spoil("action_ids", put(0, 12)),
    "one token masked": spoil("mask", put(0, 0)),
    "everything masked": spoil("mask", lambda t: t.zero_()),
    "a NaN reference": spoil("ref_logps", put(0, NAN)),
    "another reference": spoil("ref_logps", put(0, -0.5)),
}


@pytest.mark.parametrize("what", list(OTHER))
@pytest.mark.parametrize("on_empty", ["zero", "error"])
@pytest.mark.parametrize("backend", ["exact_torch", "tiled_torch"])
def test_one_sibling_with_other_data(what: str, on_empty: str, backend: str) -> None:
    batch = make_batch(50)
    reduction = ReductionSpec.exact() if backend == "exact_torch" else ReductionSpec.tiled(num_vocab_tiles=14)
    job = Job(
        batch=batch,
        layout=Layout(tp=((0, 7), (7, 14)), dp=((0, 4), (4, 9)), padding=(0, 1)),
        objective=ObjectiveSpec(beta=0.04),
        ref_by="logps",
        backend=backend,
    )

    def run(rank: int, tp: Axis, dp: Axis) -> float:
        leaf, call = call_of(job, tp, dp)
        contract: GRPOLossContract = call["contract"]
        call["contract"] = replace(
            contract,
            logprob=replace(contract.logprob, reduction=reduction),
            reduction=LossReductionSpec(determinism_scope=reduction.determinism_scope, on_empty=on_empty),  # type: ignore[arg-type]
        )
        if rank == 1:
            OTHER[what](call)
        return DistributedGRPOLossOp().apply(leaf, **call).loss.item()

    with thread_mesh() as mesh:
        ends = mesh.run(run, tp=2, dp=2)
    shown = [str(end) for end in ends]
    assert all(end.error in ("InputError", "AgreementError") for end in ends), shown
    mine = {
        "a NaN old log-prob": "old_logps of token 0 (sequence 0) is nan",
        "a NaN reward": "reward of sequence 0 is nan",
        "a stray target": "row 0: target 12 lies outside the real vocabulary",
        "a NaN reference": "ref_logps of token 0 (sequence 0) is nan",
    }.get(what, "were given different tokens, masks or per-token data")
    assert mine in ends[1].message, shown
    assert "were given different tokens, masks or per-token data" in ends[0].message, shown


def test_long_fields_that_differ_at_their_end_are_named() -> None:
    """Four hundred sequences in pairs, but for the last two groups of one rank."""

    def run(rank: int, tp: Axis, dp: Axis) -> None:
        boundaries = list(range(0, 401, 2))
        if rank == 1:
            boundaries[-2] = 399
        contract = GRPOLossContract(
            LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(4)),
            LossShardingSpec(dp.rank, 2, 400, 1, ((0, 200), (200, 400)), tuple(boundaries)),
            ObjectiveSpec(advantage=AdvantageSpec(normalizer="mean_only")),  # type: ignore[arg-type]
        )
        ids, zeros = torch.zeros(200, dtype=torch.long), torch.zeros(200)
        DistributedGRPOLossOp().apply(
            torch.zeros(200, 4),
            ids,
            zeros,
            zeros,
            contract=contract,
            dp_group=dp,  # type: ignore[arg-type]
        )

    with thread_mesh() as mesh:
        for end in mesh.run(run, dp=2):
            assert (
                "nothing was computed: sharding.group_boundaries: rank 0 (global rank 0) has [0, 2, 4"
                in end.message
            )
            assert end.message.count("… (digest ") == 2
            assert len(end.message) < 1000
