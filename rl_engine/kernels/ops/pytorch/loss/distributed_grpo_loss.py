"""The distributed GRPO loss op under its earlier import path."""

from rl_engine.loss import DistributedGRPOLossOp as DistributedGRPOLossOp
from rl_engine.loss import GRPOLossResult as GRPOLossResult
