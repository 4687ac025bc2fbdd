"""A program as ranks send it: sums of gradients in buckets (`buckets.py`), added up a bucket behind (`sums_behind.py`),
parameters gathered in runs and ahead (`gathers.py`). For the simulator's clock.

The source of a rank does the same by its own means (`run/joined.py`, `run/order.py`), from the program without. The
result is a program like any other: the reference interpreter runs it (`ir/flat_numpy.py` has what stands around a flat
tensor), to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sennit.ir.graph import Phase, Ref
from sennit.ir.layout import Entry, Layout, Pending, Split
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Free, Lane, Program, Step, defines, reads
from sennit.ir.program_cuts import inner_size
from sennit.kernels.buckets import Bucket, buckets, term_runs
from sennit.kernels.gathers import Gathers, gathers, with_gathers_ahead
from sennit.kernels.lane_code import with_frees
from sennit.kernels.sums_behind import with_sums_behind

__all__ = ["in_buckets"]


def in_buckets(program: Program) -> Program:
    """The program with one collective for each bucket: a copy of its sources before it, and views of the flat result
    behind; parameters are gathered in runs and ahead (`gathers.py`), and copied out of what arrives. For a clock: no
    operator of the graph is the copy's, so the proof of a program is that of the one without.
    """
    return replace(program, lanes=tuple(_in_runs(_joined(lane)) for lane in program.lanes))


def _joined(lane: Lane) -> Lane:
    found, runs = buckets(lane), term_runs(lane)
    if not found and not runs:
        return lane
    results: dict[int, list[Buffer]] = {}  # of the members so far, by bucket
    missing: set[str] = set()  # what lies in a bucket that is not full, and views of it
    behind: list[Step] = []  # those views
    steps: list[Step] = []
    for step in with_sums_behind([step for step in lane.steps if not isinstance(step, Free)], runs):
        if isinstance(step, Collective) and step.result.name in found:
            bucket = found[step.result.name]
            members = results.setdefault(bucket.number, [])
            members.append(step.result)
            missing.add(step.result.name)
            if len(members) == len(bucket.sources):
                steps += _flat(bucket, members)
                missing -= {buffer.name for buffer in members}
                behind = _released(behind, missing, steps)
        elif missing.isdisjoint(reads(step)):
            steps.append(step)
        else:
            behind.append(step)
            missing |= {buffer.name for buffer in defines(step)}
    freed = {step.source for step in lane.steps if isinstance(step, Free)}
    freed |= {buffer.name for step in steps for buffer in defines(step) if buffer.name.startswith(_FLAT)}
    return replace(lane, steps=tuple(with_frees(steps, freed)))


def _released(behind: list[Step], missing: set[str], steps: list[Step]) -> list[Step]:
    """Moves the views that miss nothing any more to the steps; the others."""
    left: list[Step] = []
    for step in behind:
        missing -= {buffer.name for buffer in defines(step)}
        if missing.isdisjoint(reads(step)):
            steps.append(step)
        else:
            missing |= {buffer.name for buffer in defines(step)}
            left.append(step)
    return left


_FLAT = "~bucket."  # no buffer of a lowered program has a name that begins so


def _flat(bucket: Bucket, results: list[Buffer]) -> list[Step]:
    pieces = bucket.mesh.size(bucket.axis) if bucket.kind is CollectiveKind.REDUCE_SCATTER else 1
    made: Mapping[str, Entry] = {bucket.axis: Split(0, bucket.elements)} if pieces > 1 else {}
    shape, name = (pieces * bucket.elements,), f"{_FLAT}{bucket.number}"
    cuts = tuple(inner_size(result.layout, bucket.axis) for result in results) if pieces > 1 else ()
    given = Layout.make(bucket.mesh, shape, {bucket.axis: Pending(bucket.op)})
    source = Buffer(f"{name}.given", f"bucket.{bucket.number}", bucket.dtype, given)
    result = Buffer(name, source.tensor, bucket.dtype, Layout.make(bucket.mesh, shape, made))
    given_in = (tuple(map(Ref, bucket.sources)), pieces, cuts)
    copy = Compute("sennit.pack", given_in, (), (source,), Phase.BACKWARD, "", source.tensor)
    views = Compute("sennit.parts", (Ref(name),), (), tuple(results), Phase.BACKWARD, "", source.tensor)
    return [copy, Collective(bucket.kind, source.name, result, (bucket.axis,)), views]


# ---- gathers ---------------------------------------------------------------------------------------------------------


def _in_runs(lane: Lane) -> Lane:
    found = gathers(lane)
    if not found:
        return lane
    buffers = lane.buffers()
    steps: list[Step] = []
    packed: list[Collective] = []
    for step in with_gathers_ahead([step for step in lane.steps if not isinstance(step, Free)], found):
        if not isinstance(step, Collective) or step.result.name not in found:
            steps.append(step)
            continue
        run = found[step.result.name]
        if step.result.name not in run.packed:
            steps.append(step)
            continue
        packed.append(step)
        if len(packed) == len(run.packed):
            steps += _flat_gather(run, packed, buffers)
            packed = []
    freed = {step.source for step in lane.steps if isinstance(step, Free)}
    freed |= {buffer.name for step in steps for buffer in defines(step) if buffer.name.startswith(_RUN)}
    return replace(lane, steps=tuple(with_frees(steps, freed)))


_RUN = "~run."


def _flat_gather(run: Gathers, members: list[Collective], buffers: Mapping[str, Buffer]) -> list[Step]:
    """The pieces copied into one tensor, its gather, and the parameters copied out of it."""
    count, dtype = run.mesh.size(run.axis), buffers[members[0].source].dtype
    name, shape = f"{_RUN}{run.number}", (count * run.elements,)
    given = Layout.make(run.mesh, shape, {run.axis: Split(0, run.elements)})
    source = Buffer(f"{name}.given", f"run.{run.number}", dtype, given)
    result = Buffer(name, source.tensor, dtype, Layout.make(run.mesh, shape, {}))
    pieces = tuple(Ref(step.source) for step in members)
    cuts = tuple(inner_size(buffers[step.source].layout, run.axis) for step in members)
    results = tuple(step.result for step in members)
    copied_in = Compute("sennit.pack", (pieces, 1, ()), (), (source,), Phase.FORWARD, "", source.tensor)
    copied_out = Compute("sennit.join", (Ref(name), count, cuts), (), results, Phase.FORWARD, "", source.tensor)
    return [copied_in, Collective(CollectiveKind.ALL_GATHER, source.name, result, (run.axis,)), copied_out]
