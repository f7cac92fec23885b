"""A process that flushes subnormals is refused, since its bits would differ from the others'."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import rl_engine
from rl_engine.errors import InputError


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    yield
    torch.set_flush_denormal(False)


def call_logprobs() -> object:
    return rl_engine.selected_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.long))


def call_policy_loss() -> object:
    return rl_engine.policy_loss(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), mask=torch.ones(1, 2))


@pytest.mark.parametrize("call", [call_logprobs, call_policy_loss])
@pytest.mark.usefixtures("flushing")
def test_flushing_is_refused(call: object) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=r"flushes subnormals to zero.*torch\.set_flush_denormal\(False\)"):
        call()


def test_the_usual_mode_is_not() -> None:
    call_logprobs()
    call_policy_loss()
