"""A lane of a program as Python source that a person can read.

One function, `step(rank, inputs)`, runs on every device of the lane; what differs between devices (peers, groups,
slices) is behind `rank` (`run/rank.py`). Communication is started where the program has it and waited for where its
result is first read, so it overlaps with the lines between; `run/order.py` moves what can be started earlier or read
later. A view of something under way reads nothing yet: it is put off until it is read itself, and left out where it
never is. Frees are `del` statements. What the source does in one call where the program has several steps,
`run/joined.py` says; which results take the memory of an operand, and which copies are left out, `run/reuse.py`.

Comments say what a reader asks: a ruler where another micro-batch or phase begins, a heading for each module, behind
each line the type and layout of what it makes, at each communication what goes where and how much of it, and what the
plan decided of an operator (`notes`, by the operator's name).

A lane with buffers on several meshes has a name for this rank on each, `m0 = rank.on(0)`, and calls what depends on
coordinates there.

The source holds no numbers that depend on the device, so a thousand ranks of a lane share one text.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Mapping

import torch

from sennit.errors import ProgramError
from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Ref, Role
from sennit.ir.layout import Layout, Pending
from sennit.ir.mesh import Mesh, print_ranges
from sennit.ir.operators import is_local_form, is_local_move, is_view
from sennit.ir.program import (
    Buffer,
    Collective,
    CollectiveKind,
    Compute,
    Exchange,
    Free,
    Lane,
    Program,
    Receive,
    Send,
    Step,
    reads,
)
from sennit.ir.program_cuts import inner_size
from sennit.kernels.attention_calls_torch import cuda_call
from sennit.run.joined import Bucket, Gathers, Joined, joined
from sennit.run.local_forms import emit_form, emit_rows
from sennit.run.order import Ordered, ordered
from sennit.run.pieces import input_keys
from sennit.run.rank import meshes_of
from sennit.run.reuse import reused

__all__ = ["emit_lane"]


def emit_lane(program: Program, lane: Lane, notes: Mapping[str, str] | None = None, *, ahead: bool = True) -> str:
    """The source of one lane. `ahead`: receives are posted a task before they are read (`run/order.py`)."""
    return _Emitter(program, ordered(lane, ahead=ahead), notes or {}).source()


class _Emitter:
    def __init__(self, program: Program, order: Ordered, notes: Mapping[str, str]) -> None:
        lane = order.lane
        self.program, self.lane, self.notes = program, lane, notes
        self.buffers = lane.buffers()
        self.variables: dict[str, str] = {}
        meshes = meshes_of(lane)
        self.places = {mesh: f"m{k}" if len(meshes) > 1 else "rank" for k, mesh in enumerate(meshes)}
        self.place_of: dict[int, str] = {}  # the same by the identity of a mesh, which may have time axes
        self.taken = {"rank", "inputs", "torch", "aten", "step", *self.places.values()}
        self.in_flight: set[str] = set()
        self.put_off: dict[str, Compute] = {}  # views of what is under way, by their result
        self.looked_at: Counter[str] = Counter()  # by how many of them
        self.dying: set[str] = set()  # freed by the program, and still to be looked at by a view that was put off
        self.joined: Joined = joined(lane, order.late)
        self.reused = reused(lane)
        self.begun: set[int] = set()  # buckets that have a name already
        self.lines: list[str] = []
        self.heading = ""
        self.section = ""

    def source(self) -> str:
        lane = self.lane
        self.lines += [
            *self._preface(),
            "",
            "import torch",
            "",
            "aten = torch.ops.aten",
            "",
            "",
            "def step(rank, inputs):",
        ]
        if len(self.places) > 1:
            self.lines += ["", "    # this rank on each mesh"]
            for number, (mesh, name) in enumerate(self.places.items()):
                self._line(f"{name} = rank.on({number})", str(mesh))
        keys = input_keys(lane)
        for role in Role:
            items = [item for item in lane.inputs if item.role is role]
            if items:
                self.lines += ["", f"    # {_ROLES[role]}"]
            for item in items:
                key = keys[item.buffer.name]
                self._line(f"{self._variable(item.buffer.name)} = inputs[{key!r}]", _type(item.buffer))
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

    def _preface(self) -> list[str]:
        """What a reader must know: who runs this, on what mesh, and what it sends."""
        lane = self.lane
        meshes = dict.fromkeys(
            {id(buffer.layout.mesh): buffer.layout.mesh for buffer in self.buffers.values()}.values()
        )
        moved = Counter(
            f"{step.kind.value} over {', '.join(step.axes)}" for step in lane.steps if isinstance(step, Collective)
        )
        moved.update(f"send to {step.to}" for step in lane.steps if isinstance(step, Send))
        moved.update(f"receive from {step.origin}" for step in lane.steps if isinstance(step, Receive))
        moved.update(f"exchange among {', '.join(step.lanes)}" for step in lane.steps if isinstance(step, Exchange))
        text = ", ".join(f"{count} {name}" for name, count in moved.items()) or "nothing"
        buckets = {bucket.number: len(bucket.sources) for bucket in self.joined.buckets.values()}
        if buckets:
            text += (
                f"; {sum(buckets.values())} of them in {len(buckets)} {'bucket' if len(buckets) == 1 else 'buckets'}"
            )
        if self.joined.gathers:
            runs = {run.number for run in self.joined.gathers.values()}
            text += f"; {len(self.joined.gathers)} gathers of parameters in {len(runs)} {'run' if len(runs) == 1 else 'runs'}"
        return [
            f'"""{lane.name} of program {self.program.name!r}: devices {print_ranges(lane.devices)}, '
            f"mesh {' and '.join(map(str, meshes))}.",
            "",
            f"A step of each device communicates: {text}.",
            "Behind each line: the type of the whole tensor and how it lies on the mesh. `8{dp}` is a dim of 8 that axis dp splits,",
            "`{sum:tp}` a sum that is still to be taken over tp.",
            '"""',
        ]

    def _place(self, mesh: Mesh) -> str:
        """This rank on a mesh, as the source calls it."""
        if id(mesh) not in self.place_of:
            self.place_of[id(mesh)] = self.places[mesh.in_space()]
        return self.place_of[id(mesh)]

    def _line(self, code: str, comment: str = "") -> None:
        self.lines.append(f"    {code}  # {comment}" if comment else f"    {code}")

    def _variable(self, name: str) -> str:
        """A Python name for a buffer: `mm_3.sum~2` is `mm_3_sum_mb2`."""
        if name not in self.variables:
            candidate = re.sub(r"\W", "_", name.replace("~", "_mb"))
            if candidate[0].isdigit():
                candidate = f"_{candidate}"
            while candidate in self.taken or keyword.iskeyword(candidate):
                candidate += "_"
            self.taken.add(candidate)
            self.variables[name] = candidate
        return self.variables[name]

    def _wait(self, names: tuple[str, ...]) -> None:
        """Have these buffers: wait for those under way, make the views that were put off."""
        for name in names:
            if name in self.put_off:
                view = self._taken_up(name)
                self._wait(reads(view))
                self._compute(view)
                self._bury(reads(view))
            elif name in self.in_flight:
                self.in_flight.discard(name)
                variable = self._variable(name)
                self._line(f"{variable} = {variable}.wait()")

    def _taken_up(self, name: str) -> Compute:
        view = self.put_off.pop(name)
        self.looked_at.subtract(reads(view))
        return view

    def _bury(self, names: tuple[str, ...]) -> None:
        """Delete what was freed, once no view is left that looks at it.

        A view that was put off and is freed is never made.
        """
        gone = [name for name in names if name in self.dying and not self.looked_at[name]]
        self.dying.difference_update(gone)
        unmade = [reads(self._taken_up(name)) for name in gone if name in self.put_off]
        made = [name for name in gone if name in self.variables]
        if made:
            self._wait(tuple(made))
            self._line(f"del {', '.join(self._variable(name) for name in made)}")
        for looked in unmade:
            self._bury(looked)

    def _emit(self, step: Step) -> None:
        is_look = isinstance(step, Compute) and (is_view(step.kind) or step.kind == "sennit.take")
        if is_look and isinstance(step, Compute) and len(step.results) == 1:
            (source,) = reads(step)
            if source in self.in_flight or source in self.put_off:
                self.put_off[step.results[0].name] = step
                self.looked_at.update(reads(step))
                return
        if isinstance(step, Compute) and step.kind == "sennit.accumulate" and step.results[0].name in self.variables:
            return  # its term was added to it as it was made
        self._wait(reads(step))
        match step:
            case Compute() if step.results[0].name in self.joined.onto:
                self._add_onto(step, self.joined.onto[step.results[0].name])
            case Compute():
                self._compute(step)
            case Collective():
                self._collective(step)
            case Send(source, to):
                buffer = self.buffers[source]
                self._line(f"rank.send({self._variable(source)}, {to!r})", f"{_type(buffer)}, {self._size(buffer)}")
            case Receive(result, origin):
                shape = list(result.layout.local_shape())
                self._line(
                    f"{self._variable(result.name)} = rank.receive({shape}, torch.{result.dtype.torch_name}, {origin!r})",
                    f"{_type(result)}, {self._size(result)}",
                )
                self.in_flight.add(result.name)
            case Exchange():
                self._exchange(step)
            case Free():
                raise AssertionError(step)  # gathered by `source`

    def _exchange(self, step: Exchange) -> None:
        given = [self._variable(step.source)] if step.source is not None else []
        call = f"rank.exchange({', '.join([repr(step.label), *given])})"
        source = None if step.source is None else self.buffers[step.source]
        if step.result is None:
            assert source is not None
            self._line(call, f"{_type(source)}, {self._size(source)}")
            return
        before = "" if source is None else f"{source.layout} -> "
        self._line(
            f"{self._variable(step.result.name)} = {call}", f"{before}{_type(step.result)}, {self._size(step.result)}"
        )
        self.in_flight.add(step.result.name)

    def _free(self, names: list[str]) -> None:
        self.dying.update(names)
        self._bury(tuple(names))
        names.clear()

    def _compute(self, step: Compute) -> None:
        if not is_local_move(step.kind):
            self._headings(step)
        results = ", ".join(self._variable(buffer.name) for buffer in step.results)
        if is_local_move(step.kind):
            call = self._local_move(step)
        elif is_local_form(step.kind):
            call = emit_form(step, self.buffers, self._arg, self._place(step.results[0].layout.mesh))
            if step.kind == "sennit.convolution_backward" and len(step.results) == 1:
                results += ","
        else:
            call = self._aten(step)
            if len(step.results) == 1 and _returns_tuple(step.kind):
                results += ","
        note = self.notes.get(step.op, "")
        types = ", ".join(dict.fromkeys(map(_type, step.results)))
        self._line(f"{results} = {call}", f"{types}  <- {note}" if note else types)

    def _add_onto(self, step: Compute, sum_: Compute) -> None:
        """A term of a sum over micro-batches, added as it is made."""
        (total, _), (result,) = reads(sum_), sum_.results
        self._wait((total,))
        self._headings(step)
        fresh = self._is_first_sum(total)
        if step.kind == "aten.mm.default":
            a, b = (self._arg(arg) for arg in step.args)
            call = f"rank.add_product({self._variable(total)}, {a}, {b}, fresh={fresh})"
        else:
            place = self._place(step.results[0].layout.mesh)
            call = emit_rows(step, self._variable(total), fresh, self._arg, place)
        self._line(f"{self._variable(result.name)} = {call}", _type(result))

    def _headings(self, step: Compute) -> None:
        times = [f"{axis} {covered[0]}" for axis, covered in step.results[0].times if len(covered) == 1]
        section = ", ".join([step.phase.value, *times]) if times else f"{step.phase.value}, whole batch"
        if section != self.section:
            self.section = section
            self.lines += ["", f"    # ======== {section} " + "=" * (100 - len(section))]
            self.heading = ""
        where = ", ".join([step.module or "model", step.phase.value, *times])
        if where != self.heading:
            self.heading = where
            self.lines += ["", f"    # {where}"]

    def _size(self, buffer: Buffer) -> str:
        """What one device holds of a buffer."""
        size = float(buffer.bytes(self.lane.devices[0]))
        for unit in ("B", "KiB", "MiB"):
            if size < 1024:
                return f"{size:.4g} {unit}"
            size /= 1024
        return f"{size:.4g} GiB"

    def _aten(self, step: Compute) -> str:
        if step.results[0].name in self.reused.spared:
            return self._arg(step.args[0])
        parts = [self._arg(arg) for arg in step.args] + [f"{key}={self._arg(arg)}" for key, arg in step.kwargs]
        if not reads(step):
            parts.append("device=rank.torch_device")  # what reads no tensor does not know where it runs
        # a piece may lie differently in memory than the whole did, so a view may have to copy
        kind = "aten.reshape.default" if step.kind in ("aten.view.default", "aten._unsafe_view.default") else step.kind
        reuse = self.reused.taken.get(step.results[0].name)
        if reuse is not None:
            kind = reuse.kind
            parts += [f"{reuse.out}={self._variable(reuse.operand)}"] if reuse.out is not None else []
        method = cuda_call(kind)
        name = kind if kind.startswith(("aten.", "rank.")) else f"torch.ops.{kind}"
        call = f"{name if method is None else f'rank.{method}'}({', '.join(parts)})"
        return f"rank.present({call})" if _may_return_none(step) and method is None else call

    def _local_move(self, step: Compute) -> str:
        names = [name for arg in step.args if isinstance(arg, Ref) for name in (arg.name,)]
        variables = [self._variable(name) for name in names]
        source, result = self.buffers[names[0]].layout, step.results[0].layout
        place = self._place(result.mesh)
        match step.kind:
            case "sennit.take":
                return f"rank.take({variables[0]}, {step.results[0].name!r})"
            case "sennit.slice":
                call, current, times = variables[0], source, dict(step.results[0].times)
                for axis in [axis for axis, entry in result.entries if source.entry(axis) != entry]:
                    current = current.with_entry(axis, result.entry(axis))
                    dim, inner = inner_size(current, axis)
                    where = f"at={times[axis][0]}" if axis in times else f"axis={axis!r}"
                    call = f"{place}.slice({call}, dim={dim}, inner={inner}, size={result.mesh.size(axis)}, {where})"
                return call
            case "sennit.partial":
                call = variables[0]
                for axis in [axis for axis, entry in result.entries if source.entry(axis) != entry]:
                    call = f"{place}.partial({call}, axis={axis!r}, op={_reduction(result, axis)!r})"
                return call
            case "sennit.concat":
                (axis,) = [axis for axis, entry in source.entries if result.entry(axis) != entry]
                dim, inner = inner_size(source, axis)
                return f"rank.concat({', '.join(variables)}, dim={dim}, inner={inner})"
            case "sennit.accumulate":
                return f"rank.accumulate({', '.join(variables)}, fresh={self._is_first_sum(names[0])})"
            case _:
                raise ProgramError(f"no source for {step.kind}", where=f"lane {self.lane.name}")

    def _is_first_sum(self, name: str) -> bool:
        """Whether the running sum is still the first micro-batch's own value, and that may be aliased."""
        first = all(len(covered) == 1 for _, covered in self.buffers[name].times)
        return first and name not in self.joined.own

    def _collective(self, step: Collective) -> None:
        source, result = self.buffers[step.source].layout, step.result.layout
        (axis,) = step.axes
        if step.result.name in self.joined.buckets:
            self._bucketed(step, self.joined.buckets[step.result.name])
            return
        if step.result.name in self.joined.gathers:
            self._gathered(step, self.joined.gathers[step.result.name])
            return
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
            f"{self._variable(step.result.name)} = {self._place(result.mesh)}.{step.kind.value}({', '.join(parts)})",
            f"{source} -> {_type(step.result)}, {self._size(self.buffers[step.source])}",
        )
        self.in_flight.add(step.result.name)

    def _bucketed(self, step: Collective, bucket: Bucket) -> None:
        """Give a reduction to the bucket that it belongs to."""
        place, name = self._place(step.result.layout.mesh), f"bucket_{bucket.number}"
        if bucket.number not in self.begun:
            self.begun.add(bucket.number)
            parts = f"parts={len(bucket.sources)}, elements={bucket.elements}"
            self._line(
                f"{name} = {place}.bucket({bucket.kind.value!r}, axis={bucket.axis!r}, op={bucket.op.value!r}, {parts})"
            )
        given = self._variable(step.source)
        if bucket.kind is CollectiveKind.REDUCE_SCATTER:
            dim, inner = inner_size(step.result.layout, bucket.axis)
            given = f"{place}.take_apart({given}, axis={bucket.axis!r}, dim={dim}, inner={inner})"
        source = self.buffers[step.source]
        self._line(
            f"{self._variable(step.result.name)} = {name}.add({given})",
            f"{source.layout} -> {_type(step.result)}, {self._size(source)}",
        )
        self.in_flight.add(step.result.name)

    def _gathered(self, step: Collective, run: Gathers) -> None:
        """Give a parameter's piece to the run that it is gathered with."""
        place, name = self._place(step.result.layout.mesh), f"gathers_{run.number}"
        if step.result.name == run.packed[0]:
            self._line(f"{name} = {place}.gathers(axis={run.axis!r}, parts={len(run.packed)}, elements={run.elements})")
        source = self.buffers[step.source]
        dim, inner = inner_size(source.layout, run.axis)
        self._line(
            f"{self._variable(step.result.name)} = {name}.add({self._variable(step.source)}, dim={dim}, inner={inner})",
            f"{source.layout} -> {_type(step.result)}, {self._size(source)}",
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


_ROLES = {
    Role.PARAM: "parameters",
    Role.BUFFER: "buffers",
    Role.INPUT: "what the model was called with",
    Role.TANGENT: "upstream gradients of the losses",
    Role.SEED: "what random numbers are made from",
}


def _type(buffer: Buffer) -> str:
    return f"{buffer.dtype.value}{buffer.layout}"


def _reduction(layout: Layout, axis: str) -> str:
    entry = layout.entry(axis)
    assert isinstance(entry, Pending)
    return entry.op.value


def _returns_tuple(kind: str) -> bool:
    """Whether torch returns several tensors, or a list of them, also where one of them is all that is there."""
    namespace, name, overload = kind.split(".")
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if packet is None:
        return False  # no operator of torch: the source says so when it runs
    returns = getattr(packet, overload)._schema.returns
    return len(returns) != 1 or str(returns[0].type) != "Tensor"


def _may_return_none(step: Compute) -> bool:
    """Operators with a mask of wanted gradients return None for the others."""
    return any(
        isinstance(arg, tuple) and False in arg and all(isinstance(flag, bool) for flag in arg) for arg in step.args
    )
