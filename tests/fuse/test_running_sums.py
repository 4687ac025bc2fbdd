"""Sums whose terms are not written first: what is found in a program, and that the bits are those of the sum written
out, signs of zeros included.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sennit.capture import capture
from sennit.fuse.gradient_order import gradients_first
from sennit.fuse.in_place_torch import handed_on, overwriting
from sennit.fuse.kernel_torch import call_of, results_of
from sennit.fuse.products_torch import ProductSum, RowBlocks, added_at, from_zeros
from sennit.fuse.program_torch import StepProgram
from sennit.fuse.running_sums import ProductTerm, SliceStart, SliceTerm, running_sums
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Op, OutputKind, Phase, Ref, Role, Value
from sennit.ir.strategy import Bucket, Part, Strategy
from sennit.ir.strategy_check import Kernel

ROWS, WIDTH, INNER, POSITIONS = 128, 128, 2, 4
SQUARE, SLICED = (ROWS, WIDTH), (POSITIONS, 3)


def op(name: str, kind: str, shape: tuple[int, ...], *args: Any) -> Op:
    return Op(kind, args, (), (Value(name, TensorType(shape, DType.F32)),), Phase.BACKWARD)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Op], list[str]]:
    """A sum of products, of slices, or of other values, some of them read twice; and what is kept."""
    ops: list[Op] = []
    is_sliced = draw(st.booleans())
    shape = SLICED if is_sliced else SQUARE
    terms: list[str] = []
    for place in range(draw(st.integers(2, 5))):
        name, given = f"t{place}", f"x{draw(st.integers(0, 2))}"
        if is_sliced:
            index = draw(st.integers(-1, POSITIONS - 1))
            ops.append(op(name, "aten.select_backward.default", shape, Ref(f"g{place}"), SLICED, 0, index))
        elif draw(st.booleans()):
            ops.append(op(f"m{place}", "aten.mm.default", shape, Ref("left"), Ref("right")))
            ops.append(op(f"p{place}", "aten.permute.default", (WIDTH, ROWS), Ref(f"m{place}"), (1, 0)))
            ops.append(op(name, "aten.permute.default", shape, Ref(f"p{place}"), (1, 0)))
        else:
            ops.append(op(name, "aten.neg.default", shape, Ref(given)))
        terms.append(name)
        if place:
            ops.append(op(f"s{place}", "aten.add.Tensor", shape, Ref(terms[-2]), Ref(name)))
            terms[-1] = f"s{place}"
    if draw(st.booleans()):
        ops.append(op("again", "aten.neg.default", shape, Ref(draw(st.sampled_from([item.name for item in ops])))))
    return ops, [ops[-1].name, terms[-1], *draw(st.lists(st.sampled_from(terms), max_size=1))]


def values(zeros: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = {f"x{place}": torch.randn(SQUARE, generator=generator) for place in range(3)}
    made |= {f"g{place}": torch.randn(SLICED[1:], generator=generator) for place in range(5)}
    if zeros:
        made |= {f"g{place}": torch.tensor([-0.0, 0.0, -0.0]) for place in range(5)}
    return made | {
        "left": torch.randn(ROWS, INNER, generator=generator),
        "right": torch.randn(INNER, WIDTH, generator=generator),
    }


def run(ops: list[Op], terms: dict[str, Any], kept: list[str], zeros: bool) -> list[Tensor]:
    """Twice: the first time is that in which products compare both ways."""
    sums = {name: ProductSum() for name in terms}
    for _ in range(2):
        held = values(zeros)
        for item in ops:
            match terms.get(item.name, item):
                case None:
                    continue
                case ProductTerm(total, left, right):
                    held[item.name] = sums[item.name](held[total], held[left], held[right])
                case SliceTerm(total, of, dim, index):
                    held[item.name] = added_at(held[total], held[of], dim, index)
                case SliceStart(of, shape, dim, index):
                    held[item.name] = from_zeros(held[of], shape, dim, index)
                case _:
                    target, args, kwargs = call_of(item, held, torch.device("cpu"))
                    held.update(results_of(item, target(*args, **kwargs)))
    return [held[name] for name in kept]


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.int32)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(programs(), st.booleans())
def test_terms_that_are_not_written_give_the_same_bits(drawn: tuple[list[Op], list[str]], zeros: bool) -> None:
    ops, kept = drawn
    kernels = [Kernel((item,), frozenset()) for item in ops]
    types = {name: TensorType(tuple(value.shape), DType.F32) for name, value in values(zeros).items()}
    types |= {item.name: item.results[0].type for item in ops}
    terms = running_sums(kernels, overwriting(kernels, kept, types), kept)
    assert not set(kept) & {name for name, term in terms.items() if term is None}
    for expected, found in zip(run(ops, {}, kept, zeros), run(ops, terms, kept, zeros), strict=True):
        assert torch.equal(bits(expected), bits(found))


def test_a_sum_of_slices_starts_from_zeros() -> None:
    ops = [
        op("a", "aten.select_backward.default", SLICED, Ref("g0"), SLICED, 0, 3),
        op("b", "aten.select_backward.default", SLICED, Ref("g1"), SLICED, 0, 2),
        op("s", "aten.add.Tensor", SLICED, Ref("a"), Ref("b")),
    ]
    kernels = [Kernel((item,), frozenset()) for item in ops]
    found = running_sums(kernels, {"s"}, {"s"})
    assert found == {"a": SliceStart("g0", SLICED, 0, 3), "b": None, "s": SliceTerm("a", "g1", 0, 2)}
    assert running_sums(kernels, {"s"}, {"s"}, inside={"b"}) == {}
    assert running_sums(kernels, {"s"}, {"s", "b"}) == {}


def test_a_value_that_another_kept_one_lies_in_is_not_handed_on_alone() -> None:
    ops = [
        op("a", "aten.neg.default", SQUARE, Ref("x0")),
        op("b", "aten.neg.default", SQUARE, Ref("x0")),
        op("v", "aten.permute.default", SQUARE, Ref("b"), (1, 0)),
        op("w", "aten.permute.default", SQUARE, Ref("x0"), (1, 0)),
    ]
    kernels = [Kernel((item,), frozenset()) for item in ops]
    assert handed_on(kernels, {"a", "b", "v", "w", "x0"}) == {"a"}
    assert handed_on(kernels, {"a", "v", "w"}) == {"a", "v"}
    assert handed_on(kernels, {"a", "v"}, whole={"a"}) == {"v"}


class Cell(nn.Module):
    """A recurrent layer whose weight gets a product at every position, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inputs = nn.Embedding(11, 8), nn.Linear(8, 128)
        self.hidden, self.head = nn.Linear(128, 128, bias=False), nn.Linear(128, 11)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        gates, state = self.inputs(self.table(tokens)), torch.zeros(tokens.shape[0], 128)
        for place in range(tokens.shape[1]):
            state = torch.tanh(gates[:, place] + self.hidden(state))
        return nn.functional.cross_entropy(self.head(state), targets)


