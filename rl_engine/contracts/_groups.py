"""Validators of groups: offsets, and the sizes that builders turn into offsets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from rl_engine.contracts._checks import LOSS_RULES

__all__ = ["checked_boundaries", "sizes_of_groups"]


def checked_boundaries(field: str, boundaries: object, total: int) -> tuple[int, ...]:
    """CSR offsets of groups that rise strictly from 0 to `total`."""
    rules = LOSS_RULES
    remedy = "pass offsets such as (0, 4, 8); LossShardingSpec.even(..., group_size=4) builds them"
    items = rules.iterable(field, boundaries, "integers")
    offsets = tuple(
        rules.integer(f"{field}[{place}]", item, remedy=remedy) for place, item in enumerate(items)
    )
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != total:
        rules.fail(field, offsets, f"must rise from 0 to num_sequences = {total}", remedy)
    for group, (start, end) in enumerate(pairwise(offsets)):
        if end <= start:
            rules.fail(field, offsets, f"must rise strictly: group {group} is [{start}, {end})", remedy)
    return offsets


def sizes_of_groups(
    name: str, total: int, group_size: int | None, group_sizes: Iterable[int] | None
) -> tuple[int, ...]:
    """The size of every group of `total` sequences: equal ones, given ones, or one group."""
    rules = LOSS_RULES
    if group_size is not None and group_sizes is not None:
        rules.fail(
            f"{name} group_size", group_size, "must be left out when group_sizes is given", "pass one of them"
        )
    if group_sizes is not None:
        remedy = f"pass sizes that add up to {total}"
        items = rules.iterable(f"{name} group_sizes", group_sizes, "integers")
        sizes = tuple(rules.integer(f"{name} group_sizes", item, minimum=1, remedy=remedy) for item in items)
        if sum(sizes) != total:
            rules.fail(
                f"{name} group_sizes",
                sizes,
                f"must add up to num_sequences = {total}, got {sum(sizes)}",
                remedy,
            )
        return sizes
    if group_size is None:
        return (total,)
    remedy = "pass group_sizes=(...) for groups of different sizes"
    size = rules.integer(f"{name} group_size", group_size, minimum=1, remedy=remedy)
    if total % size:
        rules.fail(f"{name} group_size", size, f"must divide num_sequences = {total}", remedy)
    return (size,) * (total // size)
