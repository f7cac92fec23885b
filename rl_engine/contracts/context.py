"""How a sequence is cut over the context-parallel ranks: which token ranges each of them holds."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from rl_engine.contracts._checks import LOSS_RULES

__all__ = ["ContextSplit", "context_ranges"]


class ContextSplit(StrEnum):
    """Which of the equal chunks of a sequence a context-parallel rank holds.

    `contiguous`: rank i of n holds chunk i of n. `zigzag`: rank i holds the chunks i and 2n − 1 − i of 2n, so
    that causal attention costs every rank the same.
    """

    CONTIGUOUS = "contiguous"
    ZIGZAG = "zigzag"


def context_ranges(
    length: int, cp_rank: int, cp_world_size: int, split: ContextSplit | str = ContextSplit.CONTIGUOUS
) -> tuple[tuple[int, int], ...]:
    """The token ranges [start, end) of a sequence that one context-parallel rank holds, in its row order.

    Chunks are ⌈length / number of chunks⌉ tokens wide, as `torch.chunk` cuts; the last ones may be shorter or
    empty. Trainers whose attention needs equal chunks pad sequences to a multiple of their number first.

    Args:
        length: Token slots of the sequence.
        cp_rank: The rank, in [0, cp_world_size).
        cp_world_size: Size of the context-parallel axis.
        split: Which chunks a rank holds.

    Returns:
        One range (`contiguous`) or two (`zigzag`).

    Raises:
        LossContractError: A number is out of range, or the split is unknown.

    Example:
        >>> context_ranges(16, 1, 2, "zigzag"), context_ranges(10, 2, 3)
        (((4, 8), (8, 12)), ((8, 10),))
    """
    rules, name = LOSS_RULES, "context_ranges"
    slots = rules.integer(f"{name} length", length, minimum=0, remedy="pass the token slots of the sequence")
    world: Any = {"minimum": 1, "remedy": "pass the size of the process group"}
    size = rules.integer(f"{name} cp_world_size", cp_world_size, **world)
    remedy = "pass this process's rank in the group"
    rank = rules.integer(f"{name} cp_rank", cp_rank, minimum=0, below=size, remedy=remedy)
    kind = rules.member(f"{name} split", split, ContextSplit)
    zigzag = kind is ContextSplit.ZIGZAG
    parts = 2 * size if zigzag else size
    width = -(-slots // parts)
    chunks = (rank, parts - 1 - rank) if zigzag else (rank,)
    return tuple((min(c * width, slots), min((c + 1) * width, slots)) for c in chunks)
