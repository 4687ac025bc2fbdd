"""Five processes, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shm_ranks import Ranks


@pytest.fixture
def mortal() -> Iterator[Ranks]:
    """Three ranks that may be killed."""
    started = Ranks(3)
    yield started
    started.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    started = Ranks(5)
    yield started
    started.close()
