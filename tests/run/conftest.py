"""Gloo processes shared by the tests of this folder. What capture imports is loaded once, before they fork."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sennit.cluster.ranks_torch import GlooRanks

PRELOAD = (
    "sennit.run.parallelize",
    "torch.export",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "parallelize_work",
)


@pytest.fixture(scope="session")
def four() -> Iterator[GlooRanks]:
    with GlooRanks(4, preload=PRELOAD) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def two() -> Iterator[GlooRanks]:
    with GlooRanks(2, preload=PRELOAD) as ranks:
        yield ranks
