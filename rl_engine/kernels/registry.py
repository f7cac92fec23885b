"""The registry under its earlier import path."""

from rl_engine.registry import KernelRegistry as KernelRegistry
from rl_engine.registry import kernel_registry as kernel_registry
