"""`rl-engine info`: what is installed here, and which backends can serve."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch
import torch.distributed
from rich.console import Console
from rich.table import Table

from rl_engine.registry import OpKind, kernel_registry

__all__ = ["gather_info", "print_info"]

_PACKAGES = ("rl-engine", "torch", "numba", "triton", "numpy", "transformers", "safetensors")


def gather_info() -> dict[str, Any]:
    """Return versions, devices, collectives and registered backends, as JSON types."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cpu": {
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "collectives": _collectives(),
        "backends": {
            str(op): [_backend(op, name) for name in kernel_registry.backend_ids(op)] for op in OpKind
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _collectives() -> list[str]:
    distributed = torch.distributed
    if not distributed.is_available():
        return []
    found = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    return [name for name, available in found.items() if available]


def _backend(op: OpKind, backend_id: str) -> dict[str, Any]:
    declared = {
        name: capability
        for name, capability in kernel_registry.capabilities(op, backend_id).items()
        if capability
    }
    first = next(iter(declared.values()), None)
    missing = () if first is None else kernel_registry.missing_modules(first)
    scopes = [] if first is None else [str(scope) for scope in first.determinism_scopes]
    return {
        "backend_id": backend_id,
        "kind": None if first is None else str(first.implementation_kind),
        "platforms": list(declared),
        "determinism_scopes": sorted(scopes),
        "missing_modules": list(missing),
    }


def print_info(info: dict[str, Any], out: Console) -> None:
    """Print what `gather_info` returned as two tables."""
    here = Table(title="installed here", show_header=False, title_justify="left")
    here.add_row("python", f"{info['python']} on {info['platform']}")
    for name, version in info["packages"].items():
        here.add_row(name, version or "[dim]not installed[/dim]")
    cpu = info["cpu"]
    here.add_row("cpu", f"{cpu['cores']} cores, {cpu['torch_threads']} torch threads, {cpu['capability']}")
    here.add_row("gpus", ", ".join(info["gpus"]) or "[dim]none[/dim]")
    here.add_row("collectives", ", ".join(info["collectives"]) or "[dim]none[/dim]")
    out.print(here)

    backends = Table(title="backends, in the order of priority", title_justify="left")
    for column in ("op", "backend", "tier", "platforms", "same bits over", "here"):
        backends.add_column(column)
    for op, entries in info["backends"].items():
        for entry in entries:
            missing = ", ".join(entry["missing_modules"])
            backends.add_row(
                op,
                entry["backend_id"],
                entry["kind"] or "undeclared",
                ", ".join(entry["platforms"]),
                _strongest(entry["determinism_scopes"]),
                f"[yellow]needs {missing}[/yellow]" if missing else "[green]ready[/green]",
            )
    out.print(backends)


def _strongest(scopes: list[str]) -> str:
    order = ("layout_free", "cross_tp_bitwise", "fixed_topology")
    return next((scope for scope in order if scope in scopes), "nothing declared")
