"""Layouts: how one batch is cut over TP × DP ranks, deliberately neither even nor aligned.

Legend: V padded vocabulary, S sequences of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from rl_engine.errors import InputError

__all__ = ["SINGLE", "Layout", "layout_matrix", "parse_degrees"]

# Relative widths of neighbouring vocabulary shards where they shall differ: coprime, so that cuts fall
# anywhere.
_WIDTHS = (5, 3, 4, 7)


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """A TP degree and a DP degree.

    Attributes:
        tp: Vocabulary shards.
        dp: Sequence shards.

    Example:
        >>> Layout(2, 3).world_size, str(Layout(2, 3))
        (6, 'tp 2 × dp 3')
    """

    tp: int
    dp: int

    def __post_init__(self) -> None:
        for name, degree in (("tp", self.tp), ("dp", self.dp)):
            if degree < 1:
                raise InputError(f"the {name} degree of a layout is {degree}, expected at least 1")

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return self.tp * self.dp

    def vocab_bounds(self, vocab: int, *, multiple_of: int | None = None) -> tuple[tuple[int, int], ...]:
        """[start, end) of every vocabulary shard.

        Args:
            vocab: V, the columns to cut.
            multiple_of: None cuts shards of different widths at odd columns; a number cuts equal shards of
                such a multiple, as a tiled backend needs them.

        Returns:
            A contiguous partition of [0, V), one range a TP rank. Ranks may be left empty.

        Example:
            >>> Layout(3, 1).vocab_bounds(100)
            ((0, 41), (41, 67), (67, 100))
        """
        if multiple_of is not None:
            width = -(-vocab // (self.tp * multiple_of)) * multiple_of
            cuts = [min(part * width, vocab) for part in range(self.tp + 1)]
            return tuple(pairwise(cuts))
        widths = [_WIDTHS[part % len(_WIDTHS)] for part in range(self.tp)]
        total = sum(widths)
        inner = [min(vocab * part // total | 1, vocab) for part in accumulate(widths[:-1])]
        return tuple(pairwise([0, *inner, vocab]))

    def sequence_bounds(self, num_sequences: int) -> tuple[tuple[int, int], ...]:
        """[start, end) of every sequence shard; sizes differ by one where the degree does not divide S.

        Example:
            >>> Layout(1, 3).sequence_bounds(8)
            ((0, 3), (3, 6), (6, 8))
        """
        whole, rest = divmod(num_sequences, self.dp)
        return tuple(pairwise(part * whole + min(part, rest) for part in range(self.dp + 1)))

    def __str__(self) -> str:
        return f"tp {self.tp} × dp {self.dp}"


SINGLE = Layout(1, 1)
"""The layout that all others are compared with."""


def layout_matrix(tp: Iterable[int], dp: Iterable[int]) -> tuple[Layout, ...]:
    """Every combination, DP the slower one.

    Example:
        >>> [str(layout) for layout in layout_matrix((1, 2), (1,))]
        ['tp 1 × dp 1', 'tp 2 × dp 1']
    """
    tensor, data = tuple(dict.fromkeys(tp)), tuple(dict.fromkeys(dp))
    return tuple(Layout(t, d) for d in data for t in tensor)


def parse_degrees(text: str, name: str = "degrees") -> tuple[int, ...]:
    """The degrees in a comma-separated text.

    Raises:
        InputError: something in it is no positive integer.

    Example:
        >>> parse_degrees("1,2,4")
        (1, 2, 4)
    """
    try:
        degrees = tuple(int(part) for part in text.split(","))
    except ValueError:
        degrees = ()
    if not degrees or min(degrees) < 1:
        raise InputError(f"{name} is {text!r}, expected positive integers between commas, such as 1,2,4")
    return degrees
