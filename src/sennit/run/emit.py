"""A lane of a program as Python source that a person can read.

One function, `step(rank, inputs)`, runs on every device of the lane; what differs between devices (peers, groups, slices) is
behind `rank` (`run/rank.py`). Communication is started where the program has it and waited for where its result is first
read, so it overlaps with the lines between. Frees are `del` statements. Comments name the module and the layout.

The source holds no numbers that depend on the device, so a thousand ranks of a lane share one text.
"""

from __future__ import annotations

import re
from math import prod

from sennit.errors import ProgramError
from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Ref
from sennit.ir.layout import Layout, Pending
from sennit.ir.mesh import print_ranges
from sennit.ir.program import Buffer, Collective, Compute, Free, Lane, Program, Receive, Send, Step, reads

__all__ = ["emit_lane", "inner_size"]


def emit_lane(program: Program, lane: Lane) -> str:
    """The source of one lane."""
    return _Emitter(program, lane).source()


def inner_size(layout: Layout, axis: str) -> tuple[int, int]:
    """The dim that an axis splits, and how many local elements of it lie below the axis's digit: a local dim of size
    outer * inner becomes outer * p * inner when the axis is gathered, and the other way round when it is sliced."""
    split = layout.split(axis)
    assert split is not None
    below = [digit.size for digit in layout.digits(split.dim) if digit.stride < split.stride]
    return split.dim, split.stride // prod(below)


