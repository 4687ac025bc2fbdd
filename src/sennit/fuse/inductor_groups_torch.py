"""The groups that Inductor itself would form: a seed of the search, so that its result is never behind the compiler's
default in its own costs.

A phase of the step is handed to Inductor as one graph. Its scheduler fuses, and is stopped before it writes any code;
each kernel that it made says from which nodes of the graph it came (`from_node`, kept through decompositions and
pattern passes). From that:

    home of an operator       the kernel that writes its result; else the first one that computes it
    group                     operators of one home
    again                     pointwise operators and views that a kernel computes although their home is another: what Inductor inlines into several readers. What it reads from
                              memory, and what lies behind that, it does not compute

A library call is the home of its product alone: what it lists beside that was computed by others before it. An operator
that Inductor decomposes into parts of several kernels (the backward pass of a norm) is whole in its home here, and
compiled again there: such a group is several kernels. Groups that would wait for each other are not formed, so the
grouping is always legal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx

from sennit.fuse.kernel_set import KernelSet, Limits
from sennit.fuse.kernel_torch import compile_kernel, kernel_module, nodes_of
from sennit.fuse.model import Grouping, StepModel
from sennit.fuse.operator_class import Class
from sennit.ir.graph import Phase

__all__ = ["COMPILER", "InductorKernel", "grouping_of", "inductor_groups", "scheduled"]

COMPILER = Limits(size=1 << 20, repeats=1 << 20, regions=True)


@dataclass(frozen=True, slots=True)
class InductorKernel:
    """Operators, by their number in the step, that a kernel computes, those whose results it writes, and those whose
    results it reads from memory.

    `is_library` is a call that Inductor does not write; `is_nothing` a buffer whose parts others write in place, as
    those of a concatenation.
    """

    computes: frozenset[int]
    writes: frozenset[int]
    reads: frozenset[int] = frozenset()
    is_library: bool = False
    is_nothing: bool = False


class _SeenError(Exception):
    """Thrown out of the scheduler: it has fused, and nothing is to be written."""


def inductor_groups(model: StepModel, values: Callable[[Sequence[str]], list[Tensor]]) -> Grouping:
    """Inductor's groups of each phase of the step.

    `values` gives tensors for names of values; only how they lie and where matters.
    """
    found: list[InductorKernel] = []
    for phase in dict.fromkeys(model.phase):
        found += scheduled(model, phase, values)
    return grouping_of(model, found)


def scheduled(model: StepModel, phase: Phase, values: Callable[[Sequence[str]], list[Tensor]]) -> list[InductorKernel]:
    """The kernels that Inductor's scheduler makes of a phase, in its order."""
    from torch._inductor import config

    places = sorted(place for place, its in enumerate(model.phase) if its is phase)
    kernel, written = model.question(frozenset(places))
    inputs = values(kernel.reads)
    device = next((value.device for value in inputs), torch.device("cpu"))
    module, _, _ = kernel_module(kernel, written, device)
    number: dict[str, int] = {}
    for place, node in zip(places, nodes_of(module), strict=True):
        node._rename(f"sennit_operator_{place}")  # a name that no other pass gives
        number[node.name] = place
    module.recompile()
    seen: list[InductorKernel] = []

    def look(scheduler_nodes: list[Any]) -> list[Any]:
        seen.extend([_kernel(item, number) for item in scheduler_nodes])
        raise _SeenError

    # a graph that is in the cache would not come to the scheduler
    with config.patch(_post_fusion_custom_pass=look, fx_graph_cache=False):
        try:
            compile_kernel(module, inputs)
        except Exception as error:  # Inductor wraps what its passes raise in an error of its own
            if not _is_ours(error):
                raise
    return seen


def _is_ours(error: BaseException | None) -> bool:
    """Whether an error is, or was made of, the one that ends a compilation once its kernels are seen."""
    while error is not None and not isinstance(error, _SeenError):
        error = error.__cause__ or error.__context__
    return error is not None


