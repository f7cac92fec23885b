"""What the loss contract accepts, what it becomes, and what identifies it."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
from typing import Any

import numpy as np
import pytest

from rl_engine.contracts import (
    AdvantageNormalizer,
    AdvantageSpec,
    ClipSpec,
    GRPOLossContract,
    LossReductionSpec,
    LossShardingSpec,
    MaskSpec,
    ObjectiveSpec,
    OnEmpty,
    ReductionSpec,
    TokenNormalizer,
)
from tests.contracts.examples import batch, contract, loss_contract, shards


def test_defaults() -> None:
    request = loss_contract()
    assert request.objective.clip == ClipSpec(0.2, 0.2)
    assert request.objective.advantage.normalizer is AdvantageNormalizer.MEAN_STD_POPULATION
    assert request.objective.advantage.std_eps == 1e-6
    assert (request.objective.beta, request.objective.log_ratio_guard) == (0.0, 80.0)
    assert not request.objective.requires_reference
    assert request.reduction.token_normalizer is TokenNormalizer.GLOBAL_ACTIVE_TOKENS
    assert request.reduction.on_empty is OnEmpty.ZERO


def test_numbers_become_floats() -> None:
    objective = ObjectiveSpec(clip=ClipSpec(0, 1), beta=1, log_ratio_guard=88)
    for number in (objective.clip.clip_eps_low, objective.clip.clip_eps_high, objective.beta):
        assert type(number) is float
    assert objective.requires_reference
    assert objective.clip.is_asymmetric
    assert LossReductionSpec("fixed_constant", 1024).fixed_normalizer_constant == 1024.0


def test_groups_of_one_need_a_formula_without_spread() -> None:
    mean_only = ObjectiveSpec(advantage=AdvantageSpec(normalizer="mean_only"))
    assert mean_only.advantage.min_group_size == 1
    assert (
        loss_contract(sharding=batch(group_boundaries=range(9)), objective=mean_only).sharding.num_groups == 8
    )


def test_weaker_scopes_fit_weaker_logprobs() -> None:
    request = loss_contract(
        logprob=contract(reduction=ReductionSpec.tiled(4)),
        reduction=LossReductionSpec(determinism_scope="cross_tp_bitwise"),
    )
    assert request.reduction.determinism_scope == "cross_tp_bitwise"
    weaker = LossReductionSpec(determinism_scope="fixed_topology")
    assert loss_contract(reduction=weaker).logprob.reduction.determinism_scope == "layout_free"


# --- the batch


def test_batch_properties() -> None:
    first, second = batch(), batch(dp_rank=1, padded_seq_len=7)
    assert (first.local_sequence_start, first.local_sequence_end, first.num_local_sequences) == (0, 5, 5)
    assert (first.num_local_tokens, second.num_local_tokens) == (20, 21)
    assert (first.num_groups, first.group_sizes, first.has_variable_group_sizes) == (2, (4, 4), False)
    assert [first.owner_rank(sequence) for sequence in range(8)] == [0] * 5 + [1] * 3
    assert [first.group_of(sequence) for sequence in range(8)] == [0] * 4 + [1] * 4


def test_even_batches_lose_no_sequence() -> None:
    assert LossShardingSpec.even(8, 0, 3, padded_seq_len=1).sequence_shard_bounds == ((0, 3), (3, 6), (6, 8))
    few = LossShardingSpec.even(2, 2, 3, padded_seq_len=5)
    assert few.sequence_shard_bounds == ((0, 1), (1, 2), (2, 2))
    assert few.num_local_tokens == 0
    assert few.group_boundaries == (0, 2)


def test_groups_of_any_size_straddle_ranks() -> None:
    spec = LossShardingSpec.even(7, 0, 2, padded_seq_len=1, group_sizes=np.array([3, 4]))
    assert spec.group_boundaries == (0, 3, 7)
    assert spec.has_variable_group_sizes
    assert spec.owner_rank(3) != spec.owner_rank(6)
    assert spec.group_of(3) == spec.group_of(6) == 1


# --- identity


def test_frozen_and_hashable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="objective"):
        loss_contract().objective = ObjectiveSpec()  # type: ignore[misc]
    assert len({loss_contract(), loss_contract(), loss_contract(objective=ObjectiveSpec(beta=0.04))}) == 2


@pytest.mark.parametrize(
    "request_",
    [
        loss_contract(),
        loss_contract(
            logprob=contract(mask=MaskSpec(20, [True, False] * 10)),
            objective=ObjectiveSpec(
                ClipSpec(0.2, 0.28), AdvantageSpec("mean_only"), "k1_log_ratio", 0.04, 20.0
            ),
            reduction=LossReductionSpec("fixed_constant", 64.0, "mean", "error", "fixed_topology"),
        ),
    ],
    ids=["default", "everything"],
)
def test_round_trips(request_: GRPOLossContract) -> None:
    assert GRPOLossContract.from_dict(json.loads(json.dumps(request_.to_dict(), allow_nan=False))) == request_
    assert pickle.loads(pickle.dumps(request_)) == request_


def test_text() -> None:
    assert str(loss_contract()).startswith(
        "grpo 8 sequences in 2 groups of 4, dp 0/2 [0, 5) × 4"
        " | clip −0.2 +0.2, advantages mean_std_population eps 1e-06, 0·k3_unbiased"
        " | global_active_tokens, dp sum, layout_free | logprob train bf16"
    )
    assert "\n" not in str(loss_contract())
    assert str(batch(group_boundaries=(0, 3, 8), cp_world_size=2)).startswith(
        "8 sequences in 2 groups of 3–5"
    )
    assert str(batch(cp_world_size=2, cp_rank=1)).endswith(", cp 1/2")
    assert str(LossReductionSpec("fixed_constant", 64)) == "fixed_constant(64), dp sum, layout_free"
    assert str(AdvantageSpec("mean_only")) == "advantages mean_only"


# --- fingerprints

BASE = loss_contract()


def objective(**changes: Any) -> GRPOLossContract:
    return dataclasses.replace(BASE, objective=ObjectiveSpec(**changes))


def reduction(**changes: Any) -> GRPOLossContract:
    return dataclasses.replace(BASE, reduction=LossReductionSpec(**changes))


MUST_AGREE: dict[str, GRPOLossContract] = {
    "clip low": objective(clip=ClipSpec(clip_eps_low=0.1)),
    "clip high": objective(clip=ClipSpec(clip_eps_high=0.28)),
    "beta": objective(beta=0.04),
    "kl": objective(kl_estimator="k1_log_ratio"),
    "guard": objective(log_ratio_guard=20.0),
    "advantages": objective(advantage=AdvantageSpec("mean_only")),
    "std_eps": objective(advantage=AdvantageSpec(std_eps=1e-4)),
    "normalizer": reduction(token_normalizer="per_sequence_then_mean"),
    "empties": reduction(token_normalizer="per_sequence_then_mean_all"),
    "constant": reduction(token_normalizer="fixed_constant", fixed_normalizer_constant=3.0),
    "dp reduction": reduction(data_parallel_reduction="mean"),
    "on_empty": reduction(on_empty="error"),
    "scope": reduction(determinism_scope="fixed_topology"),
    "temperature": dataclasses.replace(BASE, logprob=contract(temperature=0.6)),
    "ignore_index": dataclasses.replace(BASE, logprob=contract(ignore_index=-1)),
    "groups": dataclasses.replace(BASE, sharding=batch(group_boundaries=(0, 3, 8))),
    "sequence bounds": dataclasses.replace(BASE, sharding=batch(sequence_shard_bounds=((0, 4), (4, 8)))),
}


@pytest.mark.parametrize("axis", [None, "tp", "dp", "cp"])
@pytest.mark.parametrize("name", MUST_AGREE)
def test_fingerprint_tells_what_must_agree(name: str, axis: Any) -> None:
    assert MUST_AGREE[name].cross_rank_fingerprint(axis) != BASE.cross_rank_fingerprint(axis)


def test_fingerprint_along_tp() -> None:
    sibling = loss_contract(logprob=contract(sharding=shards(tp_rank=1)))
    assert sibling.cross_rank_fingerprint("tp") == BASE.cross_rank_fingerprint("tp")
    for other in (batch(padded_seq_len=5), batch(dp_rank=1)):
        wrong = dataclasses.replace(sibling, sharding=other)
        assert wrong.cross_rank_fingerprint("tp") != BASE.cross_rank_fingerprint("tp")


def test_fingerprint_along_dp() -> None:
    masks = {rank: MaskSpec.all_active(count) for rank, count in ((0, 20), (1, 27))}
    peers = [
        loss_contract(logprob=contract(mask=masks[rank]), sharding=batch(dp_rank=rank, padded_seq_len=length))
        for rank, length in ((0, 4), (1, 9))
    ]
    assert peers[0].cross_rank_fingerprint("dp") == peers[1].cross_rank_fingerprint("dp")
    assert peers[0].cross_rank_fingerprint() == peers[1].cross_rank_fingerprint()
    assert peers[0].cross_rank_fingerprint("tp") != peers[1].cross_rank_fingerprint("tp")
    # siblings make the same claim to their peers, whatever their own place
    sibling = loss_contract(logprob=contract(sharding=shards(tp_rank=1)))
    assert sibling.cross_rank_fingerprint("dp") == BASE.cross_rank_fingerprint("dp")


def test_fingerprint_along_cp() -> None:
    peers = [
        loss_contract(
            logprob=contract(sharding=shards(cp_world_size=2, cp_rank=rank)),
            sharding=batch(cp_world_size=2, cp_rank=rank),
        )
        for rank in range(2)
    ]
    for axis in (None, "dp", "cp"):
        assert peers[0].cross_rank_fingerprint(axis) == peers[1].cross_rank_fingerprint(axis)
    assert peers[0].cross_rank_fingerprint("tp") != peers[1].cross_rank_fingerprint("tp")
    assert re.fullmatch("[0-9a-f]{64}", peers[0].cross_rank_fingerprint())


def test_loss_and_logprob_fingerprints_differ() -> None:
    assert BASE.cross_rank_fingerprint() != BASE.logprob.cross_rank_fingerprint()
