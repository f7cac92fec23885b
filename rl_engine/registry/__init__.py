"""Who answers a contract: an op, or every candidate with its reasons."""

from rl_engine.registry.builtins import LOGPROB_PRIORITY as LOGPROB_PRIORITY
from rl_engine.registry.builtins import LOSS_PRIORITY as LOSS_PRIORITY
from rl_engine.registry.dispatch import KernelRegistry as KernelRegistry
from rl_engine.registry.dispatch import ResolvedOp as ResolvedOp
from rl_engine.registry.dispatch import kernel_registry as kernel_registry
from rl_engine.registry.report import CandidateReport as CandidateReport
from rl_engine.registry.report import DispatchReport as DispatchReport
from rl_engine.registry.report import OpKind as OpKind
from rl_engine.registry.report import Platform as Platform

__all__ = [
    "LOGPROB_PRIORITY",
    "LOSS_PRIORITY",
    "CandidateReport",
    "DispatchReport",
    "KernelRegistry",
    "OpKind",
    "Platform",
    "ResolvedOp",
    "kernel_registry",
]
