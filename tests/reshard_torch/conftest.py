"""Gloo processes shared by all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sennit.cluster.ranks_torch import GlooRanks


@pytest.fixture(scope="session")
def ranks() -> Iterator[GlooRanks]:
    started = GlooRanks(6)
    yield started
    started.stop()
