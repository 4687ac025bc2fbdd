"""Programs with exchanges, for four devices: chains of random layouts on random meshes, and an interlaced pipeline by
hand.
"""

from __future__ import annotations

import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import sennit.backend  # noqa: F401  (registers "sennit" with torch.distributed)
from sennit.ir.dtype import DType
from sennit.ir.graph import Output, OutputKind, Phase, Ref, Role
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute, Exchange, Free, Lane, LaneInput, Program, Step
from sennit.run import emit_lane
from sennit.run.distributed import ProcessCommunicator
from sennit.run.groups import ProcessGroups, groups_needed
from sennit.run.load import load_source
from sennit.run.pieces import inputs_of
from sennit.run.rank import Rank, seat_of

MESHES = [
    "a=4",
    "a=2,b=2",
    "b=2,a=2@3,1,0,2",
    "a=2@0-1",
    "a=2@2-3",
    "a=2@3,0",
    "@2",
    "a=3@0,2,3",
    "a=3@1-3",
    "b=4@2,3,0,1",
]


def chain(seed: int, *, links: int = 6, shape: tuple[int, ...] = (7, 5), devices: int = 4) -> Program:
    """A tensor that goes from mesh to mesh by exchanges, doubled on each; every device is a lane of its own, or all
    that are always together share one. It ends whole on all devices.
    """
    rng = random.Random(seed)
    layouts = [_layout(rng, Mesh.parse(rng.choice(MESHES)), shape) for _ in range(links)]
    layouts.append(Layout(Mesh.parse(f"all={devices}"), shape))
    member = {d: tuple(d in layout.mesh.devices for layout in layouts) for d in range(devices)}
    groups = [tuple(d for d in range(devices) if member[d] == key) for key in dict.fromkeys(member.values())]
    if rng.random() < 0.5:
        groups = [(d,) for d in range(devices)]
    return Program(f"chain {seed}", tuple(_lane(f"l{k}", group, groups, layouts) for k, group in enumerate(groups)))


def _layout(rng: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    dims: dict[int, list[str]] = {}
    for axis in mesh.names:
        if rng.random() < 0.8:
            dims.setdefault(rng.randrange(len(shape)), []).append(axis)
    return Layout.block(mesh, shape, dims)


def _lane(name: str, group: tuple[int, ...], groups: list[tuple[int, ...]], layouts: list[Layout]) -> Lane:
    def buffer(kind: str, k: int) -> Buffer:
        return Buffer(f"{kind}{k}", f"{kind if kind == 'y' else 'y'}{k}", DType.F64, layouts[k])

    def here(k: int) -> bool:
        return group[0] in layouts[k].mesh.devices

    inputs = [LaneInput(Role.INPUT, buffer("y", 0), "x")] if here(0) else []
    steps: list[Step] = []
    for k in range(1, len(layouts)):
        if here(k - 1) or here(k):
            among = {*layouts[k - 1].mesh.devices, *layouts[k].mesh.devices}
            lanes = tuple(f"l{i}" for i, other in enumerate(groups) if other[0] in among)
            taken = Buffer(f"z{k}", f"y{k - 1}", DType.F64, layouts[k]) if here(k) else None
            steps.append(Exchange(f"from {k - 1}", f"y{k - 1}" if here(k - 1) else None, taken, lanes))
        if here(k - 1):
            steps.append(Free(f"y{k - 1}"))
        if here(k):
            doubled = Buffer(f"y{k}", f"y{k}", DType.F64, layouts[k])
            steps.append(Compute("aten.mul.Scalar", (Ref(f"z{k}"), 2), (), (doubled,), Phase.FORWARD))
    last = len(layouts) - 1
    return Lane(name, group, tuple(inputs), tuple(steps), (Output(OutputKind.RESULT, f"y{last}", "y"),))


def chain_state(seed: int, shape: tuple[int, ...] = (7, 5)) -> dict[str, Tensor]:
    return {"x": torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))}


