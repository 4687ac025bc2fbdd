"""What `gpu.py` runs on: programs for the GPU, random arrays, what must come out, and clocks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch

from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import Options, recipe
from sennit.collective.library.rings import ring_all_reduce
from sennit.collective.runtime.code import INPUT, OUTPUT, Code
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.gpu_join import without_gates
from sennit.collective.runtime.gpu_program import gpu_program
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.layout import Reduction
from sennit.ir.one_sided import OneSided

MIB = 1 << 20
T = TypeVar("T")


def in_turn(items: list[T]) -> Iterator[T]:
    while True:
        yield from items


def rotation(each: int) -> int:
    """How many sets of buffers to take in turn, so that large ones are not found in the cache."""
    return max(1, min(4, (256 * MIB) // max(1, each)))


def size(value: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value} B"


def timed(work: Callable[[], None], *, seconds: float = 0.12, least: int = 5) -> float:
    """Seconds of one call: the median of batches, each between two events."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    once = max(1e-6, time.perf_counter() - start)
    batch = max(1, min(50, int(400e-6 / once)))
    count = max(least, min(60, int(seconds / (once * batch))))
    found = []
    for _ in range(count):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(batch):
            work()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / 1e3 / batch)
    return statistics.median(found)


def launches_for(moved: int) -> int:
    """How many launches to put into one graph, given the bytes that one moves."""
    return max(2, min(20, (1 << 31) // max(1, moved)))


def timed_graph(work: Callable[[], None], *, launches: int) -> float:
    """Seconds of one launch when `launches` of them are replayed as one CUDA graph: the host is not in it."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            work()
    return timed(graph.replay) / launches


# ---- programs and data -----------------------------------------------------------------------------------------------


def program_of(name: str, ranks: int, options: Options | None = None) -> OneSided:
    return compile_one_sided(recipe(name).build(1, ranks, options or Options()))


def code_of(name: str, ranks: int, options: Options | None = None, *, gates: bool = False, join: bool = True) -> Code:
    program = program_of(name, ranks, options)
    if join:
        return encode(gpu_program(program, gates=gates))
    return encode(program if gates else without_gates(program))


def ring_in_place(ranks: int) -> Code:
    """A ring that works on the output alone, which holds the input: without the first copy."""
    return encode(gpu_program(compile_one_sided(ring_all_reduce(ranks, in_place=True))))


@dataclass
class Data:
    """`inputs` stay as they were. In place, the outputs hold a copy of them and are what a call is given."""

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    elements: int
    in_place: bool = False

    @property
    def given(self) -> list[torch.Tensor]:
        return self.outputs if self.in_place else self.inputs


def data_for(device: torch.device, code: Code, nbytes: int, dtype: torch.dtype = torch.float32) -> Data:
    """Random inputs, outputs of NaN. `nbytes` is the larger buffer of a rank."""
    item = torch.empty(0, dtype=dtype).element_size()
    parts = max(code.parts(0, INPUT), code.parts(0, OUTPUT))
    elements = max(1, nbytes // item // parts)
    return data_of(device, code, elements, dtype)


def data_of(device: torch.device, code: Code, elements: int, dtype: torch.dtype) -> Data:
    inputs = [random_tensor(code.parts(r, INPUT) * elements, dtype, device) for r in range(code.ranks)]
    if code.collective.in_place:
        return Data(inputs, [t.clone() for t in inputs], elements, in_place=True)
    outputs = [poisoned(code.parts(r, OUTPUT) * elements, dtype, device) for r in range(code.ranks)]
    return Data(inputs, outputs, elements)


def random_tensor(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(count, device=device, dtype=torch.float32).to(dtype)
    return torch.randint(0 if dtype is torch.uint8 else -7, 8, (count,), device=device, dtype=dtype)


def poisoned(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((count,), float("nan") if dtype.is_floating_point else 77, dtype=dtype, device=device)


def wanted(spec: CollectiveSpec, data: Data, reduction: Reduction) -> list[torch.Tensor | None]:
    """What each rank's output must hold, by torch in f64 or i64; None where it does not matter."""
    ranks, n = spec.ranks, data.elements
    wide = torch.float64 if data.inputs[0].dtype.is_floating_point else torch.int64
    inputs = [t.to(wide) for t in data.inputs]
    combine = {
        Reduction.SUM: lambda t: t.sum(0),
        Reduction.PROD: lambda t: t.prod(0),
        Reduction.MIN: lambda t: t.amin(0),
        Reduction.MAX: lambda t: t.amax(0),
    }[reduction]
    match spec.name:
        case CollectiveName.ALL_REDUCE:
            return [combine(torch.stack(inputs))] * ranks
        case CollectiveName.REDUCE_SCATTER:
            total = combine(torch.stack(inputs))
            return [total[r * n : (r + 1) * n] for r in range(ranks)]
        case CollectiveName.ALL_GATHER:
            return [torch.cat(inputs)] * ranks
        case CollectiveName.ALL_TO_ALL:
            return [torch.cat([inputs[s][r * n : (r + 1) * n] for s in range(ranks)]) for r in range(ranks)]
        case CollectiveName.BROADCAST:
            return [inputs[spec.root or 0]] * ranks
        case CollectiveName.ALL_TO_NEXT:
            return [None, *inputs[:-1]]
        case other:
            raise ValueError(other)


def verify(spec: CollectiveSpec, data: Data, reduction: Reduction = Reduction.SUM) -> None:
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-2, torch.bfloat16: 3e-1, torch.float64: 1e-12}
    for rank, goal in enumerate(wanted(spec, data, reduction)):
        if goal is None:
            continue
        found = data.outputs[rank].to(goal.dtype)
        if data.outputs[rank].dtype.is_floating_point:
            slack = tolerance[data.outputs[rank].dtype]
            assert torch.allclose(found, goal, rtol=slack, atol=slack), (
                f"rank {rank} is off by {(found - goal).abs().max().item()}, {found.isnan().sum().item()} NaN"
            )
        else:
            narrow = goal.to(data.outputs[rank].dtype)
            assert torch.equal(data.outputs[rank], narrow), f"rank {rank}: {(data.outputs[rank] != narrow).sum()} wrong"


def must_move(spec: CollectiveSpec, nbytes: int) -> int:
    """Bytes read and written in all: every input and every output element once.

    `nbytes` is the larger buffer of a rank.
    """
    p = spec.ranks
    match spec.name:
        case CollectiveName.ALL_REDUCE | CollectiveName.ALL_TO_ALL:
            return 2 * p * nbytes
        case CollectiveName.ALL_GATHER | CollectiveName.REDUCE_SCATTER:
            return p * nbytes + nbytes
        case CollectiveName.BROADCAST:
            return (p + 1) * nbytes
        case _:
            return 2 * (p - 1) * nbytes
