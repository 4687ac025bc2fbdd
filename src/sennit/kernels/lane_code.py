"""A lane with who makes and who reads each buffer: what a pass that looks for patterns asks."""

from __future__ import annotations

from collections.abc import Mapping

from sennit.ir.dtype import DType
from sennit.ir.program import Collective, Compute, Free, Lane, Step, defines, reads

__all__ = ["Inside", "LaneCode", "is_inside", "with_frees"]


class LaneCode:
    """Positions are those of the lane's steps.

    A `free` does not count as a reader. `others` are the lanes of the program by name, where they were looked at
    together; `lower` is what `causal_mask.py` found out.
    """

    def __init__(self, lane: Lane, others: Mapping[str, LaneCode] | None = None) -> None:
        self.others: Mapping[str, LaneCode] = others if others is not None else {}
        self.lower: dict[tuple[str, int, int], bool] = {}
        self.lane, self.buffers = lane, lane.buffers()
        self.maker: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        for position, step in enumerate(lane.steps):
            for buffer in defines(step):
                self.maker[buffer.name] = position
            if not isinstance(step, Free):
                for name in reads(step):
                    self.readers.setdefault(name, []).append(position)
        self.outputs = frozenset(item.name for item in lane.outputs)

    def compute(self, position: int) -> Compute | None:
        step = self.lane.steps[position]
        return step if isinstance(step, Compute) else None

    def made_by(self, name: str, *kinds: str) -> Compute | None:
        """The operator that makes a buffer, where it is one of `kinds`; of any kind where none is given."""
        step = self.compute(self.maker[name]) if name in self.maker else None
        return step if step is not None and (not kinds or step.kind in kinds) else None

    def reading(self, name: str, *kinds: str) -> list[tuple[int, Compute]]:
        """The operators of these kinds that read a buffer, with their positions."""
        found = ((position, self.compute(position)) for position in self.readers.get(name, ()))
        return [(position, step) for position, step in found if step is not None and step.kind in kinds]

    def only_reader(self, name: str) -> int | None:
        found = self.readers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.outputs else None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a device's piece; uneven pieces have that of the lane's first device."""
        return self.buffers[name].local_shape(self.lane.devices[0])

    def dtype(self, name: str) -> DType:
        return self.buffers[name].dtype


def is_inside(step: Collective, lane: Lane) -> bool:
    """Whether all members of a collective's groups are devices of the lane: they run one text, and so agree on what
    goes together and when.
    """
    mesh, here = step.result.layout.mesh.in_space(), set(lane.devices)
    seen: set[int] = set()
    for device in lane.devices:
        if device not in seen:  # each group once
            group = mesh.group(device, step.axes)
            if not here.issuperset(group):
                return False
            seen.update(group)
    return True


class Inside:
    """`is_inside` for many collectives of a lane, which have few meshes and axes: asked of a thousand devices once for
    each.
    """

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.known: dict[tuple[int, tuple[str, ...]], bool] = {}  # by the identity of a mesh

    def __call__(self, step: Collective) -> bool:
        key = (id(step.result.layout.mesh), step.axes)
        if key not in self.known:
            self.known[key] = is_inside(step, self.lane)
        return self.known[key]


def with_frees(steps: list[Step], freed: set[str]) -> list[Step]:
    """Each of `freed` behind the last step that reads or makes it."""
    last: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in (*reads(step), *(buffer.name for buffer in defines(step))):
            last[name] = position
    ending: dict[int, list[str]] = {}
    for name, position in last.items():
        if name in freed:
            ending.setdefault(position, []).append(name)
    return [item for position, step in enumerate(steps) for item in (step, *map(Free, ending.get(position, ())))]
