"""Every rule of the logprob contract, with the text of its error."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch

from rl_engine.contracts import LogprobContract, LogprobOutputSpec, MaskSpec, ReductionSpec, ShardingSpec
from rl_engine.errors import ContractError, LogprobContractError, RLEngineError
from tests.contracts.examples import contract

Rule = tuple[str, Callable[[], object], str]

RULES: list[Rule] = [
    # the contract's own fields
    (
        "role",
        lambda: contract(role="test"),
        "LogprobContract.role = 'test': must be one of train | infer; pass ",
    ),
    ("role type", lambda: contract(role=1), "LogprobContract.role = 1: must be one of train | infer"),
    (
        "dtype",
        lambda: contract(dtype="fp8"),
        "LogprobContract.dtype = 'fp8': must be one of bf16 | fp16 | fp32",
    ),
    (
        "float64",
        lambda: contract(dtype=torch.float64),
        "LogprobContract.dtype = torch.float64: must be one of",
    ),
    (
        "sharding",
        lambda: contract(sharding=(0, 8)),
        "LogprobContract.sharding = (0, 8): must be of type ShardingSpec, got tuple",
    ),
    (
        "mask",
        lambda: contract(mask=[True]),
        "LogprobContract.mask = [True]: must be of type MaskSpec, got list; build it with MaskSpec(",
    ),
    ("reduction", lambda: contract(reduction="exact_words"), "must be of type ReductionSpec, got str"),
    (
        "output",
        lambda: contract(output=True),
        "LogprobContract.output = True: must be of type LogprobOutputSpec, got bool",
    ),
    (
        "export_lse",
        lambda: contract(export_lse=False),
        "LogprobContract.export_lse = False: must be True; the log-sum-exp",
    ),
    (
        "export_lse type",
        lambda: contract(export_lse=1),
        "LogprobContract.export_lse = 1: must be True or False, got int",
    ),
    (
        "T zero",
        lambda: contract(temperature=0),
        "LogprobContract.temperature = 0: must be a number in [0.01, 100]; pass ",
    ),
    (
        "T negative",
        lambda: contract(temperature=-1.0),
        "LogprobContract.temperature = -1.0: must be a number in [0.01, 100]",
    ),
    ("T small", lambda: contract(temperature=0.009), "temperature = 0.009: must be a number in [0.01, 100]"),
    ("T large", lambda: contract(temperature=100.1), "temperature = 100.1: must be a number in [0.01, 100]"),
    (
        "T nan",
        lambda: contract(temperature=float("nan")),
        "temperature = nan: must be a number in [0.01, 100], and must be finite",
    ),
    (
        "T inf",
        lambda: contract(temperature=float("inf")),
        "temperature = inf: must be a number in [0.01, 100], and must be finite",
    ),
    ("T huge", lambda: contract(temperature=10**400), "must be a number in [0.01, 100], and must be finite"),
    (
        "T bool",
        lambda: contract(temperature=True),
        "temperature = True: must be a number in [0.01, 100], got bool",
    ),
    (
        "T string",
        lambda: contract(temperature="1.0"),
        "temperature = '1.0': must be a number in [0.01, 100], got str",
    ),
    (
        "T None",
        lambda: contract(temperature=None),
        "temperature = None: must be a number in [0.01, 100], got NoneType",
    ),
    (
        "ignore real",
        lambda: contract(ignore_index=5),
        "LogprobContract.ignore_index = 5: must not lie in the real vocabulary [0, 6); pass a value",
    ),
    (
        "ignore zero",
        lambda: contract(ignore_index=0),
        "LogprobContract.ignore_index = 0: must not lie in the real vocabulary",
    ),
    (
        "ignore bool",
        lambda: contract(ignore_index=False),
        "ignore_index = False: must be an integer, and a bool is not one",
    ),
    (
        "ignore float",
        lambda: contract(ignore_index=-100.0),
        "ignore_index = -100.0: must be an integer, got float",
    ),
    (
        "ignore of the mask",
        lambda: contract(mask=MaskSpec(1, [True], 3)),
        "ignore_index = 3: must not lie in the real vocabulary",
    ),
    (
        "ignore twice",
        lambda: contract(mask=MaskSpec(1, [True]), ignore_index=-1),
        "LogprobContract.ignore_index = -1: differs from mask.ignore_index = -100; leave it out",
    ),
    (
        "axis",
        lambda: contract().cross_rank_fingerprint("pp"),
        "cross_rank_fingerprint axis = 'pp': must be one of tp | dp | cp",
    ),
    # reduction
    (
        "merge",
        lambda: ReductionSpec(merge="sum"),
        "ReductionSpec.merge = 'sum': must be one of exact_words | max_sumexp_tiles | shard_lse",
    ),
    (
        "merge_axis",
        lambda: ReductionSpec(merge_axis="cp"),
        "ReductionSpec.merge_axis = 'cp': must be one of tp_vocab; pass MergeAxis.TP_VOCAB or its name",
    ),
    (
        "acc_dtype",
        lambda: ReductionSpec(acc_dtype="bf16"),
        "ReductionSpec.acc_dtype = 'bf16': must be one of fp32",
    ),
    (
        "order",
        lambda: ReductionSpec(order="any"),
        "ReductionSpec.order = 'any': must be one of free | global_tile_order | rank_order",
    ),
    (
        "transport",
        lambda: ReductionSpec(transport="mpi"),
        "ReductionSpec.transport = 'mpi': must be one of packed_all_gather | ",
    ),
    (
        "downcast_at",
        lambda: ReductionSpec(downcast_at="each"),
        "ReductionSpec.downcast_at = 'each': must be one of final_write",
    ),
    (
        "engine",
        lambda: ReductionSpec(engine="mpi"),
        "ReductionSpec.engine = 'mpi': must be one of torch_distributed",
    ),
    (
        "scope",
        lambda: ReductionSpec(determinism_scope="all"),
        "ReductionSpec.determinism_scope = 'all': must be one of fixed_topology | cross_tp_bitwise | ",
    ),
    (
        "exact order",
        lambda: ReductionSpec(order="rank_order"),
        "ReductionSpec.order = rank_order: merge=exact_words needs order=free; ReductionSpec.exact() sets",
    ),
    (
        "exact transport",
        lambda: ReductionSpec(transport="all_reduce_float"),
        "merge=exact_words needs transport=packed_all_gather | all_reduce_max_sum",
    ),
    (
        "exact tiles",
        lambda: ReductionSpec(num_vocab_tiles=64),
        "ReductionSpec.num_vocab_tiles = 64: must be None, because merge=exact_words has no tiles",
    ),
    (
        "tiles order",
        lambda: ReductionSpec(merge="max_sumexp_tiles", determinism_scope="fixed_topology"),
        "merge=max_sumexp_tiles needs order=global_tile_order; ReductionSpec.tiled(",
    ),
    (
        "tiles transport",
        lambda: dataclasses.replace(ReductionSpec.tiled(), transport="all_reduce_max_sum"),
        "merge=max_sumexp_tiles needs transport=packed_all_gather",
    ),
    (
        "tiles scope",
        lambda: dataclasses.replace(ReductionSpec.tiled(), determinism_scope="layout_free"),
        "determinism_scope = layout_free: merge=max_sumexp_tiles keeps at most cross_tp_bitwise",
    ),
    (
        "tiles zero",
        lambda: ReductionSpec.tiled(0),
        "ReductionSpec.num_vocab_tiles = 0: must be an integer >= 1; pass 64",
    ),
    (
        "tiles bool",
        lambda: ReductionSpec.tiled(True),
        "ReductionSpec.num_vocab_tiles = True: must be an integer, and a bool",
    ),
    (
        "naive order",
        lambda: dataclasses.replace(ReductionSpec.naive(), order="free"),
        "merge=shard_lse needs order=rank_order; ReductionSpec.naive() sets",
    ),
    (
        "naive transport",
        lambda: dataclasses.replace(ReductionSpec.naive(), transport="packed_all_gather"),
        "merge=shard_lse needs transport=all_reduce_float",
    ),
    (
        "naive scope",
        lambda: dataclasses.replace(ReductionSpec.naive(), determinism_scope="cross_tp_bitwise"),
        "merge=shard_lse keeps at most fixed_topology",
    ),
    # output
    (
        "entropy",
        lambda: LogprobOutputSpec(entropy=1),
        "LogprobOutputSpec.entropy = 1: must be True or False, got int; pass entropy=True",
    ),
    (
        "logp_dtype",
        lambda: LogprobOutputSpec(logp_dtype="bf16"),
        "LogprobOutputSpec.logp_dtype = 'bf16': must be one of fp32",
    ),
    (
        "lse_dtype",
        lambda: LogprobOutputSpec(lse_dtype="fp64"),
        "LogprobOutputSpec.lse_dtype = 'fp64': must be one of fp32",
    ),
    (
        "entropy_dtype",
        lambda: LogprobOutputSpec(entropy_dtype="fp64"),
        "LogprobOutputSpec.entropy_dtype = 'fp64': must be one of fp32",
    ),
    (
        "replicated_over",
        lambda: LogprobOutputSpec(replicated_over="cp"),
        "LogprobOutputSpec.replicated_over = 'cp': must be one of tp_vocab",
    ),
    # back from JSON
    (
        "json unknown",
        lambda: ReductionSpec.from_dict({"merg": "exact_words"}),
        "ReductionSpec.from_dict = ['merg']: unknown fields of ReductionSpec; the known ones are merge, ",
    ),
    ("json missing", lambda: LogprobContract.from_dict({"role": "train"}), "missing fields dtype, sharding"),
    (
        "json type",
        lambda: ShardingSpec.from_dict([1]),
        "ShardingSpec.from_dict = [1]: must be given a mapping, got list",
    ),
    (
        "json mask",
        lambda: MaskSpec.from_dict({"num_tokens": 3}),
        "must be a mapping with num_tokens and active_runs",
    ),
    (
        "json runs",
        lambda: MaskSpec.from_dict({"num_tokens": 3, "active_runs": [[2, 3], [0, 1]]}),
        "MaskSpec.active_runs = [0, 1]: runs must be ascending (start, end) within [0, 3)",
    ),
    (
        "json run too long",
        lambda: MaskSpec.from_dict({"num_tokens": 3, "active_runs": [[2, 4]]}),
        "runs must be ascending (start, end) within [0, 3)",
    ),
    (
        "json digest",
        lambda: MaskSpec.from_dict(MaskSpec(2, [True, False]).to_dict() | {"active_runs": [[0, 2]]}),
        "is not the digest of the active runs",
    ),
]


@pytest.mark.parametrize(
    ("build", "text"), [pytest.param(build, text, id=name) for name, build, text in RULES]
)
def test_rule(build: Callable[[], object], text: str) -> None:
    with pytest.raises(LogprobContractError, match=re.escape(text)):
        build()


def test_rules_are_value_errors_of_this_package() -> None:
    with pytest.raises(ValueError, match="temperature") as caught:
        contract(temperature=0)
    assert isinstance(caught.value, ContractError)
    assert isinstance(caught.value, RLEngineError)


def test_errors_stay_on_one_line() -> None:
    with pytest.raises(LogprobContractError, match="one bool per token") as caught:
        MaskSpec(1, [True] * 5000)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
