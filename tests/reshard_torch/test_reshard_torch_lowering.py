"""What ranks run, without processes: selections against numpy, messages that match, staging that stays within its
bound.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reshard_problems import KINDS, random_problem

from sennit.ir.layout import Reduction
from sennit.ir.region import Region
from sennit.reshard.lower_torch import Cut, Fill, Message, Move, Together, lower, transposed
from sennit.reshard.planner import Mode, plan
from sennit.reshard.selection_torch import Selection
from sennit.reshard.wire_torch import Wire


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[np.ndarray]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=3)))
    indices = [np.array(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))), dtype=np.int64) for size in shape]
    return shape, indices


@settings(derandomize=True, deadline=None, max_examples=120)
@given(parts(), st.sampled_from([None, *Reduction]), st.booleans())
def test_selections_take_and_put_as_numpy_does(
    part: tuple[tuple[int, ...], list[np.ndarray]], how: Reduction | None, contiguous: bool
) -> None:
    shape, indices = part
    array = np.arange(1.0, 1.0 + np.prod(shape, dtype=int)).reshape(shape)
    tensor = torch.from_numpy(array.copy())
    if not contiguous:
        backwards = tuple(reversed(range(tensor.dim())))
        tensor = tensor.permute(backwards).contiguous().permute(backwards)
    where = np.ix_(*indices) if shape else ()
    selection = Selection.at(shape, indices)
    taken = selection.take(tensor)
    assert np.array_equal(taken.numpy(), array[where].ravel())
    values = torch.arange(float(selection.elements)) - 2
    selection.put(tensor, values.double(), how)
    other = values.double().numpy().reshape(array[where].shape)
    combined = {
        None: other,
        Reduction.SUM: array[where] + other,
        Reduction.PROD: array[where] * other,
        Reduction.MAX: np.maximum(array[where], other),
        Reduction.MIN: np.minimum(array[where], other),
    }[how]
    array[where] = combined
    assert np.array_equal(tensor.numpy(), array)


def test_a_digit_is_one_strided_view() -> None:
    """Every second pair of 16 rows: no index, one view; and the middle block of a matrix's rows is sent in place."""
    whole = Region.full((16, 3))
    pairs = Region.of_indices([np.array([2, 3, 6, 7, 10, 11, 14, 15]), np.arange(3)])
    selection = Selection.of(pairs, whole)
    assert all(pick.listed is None for pick in selection.picks)
    assert selection.view(torch.zeros(16, 3)).shape == (4, 2, 3)
    assert not selection.is_dense
    assert Selection.of(Region.box((4, 0), (8, 3)), whole).is_dense


def moves_of(kind: str, seed: int, mode: Mode, cut: Cut) -> dict[int, list[Move]]:
    source, target = random_problem(kind, seed, 6)
    redistribution = plan(source, target, itemsize=8, mode=mode)
    found: dict[int, list[Move]] = {}
    for device in sorted({*source.mesh.devices, *target.mesh.devices}):
        operations = lower(redistribution, device, cut)
        if not cut.in_place and all(op in (Reduction.SUM, None) for _, op in source.pending):
            operations = transposed(operations)
        found[device] = []
        for operation in operations:
            match operation:
                case Move():
                    found[device].append(operation)
                case Together():
                    found[device] += operation.point_to_point
                case Fill():
                    pass
    return found


problems = st.tuples(st.sampled_from(KINDS), st.integers(0, 500), st.sampled_from([Mode.COLLECTIVE, Mode.DIRECT]))


@settings(derandomize=True, deadline=None, max_examples=30)
@given(problems, st.booleans())
def test_every_message_is_expected_with_its_size_and_no_key_is_used_twice(
    problem: tuple[str, int, Mode], in_place: bool
) -> None:
    moves = moves_of(*problem, Cut(16, in_place))
    assert len({len(those) for those in moves.values()}) == 1  # ranks run the same steps
    for position in range(len(next(iter(moves.values())))):
        sent: dict[tuple[int, int, tuple[int, ...]], int] = {}
        received: dict[tuple[int, int, tuple[int, ...]], int] = {}
        for device, those in moves.items():
            for message in those[position].sends:
                sent[device, message.peer, message.key] = message.part.elements
            for message in those[position].receives:
                received[message.peer, device, message.key] = message.part.elements
        assert sent == received


@settings(derandomize=True, deadline=None, max_examples=30)
@given(problems, st.booleans(), st.sampled_from([512, 4096]))
def test_staging_stays_within_its_bound(problem: tuple[str, int, Mode], in_place: bool, staging: int) -> None:
    """Four batches are under way at most, so each has a quarter."""
    wire = Wire(1.0)
    for moves in moves_of(*problem, Cut(max(1, staging // 64), in_place)).values():
        for move in moves:
            tensor = torch.empty(move.given, dtype=torch.float64)

            def staged(pair: tuple[Message, bool], move: Move = move, tensor: torch.Tensor = tensor) -> int:
                message, arrives = pair
                return 0 if wire._in_place(move, message, arrives, tensor) else 8 * message.part.elements

            for batch in wire._batches(move, tensor, staging):
                assert sum(map(staged, batch)) <= staging // 4
