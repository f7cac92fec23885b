"""What the logprob contract accepts, what it becomes, and what identifies it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rl_engine.contracts import (
    DEFAULT_NUM_VOCAB_TILES,
    AccDtype,
    DeterminismScope,
    LogitsDtype,
    LogprobContract,
    LogprobOutputSpec,
    LogprobRole,
    MaskSpec,
    MergeKind,
    MergeOrder,
    ReductionSpec,
    ShardingSpec,
    Transport,
)
from tests.contracts.examples import Group, Mesh, MeshAxisLike, contract, shards

# --- what is accepted, and what it becomes


def test_names_become_members() -> None:
    request = contract(role="infer", dtype="fp16", reduction=ReductionSpec(transport="all_reduce_max_sum"))
    assert request.role is LogprobRole.INFER
    assert request.dtype is LogitsDtype.FP16
    assert request.reduction.transport is Transport.ALL_REDUCE_MAX_SUM
    assert request == contract(role=LogprobRole.INFER, dtype=LogitsDtype.FP16, reduction=request.reduction)


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        (torch.bfloat16, "bf16"),
        (torch.float16, "fp16"),
        (torch.float32, "fp32"),
        (torch.half, "fp16"),
        (np.dtype("float32"), "fp32"),
        ("torch.bfloat16", "bf16"),
        ("BFloat16", "bf16"),
        ("float", "fp32"),
        (LogitsDtype.FP32, "fp32"),
    ],
    ids=str,
)
def test_dtype_spellings(spelling: object, expected: str) -> None:
    assert LogitsDtype.parse(spelling) == expected
    assert contract(dtype=spelling).dtype is LogitsDtype(expected)


def test_dtype_names_of_torch() -> None:
    assert [getattr(torch, dtype.torch_name) for dtype in LogitsDtype] == [
        torch.bfloat16,
        torch.float16,
        torch.float32,
    ]


@pytest.mark.parametrize("value", [1, Fraction(1, 2), np.float32(0.5), 0.01, 100, 1e2], ids=repr)
def test_temperatures(value: Any) -> None:
    request = contract(temperature=value)
    assert type(request.temperature) is float
    assert request.temperature == float(value)


def test_integers_of_numpy_become_ints() -> None:
    spec = shards(tp_rank=np.int64(1), vocab_shard_bounds=np.array([[0, 4], [4, 8]]))
    assert spec == shards(tp_rank=1)
    assert type(spec.tp_rank) is int
    assert spec.vocab_shard_bounds == ((0, 4), (4, 8))


@pytest.mark.parametrize(
    "mask",
    [
        [True, False, True],
        (value for value in (True, False, True)),
        np.array([True, False, True]),
        torch.tensor([True, False, True]),
        [np.bool_(True), False, torch.tensor(True)],
    ],
    ids=["list", "generator", "array", "tensor", "scalars"],
)
def test_masks(mask: Any) -> None:
    spec = MaskSpec(3, mask)
    assert spec.active_mask == (True, False, True)
    assert spec.active_token_count == 2
    assert spec.active_mask_sha256 == hashlib.sha256(b"\x01\x00\x01").hexdigest()
    assert hash(spec) == hash(MaskSpec(3, [True, False, True]))


def test_mask_digest_is_computed_when_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        pytest.fail("the digest was computed")

    monkeypatch.setattr(hashlib, "sha256", forbidden)
    request = contract(mask=MaskSpec(3, [True, False, True]))
    assert str(request)
    assert hash(request) == hash(request)


def test_empty_mask() -> None:
    assert MaskSpec(0, []).active_token_count == 0
    assert MaskSpec.all_active(2).active_mask == (True, True)


def test_ignore_index_of_mask_or_contract() -> None:
    assert contract().resolved_ignore_index == -100
    assert contract(ignore_index=-1).resolved_ignore_index == -1
    assert contract(mask=MaskSpec(1, [True], -7)).resolved_ignore_index == -7
    assert contract(mask=MaskSpec(1, [True], -7), ignore_index=-7).resolved_ignore_index == -7
    # a padding column is outside the real vocabulary
    assert contract(ignore_index=6).resolved_ignore_index == 6


def test_source_call_forms() -> None:
    assert MaskSpec(2, [True, False]) == MaskSpec(num_tokens=2, active_mask=[True, False], ignore_index=-100)
    assert ShardingSpec(0, 1, ((0, 8),), 8, 8) == ShardingSpec.even(8)
    assert contract(mask=None, output=LogprobOutputSpec(), export_lse=True) == contract()


def test_reduction_builders() -> None:
    assert ReductionSpec.exact() == ReductionSpec()
    assert ReductionSpec.tiled() == ReductionSpec(
        merge="max_sumexp_tiles", order="global_tile_order", determinism_scope="cross_tp_bitwise"
    )
    assert ReductionSpec.tiled().num_vocab_tiles == DEFAULT_NUM_VOCAB_TILES == 64
    assert ReductionSpec.naive().merge is MergeKind.SHARD_LSE
    assert ReductionSpec.naive().order is MergeOrder.RANK_ORDER
    weaker = dataclasses.replace(ReductionSpec.tiled(), determinism_scope=DeterminismScope.FIXED_TOPOLOGY)
    assert weaker.determinism_scope is DeterminismScope.FIXED_TOPOLOGY
    assert ReductionSpec().acc_dtype is AccDtype.FP32


@pytest.mark.parametrize("strong", DeterminismScope)
@pytest.mark.parametrize("weak", DeterminismScope)
def test_scopes_are_nested(strong: DeterminismScope, weak: DeterminismScope) -> None:
    order = ["fixed_topology", "cross_tp_bitwise", "layout_free"]
    assert strong.covers(weak) == (order.index(strong) >= order.index(weak))


# --- shards


def test_even_shards_are_those_of_torch_chunk() -> None:
    for size, world in [(6, 4), (7, 2), (8, 3), (151936, 7), (1, 3), (5, 5)]:
        widths = [len(chunk) for chunk in torch.arange(size).chunk(world)]
        spec = ShardingSpec.even(size, 0, world)
        assert [end - start for start, end in spec.vocab_shard_bounds] == widths + [0] * (world - len(widths))
        assert spec.has_empty_shards == (len(widths) < world)


def test_aligned_shards() -> None:
    spec = ShardingSpec.even(152064, 0, 3, multiple_of=2376)
    assert spec.vocab_shard_bounds == ((0, 52272), (52272, 104544), (104544, 152064))
    assert all(start % 2376 == 0 for start, _ in spec.vocab_shard_bounds)


def test_shard_properties() -> None:
    last = ShardingSpec.even(6, 3, 4, padded_vocab_size=12)
    assert (last.local_vocab_start, last.local_vocab_end, last.local_vocab_size) == (9, 12, 3)
    assert (last.local_real_size, last.num_padding_columns, last.has_empty_shards) == (0, 6, False)
    middle = ShardingSpec.even(7, 1, 2, padded_vocab_size=10)
    assert middle.local_real_size == 2
    assert [middle.owner_rank(token) for token in range(7)] == [0, 0, 0, 0, 0, 1, 1]


def test_owner_skips_empty_shards() -> None:
    spec = ShardingSpec(0, 4, ((0, 0), (0, 2), (2, 2), (2, 6)), 6, 6)
    assert [spec.owner_rank(token) for token in range(6)] == [1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize("mesh", [Group(1, 3), Mesh(), MeshAxisLike(1, 3)], ids=["group", "mesh", "axis"])
def test_from_mesh(mesh: object) -> None:
    assert ShardingSpec.from_mesh(mesh, 6, padded_vocab_size=9) == ShardingSpec.even(
        6, 1, 3, padded_vocab_size=9
    )


def test_from_mesh_of_one_rank() -> None:
    assert ShardingSpec.from_mesh(None, 6) == ShardingSpec.even(6)
    cp = ShardingSpec.from_mesh(None, 6, cp=Group(1, 2))
    assert (cp.cp_rank, cp.cp_world_size) == (1, 2)


# --- identity


def test_frozen_and_hashable() -> None:
    request = contract(mask=MaskSpec(2, [True, False]))
    with pytest.raises(dataclasses.FrozenInstanceError, match="temperature"):
        request.temperature = 2.0  # type: ignore[misc]
    assert len({request, contract(mask=MaskSpec(2, [True, False])), contract()}) == 2


@pytest.mark.parametrize(
    "request_",
    [
        contract(),
        contract(mask=MaskSpec(5, [False, True, True, False, True], -7), reduction=ReductionSpec.tiled(4)),
        contract(output=LogprobOutputSpec(entropy=True), temperature=0.6, ignore_index=-1),
    ],
    ids=["default", "mask", "entropy"],
)
def test_round_trips(request_: LogprobContract) -> None:
    assert LogprobContract.from_dict(json.loads(json.dumps(request_.to_dict()))) == request_
    assert pickle.loads(pickle.dumps(request_)) == request_


def test_to_dict_is_plain() -> None:
    data = contract(mask=MaskSpec(4, [False, True, True, False])).to_dict()
    assert type(data["role"]) is str
    assert data["sharding"]["vocab_shard_bounds"] == [[0, 4], [4, 8]]
    assert data["mask"]["active_runs"] == [[1, 3]]
    assert data["mask"]["ignore_index"] == -100


def test_text() -> None:
    request = contract(
        mask=MaskSpec(2, [True, False]), temperature=0.6, output=LogprobOutputSpec(entropy=True)
    )
    assert str(request) == (
        "logprob train bf16 | vocab 6 of 8 padded, tp 0/2 [0, 4)"
        " | exact_words by packed_all_gather, layout_free | T 0.6 | mask 1/2 active | logp, lse, entropy"
    )
    assert str(ShardingSpec.even(6, cp_rank=1, cp_world_size=2)) == "vocab 6, tp 0/1 [0, 6), cp 1/2"
    assert str(ReductionSpec.tiled(4)) == "max_sumexp_tiles(4) by packed_all_gather, cross_tp_bitwise"
    assert str(MaskSpec(1, [False], -7)) == "mask 0/1 active, ignore_index -7"


# --- fingerprints

BASE = contract(mask=MaskSpec(4, [True, True, False, True]))

MUST_AGREE: dict[str, LogprobContract] = {
    "role": dataclasses.replace(BASE, role="infer"),
    "dtype": dataclasses.replace(BASE, dtype="fp32"),
    "temperature": dataclasses.replace(BASE, temperature=0.6),
    "ignore_index": dataclasses.replace(BASE, mask=MaskSpec(4, [True, True, False, True], -1)),
    "entropy": dataclasses.replace(BASE, output=LogprobOutputSpec(entropy=True)),
    "merge": dataclasses.replace(BASE, reduction=ReductionSpec.tiled(4)),
    "transport": dataclasses.replace(BASE, reduction=ReductionSpec.exact(Transport.ALL_REDUCE_MAX_SUM)),
    "scope": dataclasses.replace(BASE, reduction=ReductionSpec(determinism_scope="fixed_topology")),
    "bounds": dataclasses.replace(BASE, sharding=shards(vocab_shard_bounds=((0, 5), (5, 8)))),
    "real vocabulary": dataclasses.replace(BASE, sharding=shards(real_vocab_size=5)),
    "padded vocabulary": dataclasses.replace(BASE, sharding=ShardingSpec.even(6, 0, 2, padded_vocab_size=10)),
    "tp degree": dataclasses.replace(BASE, sharding=ShardingSpec.even(6, 0, 4, padded_vocab_size=8)),
    "cp degree": dataclasses.replace(BASE, sharding=shards(cp_world_size=2)),
}


@pytest.mark.parametrize("axis", [None, "tp", "dp", "cp"])
@pytest.mark.parametrize("name", MUST_AGREE)
def test_fingerprint_tells_what_must_agree(name: str, axis: Any) -> None:
    assert MUST_AGREE[name].cross_rank_fingerprint(axis) != BASE.cross_rank_fingerprint(axis)


def test_fingerprint_ignores_what_is_local() -> None:
    other = dataclasses.replace(BASE, sharding=shards(tp_rank=1), mask=MaskSpec(2, [False, True]))
    assert other.cross_rank_fingerprint() == BASE.cross_rank_fingerprint()
    assert re.fullmatch("[0-9a-f]{64}", BASE.cross_rank_fingerprint())


def test_fingerprint_along_tp_covers_the_tokens() -> None:
    sibling = dataclasses.replace(BASE, sharding=shards(tp_rank=1))
    assert sibling.cross_rank_fingerprint("tp") == BASE.cross_rank_fingerprint("tp")
    for mask in (MaskSpec(4, [True] * 4), MaskSpec(2, [True, False])):
        other = dataclasses.replace(sibling, mask=mask)
        assert other.cross_rank_fingerprint("tp") != BASE.cross_rank_fingerprint("tp")
    cp = dataclasses.replace(BASE, sharding=shards(cp_world_size=2))
    cp_peer = dataclasses.replace(BASE, sharding=shards(cp_world_size=2, cp_rank=1))
    assert cp.cross_rank_fingerprint("tp") != cp_peer.cross_rank_fingerprint("tp")
    assert cp.cross_rank_fingerprint("cp") == cp_peer.cross_rank_fingerprint("cp")


@pytest.mark.parametrize("axis", ["dp", "cp"])
def test_fingerprint_along_other_axes_is_that_of_the_mesh(axis: Any) -> None:
    sibling = dataclasses.replace(BASE, sharding=shards(tp_rank=1))
    assert sibling.cross_rank_fingerprint(axis) == BASE.cross_rank_fingerprint()


def test_agreement_fields_show_the_difference() -> None:
    mine, theirs = BASE.agreement_fields(), MUST_AGREE["temperature"].agreement_fields()
    assert [key for key in mine if mine[key] != theirs[key]] == ["temperature"]
    json.dumps(mine, allow_nan=False)
