"""What is asked, and what is offered, as frozen data: contracts, their parts and backends' capabilities.

Nothing here imports torch or looks at a tensor.
"""

from rl_engine.contracts.context import context_ranges as context_ranges
from rl_engine.contracts.logprob import DEFAULT_IGNORE_INDEX as DEFAULT_IGNORE_INDEX
from rl_engine.contracts.logprob import DEFAULT_NUM_VOCAB_TILES as DEFAULT_NUM_VOCAB_TILES
from rl_engine.contracts.logprob import MAX_TEMPERATURE as MAX_TEMPERATURE
from rl_engine.contracts.logprob import MIN_TEMPERATURE as MIN_TEMPERATURE
from rl_engine.contracts.logprob import AccDtype as AccDtype
from rl_engine.contracts.logprob import DeterminismScope as DeterminismScope
from rl_engine.contracts.logprob import DowncastAt as DowncastAt
from rl_engine.contracts.logprob import Engine as Engine
from rl_engine.contracts.logprob import ImplementationKind as ImplementationKind
from rl_engine.contracts.logprob import LogitsDtype as LogitsDtype
from rl_engine.contracts.logprob import LogprobBackendCapability as LogprobBackendCapability
from rl_engine.contracts.logprob import LogprobContract as LogprobContract
from rl_engine.contracts.logprob import LogprobOutputSpec as LogprobOutputSpec
from rl_engine.contracts.logprob import LogprobRole as LogprobRole
from rl_engine.contracts.logprob import MaskMode as MaskMode
from rl_engine.contracts.logprob import MaskSpec as MaskSpec
from rl_engine.contracts.logprob import MergeAxis as MergeAxis
from rl_engine.contracts.logprob import MergeKind as MergeKind
from rl_engine.contracts.logprob import MergeOrder as MergeOrder
from rl_engine.contracts.logprob import MeshAxis as MeshAxis
from rl_engine.contracts.logprob import ReductionSpec as ReductionSpec
from rl_engine.contracts.logprob import ShardingSpec as ShardingSpec
from rl_engine.contracts.logprob import Transport as Transport
from rl_engine.contracts.loss import MAX_LOG_RATIO_GUARD as MAX_LOG_RATIO_GUARD
from rl_engine.contracts.loss import AdvantageNormalizer as AdvantageNormalizer
from rl_engine.contracts.loss import AdvantageReplication as AdvantageReplication
from rl_engine.contracts.loss import AdvantageSpec as AdvantageSpec
from rl_engine.contracts.loss import AdvantageVariance as AdvantageVariance
from rl_engine.contracts.loss import BatchPlan as BatchPlan
from rl_engine.contracts.loss import ClipSpec as ClipSpec
from rl_engine.contracts.loss import ContextSplit as ContextSplit
from rl_engine.contracts.loss import DataParallelReduction as DataParallelReduction
from rl_engine.contracts.loss import GRPOLossContract as GRPOLossContract
from rl_engine.contracts.loss import KLEstimator as KLEstimator
from rl_engine.contracts.loss import LossBackendCapability as LossBackendCapability
from rl_engine.contracts.loss import LossOutputSpec as LossOutputSpec
from rl_engine.contracts.loss import LossReductionSpec as LossReductionSpec
from rl_engine.contracts.loss import LossReplication as LossReplication
from rl_engine.contracts.loss import LossShardingSpec as LossShardingSpec
from rl_engine.contracts.loss import ObjectiveSpec as ObjectiveSpec
from rl_engine.contracts.loss import OnEmpty as OnEmpty
from rl_engine.contracts.loss import TokenNormalizer as TokenNormalizer

__all__ = [
    "DEFAULT_IGNORE_INDEX",
    "DEFAULT_NUM_VOCAB_TILES",
    "MAX_LOG_RATIO_GUARD",
    "MAX_TEMPERATURE",
    "MIN_TEMPERATURE",
    "AccDtype",
    "AdvantageNormalizer",
    "AdvantageReplication",
    "AdvantageSpec",
    "AdvantageVariance",
    "BatchPlan",
    "ClipSpec",
    "ContextSplit",
    "DataParallelReduction",
    "DeterminismScope",
    "DowncastAt",
    "Engine",
    "GRPOLossContract",
    "ImplementationKind",
    "KLEstimator",
    "LogitsDtype",
    "LogprobBackendCapability",
    "LogprobContract",
    "LogprobOutputSpec",
    "LogprobRole",
    "LossBackendCapability",
    "LossOutputSpec",
    "LossReductionSpec",
    "LossReplication",
    "LossShardingSpec",
    "MaskMode",
    "MaskSpec",
    "MergeAxis",
    "MergeKind",
    "MergeOrder",
    "MeshAxis",
    "ObjectiveSpec",
    "OnEmpty",
    "ReductionSpec",
    "ShardingSpec",
    "TokenNormalizer",
    "Transport",
    "context_ranges",
]
