"""The preflight: the ranks of an axis agree on what they are about to do, or every one of them raises.

Steps, on each axis (TP, then DP, then CP):

1. One all-gather of six int64: failed or not, SHA-256 of the fingerprint, number of axes.
2. All fine and equal: done, one collective.
3. Otherwise every rank sees the same table, so every rank takes part in a second exchange, of texts: facts
   and errors. Then every rank raises: the one that failed its own error, the others an AgreementError that
   says who and what.

It does not check tensors: a rank does that before, and brings what it found as `error=`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from rl_engine.errors import AgreementError
from rl_engine.mesh.alarm import ring_alarm
from rl_engine.mesh.axis import Axis
from rl_engine.mesh.exchange import describe_error, gather_texts
from rl_engine.mesh.transport import LostRankError, gather, sync_to_cpu

__all__ = ["Claim", "preflight", "preflight_mesh"]

_KIND = "preflight"
_DETAILS = "preflight_details"
_MAX_ERROR_TEXT = 8000
_MAX_FACT_TEXT = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What this rank claims to be about to do, as the other ranks of one axis must see it too.

    Attributes:
        axis: The mesh axis.
        fingerprint: A digest (any text) of all that must agree over the axis.
        facts: The same in readable form, for the message: {"beta": "0.04", "backend": "exact_torch"}.
    """

    axis: Axis
    fingerprint: str
    facts: Mapping[str, str] = field(default_factory=dict[str, str])


def preflight(
    axis: Axis, *, fingerprint: str, facts: Mapping[str, str], error: BaseException | None = None
) -> None:
    """Return where every rank of the axis is fine and all fingerprints are equal; else raise on every rank.

    One collective when all is well, a second one (or a third, for texts beyond 1 KiB) when it is not, none
    on an axis of one rank.

    Args:
        axis: The mesh axis.
        fingerprint: A digest of all that must agree over the axis.
        facts: The same in readable form, for the message.
        error: What this rank failed with, if it did: a rank that failed its checks still takes part.

    Raises:
        BaseException: `error` itself, on the rank that gave it.
        AgreementError: on the other ranks, naming the axis, the ranks and the fields that differ.
        LostRankError: a rank of the axis is gone.
    """
    preflight_mesh([Claim(axis=axis, fingerprint=fingerprint, facts=facts)], error=error)


def preflight_mesh(claims: Sequence[Claim], *, error: BaseException | None = None) -> None:
    """The preflight over every axis of the mesh: afterwards every rank of the whole mesh has raised, or none.

    The axes are asked in the given order (TP, DP, CP). What a rank learns on one axis it carries on to the
    next, so that the DP peers of a failed rank's TP siblings hear of it too. A claim on a later axis must
    be the same for the siblings on the earlier ones (leave out what is local to them): it is compared there
    as well, which is what makes a disagreement on DP known to every TP group.

    Args:
        claims: One per axis; axes of one rank issue nothing.
        error: What this rank failed with, if it did.

    Raises:
        BaseException: `error` itself, on the rank that gave it.
        AgreementError: on every other rank of the mesh.
        LostRankError: a rank is gone.
    """
    failure = error
    for index, claim in enumerate(claims):
        if claim.axis.size == 1:
            continue
        try:
            found = _ask(claims[index:], failure)
        except LostRankError as exc:
            found = exc
            for earlier in claims[:index]:  # they have passed already, and would wait for us in the step
                ring_alarm(earlier.axis, describe_error(exc))
        failure = failure or found
    if failure is not None:
        raise failure


def _ask(claims: Sequence[Claim], failure: BaseException | None) -> AgreementError | None:
    """One axis (the first claim's): the disagreement found on it, None where all is well."""
    axis = claims[0].axis
    digest = hashlib.sha256("\0".join(claim.fingerprint for claim in claims).encode()).digest()
    hashes = [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, 32, 8)]
    numbers = [int(failure is not None), *hashes, len(claims)]
    row = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    table = sync_to_cpu(axis, _KIND, gather(axis, _KIND, row.to(axis.wire_device())))
    rows = cast(list[list[int]], table.tolist())
    if all(row == rows[0] for row in rows) and rows[0][0] == 0:
        return None

    facts = {key: str(value) for claim in reversed(claims) for key, value in claim.facts.items()}
    mine = json.dumps(
        {
            "facts": {key: _shorten(value) for key, value in facts.items()},
            "error": describe_error(failure)[:_MAX_ERROR_TEXT] if failure is not None else None,
        }
    )
    replies = gather_texts(axis, mine, failed=failure is not None, kind=_DETAILS)
    return _disagreement(axis, rows, [json.loads(text) for _, text in replies])


def _shorten(fact: str) -> str:
    """A long fact by its beginning and a digest: two that differ stay different."""
    if len(fact) <= _MAX_FACT_TEXT:
        return fact
    return f"{fact[:_MAX_FACT_TEXT]}… (digest {hashlib.sha256(fact.encode()).hexdigest()[:8]})"


def _disagreement(axis: Axis, rows: list[list[int]], replies: list[dict[str, Any]]) -> AgreementError:
    parts: list[str] = []
    sound = [rank for rank, reply in enumerate(replies) if reply["error"] is None]
    for rank, reply in enumerate(replies):
        if reply["error"] is not None:
            parts.append(f"{axis.describe_rank(rank)} failed its own checks: {reply['error']}")
    if len({tuple(rows[rank][1:]) for rank in sound}) > 1:
        facts = {rank: replies[rank]["facts"] for rank in sound}
        keys = dict.fromkeys(key for rank in sound for key in facts[rank])
        differing = [key for key in keys if len({facts[rank].get(key) for rank in sound}) > 1]
        for key in differing:
            parts.append(f"{key}: " + _by_value(axis, {rank: facts[rank].get(key) for rank in sound}))
        if not differing:
            digests = {rank: f"{rows[rank][1] & 0xFFFFFFFF:08x}" for rank in sound}
            parts.append("a field that is not among the readable facts; digest: " + _by_value(axis, digests))
    return AgreementError(
        f"the ranks of the {axis.name} axis do not agree, and nothing was computed: {'; '.join(parts)}; "
        f"every rank of this axis must be given the same request"
    )


def _by_value(axis: Axis, values: Mapping[int, str | None]) -> str:
    """Who has what, ranks with one value together: "rank 0 (global rank 0) has 0.0, rank 1 … has 0.04"."""
    ranks_of: dict[str | None, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(
        f"{_name_ranks(axis, ranks)} {'has' if len(ranks) == 1 else 'have'} "
        f"{'nothing' if value is None else value}"
        for value, ranks in ranks_of.items()
    )


def _name_ranks(axis: Axis, ranks: list[int]) -> str:
    if len(ranks) == 1:
        return axis.describe_rank(ranks[0])
    return f"ranks {ranks} (global ranks {[axis.ranks[rank] for rank in ranks]})"