def _kernel(item: Any, number: Mapping[str, int]) -> InductorKernel:
    from torch._inductor.virtualized import V

    buffers = [node.node for node in item.get_nodes() if node.node is not None]
    computes = {place for buffer in buffers for place in _places(buffer.get_origins(), number)}
    writes = {place for buffer in buffers for place in _result(buffer, number)}
    behind = [V.graph.name_to_buffer.get(read.name) for read in item.read_writes.reads]  # None for inputs
    reads = {place for buffer in behind if buffer is not None for place in _result(buffer, number)}
    kinds = {type(node).__name__ for node in item.get_nodes()}
    return InductorKernel(
        frozenset(computes),
        frozenset(writes & computes),
        frozenset(reads - writes),
        bool(item.is_extern()),
        kinds == {"NopKernelSchedulerNode"},
    )


def _result(buffer: Any, number: Mapping[str, int]) -> list[int]:
    """The operator whose result a buffer holds."""
    node = buffer.get_origin_node()
    found = list(_places([node], number)) if node is not None else []
    return found or sorted(_places(buffer.get_origins(), number))[-1:]


def _places(nodes: Iterable[fx.Node], number: Mapping[str, int]) -> Iterator[int]:
    for node in nodes:
        for source in _sources(node.meta.get("from_node", ())):
            if source in number:
                yield number[source]


def _sources(found: Iterable[Any]) -> Iterator[str]:
    for source in found:
        yield source.name
        yield from _sources(source.from_node)


def grouping_of(model: StepModel, found: Sequence[InductorKernel]) -> Grouping:
    """Those kernels as groups of the step, as far as that is legal."""
    home = _homes(model, found)
    kernels = KernelSet(model, Grouping(), COMPILER)
    members: dict[int, list[int]] = {}
    for place, number in sorted(home.items()):
        members.setdefault(number, []).append(place)
    for places in members.values():
        for one, other in pairwise(places):
            kernels.fuse(one, other)
    for number, item in enumerate(found):
        if number not in members or item.is_library:
            continue
        if item.is_nothing:  # its parts are written by the kernels that make them
            for place in members[number]:
                for read in model.reads[place]:
                    if not found[home.get(read, number)].is_library:
                        kernels.fuse(read, place)
        else:
            _repeat(model, kernels, members[number][-1], item)
    return kernels.grouping()


def _homes(model: StepModel, found: Sequence[InductorKernel]) -> dict[int, int]:
    """Of the kernels that compute an operator: one that writes it, with the most of its neighbours, the first of
    equals.
    """
    candidates: dict[int, list[int]] = {}
    for number, item in enumerate(found):
        if item.is_library:  # what it lists beside its own call came before it
            own = [place for place in item.computes if model.kind[place] in (Class.PRODUCT, Class.OTHER)]
            places = [max(own)] if own else []
        else:
            places = sorted(item.writes if item.is_nothing else item.computes)
        for place in places:
            candidates.setdefault(place, []).append(number)

    def rank(place: int, number: int) -> tuple[bool, int, int]:
        around = (*model.reads[place], *model.readers[place])
        return place in found[number].writes, sum(other in found[number].computes for other in around), -number

    home = {place: max(numbers, key=lambda n: rank(place, n)) for place, numbers in candidates.items()}
    for place in range(len(model.ops) - 1, -1, -1):
        # a constant, or what a pattern pass rewrote, leaves no trace: it goes with the first that reads it
        if place not in home and model.kind[place] is Class.POINTWISE:
            first = next((home[reader] for reader in model.readers[place] if reader in home), None)
            if first is not None and not found[first].is_library:
                home[place] = first
    return home


def _repeat(model: StepModel, kernels: KernelSet, reader: int, item: InductorKernel) -> None:
    """What is inlined: from the readers backwards, up to what is read from memory."""
    waiting = sorted({read for place in kernels.kernel(reader)[0] for read in model.reads[place]})
    seen: set[int] = set()
    while waiting:
        place = waiting.pop()
        if place in seen or place in item.reads or place not in item.computes:
            continue
        seen.add(place)
        group, again = kernels.kernel(reader)
        if place not in group | again and not kernels.repeat(reader, place):
            continue
        waiting += model.reads[place]