_LANE = """
  lane {name} on {devices} {{
    param %e : f64[6{{pp}},4] of %e on all "e"
    param %w : f64[4,4] of %{weight} on {stage} "{weight}"
    input %x : f64[8,6{{pp}}] of %x on all "x"
{body}
    forward %y : f64[8{{dp:2}},4{{pp}}] of %y on all = sennit.concat(%y0, %y1)
    result "y" %y
  }}"""


def interlaced() -> Program:
    """An embedding split over all four devices, a layer on each pair, and the result split over all by columns: two
    lanes, two micro-batches, collectives over both lanes, exchanges within and between them.
    """
    bodies = {"first": "", "second": ""}
    for mb in (0, 1):
        at = f"at mb={mb}"
        head = f"""
    forward %x{mb} : f64[8{{mb,dp}},6{{pp}}] of %x on all {at} = sennit.slice(%x)
    forward %p{mb} : f64[8{{mb,dp}},4]{{sum:pp}} of %h on all {at} = aten.mm.default(%x{mb}, %e)
    all_reduce %h{mb} : f64[8{{mb,dp}},4] of %h on all {at} = %p{mb} over pp"""
        tail = f"%y{mb} : f64[8{{mb,dp}},4{{pp}}] of %y on all {at}"
        bodies["first"] += f"""{head}
    forward %t{mb} : f64[8{{mb,dp}},4] of %h on s0 {at} = sennit.take(%h{mb})
    forward %u{mb} : f64[8{{mb,dp}},4] of %u on s0 {at} = aten.mm.default(%t{mb}, %w)
    exchange "u at mb={mb}" %u{mb} among first, second
    free %u{mb}
    exchange "y at mb={mb}" {tail} = nothing among first, second"""
        bodies["second"] += f"""{head}
    exchange "u at mb={mb}" %u{mb} : f64[8{{mb,dp}},4] of %u on s1 {at} = nothing among first, second
    forward %v{mb} : f64[8{{mb,dp}},4] of %y on s1 {at} = aten.mm.default(%u{mb}, %w)
    exchange "y at mb={mb}" {tail} = %v{mb} among first, second"""
    text = 'program "interlaced" { mesh all = pp=2,dp=2;mb=2\n mesh s0 = dp=2;mb=2@0-1\n mesh s1 = dp=2;mb=2@2-3\n'
    text += _LANE.format(name="first", devices="0-1", weight="a", stage="s0", body=bodies["first"])
    text += _LANE.format(name="second", devices="2-3", weight="b", stage="s1", body=bodies["second"])
    return Program.parse(text + "}")


def interlaced_state() -> dict[str, Tensor]:
    draw = np.random.default_rng(1).standard_normal
    return {"e": torch.from_numpy(draw((6, 4))), "a": torch.from_numpy(draw((4, 4))), "b": torch.from_numpy(draw((4, 4))),
            "x": torch.from_numpy(draw((8, 6)))}  # fmt: skip


def run_on_our_backend(rank: int, folder: str, seeds: list[int]) -> list[bool]:
    """What a rank does in the test of the `sennit` backend: whether each chain gives it the whole, doubled at each
    link.
    """
    dist.barrier()  # all have joined the group that is left here
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 4)
    dist.init_process_group("sennit", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
    groups, found = ProcessGroups(), []
    for seed in seeds:
        program, state = chain(seed), chain_state(seed)
        groups.make_for(groups_needed(program))
        communicator, lane = ProcessCommunicator(groups), program.lane_of(rank)
        step = load_source(emit_lane(program, lane), program.name)
        for _ in range(2):
            made = step(Rank(seat_of(program, lane, rank), communicator), inputs_of(lane, rank, state))
            communicator.finish()
            found.append(torch.equal(made["y"], state["x"] * 2.0**6))
    dist.barrier()
    dist.destroy_process_group()
    return found