class _Emitter:
    def __init__(self, program: Program, lane: Lane) -> None:
        self.program, self.lane = program, lane
        self.buffers = lane.buffers()
        self.variables: dict[str, str] = {}
        self.in_flight: set[str] = set()
        self.lines: list[str] = []
        self.heading = ""

    def source(self) -> str:
        lane = self.lane
        meshes = dict.fromkeys(buffer.layout.mesh for buffer in self.buffers.values())
        self.lines += [
            f'"""{lane.name} of program {self.program.name!r}: devices {print_ranges(lane.devices)}, '
            f'mesh {" and ".join(map(str, meshes))}."""',
            "",
            "import torch",
            "",
            "aten = torch.ops.aten",
            "",
            "",
            "def step(rank, inputs):",
        ]
        for item in lane.inputs:
            self._line(f"{self._variable(item.buffer.name)} = inputs[{item.path!r}]", _type(item.buffer))
        dead: list[str] = []  # freed one after another: one line
        for step in lane.steps:
            if isinstance(step, Free):
                dead.append(step.source)
                continue
            self._free(dead)
            self._emit(step)
        self._free(dead)
        self._outputs()
        return "\n".join(self.lines) + "\n"

    def _line(self, code: str, comment: str = "") -> None:
        self.lines.append(f"    {code}  # {comment}" if comment else f"    {code}")

    def _variable(self, name: str) -> str:
        """A Python name for a buffer: `mm_3.sum~2` is `mm_3_sum_mb2`."""
        if name not in self.variables:
            base = re.sub(r"\W", "_", name.replace("~", "_mb"))
            candidate, taken = base, set(self.variables.values())
            while candidate in taken or candidate in ("rank", "inputs", "torch", "aten"):
                candidate += "_"
            self.variables[name] = candidate
        return self.variables[name]

    def _wait(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name in self.in_flight:
                self.in_flight.discard(name)
                variable = self._variable(name)
                self._line(f"{variable} = {variable}.wait()")

    def _emit(self, step: Step) -> None:
        self._wait(reads(step))
        match step:
            case Compute():
                self._compute(step)
            case Collective():
                self._collective(step)
            case Send(source, to):
                self._line(f"rank.send({self._variable(source)}, {to!r})")
            case Receive(result, origin):
                shape = list(result.layout.local_shape())
                self._line(
                    f"{self._variable(result.name)} = rank.receive({shape}, torch.{result.dtype.torch_name}, {origin!r})",
                    _type(result),
                )
                self.in_flight.add(result.name)
            case Free():
                raise AssertionError(step)  # gathered by `source`

    def _free(self, names: list[str]) -> None:
        if names:
            self._wait(tuple(names))
            self._line(f"del {', '.join(self._variable(name) for name in names)}")
            names.clear()

    def _compute(self, step: Compute) -> None:
        where = f"{step.module or 'model'}, {step.phase.value}" + "".join(
            f", {axis} {covered[0]}" for axis, covered in step.results[0].times if len(covered) == 1
        )
        if where != self.heading and not step.kind.startswith("sennit."):
            self.heading = where
            self.lines += ["", f"    # {where}"]
        results = ", ".join(self._variable(buffer.name) for buffer in step.results)
        if step.kind.startswith("sennit."):
            call = self._local_move(step)
        else:
            call = self._aten(step)
            if len(step.results) == 1 and _returns_tuple(step.kind):
                results += ","
        self._line(f"{results} = {call}", ", ".join(map(_type, step.results)))

    def _aten(self, step: Compute) -> str:
        parts = [self._arg(arg) for arg in step.args] + [f"{key}={self._arg(arg)}" for key, arg in step.kwargs]
        # a piece may lie differently in memory than the whole did, so a view may have to copy
        kind = "aten.reshape.default" if step.kind in ("aten.view.default", "aten._unsafe_view.default") else step.kind
        call = f"{kind}({', '.join(parts)})"
        return f"rank.present({call})" if _may_return_none(step) else call

    def _local_move(self, step: Compute) -> str:
        names = [name for arg in step.args if isinstance(arg, Ref) for name in (arg.name,)]
        variables = [self._variable(name) for name in names]
        source, result = self.buffers[names[0]].layout, step.results[0].layout
        match step.kind:
            case "sennit.slice":
                (axis,) = [axis for axis, entry in result.entries if source.entry(axis) != entry]
                dim, inner = inner_size(result, axis)
                times = dict(step.results[0].times)
                at = times[axis][0] if axis in times else None
                where = f"at={at}" if at is not None else f"axis={axis!r}"
                return f"rank.slice({variables[0]}, dim={dim}, inner={inner}, size={result.mesh.size(axis)}, {where})"
            case "sennit.partial":
                (axis,) = [axis for axis, entry in result.entries if source.entry(axis) != entry]
                return f"rank.partial({variables[0]}, axis={axis!r}, op={_reduction(result, axis)!r})"
            case "sennit.accumulate":
                return f"rank.accumulate({', '.join(variables)}, fresh={self._is_first_sum(names[0])})"
            case _:
                raise ProgramError(f"no source for {step.kind}", where=f"lane {self.lane.name}")

    def _is_first_sum(self, name: str) -> bool:
        """Whether the running sum is still the first micro-batch's own value, which may be aliased."""
        return all(len(covered) == 1 for _, covered in self.buffers[name].times)

    def _collective(self, step: Collective) -> None:
        source, result = self.buffers[step.source].layout, step.result.layout
        (axis,) = step.axes
        parts = [self._variable(step.source), f"axis={axis!r}"]
        match step.kind.value:
            case "all_reduce":
                parts.append(f"op={_reduction(source, axis)!r}")
            case "all_gather":
                dim, inner = inner_size(source, axis)
                parts.append(f"dim={dim}, inner={inner}")
            case "reduce_scatter":
                dim, inner = inner_size(result, axis)
                parts.append(f"dim={dim}, inner={inner}, op={_reduction(source, axis)!r}")
            case "all_to_all":
                (from_dim, from_inner), (to_dim, to_inner) = inner_size(source, axis), inner_size(result, axis)
                parts.append(f"gather=({from_dim}, {from_inner}), split=({to_dim}, {to_inner})")
        self._line(
            f"{self._variable(step.result.name)} = rank.{step.kind.value}({', '.join(parts)})", _type(step.result)
        )
        self.in_flight.add(step.result.name)

    def _outputs(self) -> None:
        self._wait(tuple(output.name for output in self.lane.outputs))
        self.lines.append("")
        self._line("return {")
        for output in self.lane.outputs:
            self._line(f"    {output.key!r}: {self._variable(output.name)},")
        self._line("}")

    def _arg(self, arg: Arg) -> str:
        match arg:
            case Ref(name):
                return self._variable(name)
            case DType():
                return f"torch.{arg.torch_name}"
            case tuple():
                return "[" + ", ".join(self._arg(part) for part in arg) + "]"
            case float() if arg in (float("inf"), float("-inf")) or arg != arg:
                return f'float("{arg}")'
            case _:
                return repr(arg)


def _type(buffer: Buffer) -> str:
    return f"{buffer.dtype.value}{buffer.layout}"


def _reduction(layout: Layout, axis: str) -> str:
    entry = layout.entry(axis)
    assert isinstance(entry, Pending)
    return entry.op.value


def _returns_tuple(kind: str) -> bool:
    return kind in (
        "aten.split_with_sizes.default",
        "aten.native_layer_norm.default",
        "aten.native_layer_norm_backward.default",
    )


def _may_return_none(step: Compute) -> bool:
    """Operators with a mask of wanted gradients return None for the others."""
    return any(
        isinstance(arg, tuple) and False in arg and all(isinstance(flag, bool) for flag in arg) for arg in step.args
    )
