"""Memory that values may share: by its definition, and never less than torch shares."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.kernels.aliases_torch import may_share
from sennit.kernels.shared_memory import SharedMemory, Touch

KINDS = {  # by the operands that they take
    "aten.add.Tensor": 2,
    "aten.clone.default": 1,
    "aten.expand.default": 1,
    "aten.permute.default": 1,
    "aten.relu.default": 1,
    "aten.split.Tensor": 1,
    "aten.view.default": 1,
}
ARGUMENTS = {
    "aten.expand.default": ([4, 4],),
    "aten.permute.default": ([1, 0],),
    "aten.split.Tensor": (4,),
    "aten.view.default": ([4, 4],),
}


@st.composite
def lines(draw: st.DrawFn) -> list[tuple[str, Touch]]:
    """Operators on tensors of 4 x 4, two of which come from outside."""
    made, line = ["x", "y"], list[tuple[str, Touch]]()
    for place in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(sorted(KINDS)))
        reads = tuple(draw(st.sampled_from(made)) for _ in range(KINDS[kind]))
        line.append((kind, Touch(reads, (f"v{place}",), may_share(kind))))
        made.append(f"v{place}")
    return line


def lies_in(line: list[Touch], name: str) -> set[str]:
    """The definition, read backwards from the value."""
    found = {name}
    for touch in line:
        if name in touch.results and touch.shares:
            for read in touch.reads:
                found |= lies_in(line, read)
    return found


@settings(derandomize=True, deadline=None, max_examples=200)
@given(lines())
def test_it_is_its_definition(drawn: list[tuple[str, Touch]]) -> None:
    line = [touch for _, touch in drawn]
    memory = SharedMemory(line)
    names = ["x", "y", *(name for touch in line for name in touch.results)]
    for name in names:
        assert memory.under(name) == lies_in(line, name)
    for place, touch in enumerate(line):
        for name in names:
            later = {read for other in line[place + 1 :] for read in other.reads}
            others = list(touch.reads)
            if name in others:
                others.remove(name)
            seen = [read for read in (*later, *others) if lies_in(line, read) & lies_in(line, name)]
            assert memory.is_last_look(name, place) == (name in touch.reads and not seen)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(lines())
def test_torch_shares_no_more(drawn: list[tuple[str, Touch]]) -> None:
    values = {"x": torch.randn(4, 4), "y": torch.randn(4, 4)}
    memory = SharedMemory(touch for _, touch in drawn)
    for kind, touch in drawn:
        name, overload = kind.split(".")[1:]
        name, overload = ("reshape", "default") if name == "view" else (name, overload)  # as we call it
        target = getattr(getattr(torch.ops.aten, name), overload)
        result = target(*(values[read] for read in touch.reads), *ARGUMENTS.get(kind, ()))
        values[touch.results[0]] = result[0] if isinstance(result, list) else result
    pointers = {name: value.untyped_storage().data_ptr() for name, value in values.items()}
    for one in values:
        for other in values:
            if pointers[one] == pointers[other]:
                assert not memory.under(one).isdisjoint(memory.under(other))
