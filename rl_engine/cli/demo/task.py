"""Four arithmetic questions whose answers are graded by rule."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["QUESTIONS", "Question", "grade"]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

# The parts of a grade. They add up to 1 for a finished completion whose last number is the answer.
_EXACT = 0.9  # the last number is the answer
_MENTIONED = 0.5  # the answer is there, but another number has the last word
_NEAR = 0.4  # an upper bound, scaled by how near the last number is
_FINISHED = 0.1  # the completion ended by itself


@dataclass(frozen=True, slots=True)
class Question:
    """A question in words, with the number that answers it."""

    text: str
    answer: int


QUESTIONS = (
    Question("What is 17 + 25?", 42),
    Question("What is 48 - 19?", 29),
    Question("What is 9 * 6?", 54),
    Question("What is 63 / 7?", 9),
)
"""The prompts of the demo: each is something that the model gets right some of the time."""


def grade(completion: str, answer: int, *, finished: bool) -> float:
    """Grade a completion between 0 and 1, so that a group of samples rarely has one grade only.

    Args:
        completion: What the model wrote, without the prompt.
        answer: The right number.
        finished: Whether the completion ended by itself rather than at the token limit.

    Returns:
        0.9 where the last number is the answer, 0.5 where the answer is only mentioned, up to 0.4 by the
        relative distance of the last number, 0 without any number; and 0.1 more where the completion with a
        number is finished.

    Example:
        >>> grade("17 + 25 = 42.", 42, finished=True)
        1.0
        >>> grade("17 + 25 = 32", 42, finished=True) < grade("17 + 25 = 41", 42, finished=True) < 0.5
        True
        >>> grade("I am not sure.", 42, finished=True)
        0.0
    """
    numbers = [float(text) for text in _NUMBER.findall(completion.replace(",", ""))]
    if not numbers:
        return 0.0
    if numbers[-1] == answer:
        score = _EXACT
    elif answer in numbers:
        score = _MENTIONED
    else:
        distance = abs(numbers[-1] - answer) / max(1, abs(answer))
        score = _NEAR * max(0.0, 1.0 - distance)
    return score + (_FINISHED if finished else 0.0)
