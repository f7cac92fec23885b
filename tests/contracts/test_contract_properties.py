"""What holds for every sharding, mask and grouping."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_engine.contracts import (
    DeterminismScope,
    GRPOLossContract,
    LogprobContract,
    LossShardingSpec,
    MaskSpec,
    ReductionSpec,
    ShardingSpec,
)
from rl_engine.errors import LogprobContractError, LossContractError
from tests.contracts.examples import contract, logprob_capability, loss_contract

# A deadline measures the machine, not the code.
relaxed = settings(deadline=None)

Bounds = tuple[tuple[int, int], ...]


@st.composite
def partitions(draw: st.DrawFn, max_size: int = 200, max_parts: int = 9) -> tuple[int, Bounds]:
    """A size and contiguous ranges that tile it: uneven, unaligned, some empty."""
    size = draw(st.integers(1, max_size))
    cuts = sorted(draw(st.lists(st.integers(0, size), max_size=max_parts - 1)))
    return size, tuple(pairwise([0, *cuts, size]))


@st.composite
def shardings(draw: st.DrawFn) -> ShardingSpec:
    size, bounds = draw(partitions())
    cp_world_size = draw(st.integers(1, 3))
    return ShardingSpec(
        tp_rank=draw(st.integers(0, len(bounds) - 1)),
        tp_world_size=len(bounds),
        vocab_shard_bounds=bounds,
        real_vocab_size=draw(st.integers(1, size)),
        padded_vocab_size=size,
        cp_rank=draw(st.integers(0, cp_world_size - 1)),
        cp_world_size=cp_world_size,
    )


@st.composite
def batches(draw: st.DrawFn, min_group: int = 1) -> LossShardingSpec:
    size, bounds = draw(partitions(max_size=40).filter(lambda part: part[0] >= min_group))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, size - 1)), max_size=size - 1)) - {size})
    offsets = [0]
    for cut in [*cuts, size]:
        if cut - offsets[-1] >= min_group and (cut == size or size - cut >= min_group):
            offsets.append(cut)
    return LossShardingSpec(
        dp_rank=draw(st.integers(0, len(bounds) - 1)),
        dp_world_size=len(bounds),
        num_sequences=size,
        padded_seq_len=draw(st.integers(0, 9)),
        sequence_shard_bounds=bounds,
        group_boundaries=offsets,
    )


@relaxed
@given(shardings())
def test_every_token_has_one_owner(spec: ShardingSpec) -> None:
    owners = [spec.owner_rank(token) for token in range(spec.real_vocab_size)]
    assert owners == sorted(owners)
    for token, owner in enumerate(owners):
        start, end = spec.vocab_shard_bounds[owner]
        assert start <= token < end
    ranks = [dataclasses.replace(spec, tp_rank=rank) for rank in range(spec.tp_world_size)]
    assert sum(rank.local_vocab_size for rank in ranks) == spec.padded_vocab_size
    assert sum(rank.local_real_size for rank in ranks) == spec.real_vocab_size
    assert [rank.local_real_size for rank in ranks] == [owners.count(rank) for rank in range(len(ranks))]
    assert spec.has_empty_shards == any(rank.local_vocab_size == 0 for rank in ranks)


@relaxed
@given(shardings(), st.data())
def test_any_moved_bound_is_refused(spec: ShardingSpec, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, spec.tp_world_size - 1))
    side = data.draw(st.integers(0, 1))
    step = data.draw(st.sampled_from([-2, -1, 1, 2]))
    bounds = [list(pair) for pair in spec.vocab_shard_bounds]
    bounds[place][side] += step
    with pytest.raises(LogprobContractError, match=r"vocab_shard_bounds = .*(must tile|before its start)"):
        dataclasses.replace(spec, vocab_shard_bounds=bounds)


@relaxed
@given(
    size=st.integers(1, 3000),
    padding=st.integers(0, 64),
    world=st.integers(1, 9),
    step=st.integers(1, 70),
    data=st.data(),
)
def test_even_shards(size: int, padding: int, world: int, step: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    spec = ShardingSpec.even(size, rank, world, padded_vocab_size=size + padding, multiple_of=step)
    widths = [end - start for start, end in spec.vocab_shard_bounds]
    assert widths == sorted(widths, reverse=True)
    assert all(start % step == 0 or start == size + padding for start, _ in spec.vocab_shard_bounds)
    assert max(widths) < -(-(size + padding) // world) + step
    assert ShardingSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@relaxed
@given(size=st.integers(1, 64), tiles=st.integers(1, 64), world=st.integers(1, 5), scale=st.integers(1, 40))
def test_aligned_shards_serve_the_tiled_merge(size: int, tiles: int, world: int, scale: int) -> None:
    capability = logprob_capability(
        merges="max_sumexp_tiles", determinism_scopes="cross_tp_bitwise", requires_tile_alignment=True
    )
    padded = tiles * scale
    shards = ShardingSpec.even(
        min(size, padded), 0, world, padded_vocab_size=padded, multiple_of=padded // tiles
    )
    request = contract(sharding=shards, reduction=ReductionSpec.tiled(tiles))
    assert capability.incompatibilities(request) == ()


@relaxed
@given(st.lists(st.booleans(), max_size=60), st.integers(-1000, -1))
def test_masks_survive_json(active: list[bool], ignore_index: int) -> None:
    mask = MaskSpec(len(active), active, ignore_index)
    data = json.loads(json.dumps(mask.to_dict()))
    assert MaskSpec.from_dict(data) == mask
    assert sum(end - start for start, end in data["active_runs"]) == mask.active_token_count == sum(active)


@relaxed
@given(st.lists(st.booleans(), min_size=1, max_size=60), st.data())
def test_mask_digest_sees_every_token(active: list[bool], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(active) - 1))
    flipped = [value != (index == place) for index, value in enumerate(active)]
    assert (
        MaskSpec(len(active), active).active_mask_sha256 != MaskSpec(len(active), flipped).active_mask_sha256
    )


@relaxed
@given(batches())
def test_every_sequence_has_one_rank_and_one_group(spec: LossShardingSpec) -> None:
    owners = [spec.owner_rank(sequence) for sequence in range(spec.num_sequences)]
    groups = [spec.group_of(sequence) for sequence in range(spec.num_sequences)]
    ranks = [dataclasses.replace(spec, dp_rank=rank) for rank in range(spec.dp_world_size)]
    assert [rank.num_local_sequences for rank in ranks] == [owners.count(rank) for rank in range(len(ranks))]
    assert sum(rank.num_local_sequences for rank in ranks) == spec.num_sequences
    assert spec.group_sizes == tuple(groups.count(group) for group in range(spec.num_groups))
    assert groups == sorted(groups)


@relaxed
@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 5))
def test_even_batches(total: int, world: int, length: int) -> None:
    specs = [LossShardingSpec.even(total, rank, world, padded_seq_len=length) for rank in range(world)]
    counts = [spec.num_local_sequences for spec in specs]
    assert sum(counts) == total
    assert max(counts) - min(counts) <= 1
    assert LossShardingSpec.from_dict(json.loads(json.dumps(specs[0].to_dict()))) == specs[0]


@relaxed
@given(batches(), st.data())
def test_any_repeated_group_offset_is_refused(spec: LossShardingSpec, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(spec.group_boundaries) - 1))
    offsets = list(spec.group_boundaries)
    offsets.insert(place, offsets[place])
    with pytest.raises(LossContractError, match="must rise strictly"):
        dataclasses.replace(spec, group_boundaries=offsets)


@relaxed
@given(shardings(), batches(min_group=2), st.data())
def test_fingerprints_over_a_whole_mesh(
    shards: ShardingSpec, batch: LossShardingSpec, data: st.DataObject
) -> None:
    batch = dataclasses.replace(batch, cp_rank=shards.cp_rank, cp_world_size=shards.cp_world_size)
    base = loss_contract(logprob=contract(sharding=shards, ignore_index=-100), sharding=batch)
    tp_rank = data.draw(st.integers(0, shards.tp_world_size - 1))
    dp_rank = data.draw(st.integers(0, batch.dp_world_size - 1))
    padded = data.draw(st.integers(0, 9))

    def at(tp: int, dp: int, length: int) -> GRPOLossContract:
        logprob: LogprobContract = dataclasses.replace(
            base.logprob, sharding=dataclasses.replace(shards, tp_rank=tp)
        )
        moved: dict[str, Any] = {"dp_rank": dp, "padded_seq_len": length}
        return dataclasses.replace(base, logprob=logprob, sharding=dataclasses.replace(batch, **moved))

    anywhere = at(tp_rank, dp_rank, padded)
    assert anywhere.cross_rank_fingerprint() == base.cross_rank_fingerprint()
    sibling = at(tp_rank, batch.dp_rank, batch.padded_seq_len)
    assert sibling.cross_rank_fingerprint("tp") == base.cross_rank_fingerprint("tp")
    peer = at(shards.tp_rank, dp_rank, padded)
    assert peer.cross_rank_fingerprint("dp") == base.cross_rank_fingerprint("dp")


@relaxed
@given(
    st.sampled_from(DeterminismScope), st.sampled_from(DeterminismScope), st.sampled_from(DeterminismScope)
)
def test_scopes_are_a_total_order(a: DeterminismScope, b: DeterminismScope, c: DeterminismScope) -> None:
    assert a.covers(a)
    assert a.covers(b) or b.covers(a)
    assert not (a.covers(b) and b.covers(a)) or a is b
    assert not (a.covers(b) and b.covers(c)) or a.covers(c)
