"""The pipeline from end to end, and what it says when the pieces do not fit together."""

from __future__ import annotations

import pytest

from sennit.cluster import load
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.errors import ClusterError
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.ir.timeline import Origin
from sennit.pipeline import compile_graph, compile_model
from sennit.plan import data_parallel, pipeline


def test_every_value_is_kept() -> None:
    config = GPTConfig(vocabulary=32, context=8, width=16, heads=2, layers=2)
    made = compile_model(GPT(config), random_batch(config, 4), data_parallel, Mesh.parse("dp=4"), load("dgx-a100"))
    assert made.plan.graph is made.graph
    assert made.decisions.plan is made.plan
    assert Program.parse(str(made.program)) == made.program
    assert made.timeline.origin is Origin.SIMULATED
    assert made.timeline.devices == (0, 1, 2, 3)
    assert made.timeline.critical_path()


def test_a_mesh_larger_than_the_cluster(small_gpt) -> None:
    with pytest.raises(ClusterError) as caught:
        compile_graph(small_gpt.graph, data_parallel, Mesh.parse("dp=16"), load("dgx-h100"))
    message = str(caught.value)
    assert "mesh dp=16" in message
    assert "16" in message
    assert "8 devices (1 node of 8)" in message
    assert "fix:" in message


def test_a_pipeline_has_a_bubble_and_less_memory_per_device(small_gpt) -> None:
    def staged(graph, mesh):
        return pipeline(graph, mesh, layers=("blocks.0", "blocks.1"))

    whole = compile_graph(small_gpt.graph, data_parallel, Mesh.parse("dp=1"), load("dgx-h100"))
    split = compile_graph(small_gpt.graph, staged, Mesh.parse("pp=2;mb=4"), load("dgx-h100"))
    assert split.timeline.peak_memory(0) < whole.timeline.peak_memory(0)
    assert split.timeline.idle(0) > 0
    assert split.timeline.wire_bytes() > 0
    assert whole.timeline.wire_bytes() == 0
