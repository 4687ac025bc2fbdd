"""Real families on real ranks, a small part of `benchmarks/plan/families.py`: three steps equal the unsplit model,
dropout on.
"""

from __future__ import annotations

import importlib.util

import pytest

from sennit.cluster.ranks_torch import GlooRanks
from sennit.testing.family_parity_torch import family_reference, family_run

ROUNDING = 1e-12
needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: pip install sennit[hf]"
)


@needs_transformers
@pytest.mark.parametrize(("name", "how"), [("gpt2", "pipeline"), ("vit", "tensor"), ("resnet", "data")])
def test_three_steps(name: str, how: str, two: GlooRanks) -> None:
    reference = family_reference(name)
    for run in two.call(family_run, name, how):
        assert run.record.difference(reference) <= ROUNDING
