"""Plans on GPUs, with NCCL between the ranks: the same three steps as on gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sennit.cluster.ranks_torch import NcclRanks
from sennit.testing.family_parity_torch import family_reference, family_run

GPUS = torch.cuda.device_count()


@pytest.fixture(scope="module")
def ranks() -> Iterator[NcclRanks]:
    if not GPUS:
        pytest.skip("there is no GPU")
    if GPUS < 2 and torch.cuda.nccl.version() < (2, 30):
        pytest.skip("one GPU, and this NCCL takes one rank on a GPU")
    with NcclRanks(2, timeout=300.0) as started:
        yield started


@pytest.mark.parametrize("how", ["data", "tensor", "pipeline"])
def test_three_steps_on_gpus(ranks: NcclRanks, how: str) -> None:
    whole = family_reference("gpt2", "cuda")
    for answer in ranks.call(family_run, "gpt2", how):
        assert answer.record.difference(whole) < 1e-12
