"""The mesh room, the only one that talks to torch.distributed: axes, preflight, exchanges, real ranks."""

from rl_engine.mesh.axis import Axis as Axis
from rl_engine.mesh.axis import GroupLike as GroupLike
from rl_engine.mesh.exchange import all_gather_rows as all_gather_rows
from rl_engine.mesh.exchange import all_reduce_float as all_reduce_float
from rl_engine.mesh.exchange import all_reduce_max as all_reduce_max
from rl_engine.mesh.exchange import all_reduce_sum as all_reduce_sum
from rl_engine.mesh.exchange import all_reduce_sum_over as all_reduce_sum_over
from rl_engine.mesh.exchange import gather_json as gather_json
from rl_engine.mesh.exchange import guard as guard
from rl_engine.mesh.preflight import Claim as Claim
from rl_engine.mesh.preflight import preflight as preflight
from rl_engine.mesh.preflight import preflight_mesh as preflight_mesh
from rl_engine.mesh.transport import LostRankError as LostRankError
from rl_engine.mesh.transport import count_collectives as count_collectives

__all__ = [
    "Axis",
    "Claim",
    "GroupLike",
    "LostRankError",
    "all_gather_rows",
    "all_reduce_float",
    "all_reduce_max",
    "all_reduce_sum",
    "all_reduce_sum_over",
    "count_collectives",
    "gather_json",
    "guard",
    "preflight",
    "preflight_mesh",
]
