"""Programs that sennit captures, run on one GPU: step time and peak memory, for captured_steps.py to compare with.

    python benchmarks/sim/run_captured.py --out captured.json [--device cuda] [--seconds 150] [NAME ...]

Each block of blocks.py is captured, planned on one device and lowered; its emitted source then runs on the device. So
what is measured here and what is simulated are the same operators, in the same order, with the same frees: attention in
its mathematical form, where the blocks themselves call a fused kernel. Time is that of a step replayed from a CUDA
graph, and eager.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from blocks import CASES, Case, make
from torch import Tensor

from sennit.capture import capture
from sennit.ir.graph import Role
from sennit.ir.mesh import Mesh
from sennit.ir.program import Lane
from sennit.plan import data_parallel, lower, propagate
from sennit.run.emit import emit_lane
from sennit.run.load import load_source
from sennit.run.rank import Rank, seat_of


class Alone:
    """What a program on one device asks of a communicator: where it runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


def inputs_of(lane: Lane, module: torch.nn.Module, arguments: tuple[Tensor, ...], device: torch.device) -> list[Tensor]:
    known = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given = iter(arguments)
    found = []
    for item in lane.inputs:
        match item.role:
            case Role.PARAM | Role.BUFFER:
                value = known[item.path].detach()
            case Role.INPUT:
                value = next(given)
            case Role.TANGENT:
                value = torch.ones((), dtype=getattr(torch, item.buffer.dtype.torch_name))
            case Role.SEED:
                value = torch.zeros(2, dtype=torch.int64)
        found.append(value.to(device))
    return found


def prepared(case: Case, device: torch.device) -> tuple[Callable[[], object], int]:
    """A step, and the bytes that are there before it."""
    module, arguments = make(case, "cpu")
    graph = capture(module, arguments, name=case.name)
    program = lower(propagate(data_parallel(graph, Mesh.parse("dp=1"))))
    (lane,) = program.lanes
    values = inputs_of(lane, module, arguments, device)
    inputs = {item.buffer.name: value for item, value in zip(lane.inputs, values, strict=True)}
    call = load_source(emit_lane(program, lane), case.name)
    handle = Rank(seat_of(program, lane, 0), Alone(device))  # type: ignore[arg-type]

    def step() -> object:
        with torch.no_grad():
            return call(handle, inputs)

    return step, sum(value.nbytes for value in values)


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    step, there = prepared(case, device)
    row: dict[str, Any] = {"name": case.name, "inputs": there}
    if device.type != "cuda":
        step()
        return row
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    row["before"] = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    row["peak"], row["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    row["eager"] = [timed(step) for _ in range(5)]
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        row["not graphed"] = str(error).splitlines()[0]
        torch.cuda.synchronize()
        return row
    graph.replay()
    row["graphed"] = [timed(graph.replay) for _ in range(7)]
    return row


def timed(call: Callable[[], object]) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of cases")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0, help="no case is begun later than this")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    result: dict[str, Any] = {"torch": torch.__version__, "steps": [], "failures": []}
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name()
    begin = time.monotonic()
    for case in CASES:
        if options.names and not any(name in case.name for name in options.names):
            continue
        if time.monotonic() - begin > options.seconds:
            print(f"{case.name}: left out, {options.seconds:g} s are over")
            continue
        start = time.monotonic()
        try:
            row = measure(case, device)
            result["steps"].append(row)
            if "graphed" in row:
                print(f"{1e3 * median(row['graphed']):.2f} ms, {(row['peak'] - row['before']) / 1e6:.0f} MB", end=" ")
        except Exception:
            result["failures"].append([case.name, traceback.format_exc()])
            print(traceback.format_exc().strip().splitlines()[-1])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
        print(f"{case.name}: {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
