"""One axis of the mesh as the rest of the package sees it: a name, a rank, a size, a process group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_engine.errors import InputError

__all__ = ["Axis", "GroupLike"]

# What callers hand over. The int is what torch.distributed gives to processes that a group leaves out.
GroupLike: TypeAlias = dist.ProcessGroup | DeviceMesh | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of the mesh ("tp", "dp" or "cp"), seen from this process.

    No collective is issued by building one. An axis of size 1 has nobody to talk to: every operation on it
    is local.

    Attributes:
        name: What messages call it: "tp", "dp", "cp".
        group: The process group, None on an axis that was given none.
        rank: This process's place on the axis.
        size: How many processes the axis has.
        ranks: Their global ranks, in axis order.

    Example:
        >>> Axis.single("tp")
        Axis(name='tp', group=None, rank=0, size=1, ranks=(0,))
    """

    name: str
    group: dist.ProcessGroup | None
    rank: int
    size: int
    ranks: tuple[int, ...]

    @classmethod
    def single(cls, name: str) -> Axis:
        """The axis of one process: every operation on it is a local one."""
        return cls(name=name, group=None, rank=0, size=1, ranks=(_own_global_rank(),))

    @classmethod
    def from_group(cls, name: str, group: GroupLike) -> Axis:
        """The axis over a process group, or over a one-dimensional DeviceMesh.

        None means an axis of one process, also where torch.distributed is initialised: a group is never
        assumed.

        Raises:
            InputError: this process is not in the group, the group was destroyed, or the mesh has several
                dims.
        """
        if group is None:
            return cls.single(name)
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise InputError(
                    f"{name}_group is a DeviceMesh of {group.ndim} dims {group.mesh_dim_names}, "
                    f'expected one dim: hand over mesh["{name}"]'
                )
            group = group.get_group()
        if not isinstance(group, dist.ProcessGroup):
            raise InputError(
                f"{name}_group is {group!r}, expected a ProcessGroup that this process belongs to, "
                f"a DeviceMesh of one dim, or None; new_group gives a placeholder to those it leaves out"
            )
        try:
            ranks = tuple(int(rank) for rank in dist.get_process_group_ranks(group))
            rank = dist.get_rank(group)
        except (KeyError, ValueError, RuntimeError) as exc:
            raise InputError(
                f"{name}_group is not a live process group of this process ({exc}); "
                f"it was destroyed, or belongs to another initialisation"
            ) from exc
        if rank < 0:
            raise InputError(
                f"{name}_group holds the global ranks {list(ranks)}, this process is none of them"
            )
        return cls(name=name, group=group, rank=rank, size=len(ranks), ranks=ranks)

    def __str__(self) -> str:
        return f"{self.name} {self.rank}/{self.size}"

    def describe_rank(self, rank: int) -> str:
        """How messages name a member: "rank 1 (global rank 5)"."""
        return f"rank {rank} (global rank {self.ranks[rank]})"

    def device_types(self) -> dict[str, str]:
        """The group's transport per device type: {"cpu": "gloo", "cuda": "nccl"}; empty without a group."""
        if self.group is None:
            return {}
        # "cpu:gloo,cuda:nccl", in every version that has get_backend_config.
        entries = str(dist.get_backend_config(self.group)).split(",")
        return {device: backend for device, _, backend in (entry.partition(":") for entry in entries)}

    def wire_device(self) -> torch.device:
        """Where control messages live: the CPU if the group can carry them, so that none waits for a GPU."""
        kinds = self.device_types()
        return torch.device("cpu" if "cpu" in kinds or not kinds else next(iter(kinds)))


def _own_global_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
