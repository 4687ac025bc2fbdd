"""Parameters that live in pieces on replicas, gathered several at a time and ahead of their use.

A program gathers each parameter right before the operator that reads it. Run so, a rank waits for every message, and
pays a latency for each parameter, however small. So the gathers of a lane, in its order g1, g2, ..., are cut into runs
of neighbours, much as the sums of gradients are (`buckets.py`): a run ends at `bucket_bytes` of all that is gathered in
one pass over the parameters, before one that would make it half as large again (unless it is small so far: biases go
with the weight behind them), and before a parameter that is in it already. The *small* ones of a run, below an eighth
of such a bucket, travel in one collective: their pieces are copied into a flat tensor, and the parameters out of what
arrives. Large ones travel alone: copying them would take longer than a latency.

A run starts where the one before it would have: while the operators of run k compute, run k + 1 travels. So at most two
runs are held beside what the program holds, each a thirty-second part of the parameters or one large one.

| | |
|---|---|
| what is in which run | `gathers` |
| the steps with runs ahead | `with_gathers_ahead` |
| how many messages there are, for the search | `message_count` |

Only gathers of inputs whose group lies inside the lane count: its members run one text, so all of them have the same
runs in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from sennit.ir.dtype import DType
from sennit.ir.graph import Role
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Collective, CollectiveKind, Lane, Step
from sennit.kernels.buckets import bucket_bytes
from sennit.kernels.lane_code import Inside

__all__ = ["Gathers", "gathers", "message_count", "with_gathers_ahead"]


@dataclass(frozen=True, slots=True)
class Gathers:
    """A run of gathers over one axis; `results` by name, in the order of the lane.

    Those in `packed`, if any, are one call; `elements` of what a device gives to it.
    """

    number: int
    axis: str
    dtype: DType
    mesh: Mesh
    results: tuple[str, ...]
    packed: tuple[str, ...]
    elements: int


def gathers(lane: Lane) -> dict[str, Gathers]:
    """The runs of a lane's gathers, by the result of each gather in them. A run of one is a run too."""
    given = {item.buffer.name: item.buffer for item in lane.inputs if item.role is Role.PARAM}
    inside = Inside(lane)
    steps = [step for step in lane.steps if isinstance(step, Collective) and _counts(step, given, inside)]
    distinct = {step.source: _bytes(step.result, lane) for step in steps}
    cap = bucket_bytes(sum(distinct.values()))
    found: dict[str, Gathers] = {}
    run: list[Collective] = []
    number = full = 0

    def close() -> None:
        nonlocal number, full
        if run:
            source = given[run[0].source]
            names = tuple(step.result.name for step in run)
            small = [step for step in run if _is_small(distinct[step.source], cap)]
            small = small if len(small) > 1 else []
            packed = tuple(step.result.name for step in small)
            elements = sum(prod(given[step.source].layout.local_shape()) for step in small)
            made = Gathers(number, run[0].axes[0], source.dtype, source.layout.mesh.in_space(), names, packed, elements)
            found.update((name, made) for name in names)
            number += 1
        run.clear()
        full = 0

    for step in steps:
        size = distinct[step.source]
        again = any(step.source == other.source for other in run)
        other_kind = bool(run) and _kind(step, given) != _kind(run[-1], given)
        if again or other_kind or _ends(full, size, cap):
            close()
        run.append(step)
        full += size
    close()
    return found


def message_count(sizes: Iterable[int], cap: int) -> int:
    """How many messages gather parameters of these sizes, in this order."""
    count = full = small = 0
    for size in sizes:
        if _ends(full, size, cap):
            full = small = 0
        is_small = _is_small(size, cap)
        count += not (is_small and small)
        small += is_small
        full += size
    return count


def _is_small(size: int, cap: int) -> bool:
    return size < cap // 8


def _ends(full: int, size: int, cap: int) -> bool:
    return full >= cap or (full > cap // 4 and full + size > cap + cap // 2)


def with_gathers_ahead(steps: list[Step], found: Mapping[str, Gathers]) -> list[Step]:
    """Each run where the one before it began; the first two where the first did."""
    runs: list[list[Step]] = []
    begins: dict[int, int] = {}  # which run, by the position of its first gather
    for position, step in enumerate(steps):
        if isinstance(step, Collective) and step.result.name in found:
            if found[step.result.name].number == len(runs):
                begins[position] = len(runs)
                runs.append([])
            runs[-1].append(step)
    moved: list[Step] = []
    for position, step in enumerate(steps):
        if position in begins:
            run = begins[position]
            moved += runs[0] if run == 0 else []
            moved += runs[run + 1] if run + 1 < len(runs) else []
        if not (isinstance(step, Collective) and step.result.name in found):
            moved.append(step)
    return moved


def _counts(step: Collective, given: Mapping[str, Buffer], inside: Inside) -> bool:
    if step.kind is not CollectiveKind.ALL_GATHER or step.source not in given or len(step.axes) != 1:
        return False
    return inside(step) and given[step.source].layout.is_even and step.result.layout.is_even


def _kind(step: Collective, given: Mapping[str, Buffer]) -> tuple[tuple[str, ...], DType, Mesh]:
    source = given[step.source]
    return step.axes, source.dtype, source.layout.mesh.in_space()


def _bytes(buffer: Buffer, lane: Lane) -> int:
    return buffer.bytes(lane.devices[0])
