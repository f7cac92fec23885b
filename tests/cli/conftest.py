"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest

from rl_engine.cli.demo.policy import Policy
from tests.cli.tiny import tiny_policy


@pytest.fixture
def policy() -> Policy:
    return tiny_policy()
