"""What the logprob op refuses: tensors that do not fit their contract, each with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_engine.contracts import (
    DeterminismScope,
    LogprobContract,
    LogprobOutputSpec,
    MaskSpec,
    MergeKind,
    ReductionSpec,
    ShardingSpec,
)
from rl_engine.errors import AgreementError, InputError, LogprobContractError, RLEngineError, UnsupportedError
from rl_engine.logprob import VocabParallelLogprobOp
from rl_engine.logprob.exact import load_exact_torch
from rl_engine.mesh import Axis
from rl_engine.registry import kernel_registry
from tests.faults.thread_mesh import thread_mesh

CONTRACT = LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(6))
MASKED = LogprobContract(
    role="train", dtype="fp32", sharding=ShardingSpec.even(6), mask=MaskSpec(4, (True, False, True, True))
)
HALF = LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(12, 1, 2))


def change(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda call: call.update(changes)


def meta(call: dict[str, Any]) -> None:
    call["target_ids"] = torch.zeros(3, dtype=torch.long, device="meta")


def meta_mask(call: dict[str, Any]) -> None:
    call["mask"] = torch.zeros(3, dtype=torch.bool, device="meta")


LONG, BOOL = torch.long, torch.bool
WRONG: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "logits are a list": (change(local_logits=[[0.0] * 6] * 3), "must be torch tensors, got list and Tensor"),
    "targets are a list": (change(target_ids=[1, 2, 3]), "must be torch tensors, got Tensor and list"),
    "three dims": (
        change(local_logits=torch.zeros(1, 3, 6)),
        r"must be \[n, V_local\], got \[1, 3, 6\]; flatten with .*selected_logprobs, which takes \[B, T, V\]",
    ),
    "one dim": (change(local_logits=torch.zeros(6)), r"must be \[n, V_local\], got \[6\]"),
    "another dtype": (
        change(local_logits=torch.zeros(3, 6, dtype=torch.bfloat16)),
        r"logits are torch.bfloat16, the contract says torch.float32; build the contract with dtype=",
    ),
    "float64": (
        change(local_logits=torch.zeros(3, 6, dtype=torch.float64)),
        "logits are torch.float64, the contract says torch.float32",
    ),
    "another width": (
        change(local_logits=torch.zeros(3, 5)),
        r"logits have 5 columns, but TP rank 0 holds \[0, 6\) = 6",
    ),
    "too few targets": (
        change(target_ids=torch.zeros(2, dtype=LONG)),
        r"target_ids must be \[3\] like the rows of logits, got \[2\]",
    ),
    "targets in two dims": (change(target_ids=torch.zeros(3, 1, dtype=LONG)), r"\[3\] .* got \[3, 1\]"),
    "float targets": (
        change(target_ids=torch.zeros(3)),
        r"target_ids are torch.float32, expected torch.int64 or torch.int32; use .long\(\)",
    ),
    "bool targets": (change(target_ids=torch.zeros(3, dtype=BOOL)), "target_ids are torch.bool"),
    "int16 targets": (change(target_ids=torch.zeros(3, dtype=torch.int16)), "target_ids are torch.int16"),
    "a mask of another length": (
        change(mask=torch.ones(4, dtype=BOOL)),
        r"mask must be \[3\] like the rows of logits, got \[4\]",
    ),
    "a mask of floats": (
        change(mask=torch.ones(3)),
        r"mask is torch.float32, expected torch.bool; use mask.bool\(\)",
    ),
    "a mask of ints": (change(mask=torch.ones(3, dtype=LONG)), "mask is torch.int64, expected torch.bool"),
    "a list as mask": (
        change(mask=[True, False, True]),
        r"mask is list, expected a torch.bool tensor of \[3\]",
    ),
    "targets elsewhere": (meta, "target_ids is on meta, logits on cpu; move one of them"),
    "mask elsewhere": (meta_mask, "mask is on meta, logits on cpu; move one of them"),
    "the contract's mask is longer": (
        change(contract=MASKED),
        "the contract's mask covers 4 tokens, the logits have 3 rows",
    ),
    "a shard without its group": (
        change(contract=HALF),
        "the contract is for TP rank 1 of 2, the call has rank 0 of 1; pass tp_group=, or build the sharding",
    ),
}


def good_call() -> dict[str, Any]:
    return {"local_logits": torch.zeros(3, 6), "target_ids": torch.zeros(3, dtype=LONG), "contract": CONTRACT}


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_call_that_does_not_fit(wrong: str, validate: bool) -> None:
    """Shapes and dtypes are checked with and without validation: they cost nothing."""
    call = good_call()
    WRONG[wrong][0](call)
    with pytest.raises(InputError, match=WRONG[wrong][1]):
        VocabParallelLogprobOp()(**call, validate=validate)


def test_the_call_they_all_come_from_is_fine() -> None:
    assert VocabParallelLogprobOp()(**good_call())[0].shape == (3,)


@pytest.mark.parametrize("wrong", list(WRONG))
@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_with_a_wrong_call_stops_both(wrong: str, victim: int) -> None:
    """The rank itself hears what it did, the other one who did it and what; nobody waits."""
    with thread_mesh() as mesh:

        def run(rank: int, tp: Axis, dp: Axis) -> None:
            call = good_call()
            call["contract"] = LogprobContract(
                role="train", dtype="fp32", sharding=ShardingSpec.even(12, rank, 2)
            )
            if rank == victim:
                WRONG[wrong][0](call)
                if call["contract"] is HALF:
                    call["contract"] = LogprobContract(
                        role="train", dtype="fp32", sharding=ShardingSpec.even(12, 1 - rank, 2)
                    )
            VocabParallelLogprobOp()(**call, tp_group=tp)  # type: ignore[arg-type]

        ends = mesh.run(run, tp=2)
    assert ends[victim].error == "InputError", str(ends[victim])
    assert ends[1 - victim].error == "AgreementError", str(ends[1 - victim])
    assert (
        f"rank {victim} (global rank {victim}) failed its own checks: InputError:" in ends[1 - victim].message
    )
    assert ends[victim].message in ends[1 - victim].message


@pytest.mark.parametrize("contract", [None, "a contract", CONTRACT.sharding])
def test_what_is_no_contract(contract: Any) -> None:
    call = good_call() | {"contract": contract}
    with pytest.raises(LogprobContractError, match="must be of type LogprobContract, got"):
        VocabParallelLogprobOp()(**call)
    op = kernel_registry.get_logprob_op(CONTRACT).op
    with pytest.raises(InputError, match=f"contract is {type(contract).__name__}, expected LogprobContract"):
        op(**call)


def test_what_no_backend_can_serve() -> None:
    contract = LogprobContract(
        role="train",
        dtype="fp32",
        sharding=ShardingSpec.even(6),
        reduction=ReductionSpec.naive(),
        output=LogprobOutputSpec(entropy=True),
    )
    with pytest.raises(UnsupportedError, match="does not export the entropy") as caught:
        VocabParallelLogprobOp()(torch.zeros(3, 6), torch.zeros(3, dtype=LONG), contract=contract)
    assert set(caught.value.reasons) >= {"exact_numba", "exact_torch", "tiled_torch", "naive_torch"}


# ---------------------------------------------------------------- what the ranks of a TP group disagree on


def contract_for(rank: int, size: int = 2, **changes: Any) -> LogprobContract:
    fields: dict[str, Any] = {
        "role": "train",
        "dtype": "fp32",
        "sharding": ShardingSpec.even(6 * size, rank, size),
    }
    return LogprobContract(**(fields | changes))


DISAGREEMENTS: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "temperature": (
        lambda rank: {"contract": contract_for(rank, temperature=(1.0, 0.6)[rank])},
        r"temperature: rank 0 \(global rank 0\) has 1.0, rank 1 \(global rank 1\) has 0.6",
    ),
    "ignore_index": (
        lambda rank: {"contract": contract_for(rank, ignore_index=(-100, -1)[rank])},
        r"ignore_index: rank 0 \(global rank 0\) has -100, rank 1 \(global rank 1\) has -1;",
    ),
    "role": (
        lambda rank: {"contract": contract_for(rank, role=("train", "infer")[rank])},
        r"role: rank 0 .* train",
    ),
    "dtype": (
        lambda rank: {
            "contract": contract_for(rank, dtype=("fp32", "bf16")[rank]),
            "local_logits": torch.zeros(3, 6, dtype=(torch.float32, torch.bfloat16)[rank]),
        },
        r"dtype: rank 0 \(global rank 0\) has fp32, rank 1 \(global rank 1\) has bf16",
    ),
    "real vocabulary": (
        lambda rank: {
            "contract": contract_for(
                rank, sharding=ShardingSpec.even((12, 11)[rank], rank, 2, padded_vocab_size=12)
            )
        },
        r"agree, and nothing was computed: sharding.real_vocab_size: rank 0 \(global rank 0\) has 12, rank 1",
    ),
    "shards": (
        lambda rank: {
            "contract": contract_for(
                rank, sharding=ShardingSpec(rank, 2, (((0, 6), (6, 12)), ((0, 5), (5, 12)))[rank], 12, 12)
            ),
            "local_logits": torch.zeros(3, (6, 7)[rank]),
        },
        r"sharding.vocab_shard_bounds: rank 0 \(global rank 0\) has \[\[0, 6\], \[6, 12\]\], rank 1",
    ),
    "transport": (
        lambda rank: {
            "contract": contract_for(
                rank, reduction=ReductionSpec(transport=("packed_all_gather", "all_reduce_max_sum")[rank])
            )
        },
        r"reduction.transport: rank 0 \(global rank 0\) has packed_all_gather, rank 1",
    ),
    "scope": (
        lambda rank: {
            "contract": contract_for(
                rank,
                reduction=ReductionSpec(
                    determinism_scope=(DeterminismScope.LAYOUT_FREE, DeterminismScope.FIXED_TOPOLOGY)[rank]
                ),
            )
        },
        r"reduction.determinism_scope: rank 0 \(global rank 0\) has layout_free",
    ),
    "merge": (
        lambda rank: {
            "contract": contract_for(
                rank, reduction=(ReductionSpec.exact(), ReductionSpec.tiled(num_vocab_tiles=2))[rank]
            )
        },
        rf"backend_id: rank 0 .*reduction.merge: rank 0 \(global rank 0\) has {MergeKind.EXACT_WORDS}",
    ),
    "entropy": (
        lambda rank: {"contract": contract_for(rank, output=LogprobOutputSpec(entropy=rank == 1))},
        r"output.entropy: rank 0 \(global rank 0\) has False, rank 1 \(global rank 1\) has True",
    ),
    "rows": (
        lambda rank: {
            "local_logits": torch.zeros(3 + rank, 6),
            "target_ids": torch.zeros(3 + rank, dtype=LONG),
        },
        r"nothing was computed: num_rows: rank 0 \(global rank 0\) has 3, rank 1 \(global rank 1\) has 4;",
    ),
    "the contract's mask": (
        lambda rank: {"contract": contract_for(rank, mask=MaskSpec(3, (True, rank == 0, True)))},
        r"active_mask_sha256: rank 0 \(global rank 0\) has",
    ),
    "a mask in the contract and none": (
        lambda rank: {"contract": contract_for(rank, mask=MaskSpec(3, (True,) * 3) if rank else None)},
        r"num_tokens: rank 0 \(global rank 0\) has nothing, rank 1 \(global rank 1\) has 3",
    ),
    "targets": (
        lambda rank: {"target_ids": torch.tensor([1, 2, 3 + rank])},
        "tp group were given different tokens, masks or per-token data for the same rows; .*data loader",
    ),
    "targets in another order": (
        lambda rank: {"target_ids": torch.tensor([[1, 2, 3], [1, 3, 2]][rank])},
        "were given different tokens, masks or per-token data",
    ),
    "masks": (
        lambda rank: {"mask": torch.tensor([True, True, rank == 0])},
        "were given different tokens, masks or per-token data",
    ),
    "which row is masked": (
        lambda rank: {"mask": torch.tensor([True, rank == 0, rank == 1])},
        "were given different tokens, masks or per-token data",
    ),
    "ignored and not": (
        lambda rank: {"target_ids": torch.tensor([1, 2, (3, -100)[rank]])},
        "were given different tokens, masks or per-token data",
    ),
}


@pytest.mark.parametrize("what", list(DISAGREEMENTS))
def test_siblings_that_disagree(what: str) -> None:
    differ, match = DISAGREEMENTS[what]
    with thread_mesh() as mesh:

        def run(rank: int, tp: Axis, dp: Axis) -> None:
            call = good_call() | {"contract": contract_for(rank)} | differ(rank)
            VocabParallelLogprobOp()(**call, tp_group=tp)  # type: ignore[arg-type]

        ends = mesh.run(run, tp=2)
    for end in ends:
        assert end.error == "AgreementError", str(end)
        with pytest.raises(AgreementError, match=match):
            raise AgreementError(end.message)


def test_backends_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without numba resolves another tier: same bits, but not what was meant to run."""
    with thread_mesh() as mesh:

        def run(rank: int, tp: Axis, dp: Axis) -> None:
            contract = contract_for(rank)
            op = kernel_registry.get_logprob_op(contract, ("exact_numba", "exact_torch")[rank]).op
            op(**(good_call() | {"contract": contract}), tp_group=tp)

        ends = mesh.run(run, tp=2)
    for end in ends:
        assert (
            "backend_id: rank 0 (global rank 0) has exact_numba, rank 1 (global rank 1) has exact_torch"
            in end.message
        )


