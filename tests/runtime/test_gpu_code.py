"""The code of the GPU interpreter: joined moves, pages, and phases for ranks that take turns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import Options, recipe, recipes
from sennit.collective.runtime.code import INPUT, OUTPUT, Code, Geometry
from sennit.collective.runtime.code_numpy import allocate
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.gpu_code import (
    PAGE_PLACES,
    PAGE_STEPS,
    Flag,
    Transfer,
    Walk,
    block_items,
    join_transfers,
    walk_of,
)
from sennit.collective.runtime.gpu_delay import delay_copies
from sennit.collective.runtime.gpu_join import join_blocks, without_gates
from sennit.collective.runtime.gpu_phases import phases_of
from sennit.collective.verify_one_sided import verify_one_sided
from sennit.ir.collective import CollectiveName
from sennit.ir.layout_numpy import Array
from sennit.ir.one_sided import LocalCopy, OneSided
from sennit.ir.one_sided_numpy import run_one_sided

NAMES = [item.name for item in recipes() if not item.across]


def joined(name: str, ranks: int, options: Options | None = None) -> OneSided:
    return join_blocks(compile_one_sided(recipe(name).build(1, ranks, options or Options())))


@pytest.mark.parametrize(
    ("name", "sources", "targets"),
    [
        ("direct_all_reduce", 4, 4),
        ("direct_reduce_scatter", 4, 1),
        ("all_pairs_all_gather", 1, 4),
        ("direct_all_to_all", 4, 4),
    ],
)
def test_direct_algorithms_become_one_step(name: str, sources: int, targets: int) -> None:
    code = encode(without_gates(joined(name, 4)))
    for rank in range(4):
        (item,) = join_transfers(code, block_items(code, rank, 1))
        assert isinstance(item, Transfer)
        assert (len(item.sources), len(item.targets)) == (sources, targets)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(name=st.sampled_from(NAMES), ranks=st.sampled_from([2, 3, 4]), cut=st.integers(1, 2))
def test_delayed_copies_keep_the_meaning(name: str, ranks: int, cut: int) -> None:
    ranks = 4 if name == "halving_doubling_all_reduce" else ranks
    program = joined(name, ranks, Options(instances=cut, pieces=cut))
    delayed = delay_copies(program)
    verify_one_sided(delayed)
    draw = np.random.default_rng(ranks)
    spec = program.collective
    inputs = [draw.integers(-9, 9, (spec.input_chunks(rank), 3)) for rank in range(ranks)]
    for seed in range(3):
        found, wanted = (run_one_sided(p, inputs, seed=seed) for p in (delayed, program))
        for rank in range(ranks):
            for chunk in range(spec.output_chunks(rank)):
                if spec.after(rank, chunk) is not None:
                    np.testing.assert_array_equal(found[rank][chunk], wanted[rank][chunk])


def test_a_ring_copies_one_chunk_only() -> None:
    """The others are added where they are first needed; the one that the next rank reads at once must be copied."""
    program = delay_copies(joined("ring_all_reduce", 4))
    copies = [step for step in program.ranks[1].blocks[1] if isinstance(step, LocalCopy)]
    assert [copy.source.count for copy in copies] == [1, 1, 1, 1]
    code = encode(without_gates(program))
    moves = [item for item in join_transfers(code, block_items(code, 1, 1)) if isinstance(item, Transfer)]
    assert [(len(move.sources), move.sources[0].buffer) for move in moves[:4]] == [(1, 0), (2, 0), (2, 0), (2, 0)]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(name=st.sampled_from(NAMES), ranks=st.sampled_from([2, 4, 8]), cut=st.integers(1, 3), join=st.booleans())
def test_pages_hold_the_items_in_order(name: str, ranks: int, cut: int, join: bool) -> None:
    code = encode(joined(name, ranks, Options(instances=cut, pieces=cut)))
    walk = walk_of(code, join=join)
    for rank, block, first, count, *page in walk.workers.tolist():
        items = block_items(code, rank, block)
        items = join_transfers(code, items) if join else items
        pages = [page, *walk.pages[first : first + count].tolist()]
        assert all(1 <= steps <= PAGE_STEPS and places <= PAGE_PLACES for _, steps, _, places in pages)
        kinds = [int(walk.steps[step + i][0]) for step, steps, _, _ in pages for i in range(steps)]
        # of signals that follow one another to the same flag the last is kept
        assert [kind for kind in kinds if kind != 1] == [
            3 * i.pairs if isinstance(i, Transfer) else 2 for i in items if isinstance(i, Transfer) or i.waits
        ]
    assert len({(rank, block) for rank, block, *_ in walk.workers.tolist()}) == len(walk.workers)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(name=st.sampled_from(NAMES), ranks=st.sampled_from([2, 3, 4]), elements=st.integers(1, 40), join=st.booleans())
def test_phases_compute_the_collective(name: str, ranks: int, elements: int, join: bool) -> None:
    """In each phase the ranks run one after another, in either order: they must not need each other."""
    ranks = 4 if name == "halving_doubling_all_reduce" else ranks
    program = joined(name, ranks, Options(instances=2, pieces=2))
    code = encode(program)
    draw = np.random.default_rng(elements)
    inputs = [draw.integers(-9, 9, code.parts(r, INPUT) * elements).astype(np.int64) for r in range(ranks)]
    wanted = [array.reshape(-1) for array in _by_chunks(program, code, inputs, elements)]
    for backwards in (False, True):
        buffers = allocate(code, inputs, elements, 1)
        for by_rank in phases_of(code, join=join):
            for walk in reversed(by_rank) if backwards else by_rank:
                _run_walk(walk, buffers, Geometry.of(code, elements))
        for rank in range(ranks):
            np.testing.assert_array_equal(buffers[rank][OUTPUT], wanted[rank])


def _by_chunks(program: OneSided, code: Code, inputs: list[Array], elements: int) -> list[Array]:
    """What the collective asks for, by the interpreter of one-sided programs: parts padded to whole chunks, and cut
    again.
    """
    geometry = Geometry.of(code, elements)
    room = geometry.chunks * geometry.stride
    padded = [
        np.pad(array.reshape(-1, elements), ((0, 0), (0, room - elements))).reshape(-1, geometry.stride)
        for array in inputs
    ]
    return [array.reshape(-1, room)[:, :elements] for array in run_one_sided(program, padded)]


def _run_walk(walk: Walk, buffers: list[list[Array]], geometry: Geometry) -> None:
    """What the kernel does with a walk that neither signals nor waits."""
    for _, _, first, count, *start in walk.workers.tolist():
        for page in (start, *walk.pages[first : first + count].tolist()):
            for kind, sources, targets, at, chunks, clip, _, _ in walk.steps[page[0] : page[0] + page[1]].tolist():
                assert kind in (0, 3)
                places = walk.places[page[2] + at : page[2] + at + sources + targets].tolist()
                length = chunks * geometry.stride
                if clip:
                    length = min(length, max(0, geometry.elements - (clip - 1) * geometry.stride))
                starts = [part * geometry.elements + chunk * geometry.stride for _, _, part, chunk in places]
                views = [
                    buffers[rank][buffer][start : start + length]
                    for (rank, buffer, _, _), start in zip(places, starts, strict=True)
                ]
                total = sum(views[1:sources], start=views[0].copy())
                results = [view.copy() for view in views[:sources]] if kind == 3 else [total] * targets
                for view, result in zip(views[sources:], results, strict=True):
                    view[...] = result


def test_signals_to_one_flag_in_a_row_are_one() -> None:
    for item in recipes():
        if item.across or item.collective is CollectiveName.ALL_TO_NEXT:
            continue
        code = encode(joined(item.name, 4))
        walk = walk_of(code)
        for step, steps, _, _ in walk.pages.tolist():
            words = walk.steps[step : step + steps].tolist()
            for position, word in enumerate(words):
                if word[0] == 1:
                    run = walk.flags[step + position : step + position + word[2]].tolist()
                    assert len({tuple(pair) for pair in run}) == len(run)


def test_items_of_a_gate_are_flags() -> None:
    code = encode(joined("ring_all_reduce", 4))
    assert all(isinstance(item, Flag) for item in block_items(code, 0, 0))
