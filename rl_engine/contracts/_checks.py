"""Validators shared by both contracts: each returns the normalised value, or raises and says what to type.

The two contracts raise different errors for the same mistakes, so the validators are methods of a `Rules`
object that holds the error type: `LOGPROB_RULES` and `LOSS_RULES`.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final, NoReturn, TypeVar, cast

from rl_engine.errors import ContractError, LogprobContractError, LossContractError

__all__ = ["LOGPROB_RULES", "LOSS_RULES", "POLICY_WORDS", "Rules", "show"]

E = TypeVar("E", bound=StrEnum)
T = TypeVar("T")

#: Words that select by policy, where a backend id selects by name; the last is reserved to be refused.
POLICY_WORDS: Final = ("auto", "production", "reference", "deterministic")

_SHOWN_CHARACTERS: Final = 96


def show(value: object) -> str:
    """The value as errors print it: one line, cut short rather than pushing the rule out of sight."""
    text = str(value) if isinstance(value, StrEnum) else repr(value)
    text = " ".join(line.strip() for line in text.splitlines())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _is_bool(value: object) -> bool:
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")


class Rules:
    """Validators that raise one kind of contract error.

    Args:
        error: The error type of the contract that these rules speak for.
    """

    __slots__ = ("error",)

    def __init__(self, error: type[ContractError]) -> None:
        self.error = error

    def fail(self, field: str, value: object, rule: str, remedy: str) -> NoReturn:
        """Raise the contract's error: what the field holds, what it must hold, what to type."""
        raise self.error(f"{field} = {show(value)}: {rule}; {remedy}")

    def integer(
        self, field: str, value: object, *, minimum: int | None = None, below: int | None = None, remedy: str
    ) -> int:
        """An int, or anything with `__index__` but bools, in [minimum, below)."""
        if _is_bool(value):
            self.fail(field, value, "must be an integer, and a bool is not one", remedy)
        try:
            result = operator.index(cast(Any, value))
        except (TypeError, ValueError):
            self.fail(field, value, f"must be an integer, got {type(value).__name__}", remedy)
        if minimum is not None and result < minimum:
            self.fail(field, value, f"must be an integer >= {minimum}", remedy)
        if below is not None and result >= below:
            self.fail(field, value, f"must be an integer in [{minimum or 0}, {below})", remedy)
        return result

    def number(self, field: str, value: object, *, rule: str, remedy: str) -> float:
        """A finite real number as a float; `rule` names the range, which the caller checks."""
        if _is_bool(value) or not isinstance(value, numbers.Real):
            self.fail(field, value, f"{rule}, got {type(value).__name__}", remedy)
        try:
            result = float(value)
        except OverflowError:
            result = math.inf
        if not math.isfinite(result):
            self.fail(field, value, f"{rule}, and must be finite", remedy)
        return result

    def flag(self, field: str, value: object, *, remedy: str) -> bool:
        """A bool, and nothing that is merely truthy."""
        if not isinstance(value, bool):
            self.fail(field, value, f"must be True or False, got {type(value).__name__}", remedy)
        return value

    def member(self, field: str, value: object, kind: type[E]) -> E:
        """A member of the closed set `kind`, or its spelling."""
        if isinstance(value, str):
            try:
                return kind(value)
            except ValueError:
                pass
        remedy = f"pass {kind.__name__}.{next(iter(kind)).name} or its name"
        self.fail(field, value, f"must be one of {' | '.join(kind)}", remedy)

    def members(self, field: str, values: object, kind: type[E]) -> frozenset[E]:
        """A non-empty set of members of `kind`; a lone member counts as a set of one."""
        what = f"{kind.__name__} members"
        items = (values,) if isinstance(values, str) else self.iterable(field, values, what)
        result = frozenset(self.member(field, item, kind) for item in items)
        if not result:
            self.fail(field, values, "must name at least one member", f"choose from {' | '.join(kind)}")
        return result

    def iterable(self, field: str, value: object, what: str) -> tuple[object, ...]:
        """The items of an iterable as a tuple, through `.tolist()` where it is an array or a tensor."""
        tolist = getattr(value, "tolist", None)
        source = tolist() if callable(tolist) else value
        if not isinstance(source, str | bytes):
            try:
                return tuple(cast("Iterable[object]", source))
            except TypeError:
                pass
        rule = f"must be an iterable of {what}, got {type(value).__name__}"
        self.fail(field, value, rule, f"pass a tuple of {what}")

    def sizes(self, field: str, values: object) -> frozenset[int] | None:
        """A non-empty set of positive world sizes, or None for any."""
        if values is None:
            return None
        remedy = "pass None for any size, or a set such as {1, 2, 4}"
        items = self.iterable(field, values, "world sizes")
        if not items:
            self.fail(field, values, "must name at least one world size", remedy)
        return frozenset(self.integer(field, item, minimum=1, remedy=remedy) for item in items)

    def partition(
        self,
        field: str,
        bounds: object,
        *,
        parts: int,
        total: int,
        parts_name: str,
        total_name: str,
        remedy: str,
    ) -> tuple[tuple[int, int], ...]:
        """[start, end) of every rank in rank order: contiguous, from 0 to `total`; empty ranges are legal."""
        pairs: list[tuple[int, int]] = []
        for rank, item in enumerate(self.iterable(field, bounds, "(start, end) pairs")):
            pair = self.iterable(f"{field}[{rank}]", item, "two integers")
            if len(pair) != 2:
                self.fail(f"{field}[{rank}]", item, "must be a pair (start, end)", remedy)
            start, end = (self.integer(f"{field}[{rank}]", number, remedy=remedy) for number in pair)
            pairs.append((start, end))
        if len(pairs) != parts:
            rule = f"must hold one (start, end) per rank: {parts_name} is {parts}, got {len(pairs)}"
            self.fail(field, pairs, rule, remedy)
        expected = 0
        for rank, (start, end) in enumerate(pairs):
            if start != expected:
                rule = f"shards must tile [0, {total}): rank {rank} starts at {start}, expected {expected}"
                self.fail(field, pairs, rule, remedy)
            if end < start:
                self.fail(field, pairs, f"rank {rank} ends at {end}, before its start {start}", remedy)
            expected = end
        if expected != total:
            rule = f"shards must tile [0, {total_name} = {total}): the last one ends at {expected}"
            self.fail(field, pairs, rule, remedy)
        return tuple(pairs)

    def instance(self, field: str, value: object, kind: type[T]) -> T:
        """An instance of one contract part."""
        if not isinstance(value, kind):
            rule = f"must be of type {kind.__name__}, got {type(value).__name__}"
            self.fail(field, value, rule, f"build it with {kind.__name__}(...)")
        return value

    def backend_id(self, field: str, value: object) -> str:
        """A stripped, non-empty backend id that shadows no policy word."""
        remedy = "pass a name such as 'exact_torch'"
        if not isinstance(value, str):
            self.fail(field, value, f"must be a string, got {type(value).__name__}", remedy)
        name = value.strip()
        if not name:
            self.fail(field, value, "must not be blank", remedy)
        if name.lower() in POLICY_WORDS:
            self.fail(field, value, f"must not shadow a policy word ({', '.join(POLICY_WORDS)})", remedy)
        return name

    def modules(self, field: str, values: object) -> tuple[str, ...]:
        """Names of top-level modules, in the order given."""
        remedy = "pass top-level module names such as ('numba',)"
        items = (values,) if isinstance(values, str) else self.iterable(field, values, "module names")
        names: list[str] = []
        for item in items:
            # A dotted name would import its parents merely to be looked for.
            if not isinstance(item, str) or not item.isidentifier():
                self.fail(field, item, "must be the name of a top-level module", remedy)
            names.append(item)
        return tuple(names)


LOGPROB_RULES: Final = Rules(LogprobContractError)
LOSS_RULES: Final = Rules(LossContractError)