@pytest.mark.parametrize("size", [2, 3, 8])
def test_every_rank_hears_of_one_that_holds_other_data(size: int) -> None:
    """Sums of squares against squares of sums: no pattern of disagreement over the ranks may cancel."""
    with thread_mesh() as mesh:
        for odd in range(size):

            def run(rank: int, tp: Axis, dp: Axis, odd: int = odd) -> None:
                ids = torch.tensor([1, 2, 3 if rank == odd else 4])
                call = good_call() | {"contract": contract_for(rank, size), "target_ids": ids}
                VocabParallelLogprobOp()(**call, tp_group=tp)  # type: ignore[arg-type]

            ends = mesh.run(run, tp=size)
            assert all(end.error == "AgreementError" for end in ends), [str(end) for end in ends]


class Failing:
    """A backend that fails on one rank."""

    backend_id, numerics_id = "exact_torch", "exact-words/1"

    def check(self, contract: Any) -> None:
        pass

    def rows(self, rows: Any) -> Any:
        raise MemoryError("out of memory")


@pytest.mark.parametrize("validate", [True, False])
def test_a_backend_that_fails_on_one_rank(validate: bool) -> None:
    with thread_mesh() as mesh:

        def run(rank: int, tp: Axis, dp: Axis) -> None:
            contract = contract_for(rank, 3)
            op = (
                VocabParallelLogprobOp(Failing())
                if rank == 1
                else kernel_registry.get_logprob_op(contract, "exact_torch").op
            )
            op(**(good_call() | {"contract": contract}), tp_group=tp, validate=validate)

        ends = mesh.run(run, tp=3)
    assert ends[1].error == "MemoryError"
    for end in (ends[0], ends[2]):
        assert end.error == "LostRankError" and "MemoryError: out of memory" in end.message, str(end)


