"""Operators that write over an operand: the pass says which may, and a program that does gives the bits of one that
does not.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.fuse.in_place_torch import IN_PLACE, overwriting
from sennit.fuse.kernel_torch import call_of, operator_of, results_of
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Op, Phase, Ref, Value
from sennit.ir.strategy_check import Kernel

SHAPE = (3, 3)
KINDS = (
    "aten.add.Tensor",
    "aten.mul.Tensor",
    "aten.sub.Tensor",
    "aten.permute.default",
    "aten.view.default",
    "aten.tanh.default",
    "aten.mm.default",
)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Op], frozenset[str]]:
    """Operators on square tensors, two of which come from outside, and values that are kept."""
    made = ["x", "y"]
    ops: list[Op] = []
    for place in range(draw(st.integers(1, 10))):
        kind, left, right = draw(st.sampled_from(KINDS)), draw(st.sampled_from(made)), draw(st.sampled_from(made))
        match kind:
            case "aten.permute.default":
                args = (Ref(left), (1, 0))
            case "aten.view.default":
                args = (Ref(left), SHAPE)
            case "aten.tanh.default":
                args = (Ref(left),)
            case _:
                args = (Ref(left), Ref(right))
        result = Value(f"v{place}", TensorType(DType.F32, SHAPE))
        ops.append(Op(kind, args, (), (result,), Phase.BACKWARD))
        made.append(result.name)
    return ops, frozenset(draw(st.sets(st.sampled_from(made), max_size=3)))


def run(ops: list[Op], over: frozenset[str], kept: frozenset[str]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(SHAPE, generator=generator) for name in ("x", "y")}
    seen: dict[str, torch.Tensor] = {}
    last = {name: place for place, op in enumerate(ops) for name in op.reads}
    for place, op in enumerate(ops):
        target, args, kwargs = call_of(op, values, torch.device("cpu"))
        target = operator_of(IN_PLACE[op.kind]) if op.name in over else target
        values.update(results_of(op, target(*args, **kwargs)))
        if last.get(op.name, place) == place:  # nothing reads it: what it is worth is seen at once
            seen[op.name] = values[op.name].clone()
    return seen | {name: values[name] for name in kept | {"x", "y"}}


@settings(derandomize=True, deadline=None, max_examples=300)
@given(programs())
def test_a_program_that_overwrites_gives_the_same_bits(drawn: tuple[list[Op], frozenset[str]]) -> None:
    ops, kept = drawn
    types = {name: TensorType(DType.F32, SHAPE) for name in ("x", "y", *(op.name for op in ops))}
    over = overwriting([Kernel((op,), frozenset()) for op in ops], kept, types)
    expected, found = run(ops, frozenset(), kept), run(ops, over, kept)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name])


def test_a_sum_of_many_is_written_over_the_first() -> None:
    kind = TensorType(DType.F32, SHAPE)

    def op(name: str, what: str, *reads: str) -> Op:
        return Op(what, tuple(map(Ref, reads)), (), (Value(name, kind),), Phase.BACKWARD)

    ops = [
        *(op(f"g{place}", "aten.mm.default", "x", "y") for place in range(3)),
        op("s1", "aten.add.Tensor", "g0", "g1"),
        op("s2", "aten.add.Tensor", "s1", "g2"),
        op("s3", "aten.add.Tensor", "x", "s2"),
    ]
    types = dict.fromkeys(("x", "y", *(item.name for item in ops)), kind)
    kernels = [Kernel((item,), frozenset()) for item in ops]
    assert overwriting(kernels, {"s3"}, types) == {"s1", "s2"}
    assert overwriting(kernels, {"s1", "s3"}, types) == {"s1"}
    assert overwriting(kernels, {"s3"}, types, whole={"s1"}) == frozenset()
