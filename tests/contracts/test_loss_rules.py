"""Every rule of the loss contract, with the text of its error."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from rl_engine.contracts import (
    AdvantageSpec,
    ClipSpec,
    GRPOLossContract,
    LossOutputSpec,
    LossReductionSpec,
    LossShardingSpec,
    MaskSpec,
    ObjectiveSpec,
    ReductionSpec,
)
from rl_engine.errors import LossContractError
from tests.contracts.examples import batch, contract, loss_contract, shards

EVEN = LossShardingSpec.even

Rule = tuple[str, Callable[[], object], str]

PARTS: list[Rule] = [
    (
        "low",
        lambda: ClipSpec(1.0),
        "ClipSpec.clip_eps_low = 1.0: must be a number in [0, 1); pass clip_eps_low=0.2",
    ),
    ("low negative", lambda: ClipSpec(-0.1), "ClipSpec.clip_eps_low = -0.1: must be a number in [0, 1)"),
    (
        "low nan",
        lambda: ClipSpec(float("nan")),
        "ClipSpec.clip_eps_low = nan: must be a number in [0, 1), and must",
    ),
    (
        "low bool",
        lambda: ClipSpec(False),
        "ClipSpec.clip_eps_low = False: must be a number in [0, 1), got bool",
    ),
    (
        "high",
        lambda: ClipSpec(0.2, -0.1),
        "ClipSpec.clip_eps_high = -0.1: must be a number >= 0; pass clip_eps_high",
    ),
    (
        "high inf",
        lambda: ClipSpec(0.2, float("inf")),
        "clip_eps_high = inf: must be a number >= 0, and must be finite",
    ),
    (
        "high text",
        lambda: ClipSpec(0.2, "0.2"),
        "ClipSpec.clip_eps_high = '0.2': must be a number >= 0, got str",
    ),
    (
        "normalizer",
        lambda: AdvantageSpec("rank"),
        "AdvantageSpec.normalizer = 'rank': must be one of mean_std_popul",
    ),
    (
        "variance",
        lambda: AdvantageSpec(variance="one_pass"),
        "AdvantageSpec.variance = 'one_pass': must be one of two",
    ),
    (
        "replication",
        lambda: AdvantageSpec(replication="none"),
        "AdvantageSpec.replication = 'none': must be one of all",
    ),
    (
        "eps",
        lambda: AdvantageSpec(std_eps=0),
        "AdvantageSpec.std_eps = 0: must be a number > 0; pass std_eps=1e-6",
    ),
    (
        "eps nan",
        lambda: AdvantageSpec(std_eps=float("nan")),
        "std_eps = nan: must be a number > 0, and must be finite",
    ),
    (
        "eps None",
        lambda: AdvantageSpec(std_eps=None),
        "AdvantageSpec.std_eps = None: must be a number > 0, got NoneType",
    ),
    (
        "clip",
        lambda: ObjectiveSpec(clip=0.2),
        "ObjectiveSpec.clip = 0.2: must be of type ClipSpec, got float; build it with",
    ),
    (
        "advantage",
        lambda: ObjectiveSpec(advantage="mean_only"),
        "ObjectiveSpec.advantage = 'mean_only': must be of type Adv",
    ),
    (
        "kl",
        lambda: ObjectiveSpec(kl_estimator="k2"),
        "ObjectiveSpec.kl_estimator = 'k2': must be one of k3_unbiased | k1",
    ),
    (
        "beta",
        lambda: ObjectiveSpec(beta=-0.1),
        "ObjectiveSpec.beta = -0.1: must be a number >= 0; pass beta=0.0 for no",
    ),
    (
        "beta inf",
        lambda: ObjectiveSpec(beta=float("inf")),
        "ObjectiveSpec.beta = inf: must be a number >= 0, and must",
    ),
    (
        "beta bool",
        lambda: ObjectiveSpec(beta=True),
        "ObjectiveSpec.beta = True: must be a number >= 0, got bool",
    ),
    (
        "guard zero",
        lambda: ObjectiveSpec(log_ratio_guard=0),
        "log_ratio_guard = 0: must be a number in (0, 88]; pass log",
    ),
    (
        "guard high",
        lambda: ObjectiveSpec(log_ratio_guard=88.5),
        "log_ratio_guard = 88.5: must be a number in (0, 88]",
    ),
    (
        "token",
        lambda: LossReductionSpec("mean"),
        "LossReductionSpec.token_normalizer = 'mean': must be one of global_",
    ),
    (
        "dp",
        lambda: LossReductionSpec(data_parallel_reduction="avg"),
        "data_parallel_reduction = 'avg': must be one of s",
    ),
    (
        "empty",
        lambda: LossReductionSpec(on_empty="nan"),
        "LossReductionSpec.on_empty = 'nan': must be one of zero | err",
    ),
    (
        "scope",
        lambda: LossReductionSpec(determinism_scope="tp"),
        "LossReductionSpec.determinism_scope = 'tp': must be",
    ),
    (
        "constant unasked",
        lambda: LossReductionSpec(fixed_normalizer_constant=2.0),
        "fixed_normalizer_constant = 2.0: must be None, because token_normalizer=global_active_tokens counts",
    ),
    (
        "constant missing",
        lambda: LossReductionSpec("fixed_constant"),
        "fixed_normalizer_constant = None: must be a number > 0 for token_normalizer=fixed_constant, got",
    ),
    (
        "constant zero",
        lambda: LossReductionSpec("fixed_constant", 0),
        "fixed_normalizer_constant = 0: must be a number >",
    ),
    (
        "constant inf",
        lambda: LossReductionSpec("fixed_constant", float("inf")),
        "fixed_constant, and must be finite",
    ),
    (
        "output dtype",
        lambda: LossOutputSpec(dtype="bf16"),
        "LossOutputSpec.dtype = 'bf16': must be one of fp32",
    ),
    (
        "output ranks",
        lambda: LossOutputSpec(replicated_over="dp"),
        "replicated_over = 'dp': must be one of mesh",
    ),
]

BATCH: list[Rule] = [
    (
        "dp_rank",
        lambda: batch(dp_rank=2),
        "LossShardingSpec.dp_rank = 2: must be an integer in [0, 2); pass this process",
    ),
    (
        "dp_rank bool",
        lambda: batch(dp_rank=False),
        "dp_rank = False: must be an integer, and a bool is not one",
    ),
    (
        "dp_world_size",
        lambda: batch(dp_world_size=0),
        "LossShardingSpec.dp_world_size = 0: must be an integer >= 1",
    ),
    ("cp_rank", lambda: batch(cp_rank=1), "LossShardingSpec.cp_rank = 1: must be an integer in [0, 1)"),
    (
        "cp_world_size",
        lambda: batch(cp_world_size="2"),
        "LossShardingSpec.cp_world_size = '2': must be an integer, got",
    ),
    (
        "num_sequences",
        lambda: batch(num_sequences=0),
        "LossShardingSpec.num_sequences = 0: must be an integer >= 1",
    ),
    (
        "padded_seq_len",
        lambda: batch(padded_seq_len=-1),
        "LossShardingSpec.padded_seq_len = -1: must be an integer >= 0",
    ),
    (
        "bounds drop a sequence",
        lambda: batch(sequence_shard_bounds=((0, 3), (3, 6))),
        "shards must tile [0, num_sequences = 8): the last one ends at 6; LossShardingSpec.even(...",
    ),
    (
        "bounds gap",
        lambda: batch(sequence_shard_bounds=((0, 3), (4, 8))),
        "sequence_shard_bounds = [(0, 3), (4, 8)]: shards must tile [0, 8): rank 1 starts at 4, expected 3",
    ),
    ("bounds count", lambda: batch(sequence_shard_bounds=((0, 8),)), "per rank: dp_world_size is 2, got 1"),
    (
        "bounds type",
        lambda: batch(sequence_shard_bounds=4),
        "sequence_shard_bounds = 4: must be an iterable of (start",
    ),
    (
        "groups type",
        lambda: batch(group_boundaries=4),
        "group_boundaries = 4: must be an iterable of integers, got int",
    ),
    (
        "groups float",
        lambda: batch(group_boundaries=(0, 4.0, 8)),
        "group_boundaries[1] = 4.0: must be an integer, got flo",
    ),
    (
        "groups empty",
        lambda: batch(group_boundaries=()),
        "group_boundaries = (): must rise from 0 to num_sequences = 8",
    ),
    (
        "groups start",
        lambda: batch(group_boundaries=(1, 8)),
        "group_boundaries = (1, 8): must rise from 0 to num_sequen",
    ),
    (
        "groups end",
        lambda: batch(group_boundaries=(0, 4)),
        "(0, 4): must rise from 0 to num_sequences = 8; pass offsets",
    ),
    (
        "groups flat",
        lambda: batch(group_boundaries=(0, 4, 4, 8)),
        "(0, 4, 4, 8): must rise strictly: group 1 is [4, 4)",
    ),
    (
        "groups fall",
        lambda: batch(group_boundaries=(0, 6, 4, 8)),
        "(0, 6, 4, 8): must rise strictly: group 1 is [6, 4)",
    ),
    (
        "even size",
        lambda: EVEN(8, padded_seq_len=1, group_size=3),
        "even group_size = 3: must divide num_sequences = 8",
    ),
    (
        "even sizes",
        lambda: EVEN(8, padded_seq_len=1, group_sizes=(4, 3)),
        "(4, 3): must add up to num_sequences = 8, got 7",
    ),
    (
        "even both",
        lambda: EVEN(8, padded_seq_len=1, group_size=4, group_sizes=(4, 4)),
        "even group_size = 4: must be left out when group_sizes is given; pass one of them",
    ),
    (
        "even zero",
        lambda: EVEN(8, padded_seq_len=1, group_sizes=(8, 0)),
        "even group_sizes = 0: must be an integer >= 1",
    ),
    (
        "owner",
        lambda: batch().owner_rank(8),
        "owner_rank sequence = 8: must be an integer in [0, 8); sequences lie in [0",
    ),
    (
        "group",
        lambda: batch().group_of(-1),
        "LossShardingSpec.group_of sequence = -1: must be an integer >= 0",
    ),
]

TOGETHER: list[Rule] = [
    (
        "logprob",
        lambda: loss_contract(logprob=None),
        "GRPOLossContract.logprob = None: must be of type LogprobContract, got No",
    ),
    (
        "sharding",
        lambda: loss_contract(sharding=shards()),
        "must be of type LossShardingSpec, got ShardingSpec; build it with",
    ),
    ("objective", lambda: loss_contract(objective=ClipSpec()), "must be of type ObjectiveSpec, got ClipSpec"),
    (
        "reduction",
        lambda: loss_contract(reduction=ReductionSpec()),
        "must be of type LossReductionSpec, got ReductionSpec",
    ),
    (
        "output",
        lambda: loss_contract(output="fp32"),
        "GRPOLossContract.output = 'fp32': must be of type LossOutputSpec, got st",
    ),
    (
        "role",
        lambda: loss_contract(logprob=contract(role="infer")),
        "GRPOLossContract.logprob.role = infer: must be train, because a loss is differentiated; pass",
    ),
    (
        "tokens",
        lambda: loss_contract(logprob=contract(mask=MaskSpec.all_active(19))),
        "logprob.mask.num_tokens = 19: must be num_local_sequences × padded_seq_len = 5 × 4 = 20; pass",
    ),
    (
        "cp degree",
        lambda: loss_contract(logprob=contract(sharding=shards(cp_world_size=2))),
        "logprob.sharding.cp_world_size = 2: differs from sharding.cp_world_size = 1; pass the same",
    ),
    (
        "cp rank",
        lambda: loss_contract(
            logprob=contract(sharding=shards(cp_world_size=2, cp_rank=1)), sharding=batch(cp_world_size=2)
        ),
        "GRPOLossContract.logprob.sharding.cp_rank = 1: differs from sharding.cp_rank = 0",
    ),
    (
        "scope",
        lambda: loss_contract(logprob=contract(reduction=ReductionSpec.tiled())),
        "reduction.determinism_scope = layout_free: is stronger than "
        "logprob.reduction.determinism_scope = cross_tp_bitwise; pass LossReductionSpec(",
    ),
    (
        "group of one",
        lambda: loss_contract(sharding=batch(group_boundaries=(0, 4, 5, 8))),
        "group 1 holds 1 sequence, but advantages mean_std_population need two; pass AdvantageSpec(",
    ),
    (
        "group of one, sample",
        lambda: loss_contract(
            sharding=batch(group_boundaries=(0, 7, 8)),
            objective=ObjectiveSpec(advantage=AdvantageSpec("mean_std_sample")),
        ),
        "group 1 holds 1 sequence, but advantages mean_std_sample need two",
    ),
    (
        "axis",
        lambda: loss_contract().cross_rank_fingerprint("pp"),
        "axis = 'pp': must be one of tp | dp | cp",
    ),
    (
        "json",
        lambda: GRPOLossContract.from_dict({}),
        "GRPOLossContract.from_dict = []: missing fields logprob, sharding",
    ),
]


@pytest.mark.parametrize(
    ("build", "text"), [pytest.param(build, text, id=name) for name, build, text in PARTS + BATCH + TOGETHER]
)
def test_rule(build: Callable[[], object], text: str) -> None:
    with pytest.raises(LossContractError, match=re.escape(text)):
        build()
