from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import load
from sennit.cost import workspace
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Phase, Ref
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute, Program
from sennit.sim import simulate_fully
from sennit.sim.allocator import CachingAllocator, rounded, segment_size

KIB, MIB = 1 << 10, 1 << 20


@dataclass
class Piece:
    start: int
    size: int
    key: object = None  # None: free


class Naive:
    """The same rules on a list of segments, each a list of pieces: everything is looked at every time."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[Piece]]] = []  # whether small, and its pieces in order

    @property
    def pieces(self) -> list[Piece]:
        return [piece for _, pieces in self.segments for piece in pieces]

    @property
    def reserved(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def live(self) -> int:
        return sum(piece.size for piece in self.pieces if piece.key is not None)

    def allocate(self, key: object, size: int) -> None:
        size = rounded(size)
        small = size <= MIB
        if not self._fitting(small, size):
            self.segments.append((small, [Piece(0, segment_size(size))]))
        _, number, start = min(self._fitting(small, size))
        pieces = self.segments[number][1]
        place = next(place for place, piece in enumerate(pieces) if piece.start == start)
        rest = pieces[place].size - size
        if (rest >= 512) if small else (rest > MIB):
            pieces[place : place + 1] = [Piece(start, size, key), Piece(start + size, rest)]
        else:
            pieces[place].key = key

    def _fitting(self, small: bool, size: int) -> list[tuple[int, int, int]]:
        return [
            (piece.size, number, piece.start)
            for number, (pool, pieces) in enumerate(self.segments)
            for piece in pieces
            if pool == small and piece.key is None and piece.size >= size
        ]

    def release(self, key: object) -> None:
        for _, pieces in self.segments:
            joined: list[Piece] = []
            for piece in pieces:
                if piece.key == key:
                    piece.key = None
                if joined and joined[-1].key is None and piece.key is None:
                    joined[-1].size += piece.size
                else:
                    joined.append(piece)
            pieces[:] = joined


def test_sizes_of_segments() -> None:
    assert [rounded(size) for size in (0, 1, 512, 513)] == [512, 512, 512, 1024]
    sizes = (512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 21 * MIB)
    assert [segment_size(size) // MIB for size in sizes] == [2, 2, 20, 20, 10, 22]


def test_small_ones_share_a_segment_and_large_ones_split_one() -> None:
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 512 * KIB)
    assert (allocator.reserved, allocator.segments) == (2 * MIB, 1)
    allocator.allocate("a", 4 * MIB)
    allocator.allocate("b", 4 * MIB)
    assert (allocator.reserved, allocator.live) == (22 * MIB, 10 * MIB)


def test_what_is_free_between_live_blocks_does_not_serve_a_larger_one() -> None:
    allocator = CachingAllocator()
    for key in range(4):
        allocator.allocate(key, 5 * MIB)
    allocator.release(0)
    allocator.release(2)
    allocator.allocate("large", 9 * MIB)  # 10 are free, 5 and 5
    assert (allocator.live, allocator.reserved) == (19 * MIB, 40 * MIB)
    allocator.release(1)  # now 15 are free in a row
    allocator.allocate("larger", 15 * MIB)
    assert allocator.reserved == 40 * MIB


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(
        st.one_of(
            st.sampled_from([1, 700, 300 * KIB, MIB, MIB + 1, 3 * MIB, 9 * MIB, 11 * MIB, 30 * MIB]),
            st.integers(-12, -1),  # release one of those that are held
        ),
        max_size=40,
    )
)
def test_it_equals_the_allocator_that_looks_at_everything(actions: list[int]) -> None:
    fast, slow = CachingAllocator(), Naive()
    held: list[int] = []
    for number, action in enumerate(actions):
        if action > 0:
            fast.allocate(number, action)
            slow.allocate(number, action)
            held.append(number)
        elif held:
            key = held.pop(action % len(held))
            fast.release(key)
            slow.release(key)
        assert (fast.live, fast.reserved) == (slow.live, slow.reserved)
        assert fast.live <= fast.reserved


def test_a_simulation_says_what_is_reserved(pipeline: Callable[[int, int], Program]) -> None:
    simulation = simulate_fully(pipeline(3, 512), load("dgx-a100"), reserved=True)
    reserved = dict(simulation.reserved)
    assert set(reserved) == {"first", "second"}
    for device, size in enumerate(reserved.values()):
        peak = simulation.timeline.peak_memory(device)
        assert peak <= size <= peak + 42 * MIB
    assert simulate_fully(pipeline(3, 512), load("dgx-a100")).reserved == ()
    assert simulate_fully(pipeline(3, 512), load("laptop"), reserved=True).reserved == ()


@pytest.mark.parametrize(
    ("kind", "shapes", "result", "wanted"),
    [
        ("aten._softmax_backward_data.default", ((4, 8), (4, 8)), (4, 8), 2 * 32),
        ("aten.sum.dim_IntList", ((1024, 64),), (64,), 8 * 1024 * 64),
        ("aten.sum.dim_IntList", ((1 << 20, 64),), (64,), 132 << 20),
        ("aten.sum.dim_IntList", ((1024, 64),), (1024,), 0),
        ("aten.add.Tensor", ((4, 8), (4, 8)), (4, 8), 0),
    ],
)
def test_what_kernels_take_for_themselves(
    kind: str, shapes: tuple[tuple[int, ...], ...], result: tuple[int, ...], wanted: int
) -> None:
    types = {f"x{number}": TensorType(shape, DType.BF16) for number, shape in enumerate(shapes)}
    out = Buffer("out", "out", DType.BF16, Layout(Mesh.make({"x": 1}), result))
    step = Compute(kind, tuple(map(Ref, types)), (), (out,), Phase.BACKWARD)
    assert workspace(step, {**types, "out": TensorType(result, DType.BF16)}) == wanted
