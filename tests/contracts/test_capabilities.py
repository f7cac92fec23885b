"""Capabilities: their own rules, and every reason why a backend cannot serve a contract."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from rl_engine.contracts import (
    AdvantageSpec,
    ClipSpec,
    GRPOLossContract,
    LogprobBackendCapability,
    LogprobContract,
    LogprobOutputSpec,
    LossBackendCapability,
    LossReductionSpec,
    MaskSpec,
    ObjectiveSpec,
    ReductionSpec,
    ShardingSpec,
)
from rl_engine.errors import LogprobContractError, LossContractError
from tests.contracts.examples import (
    batch,
    contract,
    logprob_capability,
    loss_capability,
    loss_contract,
    shards,
)

Case = tuple[str, dict[str, Any], LogprobContract, tuple[str, ...]]

TILED = {
    "merges": "max_sumexp_tiles",
    "determinism_scopes": "cross_tp_bitwise",
    "requires_tile_alignment": True,
}


def tiled(tiles: int, **sharding: Any) -> LogprobContract:
    return contract(reduction=ReductionSpec.tiled(tiles), sharding=shards(**sharding))


LOGPROB_CASES: list[Case] = [
    ("all fits", {}, contract(), ()),
    ("role", {"roles": "infer"}, contract(), ("role train is not among infer",)),
    ("dtype", {"dtypes": ["fp32", "fp16"]}, contract(), ("dtype bf16 is not among fp16, fp32",)),
    ("single shard", {"tp_world_sizes": {1}}, contract(), ("tp_world_size 2 is not among 1",)),
    ("tp degrees", {"tp_world_sizes": [1, 16, 8]}, contract(), ("tp_world_size 2 is not among 1, 8, 16",)),
    ("tp served", {"tp_world_sizes": {1, 2}}, contract(), ()),
    ("cp", {"cp_world_sizes": {2}}, contract(), ("cp_world_size 1 is not among 2",)),
    (
        "padding",
        {"supports_vocab_padding": False},
        contract(),
        ("no vocabulary padding, but 2 columns are padding",),
    ),
    ("no padding", {"supports_vocab_padding": False}, contract(sharding=ShardingSpec.even(8, 0, 2)), ()),
    (
        "empty shards",
        {"supports_empty_shards": False},
        contract(sharding=ShardingSpec.even(6, 0, 4)),
        ("no empty shards, but rank 3 holds no column",),
    ),
    (
        "merge",
        {"merges": ["shard_lse", "max_sumexp_tiles"]},
        contract(),
        ("merge exact_words is not among max_sumexp_tiles, shard_lse",),
    ),
    (
        "transport",
        {},
        contract(reduction=ReductionSpec.exact("all_reduce_max_sum")),
        ("transport all_reduce_max_sum is not among packed_all_gather",),
    ),
    (
        "scope",
        {"determinism_scopes": "cross_tp_bitwise"},
        contract(),
        ("determinism_scope layout_free is stronger than cross_tp_bitwise",),
    ),
    ("lse", {"exports_vocab_lse": False}, contract(), ("does not export the log-sum-exp",)),
    (
        "entropy",
        {"exports_entropy": False},
        contract(output=LogprobOutputSpec(entropy=True)),
        ("does not export the entropy",),
    ),
    (
        "inactive tokens",
        {"mask_modes": "ignore_index"},
        contract(mask=MaskSpec(3, [True, False, False])),
        ("understands only ignore_index, but 2 tokens are inactive by the mask",),
    ),
    ("all active", {"mask_modes": "ignore_index"}, contract(mask=MaskSpec.all_active(3)), ()),
    ("mask of the call", {"mask_modes": "ignore_index"}, contract(), ()),
    ("tiles", TILED, tiled(4), ()),
    ("tile count", TILED, tiled(3), ("num_vocab_tiles 3 does not divide padded_vocab_size 8",)),
    (
        "unaligned",
        TILED,
        tiled(4, vocab_shard_bounds=((0, 3), (3, 8))),
        (
            "vocab shards must consist of whole tiles of 2 columns: rank 0 holds [0, 3); "
            "ShardingSpec.even(..., multiple_of=2) builds such shards",
        ),
    ),
    ("unaligned is fine elsewhere", {}, contract(sharding=shards(vocab_shard_bounds=((0, 3), (3, 8)))), ()),
    (
        "every reason",
        {
            "roles": "infer",
            "dtypes": "fp32",
            "tp_world_sizes": {1},
            "cp_world_sizes": {2},
            "merges": "shard_lse",
            "determinism_scopes": "fixed_topology",
            "supports_vocab_padding": False,
            "supports_empty_shards": False,
            "mask_modes": "ignore_index",
            "exports_vocab_lse": False,
            "exports_entropy": False,
        },
        contract(
            mask=MaskSpec(1, [False]),
            output=LogprobOutputSpec(entropy=True),
            sharding=ShardingSpec.even(5, 0, 4, padded_vocab_size=6),
        ),
        (
            "role train is not among infer",
            "dtype bf16 is not among fp32",
            "tp_world_size 4 is not among 1",
            "cp_world_size 1 is not among 2",
            "merge exact_words is not among shard_lse",
            "determinism_scope layout_free is stronger than fixed_topology",
            "no vocabulary padding, but 1 columns are padding",
            "no empty shards, but rank 3 holds no column",
            "understands only ignore_index, but 1 tokens are inactive by the mask",
            "does not export the log-sum-exp",
            "does not export the entropy",
        ),
    ),
]


@pytest.mark.parametrize(
    ("changes", "request_", "reasons"),
    [pytest.param(changes, request_, reasons, id=name) for name, changes, request_, reasons in LOGPROB_CASES],
)
def test_logprob_reasons(
    changes: dict[str, Any], request_: LogprobContract, reasons: tuple[str, ...]
) -> None:
    capability = logprob_capability(**changes)
    assert capability.incompatibilities(request_) == reasons
    assert capability.supports(request_) == (not reasons)


LOSS_CASES: list[tuple[str, dict[str, Any], GRPOLossContract, tuple[str, ...]]] = [
    ("all fits", {}, loss_contract(), ()),
    (
        "normalizer",
        {"token_normalizers": ["fixed_constant", "per_sequence_then_mean"]},
        loss_contract(),
        ("token_normalizer global_active_tokens is not among fixed_constant, per_sequence_then_mean",),
    ),
    (
        "kl",
        {"kl_estimators": "k1_log_ratio"},
        loss_contract(),
        ("kl_estimator k3_unbiased is not among k1_log_ratio",),
    ),
    (
        "advantages",
        {"advantage_normalizers": "mean_only"},
        loss_contract(),
        ("advantage normalizer mean_std_population is not among mean_only",),
    ),
    (
        "scope",
        {"determinism_scopes": "fixed_topology"},
        loss_contract(),
        ("determinism_scope layout_free is stronger than fixed_topology",),
    ),
    ("dp", {"dp_world_sizes": {1}}, loss_contract(), ("dp_world_size 2 is not among 1",)),
    ("cp", {"cp_world_sizes": {2, 4}}, loss_contract(), ("cp_world_size 1 is not among 2, 4",)),
    (
        "group sizes",
        {"supports_variable_group_sizes": False},
        loss_contract(sharding=batch(group_boundaries=(0, 3, 8))),
        ("groups must be of one size, but sizes are 3, 5",),
    ),
    ("one group size", {"supports_variable_group_sizes": False}, loss_contract(), ()),
    (
        "clip",
        {"supports_asymmetric_clip": False},
        loss_contract(objective=ObjectiveSpec(ClipSpec(0.2, 0.28))),
        ("clip bounds must be equal, but are clip −0.2 +0.28",),
    ),
    (
        "dp reduction",
        {"data_parallel_reductions": "sum"},
        loss_contract(reduction=LossReductionSpec(data_parallel_reduction="mean")),
        ("data_parallel_reduction mean is not among sum",),
    ),
    (
        "two reasons",
        {"dp_world_sizes": {1}, "advantage_normalizers": "mean_only"},
        loss_contract(objective=ObjectiveSpec(advantage=AdvantageSpec("mean_std_sample"))),
        (
            "advantage normalizer mean_std_sample is not among mean_only",
            "dp_world_size 2 is not among 1",
        ),
    ),
]


@pytest.mark.parametrize(
    ("changes", "request_", "reasons"),
    [pytest.param(changes, request_, reasons, id=name) for name, changes, request_, reasons in LOSS_CASES],
)
def test_loss_reasons(changes: dict[str, Any], request_: GRPOLossContract, reasons: tuple[str, ...]) -> None:
    capability = loss_capability(**changes)
    assert capability.incompatibilities(request_) == reasons
    assert capability.supports(request_) == (not reasons)
    assert capability.implements(request_)


RULES: list[tuple[str, Callable[[], object], str]] = [
    (
        "blank id",
        lambda: logprob_capability("  "),
        "LogprobBackendCapability.backend_id = '  ': must not be blank",
    ),
    (
        "id type",
        lambda: logprob_capability(7),
        "backend_id = 7: must be a string, got int; pass a name such as",
    ),
    ("roles", lambda: logprob_capability(roles=["test"]), "roles = 'test': must be one of train | infer"),
    (
        "roles type",
        lambda: logprob_capability(roles=3),
        "roles = 3: must be an iterable of LogprobRole members, got",
    ),
    (
        "no role",
        lambda: logprob_capability(roles=[]),
        "roles = []: must name at least one member; choose from train",
    ),
    ("dtypes", lambda: logprob_capability(dtypes="fp8"), "= 'fp8': must be one of bf16 | fp16 | fp32"),
    (
        "no dtype",
        lambda: logprob_capability(dtypes=()),
        "dtypes = (): must name at least one member; choose from bf",
    ),
    (
        "sizes",
        lambda: logprob_capability(tp_world_sizes=[0]),
        "tp_world_sizes = 0: must be an integer >= 1; pass No",
    ),
    (
        "sizes type",
        lambda: logprob_capability(tp_world_sizes=4),
        "must be an iterable of world sizes, got int",
    ),
    (
        "no size",
        lambda: logprob_capability(cp_world_sizes=[]),
        "cp_world_sizes = []: must name at least one world si",
    ),
    (
        "scope",
        lambda: logprob_capability(determinism_scopes="any"),
        "determinism_scopes = 'any': must be one of fix",
    ),
    (
        "tier",
        lambda: logprob_capability(implementation_kind="fast"),
        "= 'fast': must be one of reference | product",
    ),
    (
        "merge",
        lambda: logprob_capability(merges="sum"),
        "LogprobBackendCapability.merges = 'sum': must be one of exa",
    ),
    (
        "transport",
        lambda: logprob_capability(transports="mpi"),
        "transports = 'mpi': must be one of packed_all_gath",
    ),
    (
        "mode",
        lambda: logprob_capability(mask_modes="none"),
        "mask_modes = 'none': must be one of explicit_active_ma",
    ),
    (
        "module",
        lambda: logprob_capability(requires=["a.b"]),
        "requires = 'a.b': must be the name of a top-level mod",
    ),
    (
        "modules",
        lambda: logprob_capability(requires=3),
        "requires = 3: must be an iterable of module names, got int",
    ),
    (
        "padding",
        lambda: logprob_capability(supports_vocab_padding=1),
        "supports_vocab_padding = 1: must be True or Fa",
    ),
    (
        "lse",
        lambda: logprob_capability(exports_vocab_lse=None),
        "exports_vocab_lse = None: must be True or False, got",
    ),
    (
        "entropy",
        lambda: logprob_capability(exports_entropy="no"),
        "exports_entropy = 'no': must be True or False",
    ),
    (
        "tiles",
        lambda: logprob_capability(requires_tile_alignment=0),
        "requires_tile_alignment = 0: must be True or",
    ),
    (
        "empty",
        lambda: logprob_capability(supports_empty_shards=0),
        "supports_empty_shards = 0: must be True or Fals",
    ),
    (
        "contract",
        lambda: logprob_capability().incompatibilities(loss_contract()),
        "must be of type LogprobContract, got GRPO",
    ),
]


@pytest.mark.parametrize("word", ["auto", "production", "reference", "deterministic", "AUTO", " Production "])
@pytest.mark.parametrize("build", [logprob_capability, loss_capability])
def test_ids_shadow_no_policy(build: Callable[[str], object], word: str) -> None:
    error = LogprobContractError if build is logprob_capability else LossContractError
    text = "must not shadow a policy word (auto, production, reference, deterministic)"
    with pytest.raises(error, match=re.escape(text)):
        build(word)


@pytest.mark.parametrize(
    ("build", "text"), [pytest.param(build, text, id=name) for name, build, text in RULES]
)
def test_logprob_rule(build: Callable[[], object], text: str) -> None:
    with pytest.raises(LogprobContractError, match=re.escape(text)):
        build()


LOSS_RULES: list[tuple[str, Callable[[], object], str]] = [
    (
        "blank id",
        lambda: loss_capability(""),
        "LossBackendCapability.backend_id = '': must not be blank; pass a name",
    ),
    (
        "token",
        lambda: loss_capability(token_normalizers="mean"),
        "token_normalizers = 'mean': must be one of global",
    ),
    (
        "kl",
        lambda: loss_capability(kl_estimators=[]),
        "kl_estimators = []: must name at least one member; choose from",
    ),
    (
        "advantage",
        lambda: loss_capability(advantage_normalizers=1),
        "advantage_normalizers = 1: must be an iterable of",
    ),
    (
        "dp reduction",
        lambda: loss_capability(data_parallel_reductions="avg"),
        "= 'avg': must be one of sum | mean",
    ),
    (
        "scope",
        lambda: loss_capability(determinism_scopes=None),
        "must be an iterable of DeterminismScope members, got",
    ),
    (
        "dp sizes",
        lambda: loss_capability(dp_world_sizes=[True]),
        "dp_world_sizes = True: must be an integer, and a bo",
    ),
    (
        "cp sizes",
        lambda: loss_capability(cp_world_sizes=2),
        "cp_world_sizes = 2: must be an iterable of world sizes",
    ),
    (
        "tier",
        lambda: loss_capability(implementation_kind=None),
        "implementation_kind = None: must be one of referenc",
    ),
    (
        "groups",
        lambda: loss_capability(supports_variable_group_sizes=1),
        "supports_variable_group_sizes = 1: must be",
    ),
    (
        "clip",
        lambda: loss_capability(supports_asymmetric_clip="yes"),
        "supports_asymmetric_clip = 'yes': must be Tru",
    ),
    (
        "module",
        lambda: loss_capability(requires="not a module"),
        "= 'not a module': must be the name of a top-level",
    ),
    (
        "contract",
        lambda: loss_capability().incompatibilities(contract()),
        "must be of type GRPOLossContract, got LogprobCon",
    ),
]


@pytest.mark.parametrize(
    ("build", "text"), [pytest.param(build, text, id=name) for name, build, text in LOSS_RULES]
)
def test_loss_rule(build: Callable[[], object], text: str) -> None:
    with pytest.raises(LossContractError, match=re.escape(text)):
        build()


def test_ids_are_stripped() -> None:
    assert logprob_capability("  mine\n").backend_id == "mine"
    assert loss_capability(" mine ").backend_id == "mine"


@pytest.mark.parametrize("build", [logprob_capability, loss_capability])
@pytest.mark.parametrize(
    ("named", "kept"),
    [
        ("fixed_topology", {"fixed_topology"}),
        (["cross_tp_bitwise"], {"fixed_topology", "cross_tp_bitwise"}),
        ({"layout_free", "fixed_topology"}, {"fixed_topology", "cross_tp_bitwise", "layout_free"}),
    ],
    ids=["weakest", "middle", "strongest"],
)
def test_a_scope_brings_the_weaker_ones(build: Callable[..., Any], named: object, kept: set[str]) -> None:
    capability = build(determinism_scopes=named)
    assert capability.determinism_scopes == kept
    assert all(capability.strongest_scope.covers(scope) for scope in capability.determinism_scopes)


def test_defaults_claim_the_least() -> None:
    capability = LogprobBackendCapability("mine", ["train"], ["bf16"])
    assert capability.determinism_scopes == {"fixed_topology"}
    assert capability.implementation_kind == "reference"
    assert capability.merges == {"max_sumexp_tiles"}
    assert not capability.exports_entropy


def test_round_trips_and_text() -> None:
    logprob, loss = logprob_capability(tp_world_sizes={8, 1}), loss_capability(requires=("numba",))
    assert LogprobBackendCapability.from_dict(json.loads(json.dumps(logprob.to_dict()))) == logprob
    assert LossBackendCapability.from_dict(json.loads(json.dumps(loss.to_dict()))) == loss
    assert logprob.to_dict()["dtypes"] == ["bf16", "fp16", "fp32"]
    assert str(logprob) == "mine (reference): exact_words, up to layout_free, bf16, fp16, fp32, tp 1, 8"
    assert str(loss) == "mine (reference): up to layout_free, dp any"
    assert len({logprob, logprob_capability(tp_world_sizes=[1, 8])}) == 1
