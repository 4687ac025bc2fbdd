"""The groups that Inductor itself would form, as a seed of the search."""

from __future__ import annotations

import pytest
import torch

from sennit.cluster import load
from sennit.fuse.inductor_groups_torch import InductorKernel, grouping_of, inductor_groups, scheduled
from sennit.fuse.kernel_cost import Roofline
from sennit.fuse.kernel_torch import sample_inputs
from sennit.fuse.model import Channel, Grouping, StepModel
from sennit.fuse.search import SearchOptions, search
from sennit.ir.graph import Graph, Phase
from sennit.ir.strategy_check import check_strategy

# torch's own import of Inductor
quiet = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")

TEXT = """graph "step" {
  input %x : f32[64,32] "x"
  param %w : f32[32,48] "w"
  param %b : f32[48] "b"
  forward %y : f32[64,48] = aten.mm.default(%x, %w)
  forward %c : f32[64,48] = aten.mul.Tensor(%y, %b)
  forward %t : f32[64,48] = aten.tanh.default(%c)
  forward %e : f32[64,48] = aten.exp.default(%c)
  forward %p : f32[48,64] = aten.permute.default(%t, [1, 0])
  forward %m : f32[48,48] = aten.mm.default(%p, %e)
  result "m" %m
}"""


@pytest.fixture(scope="module")
def model() -> StepModel:
    graph = Graph.parse(TEXT)
    return StepModel(graph, Roofline.of(graph, load("h200x8").device), Channel(0.0, 0.0))


def names(model: StepModel, grouping: Grouping) -> set[frozenset[str]]:
    return {frozenset(model.ops[place].name for place in group) for group in grouping.groups}


@quiet
def test_a_library_call_is_alone_and_pointwise_operators_are_together(model) -> None:
    found = inductor_groups(model, lambda reads: sample_inputs(reads, model.graph.types(), "cpu"))
    groups = names(model, found)
    assert any({"c", "t", "e"} <= group for group in groups)
    assert not any({"y", "m"} & group for group in groups)
    check_strategy(model.strategy("inductor", found, ()), model.graph)


@quiet
def test_the_scheduler_names_what_it_reads_and_writes(model) -> None:
    kernels = scheduled(model, Phase.FORWARD, lambda reads: sample_inputs(reads, model.graph.types(), "cpu"))
    place = {op.name: number for number, op in enumerate(model.ops)}
    assert sum(item.is_library for item in kernels) == 2
    pointwise = [item for item in kernels if not item.is_library]
    assert all(place["y"] in item.reads for item in pointwise)
    assert {place["t"], place["e"]} <= {made for item in pointwise for made in item.writes}


def test_what_is_inlined_into_two_kernels_has_one_home_and_is_repeated(model) -> None:
    place = {op.name: number for number, op in enumerate(model.ops)}
    y, c, t, e = (place[name] for name in "ycte")
    kernels = [
        InductorKernel(frozenset([y]), frozenset([y]), is_library=True),
        InductorKernel(frozenset([c, t]), frozenset([t]), frozenset([y])),
        InductorKernel(frozenset([c, e]), frozenset([e]), frozenset([y])),
    ]
    found = grouping_of(model, kernels)
    assert names(model, found) == {frozenset("ct"), frozenset("e")}
    assert dict(found.again) == {frozenset([e]): frozenset([c])}


def test_groups_that_would_wait_for_each_other_are_not_formed(model) -> None:
    """The second product stands between what one kernel claims to hold."""
    place = {op.name: number for number, op in enumerate(model.ops)}
    everything = frozenset([place["c"], place["y"]])
    found = grouping_of(model, [InductorKernel(everything | {place["m"], place["t"]}, frozenset([place["m"]]))])
    assert model.order(found) is not None


def test_the_search_is_never_behind_its_seeds(model) -> None:
    seed = Grouping(frozenset([frozenset([1, 2, 3])]))
    options = SearchOptions(seconds=2.0, patience=20, tensors=False, across_steps=False)
    found = search(model, options, start=[seed])
    assert found.seconds <= model.step_time(seed, ()).seconds


def test_a_lone_operator_is_compiled_where_no_library_has_it(model) -> None:
    from sennit.fuse.kernel_torch import is_worth_compiling
    from sennit.ir.strategy_check import Kernel

    y, c, t, _, p, _ = (Kernel((op,)) for op in model.ops)
    assert not any(is_worth_compiling(kernel) for kernel in (y, c, p))
    assert [is_worth_compiling(kernel, lone=True) for kernel in (y, t, p)] == [False, True, False]


def test_a_copy_lies_in_order() -> None:
    from sennit.fuse.kernel_torch import kernel_module
    from sennit.ir.strategy_check import Kernel

    graph = Graph.parse(
        'graph "copy" {\n  input %x : f32[4,6] "x"\n  forward %p : f32[6,4] = aten.permute.default(%x, [1, 0])\n'
        '  forward %c : f32[6,4] = aten.clone.default(%p)\n  result "c" %c\n}'
    )
    module, _, _ = kernel_module(Kernel(graph.ops), frozenset(["c"]))
    (copy,) = module(torch.rand(4, 6))
    assert copy.is_contiguous()
