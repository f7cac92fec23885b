"""Requests, capabilities and registries to vary in tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rl_engine.contracts import (
    GRPOLossContract,
    LogprobBackendCapability,
    LogprobContract,
    LossBackendCapability,
    LossShardingSpec,
    ShardingSpec,
)
from rl_engine.registry import KernelRegistry

SHARDS = ShardingSpec.even(6, 0, 2, padded_vocab_size=8)


def contract(**changes: Any) -> LogprobContract:
    fields: dict[str, Any] = {"role": "train", "dtype": "bf16", "sharding": SHARDS}
    return LogprobContract(**fields | changes)


def shards(**changes: Any) -> ShardingSpec:
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_world_size": 2,
        "vocab_shard_bounds": ((0, 4), (4, 8)),
        "real_vocab_size": 6,
        "padded_vocab_size": 8,
    }
    return ShardingSpec(**fields | changes)


def batch(**changes: Any) -> LossShardingSpec:
    fields: dict[str, Any] = {
        "dp_rank": 0,
        "dp_world_size": 2,
        "num_sequences": 8,
        "padded_seq_len": 4,
        "sequence_shard_bounds": ((0, 5), (5, 8)),
        "group_boundaries": (0, 4, 8),
    }
    return LossShardingSpec(**fields | changes)


def loss_contract(**changes: Any) -> GRPOLossContract:
    fields: dict[str, Any] = {"logprob": contract(), "sharding": batch()}
    return GRPOLossContract(**fields | changes)


def logprob_capability(backend_id: str = "mine", **changes: Any) -> LogprobBackendCapability:
    """Everything that the exact backends can do, unless changed."""
    fields: dict[str, Any] = {
        "roles": ["train", "infer"],
        "dtypes": ["bf16", "fp16", "fp32"],
        "determinism_scopes": "layout_free",
        "merges": "exact_words",
        "exports_entropy": True,
    }
    return LogprobBackendCapability(backend_id, **fields | changes)


def loss_capability(backend_id: str = "mine", **changes: Any) -> LossBackendCapability:
    """Everything, unless changed."""
    fields: dict[str, Any] = {
        "token_normalizers": [
            "global_active_tokens",
            "per_sequence_then_mean",
            "per_sequence_then_mean_all",
            "fixed_constant",
        ],
        "kl_estimators": ["k3_unbiased", "k1_log_ratio"],
        "advantage_normalizers": ["mean_std_population", "mean_only", "mean_std_sample"],
        "determinism_scopes": "layout_free",
    }
    return LossBackendCapability(backend_id, **fields | changes)


class Group:
    """A process group's two methods."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Mesh:
    """A one-dimensional device mesh's two methods."""

    def get_local_rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


@dataclasses.dataclass
class MeshAxisLike:
    """An axis with attributes."""

    rank: int
    size: int


class Loader:
    """Counts its calls and returns an op of its own."""

    def __init__(self, name: str = "op") -> None:
        self.calls, self.op = 0, SimpleNamespace(name=name)

    def __call__(self) -> object:
        self.calls += 1
        return self.op


def forbidden() -> object:
    pytest.fail("a backend was loaded")


def registry(
    *backends: tuple[str, dict[str, Any]], loader: Callable[[], object] = forbidden
) -> KernelRegistry:
    """A registry of logprob backends that differ from one that can do everything."""
    result = KernelRegistry(builtins=False)
    for backend_id, changes in backends:
        result.register_logprob_backend(backend_id, logprob_capability(backend_id, **changes), loader)
    return result


FAST = ("fast", {"implementation_kind": "production"})
PLAIN = ("plain", {})
