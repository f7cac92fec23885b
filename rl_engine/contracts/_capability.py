"""What the capabilities of both ops have in common.

A capability is data: it never looks at a tensor and never imports its backend. Where a field has a default,
the default claims the least determinism and the lower tier; supported sizes default to all.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from rl_engine.contracts._checks import Rules
from rl_engine.contracts.reduction import DeterminismScope

__all__ = ["ImplementationKind", "closed_scopes", "listing", "size_reasons", "strongest_scope"]


class ImplementationKind(StrEnum):
    """The tier of a backend: written to be read, or written to be used."""

    REFERENCE = "reference"
    PRODUCTION = "production"


def closed_scopes(rules: Rules, field: str, values: object) -> frozenset[DeterminismScope]:
    """The scopes named and all that they cover: a backend that has a scope has the weaker ones."""
    named = rules.members(field, values, DeterminismScope)
    return frozenset(scope for scope in DeterminismScope if any(strong.covers(scope) for strong in named))


def strongest_scope(scopes: frozenset[DeterminismScope]) -> DeterminismScope:
    return next(scope for scope in scopes if all(scope.covers(other) for other in scopes))


def listing(values: Iterable[object]) -> str:
    return ", ".join(sorted(str(value) for value in values))


def size_reasons(name: str, asked: int, offered: frozenset[int] | None) -> list[str]:
    if offered is None or asked in offered:
        return []
    return [f"{name} {asked} is not among {', '.join(str(size) for size in sorted(offered))}"]
