"""The backends of this package: what each declares, and where its loader is.

Loaders are names, so that declaring a backend imports nothing. The order is the order of priority.
"""

from __future__ import annotations

from typing import Final

from rl_engine.contracts.logprob import (
    DeterminismScope,
    ImplementationKind,
    LogitsDtype,
    LogprobBackendCapability,
    LogprobRole,
    MergeKind,
    Transport,
)
from rl_engine.contracts.loss import AdvantageNormalizer, KLEstimator, LossBackendCapability, TokenNormalizer

__all__ = ["LOGPROB_BACKENDS", "LOGPROB_PRIORITY", "LOSS_BACKENDS", "LOSS_PRIORITY"]

#: Under "auto" the first backend that conforms wins.
LOGPROB_PRIORITY: Final = ("exact_triton", "exact_numba", "exact_torch", "tiled_torch", "naive_torch")
LOSS_PRIORITY: Final = ("exact", "naive")

_ALL_PLATFORMS: Final = ("cpu", "cuda", "rocm")


def _exact(backend_id: str, kind: ImplementationKind, *requires: str) -> LogprobBackendCapability:
    return LogprobBackendCapability(
        backend_id,
        roles=frozenset(LogprobRole),
        dtypes=frozenset(LogitsDtype),
        determinism_scopes=frozenset({DeterminismScope.LAYOUT_FREE}),
        implementation_kind=kind,
        merges=frozenset({MergeKind.EXACT_WORDS}),
        transports=frozenset({Transport.PACKED_ALL_GATHER, Transport.ALL_REDUCE_MAX_SUM}),
        exports_entropy=True,
        requires=requires,
    )


def _loss(backend_id: str, scope: DeterminismScope, kind: ImplementationKind) -> LossBackendCapability:
    return LossBackendCapability(
        backend_id,
        token_normalizers=frozenset(TokenNormalizer),
        kl_estimators=frozenset(KLEstimator),
        advantage_normalizers=frozenset(AdvantageNormalizer),
        determinism_scopes=frozenset({scope}),
        implementation_kind=kind,
    )


_LOGPROB: Final = {
    "exact_triton": (
        _exact("exact_triton", ImplementationKind.PRODUCTION, "triton"),
        "rl_engine.logprob.exact:load_exact_triton",
        ("cuda",),
    ),
    "exact_numba": (
        _exact("exact_numba", ImplementationKind.PRODUCTION, "numba"),
        "rl_engine.logprob.exact:load_exact_numba",
        ("cpu",),
    ),
    "exact_torch": (
        _exact("exact_torch", ImplementationKind.REFERENCE),
        "rl_engine.logprob.exact:load_exact_torch",
        _ALL_PLATFORMS,
    ),
    "tiled_torch": (
        LogprobBackendCapability(
            "tiled_torch",
            roles=frozenset(LogprobRole),
            dtypes=frozenset(LogitsDtype),
            determinism_scopes=frozenset({DeterminismScope.CROSS_TP_BITWISE}),
            merges=frozenset({MergeKind.MAX_SUMEXP_TILES}),
            requires_tile_alignment=True,
        ),
        "rl_engine.logprob.tiled:load",
        _ALL_PLATFORMS,
    ),
    "naive_torch": (
        LogprobBackendCapability(
            "naive_torch",
            roles=frozenset(LogprobRole),
            dtypes=frozenset(LogitsDtype),
            merges=frozenset({MergeKind.SHARD_LSE}),
            transports=frozenset({Transport.ALL_REDUCE_FLOAT}),
        ),
        "rl_engine.logprob.naive:load",
        _ALL_PLATFORMS,
    ),
}
_LOSS: Final = {
    "exact": (
        _loss("exact", DeterminismScope.LAYOUT_FREE, ImplementationKind.PRODUCTION),
        "rl_engine.loss.grpo:load_exact",
        _ALL_PLATFORMS,
    ),
    "naive": (
        _loss("naive", DeterminismScope.FIXED_TOPOLOGY, ImplementationKind.REFERENCE),
        "rl_engine.loss.naive:load",
        _ALL_PLATFORMS,
    ),
}

#: (capability, loader, platforms) of every backend, in the order of priority.
LOGPROB_BACKENDS: Final = tuple(_LOGPROB[backend_id] for backend_id in LOGPROB_PRIORITY)
LOSS_BACKENDS: Final = tuple(_LOSS[backend_id] for backend_id in LOSS_PRIORITY)
