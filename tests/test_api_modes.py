"""Modes of torch that a trainer may have left on: default dtype, default device, autocast, threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_engine.contracts import ObjectiveSpec
from rl_engine.loss import DistributedGRPOLossOp
from rl_engine.mesh import Axis
from tests.bits import assert_bits_equal
from tests.faults.api_calls import grpo_call, policy_call, run_grpo, run_policy, run_selected, selected_call
from tests.faults.thread_mesh import thread_mesh
from tests.logprob.op_cases import BACKENDS, answer_of, assert_same, oracle, standard_case
from tests.loss.grpo_cases import Job, assert_as_alone, call_of, layout_of, make_batch, run_job

TP, DP = Axis.single("tp"), Axis.single("dp")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def threads(count: int) -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(kept)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "float64 by default": lambda: default_dtype(torch.float64),
    "bf16 by default": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic algorithms": deterministic,
    "one thread": lambda: threads(1),
    "three threads": lambda: threads(3),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),  # type: ignore[dict-item]
}


def job_for(backend: str) -> Job:
    batch = make_batch(40, temperature=0.9)
    job = Job(
        batch=batch, layout=layout_of(batch, 1, 1, 0), objective=ObjectiveSpec(beta=0.04), backend=backend
    )
    return replace(job, ref_by="logits").alone()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_no_mode_changes_a_bit(mode: str, backend: str) -> None:
    case, job = standard_case("bf16", 0.7, True), job_for(backend)
    expected = run_job(job)
    # rows without an answer have NaN gradients, at which anomaly detection stops: none flows into them here
    with MODES[mode]():
        answer = answer_of(case, backend=backend)
        done = run_job(job)
    assert_same(answer, oracle(case), mode)
    assert_as_alone([done], job, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_another_default_device(backend: str) -> None:
    """Nothing is made where the tensors are not: on `meta` it would have no values."""
    job = job_for(backend)
    leaf, call = call_of(job, TP, DP)
    grpo, policy, selected = grpo_call(TP, DP), policy_call(DP), selected_call(TP)
    expected = run_job(job)
    with torch.device("meta"):
        result = DistributedGRPOLossOp().apply(leaf, **call)
        result.loss.backward()
        calls = [
            run_grpo(TP, DP, lambda given: given.update(grpo)),
            run_policy(DP, lambda given: given.update(policy)),
            run_selected(TP, lambda given: given.update(selected | {"with_entropy": True}))[0],
        ]
    assert_bits_equal(result.loss, expected.loss, "loss")
    assert_bits_equal(leaf.grad, expected.grad.view(leaf.shape), "gradient")
    assert all(value.device.type == "cpu" for value in calls)


@pytest.mark.parametrize("victim", [None, 1])
def test_another_default_device_over_ranks(victim: int | None) -> None:
    """The messages between ranks too, those of a refusal among them."""
    with thread_mesh() as mesh:

        def run(rank: int, tp: Axis, dp: Axis) -> Any:
            call = grpo_call(tp, dp)
            if rank == victim:
                call["group_ids"] = ["x" * 3000]
            with torch.device("meta"):
                return run_grpo(tp, dp, lambda given: given.update(call))

        ends = mesh.run(run, tp=2, dp=2)
    expected = {"InputError", "AgreementError"} if victim is not None else {""}
    assert {end.error for end in ends} == expected, [str(end) for end in ends]
