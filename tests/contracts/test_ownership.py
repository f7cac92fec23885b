"""What a rank may hold: sequences in any order, parts of them, or nothing; plans that say so for a mesh."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_engine.contracts import BatchPlan, ContextSplit, LossShardingSpec, MaskSpec, context_ranges
from rl_engine.errors import LossContractError
from tests.contracts.examples import contract, loss_contract

WHOLE = LossShardingSpec.from_sequence_ids([5, 0, 3], num_sequences=6, sequence_lengths=[4, 0, 7])
Rule = tuple[str, Callable[[], object], str]


def from_ids(ids: object, lengths: object = 4, **kwargs: Any) -> LossShardingSpec:
    return LossShardingSpec.from_sequence_ids(ids, num_sequences=6, sequence_lengths=lengths, **kwargs)  # type: ignore[arg-type]


def plan(**kwargs: Any) -> BatchPlan:
    default: dict[str, Any] = {
        "sequence_lengths": (4, 5, 6),
        "micro_batches": (((2,), (0,)), ((1,),)),
        "group_boundaries": (0, 3),
    }
    return BatchPlan(**default | kwargs)


RULES: list[Rule] = [
    (
        "both forms",
        lambda: dataclasses.replace(WHOLE, sequence_shard_bounds=((0, 6),)),
        "LossShardingSpec.sequence_shard_bounds = ((0, 6),): must be None where segments say",
    ),
    (
        "padding",
        lambda: dataclasses.replace(WHOLE, padded_seq_len=3),
        "LossShardingSpec.padded_seq_len = 3: must be 0 where segments say",
    ),
    (
        "no form",
        lambda: dataclasses.replace(WHOLE, segments=None),
        "sequence_shard_bounds = None: must be an",
    ),
    (
        "triples",
        lambda: dataclasses.replace(WHOLE, segments=((0, 1),)),  # type: ignore[arg-type]
        "LossShardingSpec.segments[0] = (0, 1): must be (sequence, start, end)",
    ),
    (
        "sequence",
        lambda: dataclasses.replace(WHOLE, segments=((6, 0, 1),)),
        "segments[0] = (6, 0, 1): must name a sequence in [0, num_sequences = 6)",
    ),
    (
        "backwards",
        lambda: dataclasses.replace(WHOLE, segments=((1, 3, 2),)),
        "segments[0] = (1, 3, 2): must end at or after its start",
    ),
    (
        "overlap",
        lambda: dataclasses.replace(WHOLE, segments=((1, 0, 3), (2, 0, 9), (1, 2, 4))),
        "segments = [(1, 0, 3), (1, 2, 4)]: must not overlap: sequence 1 does",
    ),
    ("twice", lambda: from_ids([1, 2, 1]), "sequence_ids = (1, 2, 1): must be distinct: 1 stands twice"),
    ("lengths", lambda: from_ids([1, 2], [3]), "sequence_lengths = (3,): must be 2, one per sequence id"),
    ("packed start", lambda: LossShardingSpec.packed([1, 4]), "cu_seqlens = (1, 4): must start at 0"),
    ("packed falls", lambda: LossShardingSpec.packed([0, 4, 3]), "cu_seqlens = (0, 4, 3): must start at 0"),
    (
        "packed ids",
        lambda: LossShardingSpec.packed([0, 4], dp_world_size=2),
        "sequence_ids = None: must be given where other ranks hold sequences",
    ),
    (
        "split twice",
        lambda: WHOLE.zigzag(0, 2).zigzag(0, 2),
        "split_context = 2: the spec is split over CP ranks already; split a spec of whole sequences, once",
    ),
    (
        "split a part",
        lambda: dataclasses.replace(WHOLE, segments=((1, 2, 4),)).zigzag(0, 2),
        "the spec holds only [2, 4) of sequence 1",
    ),
    ("block", lambda: WHOLE.local_sequence_start, "sequence_shard_bounds = None: is None: this rank's"),
    ("owner", lambda: WHOLE.owner_rank(2), "no contiguous block; use local_sequences"),
    ("cp rank", lambda: context_ranges(8, 2, 2), "context_ranges cp_rank = 2: must be an integer in [0, 2)"),
    ("split kind", lambda: context_ranges(8, 0, 2, "ring"), "must be one of contiguous | zigzag"),
    ("plan twice", lambda: plan(micro_batches=(((2, 0), (0, 1)),)), "0 is on DP rank 0 and on 0"),
    ("plan misses", lambda: plan(micro_batches=(((2, 0),), ())), "must hold every sequence once: 1 of 3 is"),
    ("plan nobody", lambda: plan(micro_batches=()), "must hold one entry per DP rank"),
    ("plan empty", lambda: plan(sequence_lengths=()), "must name at least one sequence"),
    ("plan groups", lambda: plan(group_boundaries=(0, 2)), "must rise from 0 to num_sequences = 3"),
    ("plan rank", lambda: plan().segments(2), "dp_rank = 2: must be an integer in [0, 2); the plan has 2 DP"),
    (
        "plan micro-batch",
        lambda: plan().segments(1, 0, 1),
        "micro_batch = 1: must be an integer in [0, 1); DP rank 1 has 1 micro-batches",
    ),
    (
        "mask",
        lambda: loss_contract(sharding=WHOLE.zigzag(0, 2)),
        "cp_world_size = 1: differs from sharding.cp_world_size = 2",
    ),
]


@pytest.mark.parametrize(("build", "text"), [rule[1:] for rule in RULES], ids=[rule[0] for rule in RULES])
def test_rules(build: Callable[[], object], text: str) -> None:
    with pytest.raises(LossContractError, match=re.escape(text)):
        build()


def test_what_a_spec_of_segments_says() -> None:
    assert WHOLE.segments == ((5, 0, 4), (0, 0, 0), (3, 0, 7))
    assert WHOLE.local_sequences == (5, 0, 3)
    assert (WHOLE.num_local_sequences, WHOLE.num_local_tokens, WHOLE.is_contiguous) == (3, 11, False)
    assert str(WHOLE) == "6 sequences in 1 groups of 6, dp 0/1 11 slots of 3 sequences"
    assert LossShardingSpec.from_dict(json.loads(json.dumps(WHOLE.to_dict()))) == WHOLE
    nothing = from_ids([], dp_rank=1, dp_world_size=2)
    assert (nothing.local_sequences, nothing.num_local_tokens) == ((), 0)


def test_contiguous_is_even_with_counts() -> None:
    given_counts = LossShardingSpec.contiguous([3, 2, 2], 1, padded_seq_len=5, group_sizes=(3, 4))
    assert given_counts == LossShardingSpec.even(7, 1, 3, padded_seq_len=5, group_sizes=(3, 4))
    assert given_counts.local_sequences == (3, 4)


def test_packed_numbers_its_sequences() -> None:
    assert LossShardingSpec.packed([0, 3, 3, 8]).segments == ((0, 0, 3), (1, 0, 0), (2, 0, 5))
    there = LossShardingSpec.packed(
        [0, 3, 5], sequence_ids=[7, 2], num_sequences=9, dp_rank=1, dp_world_size=3
    )
    assert there.segments == ((7, 0, 3), (2, 0, 2))


@given(length=st.integers(0, 70), size=st.integers(1, 5), split=st.sampled_from(list(ContextSplit)))
def test_context_ranges_tile_a_sequence(length: int, size: int, split: ContextSplit) -> None:
    held = [r for rank in range(size) for r in context_ranges(length, rank, size, split)]
    covered = sorted(place for start, end in held for place in range(start, end))
    assert covered == list(range(length))
    if length % (2 * size) == 0:
        sizes = [
            sum(end - start for start, end in context_ranges(length, rank, size, split))
            for rank in range(size)
        ]
        assert set(sizes) == {length // size}


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    dp=st.integers(1, 4),
    cp=st.integers(1, 3),
    budget=st.integers(1, 60),
    split=st.sampled_from(list(ContextSplit)),
)
def test_plans_hold_every_slot_once(
    lengths: list[int], dp: int, cp: int, budget: int, split: ContextSplit
) -> None:
    options: dict[str, Any] = {"dp_world_size": dp, "cp_world_size": cp, "cp_split": split}
    for made in (
        BatchPlan.even(lengths, micro_batch_size=budget % 3 + 1, **options),
        BatchPlan.balanced(lengths, max_tokens=budget, **options),
    ):
        held = []
        for dp_rank in range(dp):
            for cp_rank in range(cp):
                spec = LossShardingSpec.from_batch_plan(made, dp_rank, cp_rank)
                whole = list(made.sequence_ids(dp_rank))
                assert list(spec.local_sequences) == whole
                assert (spec.dp_rank, spec.cp_rank, spec.cp_world_size) == (dp_rank, cp_rank, cp)
                parts = [
                    s
                    for place in range(len(made.micro_batches[dp_rank]))
                    for s in LossShardingSpec.from_batch_plan(
                        made, dp_rank, cp_rank, micro_batch=place
                    ).segments  # type: ignore[union-attr]
                ]
                assert tuple(parts) == spec.segments
                held += [(i, place) for i, start, end in parts for place in range(start, end)]
        assert sorted(held) == [(i, place) for i, length in enumerate(lengths) for place in range(length)]
        assert BatchPlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_balanced_plans_keep_the_budget() -> None:
    made = BatchPlan.balanced([90, 10, 50, 40, 60], max_tokens=100, dp_world_size=2)
    loads = [[sum(made.sequence_lengths[i] for i in batch) for batch in own] for own in made.micro_batches]
    assert max(max(own) for own in loads) <= 100
    assert sorted(sum(own) for own in loads) == [120, 130]
    assert str(made).startswith("5 sequences over dp 2 in ")


def test_segments_do_not_join_the_fingerprint_of_the_mesh() -> None:
    def made(ids: list[int]) -> Any:
        return loss_contract(sharding=from_ids(ids, group_size=2))

    one, other = made([0, 1, 2]), made([5, 3])
    assert one.cross_rank_fingerprint("dp") == other.cross_rank_fingerprint("dp")
    assert one.cross_rank_fingerprint("tp") != other.cross_rank_fingerprint("tp")
    blocks = loss_contract(sharding=LossShardingSpec.even(6, padded_seq_len=4, group_size=2))
    assert one.cross_rank_fingerprint("dp") != blocks.cross_rank_fingerprint("dp")


def test_a_mask_in_the_contract_counts_the_slots_of_the_segments() -> None:
    masked = contract(mask=MaskSpec(4, [True] * 4))
    with pytest.raises(LossContractError, match="must be the 12 slots of this rank's segments"):
        loss_contract(logprob=masked, sharding=from_ids([0, 1, 2], group_size=2))
