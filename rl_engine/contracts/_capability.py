"""What the capabilities of both ops have in common.

A capability is data: it never looks at a tensor and never imports its backend. Where a field has a default,
the default claims the least determinism and the lower tier; supported sizes default to all.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from rl_engine.contracts._checks import Rules
from rl_engine.contracts.reduction import DeterminismScope

__all__ = [
    "ImplementationKind",
    "closed_scopes",
    "listing",
    "outside",
    "size_listing",
    "strongest_scope",
    "too_strong",
]


class ImplementationKind(StrEnum):
    """The tier of a backend: written to be read, or written to be used."""

    REFERENCE = "reference"
    PRODUCTION = "production"


def closed_scopes(rules: Rules, field: str, values: object) -> frozenset[DeterminismScope]:
    """The scopes named and all that they cover: a backend that has a scope has the weaker ones."""
    named = rules.members(field, values, DeterminismScope)
    return frozenset(scope for scope in DeterminismScope if any(strong.covers(scope) for strong in named))


def strongest_scope(scopes: frozenset[DeterminismScope]) -> DeterminismScope:
    """The scope that covers all the others; there is one, because scopes are nested."""
    return next(scope for scope in scopes if all(scope.covers(other) for other in scopes))


def listing(values: frozenset[Any]) -> str:
    """A set as text, in a stable order."""
    return ", ".join(str(value) for value in sorted(values))


def size_listing(sizes: frozenset[int] | None) -> str:
    """World sizes as text."""
    return "any" if sizes is None else listing(sizes)


def outside(name: str, asked: object, offered: frozenset[Any] | None) -> list[str]:
    """The reason that a value is not on offer, if it is not; None offers everything."""
    if offered is None or asked in offered:
        return []
    return [f"{name} {asked} is not among {listing(offered)}"]


def too_strong(asked: DeterminismScope, offered: frozenset[DeterminismScope]) -> list[str]:
    """The reason that a scope is not kept, if it is not."""
    if asked in offered:
        return []
    return [f"determinism_scope {asked} is stronger than {strongest_scope(offered)}"]
