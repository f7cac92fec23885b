"""Contracts as plain data: JSON-stable dictionaries, the way back, and the fingerprint over them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar, cast

from rl_engine.contracts._checks import Rules

__all__ = ["fingerprint", "from_mapping", "to_mapping"]

T = TypeVar("T")


def to_mapping(part: Any) -> dict[str, Any]:
    """The fields of a contract part, in order, as JSON types: enums by name, tuples as lists, sets sorted."""
    return {field.name: _plain(getattr(part, field.name)) for field in dataclasses.fields(part)}


def _plain(value: Any) -> Any:
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, frozenset):
        return sorted(_plain(item) for item in cast("frozenset[Any]", value))
    if dataclasses.is_dataclass(value):
        return cast(Any, value).to_dict()
    return value


def from_mapping(
    cls: type[T], data: object, rules: Rules, parts: Mapping[str, Callable[[Any], object]] | None = None
) -> T:
    """Build `cls` from `to_mapping`'s output.

    Args:
        cls: The dataclass to build.
        data: A mapping from field names to JSON values; fields with a default may be left out.
        rules: Who raises when a name is unknown or missing.
        parts: Builders of the nested parts, by field; None stays None.
    """
    name = f"{cls.__name__}.from_dict"
    if not isinstance(data, Mapping):
        rules.fail(
            name, data, f"must be given a mapping, got {type(data).__name__}", "pass the output of to_dict()"
        )
    given = {str(key): value for key, value in cast("Mapping[Any, Any]", data).items()}
    fields = {field.name: field for field in dataclasses.fields(cast(Any, cls))}
    unknown = sorted(given.keys() - fields.keys())
    if unknown:
        rules.fail(
            name, unknown, f"unknown fields of {cls.__name__}", f"the known ones are {', '.join(fields)}"
        )
    missing = [
        field.name
        for field in fields.values()
        if field.name not in given
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        rules.fail(
            name, sorted(given), f"missing fields {', '.join(missing)}", "pass the output of to_dict()"
        )
    for key, build in (parts or {}).items():
        if given.get(key) is not None:
            given[key] = build(given[key])
    return cls(**given)


def fingerprint(data: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of the canonical JSON of `data`: sorted keys, no spaces, no NaN."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
