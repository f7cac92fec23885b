"""The distributed GRPO loss: objective, advantages, exact sums over the mesh."""

from rl_engine.loss.grpo import DistributedGRPOLossOp as DistributedGRPOLossOp
from rl_engine.loss.result import GRPOLossResult as GRPOLossResult
from rl_engine.loss.result import LossProvenance as LossProvenance

__all__ = ["DistributedGRPOLossOp", "GRPOLossResult", "LossProvenance"]
