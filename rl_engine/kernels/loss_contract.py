"""The loss contract under its earlier import path."""

from rl_engine.contracts.loss import AdvantageNormalizer as AdvantageNormalizer
from rl_engine.contracts.loss import AdvantageSpec as AdvantageSpec
from rl_engine.contracts.loss import AdvantageVariance as AdvantageVariance
from rl_engine.contracts.loss import ClipSpec as ClipSpec
from rl_engine.contracts.loss import DataParallelReduction as DataParallelReduction
from rl_engine.contracts.loss import GRPOLossContract as GRPOLossContract
from rl_engine.contracts.loss import KLEstimator as KLEstimator
from rl_engine.contracts.loss import LossBackendCapability as LossBackendCapability
from rl_engine.contracts.loss import LossOutputSpec as LossOutputSpec
from rl_engine.contracts.loss import LossReductionSpec as LossReductionSpec
from rl_engine.contracts.loss import LossShardingSpec as LossShardingSpec
from rl_engine.contracts.loss import ObjectiveSpec as ObjectiveSpec
from rl_engine.contracts.loss import OnEmpty as OnEmpty
from rl_engine.contracts.loss import TokenNormalizer as TokenNormalizer
from rl_engine.errors import LossContractError as LossContractError
