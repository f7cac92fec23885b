"""What every test may ask for: a pool of real ranks that stays up for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rl_engine.mesh.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Workers start when a test first needs them, and are used again by all later ones."""
    with RankPool(16) as ranks:
        yield ranks