def test_a_recurrent_step_has_the_gradients_of_autograd() -> None:
    torch.manual_seed(0)
    model, rows = Cell(), (torch.randint(11, (3, 5)), torch.randint(11, (3,)))
    graph = gradients_first(capture(model, rows))
    paths = [output.path for output in graph.outputs if output.kind is OutputKind.GRADIENT]
    program = StepProgram(graph, Strategy("one", (), (Bucket(tuple(map(Part, paths))),)), torch.device("cpu"))
    assert program.source.count("added_at(") == 4
    assert program.source.count("from_zeros(") == 1
    assert program.source.count("= sum_") == 4
    assert "aten_scatter__value(" in program.source
    state = {**dict(model.named_parameters()), "tokens": rows[0], "targets": rows[1]}
    for _ in range(3):
        model.zero_grad()
        model(*rows).backward()
        found: dict[str, Tensor] = {}
        held = {item.value.name: state[item.path].detach() for item in program.inputs if item.role is not Role.TANGENT}
        with torch.no_grad():
            program.forward(held, lambda _: None)
            held[program.tangent] = torch.ones(())
            program.backward(held, cloned(found), taken(found), none_packed)
        assert found.keys() == dict(model.named_parameters()).keys()
        for path, parameter in model.named_parameters():
            assert torch.equal(found[path], parameter.grad), path


def none_packed(path: str, source: Tensor, places: Tensor) -> None:
    raise AssertionError(f"no rows of {path} travel packed")


def cloned(found: dict[str, Tensor]) -> Callable[[str, Tensor], None]:
    return lambda path, value: found.update({path: value.clone()})


def taken(found: dict[str, Tensor]) -> Callable[[str, RowBlocks, Tensor, Tensor], None]:
    def take(path: str, product: RowBlocks, left: Tensor, right: Tensor) -> None:
        ((_, found[path]),) = product(left, right)

    return take


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 9), st.integers(1, 5), st.sampled_from([1.0, 0.5, 0.25, 1 / 3]), st.integers(0, 99))
def test_products_in_their_place_are_scaled_as_a_product_that_is_scaled(
    rows: int, inner: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(inner, rows, generator=generator).T, torch.randn(inner, 6, generator=generator)
    ends = sorted({0, rows // 2, rows})
    product = RowBlocks(tuple(pairwise(ends)), 6)
    places = [torch.full((stop - start, 6), torch.nan) for start, stop in product.rows]
    written = product.written(left, right, places, scale)
    assert (written is None) == (not product.is_direct)
    if scale == 1 / 3:
        assert written is None
    if written is not None:
        assert tuple(written) == product.rows
        assert torch.equal(torch.cat(places), torch.mm(left, right).mul_(scale))