def test_a_wrong_call_without_validation_rings_the_alarm() -> None:
    with thread_mesh() as mesh:

        def run(rank: int, tp: Axis, dp: Axis) -> None:
            call = good_call() | {"contract": contract_for(rank)}
            if rank == 0:
                call["local_logits"] = torch.zeros(3, 5)
            VocabParallelLogprobOp()(**call, tp_group=tp, validate=False)  # type: ignore[arg-type]

        ends = mesh.run(run, tp=2)
    assert [end.error for end in ends] == ["InputError", "LostRankError"]
    assert "logits have 5 columns" in ends[1].message


def test_every_error_is_one_of_ours() -> None:
    for wrong in WRONG.values():
        call = good_call()
        wrong[0](call)
        with pytest.raises(RLEngineError, match=r"\S"):
            VocabParallelLogprobOp()(**call)


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("reduction", [ReductionSpec.tiled(4), ReductionSpec.naive()], ids=["tiled", "naive"])
def test_an_exact_op_refuses_a_contract_with_another_merge(reduction: ReductionSpec, validate: bool) -> None:
    contract = LogprobContract(role="train", dtype="fp32", sharding=ShardingSpec.even(8), reduction=reduction)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="exact_torch computes exact_words; build the contract with"):
        load_exact_torch()(
            torch.zeros(2, 8), torch.zeros(2, dtype=torch.long), contract=contract, validate=validate
        )
