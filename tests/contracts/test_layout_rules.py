"""Every rule of vocabulary shards and masks, with the text of its error."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rl_engine.contracts import MaskSpec, ShardingSpec
from rl_engine.errors import LogprobContractError
from tests.contracts.examples import Group, shards

Rule = tuple[str, Callable[[], object], str]

RULES: list[Rule] = [
    # shards
    (
        "tp_rank",
        lambda: shards(tp_rank=2),
        "ShardingSpec.tp_rank = 2: must be an integer in [0, 2); pass this process's rank",
    ),
    ("tp_rank negative", lambda: shards(tp_rank=-1), "ShardingSpec.tp_rank = -1: must be an integer >= 0"),
    (
        "tp_rank bool",
        lambda: shards(tp_rank=True),
        "ShardingSpec.tp_rank = True: must be an integer, and a bool is not one",
    ),
    (
        "tp_rank numpy bool",
        lambda: shards(tp_rank=np.bool_(True)),
        "must be an integer, and a bool is not one",
    ),
    (
        "tp_rank string",
        lambda: shards(tp_rank="0"),
        "ShardingSpec.tp_rank = '0': must be an integer, got str",
    ),
    (
        "tp_world_size",
        lambda: shards(tp_world_size=0),
        "ShardingSpec.tp_world_size = 0: must be an integer >= 1",
    ),
    ("cp_rank", lambda: shards(cp_rank=1), "ShardingSpec.cp_rank = 1: must be an integer in [0, 1)"),
    (
        "cp_world_size",
        lambda: shards(cp_world_size=0),
        "ShardingSpec.cp_world_size = 0: must be an integer >= 1",
    ),
    (
        "real zero",
        lambda: shards(real_vocab_size=0),
        "ShardingSpec.real_vocab_size = 0: must be an integer >= 1",
    ),
    (
        "real over padded",
        lambda: shards(real_vocab_size=9),
        "ShardingSpec.real_vocab_size = 9: must not exceed padded_vocab_size = 8; pass the real",
    ),
    (
        "padded float",
        lambda: shards(padded_vocab_size=8.0),
        "ShardingSpec.padded_vocab_size = 8.0: must be an integer, got float",
    ),
    (
        "bounds int",
        lambda: shards(vocab_shard_bounds=8),
        "ShardingSpec.vocab_shard_bounds = 8: must be an iterable of (start, end) pairs, got int",
    ),
    (
        "bounds None",
        lambda: shards(vocab_shard_bounds=None),
        "must be an iterable of (start, end) pairs, got NoneType",
    ),
    (
        "bounds string",
        lambda: shards(vocab_shard_bounds="04"),
        "must be an iterable of (start, end) pairs, got str",
    ),
    (
        "bounds flat",
        lambda: shards(vocab_shard_bounds=(0, 4)),
        "ShardingSpec.vocab_shard_bounds[0] = 0: must be an iterable of two integers, got int",
    ),
    (
        "bounds triple",
        lambda: shards(vocab_shard_bounds=((0, 4), (4, 6, 8))),
        "vocab_shard_bounds[1] = (4, 6, 8): must be a pair (start, end)",
    ),
    (
        "bounds float",
        lambda: shards(vocab_shard_bounds=((0, 4.0), (4, 8))),
        "vocab_shard_bounds[0] = 4.0: must be an integer, got float",
    ),
    (
        "bounds bool",
        lambda: shards(vocab_shard_bounds=((False, 4), (4, 8))),
        "vocab_shard_bounds[0] = False: must be an integer, and a bool",
    ),
    (
        "bounds count",
        lambda: shards(vocab_shard_bounds=((0, 8),)),
        "must hold one (start, end) per rank: tp_world_size is 2, got 1; ShardingSpec.even(...) builds them",
    ),
    (
        "bounds gap",
        lambda: shards(vocab_shard_bounds=((0, 3), (4, 8))),
        "shards must tile [0, 8): rank 1 starts at 4, expected 3; ShardingSpec.even(...) builds them",
    ),
    (
        "bounds overlap",
        lambda: shards(vocab_shard_bounds=((0, 5), (4, 8))),
        "shards must tile [0, 8): rank 1 starts at 4, expected 5",
    ),
    (
        "bounds start",
        lambda: shards(vocab_shard_bounds=((1, 4), (4, 8))),
        "shards must tile [0, 8): rank 0 starts at 1, expected 0",
    ),
    (
        "bounds short",
        lambda: shards(vocab_shard_bounds=((0, 4), (4, 7))),
        "shards must tile [0, padded_vocab_size = 8): the last one ends at 7",
    ),
    (
        "bounds long",
        lambda: shards(vocab_shard_bounds=((0, 4), (4, 9))),
        "shards must tile [0, padded_vocab_size = 8): the last one ends at 9",
    ),
    (
        "bounds backwards",
        lambda: shards(vocab_shard_bounds=((0, 9), (9, 8))),
        "rank 1 ends at 8, before its start 9",
    ),
    (
        "owner of padding",
        lambda: shards().owner_rank(6),
        "owner_rank token_id = 6: must be an integer in [0, 6); token ids lie in [0, 6)",
    ),
    (
        "owner of filler",
        lambda: shards().owner_rank(-100),
        "owner_rank token_id = -100: must be an integer >= 0",
    ),
    (
        "owner of bool",
        lambda: shards().owner_rank(True),
        "owner_rank token_id = True: must be an integer, and a bool",
    ),
    (
        "even alignment",
        lambda: ShardingSpec.even(8, 0, 2, multiple_of=0),
        "ShardingSpec.even multiple_of = 0: must be an integer >= 1",
    ),
    (
        "even real",
        lambda: ShardingSpec.even(8.5),
        "ShardingSpec.padded_vocab_size = 8.5: must be an integer, got float",
    ),
    (
        "even world",
        lambda: ShardingSpec.even(8, 0, 0),
        "ShardingSpec.tp_world_size = 0: must be an integer >= 1",
    ),
    (
        "mesh",
        lambda: ShardingSpec.from_mesh("tp", 8),
        "ShardingSpec.from_mesh tp = 'tp': must have a rank and a size; pass a process group",
    ),
    (
        "mesh of two axes",
        lambda: ShardingSpec.from_mesh(np.ones((2, 2)), 8),
        "must be one axis, got 2 dimensions; pass one of them, e.g. mesh['tp']",
    ),
    (
        "mesh outsider",
        lambda: ShardingSpec.from_mesh(Group(-1, 2), 8),
        "ShardingSpec.from_mesh tp.rank = -1: must be an integer >= 0; pass a group that this process",
    ),
    (
        "mesh cp",
        lambda: ShardingSpec.from_mesh(None, 8, cp=7),
        "ShardingSpec.from_mesh cp = 7: must have a rank and a size",
    ),
    # mask
    (
        "mask count",
        lambda: MaskSpec(3, [True, False]),
        "MaskSpec.active_mask = (True, False): must hold one bool per token: num_tokens is 3, got 2",
    ),
    (
        "mask ints",
        lambda: MaskSpec(2, [True, 1]),
        "MaskSpec.active_mask[1] = 1: must be a bool, got int; pass a one-dimensional mask",
    ),
    (
        "mask int tensor",
        lambda: MaskSpec(2, torch.tensor([1, 0])),
        "MaskSpec.active_mask[0] = 1: must be a bool, got int",
    ),
    (
        "mask 2-d",
        lambda: MaskSpec(2, torch.ones(1, 2, dtype=torch.bool)),
        "MaskSpec.active_mask[0] = [True, True]: must be a bool, got list",
    ),
    ("mask scalar", lambda: MaskSpec(1, torch.tensor(True)), "must be an iterable of bools, got Tensor"),
    (
        "mask None",
        lambda: MaskSpec(1, None),
        "MaskSpec.active_mask = None: must be an iterable of bools, got NoneType",
    ),
    (
        "mask string",
        lambda: MaskSpec(1, "1"),
        "MaskSpec.active_mask = '1': must be an iterable of bools, got str",
    ),
    ("mask negative", lambda: MaskSpec(-1, []), "MaskSpec.num_tokens = -1: must be an integer >= 0"),
    (
        "mask bool count",
        lambda: MaskSpec(True, [True]),
        "MaskSpec.num_tokens = True: must be an integer, and a bool is not one",
    ),
    (
        "mask ignore",
        lambda: MaskSpec(1, [True], None),
        "MaskSpec.ignore_index = None: must be an integer, got NoneType; pass -100",
    ),
    (
        "mask all",
        lambda: MaskSpec.all_active(2.0),
        "MaskSpec.num_tokens = 2.0: must be an integer, got float",
    ),
]


@pytest.mark.parametrize(
    ("build", "text"), [pytest.param(build, text, id=name) for name, build, text in RULES]
)
def test_rule(build: Callable[[], object], text: str) -> None:
    with pytest.raises(LogprobContractError, match=re.escape(text)):
        build()
