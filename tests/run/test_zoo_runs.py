"""Plans of the zoo on real ranks: three steps equal the unsplit model, dropout on."""

from __future__ import annotations

import importlib.util

import pytest

from sennit.cluster.ranks_torch import GlooRanks
from sennit.testing.family_parity_torch import family_reference, family_run

ROUNDING = 1e-12


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install sennit[hf]"
)
@pytest.mark.filterwarnings("default")  # those of the libraries
@pytest.mark.parametrize(("name", "how"), [("gpt2", "co-shard"), ("gpt2", "context"), ("mixtral batch", "experts")])
def test_three_steps(name: str, how: str, two: GlooRanks) -> None:
    reference = family_reference(name)
    for run in two.call(family_run, name, how):
        assert run.record.difference(reference) <= ROUNDING
