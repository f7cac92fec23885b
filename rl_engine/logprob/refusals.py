"""What a tier refuses when its op is called directly.

The registry asks the capability before it selects a tier; a caller who holds a tier's op has not asked.
"""

from __future__ import annotations

from rl_engine.contracts import LogprobContract, MergeKind
from rl_engine.errors import InputError

__all__ = ["require_merge"]


def require_merge(
    contract: LogprobContract, backend_id: str, merge: MergeKind, *, build: str, entropy: bool = False
) -> None:
    """Hold a contract against a tier that knows one merge.

    Args:
        contract: what is asked.
        backend_id: the tier's name.
        merge: the merge that it computes.
        build: what to type for a contract with that merge.
        entropy: whether the tier computes the entropy too.

    Raises:
        InputError: the contract asks for another merge, or for an entropy that the tier does not compute.
    """
    if contract.reduction.merge is not merge:
        raise InputError(
            f"the contract's merge is {contract.reduction.merge}, {backend_id} computes {merge}; build the "
            f"contract with reduction={build}, or let the registry choose the backend"
        )
    if contract.output.entropy and not entropy:
        raise InputError(
            f"the contract asks for the entropy, which {backend_id} does not compute; build it without, or "
            "with reduction=ReductionSpec.exact()"
        )
