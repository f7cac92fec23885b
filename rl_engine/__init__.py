"""rl-engine: losses of RL post-training whose bits do not depend on how the work is laid out.

Names are loaded when first used, so that the contracts and the command line do without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rl_engine.api import grpo_loss as grpo_loss
    from rl_engine.api import next_token_targets as next_token_targets
    from rl_engine.api import policy_loss as policy_loss
    from rl_engine.api import selected_logprobs as selected_logprobs
    from rl_engine.contracts import AdvantageSpec as AdvantageSpec
    from rl_engine.contracts import ClipSpec as ClipSpec
    from rl_engine.contracts import GRPOLossContract as GRPOLossContract
    from rl_engine.contracts import LogprobContract as LogprobContract
    from rl_engine.contracts import LossReductionSpec as LossReductionSpec
    from rl_engine.contracts import LossShardingSpec as LossShardingSpec
    from rl_engine.contracts import ObjectiveSpec as ObjectiveSpec
    from rl_engine.contracts import ShardingSpec as ShardingSpec
    from rl_engine.logprob import VocabParallelLogprobOp as VocabParallelLogprobOp
    from rl_engine.loss import DistributedGRPOLossOp as DistributedGRPOLossOp
    from rl_engine.loss import GRPOLossResult as GRPOLossResult
    from rl_engine.registry import kernel_registry as kernel_registry

__version__ = "0.1.0"

__all__ = [
    "AdvantageSpec",
    "ClipSpec",
    "DistributedGRPOLossOp",
    "GRPOLossContract",
    "GRPOLossResult",
    "LogprobContract",
    "LossReductionSpec",
    "LossShardingSpec",
    "ObjectiveSpec",
    "ShardingSpec",
    "VocabParallelLogprobOp",
    "grpo_loss",
    "kernel_registry",
    "next_token_targets",
    "policy_loss",
    "selected_logprobs",
]

_HOMES: Final = {
    "rl_engine.api": ("grpo_loss", "next_token_targets", "policy_loss", "selected_logprobs"),
    "rl_engine.contracts": (
        "AdvantageSpec",
        "ClipSpec",
        "GRPOLossContract",
        "LogprobContract",
        "LossReductionSpec",
        "LossShardingSpec",
        "ObjectiveSpec",
        "ShardingSpec",
    ),
    "rl_engine.logprob": ("VocabParallelLogprobOp",),
    "rl_engine.loss": ("DistributedGRPOLossOp", "GRPOLossResult"),
    "rl_engine.registry": ("kernel_registry",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'rl_engine' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
