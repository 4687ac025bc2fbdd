"""Gloo processes shared by the tests of this folder. What capture imports is loaded once, before they fork."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sennit.cluster.ranks_torch import GlooRanks

TIMEOUT = 280.0  # a busy machine is slow, a rank that hangs is found by pytest
PRELOAD = (
    "sennit.run.parallelize",
    "torch.export",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "parallelize_work",
)


@pytest.fixture(scope="session")
def four() -> Iterator[GlooRanks]:
    with GlooRanks(4, timeout=TIMEOUT, preload=PRELOAD) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two() -> Iterator[GlooRanks]:
    with GlooRanks(2, timeout=TIMEOUT, preload=PRELOAD) as ranks:
        yield ranks
