"""Reduce-scatters in buckets have the bits of reduce-scatters one by one, on gloo and on our backend."""

from __future__ import annotations

import pytest
import torch
from scatter_work import SIZES, SennitRanks, both_ways, scattered

from sennit.cluster.ranks_torch import GlooRanks
from sennit.ir.layout import Reduction
from sennit.ir.mesh import Mesh
from sennit.plan import lower, propagate, zoo

RANKS = {"gloo": GlooRanks, "sennit": SennitRanks}


@pytest.mark.parametrize("backend", RANKS)
def test_an_element_has_its_bits_wherever_it_travels(backend: str) -> None:
    with RANKS[backend](3) as ranks:
        for sizes in SIZES.values():
            for dtype in (torch.float32, torch.bfloat16):
                for same, in_order in ranks.call(scattered, sizes, dtype, Reduction.SUM):
                    assert all(same), (sizes, dtype)
                    assert backend != "gloo" or all(in_order), (sizes, dtype)
        for same, in_order in ranks.call(scattered, SIZES["small"], torch.float32, Reduction.MAX):
            assert all(same)
            assert all(in_order)


@pytest.mark.parametrize("backend", RANKS)
def test_a_step_has_the_bits_of_one_by_one(backend: str, small_gpt) -> None:
    with RANKS[backend](4) as ranks:
        for level, mesh in ((2, "dp=4;mb=2"), (3, "dp=4;mb=2")):
            program = lower(propagate(zoo.zero(small_gpt.graph, Mesh.parse(mesh), level=level)))
            for different, many, few in ranks.call(both_ways, str(program), small_gpt.state):
                assert not different
                assert few < many
