"""One rank of `special.py`: a contender on a case, its steps timed, its memory and its bytes on the wire counted.

| figure | is |
|---|---|
| seconds | of a step, from a barrier to the updated parameters, the slowest rank's |
| sent | bytes that the rank's TCP connections sent in a step (the kernel's own count, `TCP_INFO`), after a first step: no initialisation |
| standing | what the resident set grew between before the model was built and after a first step: parameters, optimizer, buckets, what was compiled; all libraries were loaded before, also those that a capture imports when it is first used |
| peak | the most that it grew by while steps ran |
| losses | of every step, equal on all ranks, to be compared with the serial model's |

A contender is a name and options, `ddp:bucket=25`, `fsdp2:reshard=no,checkpoint=yes`, `interlaced:mb=8`. All of them
use the same AdamW, fused into one call.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from special_models import CASES, Case, blocks, build, pieces
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuse"))
from slow_links import pace, tcp_connections

__all__ = ["OURS", "libraries_main", "rank_main", "serial_main", "warm_libraries"]

OURS = ("interlaced", "co_shard", "recycled", "data_parallel", "zero", "pipeline")
Step = Callable[[], float]


def options_of(contender: str) -> tuple[str, dict[str, str]]:
    name, _, rest = contender.partition(":")
    return name, dict(part.split("=") for part in rest.split(",") if part)


# ---- contenders ------------------------------------------------------------------------------------------------------


def step_of(case: Case, contender: str) -> Step:
    name, options = options_of(contender)
    model, batch = build(case)
    if name == "pipelining":
        return pipelining(case, model, batch, **options)
    if name in OURS:
        return loop(parallel(name, case, model, batch, options), batch, whole=True)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {key: value[rank::ranks].contiguous() for key, value in batch.items()}
    if options.get("checkpoint") == "yes":
        checkpointed(case, model)
    if name == "ddp":
        cap = float(options["bucket"])
        # in torch 2.13 the argument is deprecated, and its successor is not in 2.11
        buffers: dict[str, Any] = {"broadcast_buffers": False} if options.get("buffers") == "no" else {}
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=cap, gradient_as_bucket_view=True, **buffers
        )
        return loop(wrapped, mine, whole=False)
    assert name == "fsdp2", name
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))  # without one it takes the GPU of a machine that has one
    reshard = options.get("reshard") != "no"
    for block in blocks(case, model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    return loop(fully_shard(model, mesh=mesh, reshard_after_forward=reshard), mine, whole=False)


def loop(model: nn.Module, batch: dict[str, Any], *, whole: bool) -> Step:
    """The training loop that all share. `whole`: the loss is of the whole batch, else of this rank's part."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

    def step() -> float:
        result = model(**batch)
        loss = result if isinstance(result, Tensor) else result["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if not whole:
            dist.all_reduce(value)
            value /= dist.get_world_size()
        return float(value)

    return step


def checkpointed(case: Case, model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    wanted = blocks(case, model)
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is block for block in wanted))


def parallel(name: str, case: Case, model: nn.Module, batch: dict[str, Any], options: dict[str, str]) -> nn.Module:
    import sennit
    from sennit.plan import zoo

    ranks, passes = dist.get_world_size(), options.get("mb", "1")
    in_stages = name in ("interlaced", "recycled", "pipeline")
    mesh = f"{'pp' if in_stages else 'dp'}={ranks};mb={passes}"
    planner: Any = getattr(zoo, name)
    if "schedule" in options:
        planner = partial(planner, schedule=options["schedule"])
    for key in ("pieces", "in_flight"):
        if key in options:
            planner = partial(planner, **{key: int(options[key])})
    if name == "zero":
        planner = partial(planner, level=int(options["level"]))
    elif "level" in options:
        planner = partial(sharded, planner, int(options["level"]))
    if options.get("checkpoint") == "yes":
        planner = partial(recomputed, planner)
    losses = ["loss"] if case.family == "evoformer" else None
    return sennit.parallelize(model, batch, plan=planner, mesh=mesh, losses=losses, certify=False)


def recomputed(planner: Any, graph: Any, mesh: Any) -> Any:
    from sennit.ir.graph import Phase
    from sennit.plan import recompute
    from sennit.plan.zoo.stages import layers_of

    plan = planner(graph, mesh)
    for layer in layers_of(graph):
        plan = recompute(plan, plan.graph.select(f"{layer}|{layer}.*", phase=Phase.FORWARD))
    return plan


def sharded(planner: Any, level: int, graph: Any, mesh: Any) -> Any:
    from sennit.plan import zoo

    return zoo.sharded(planner(graph, mesh), level=level)


def pipelining(
    case: Case, model: nn.Module, batch: dict[str, Any], *, schedule: str, mb: str, checkpoint: str = "no"
) -> Step:
    """Torch's own: one stage a rank, or two for the schedules that interleave them (a V for zero bubble V and
    DualPipeV).
    """
    from torch.distributed import pipelining as library

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if checkpoint == "yes":
        checkpointed(case, model)
    cut = pieces(case, model)
    kind = getattr(library, f"Schedule{schedule}")
    single, in_v = schedule in ("1F1B", "GPipe"), schedule in ("ZBVZeroBubble", "DualPipeV")
    modules = cut.stages(ranks if single else 2 * ranks)
    numbers = [rank] if single else [rank, 2 * ranks - 1 - rank if in_v else rank + ranks]
    stages = [library.PipelineStage(modules[at], at, len(modules), torch.device("cpu")) for at in numbers]
    last = ranks - 1 if single or not in_v else 0

    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

    running = kind(stages[0] if single else stages, int(mb), loss_fn=loss_of)
    mine = nn.ModuleList(modules[at] for at in numbers)
    optimizer = torch.optim.AdamW(mine.parameters(), 1e-3, fused=True)

    def step() -> float:
        losses: list[Tensor] = []
        arguments = (batch[cut.enters],) if rank == 0 else ()
        targets = {"target": batch[cut.target], "losses": losses} if rank == last else {}
        running.step(*arguments, **targets)
        optimizer.step()
        optimizer.zero_grad()
        value = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        dist.broadcast(value, last)
        return float(value)

    return step


# ---- a rank ----------------------------------------------------------------------------------------------------------


def rank_main(case: str, contender: str, steps: int, cores: str, out: str, variables: dict[str, str]) -> None:
    os.environ.update(variables)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 65536)  # what is freed leaves the resident set, for every contender
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split("+")})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    warm_libraries()
    first_uses()
    dist.barrier()
    before = resident("VmRSS")
    step = step_of(CASES[case], contender)
    losses = [step()]
    pace()  # every connection is there now
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak from here on
    seconds, standing = [], resident("VmRSS") - before
    dist.barrier()
    sent = sent_bytes()
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    row = [*seconds, standing, float(resident("VmHWM") - before), (sent_bytes() - sent) / steps]
    found = torch.tensor(row, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        *seconds, standing, peak, sent = found.tolist()
        answer = {"seconds": seconds, "standing": standing, "bytes": peak, "sent": sent, "losses": losses}
        Path(out).write_text(json.dumps(answer), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def serial_main(case: str, steps: int, out: str) -> None:
    """The same steps of the model as it is, in one process: the losses that all must have."""
    torch.set_num_threads(1)
    model, batch = build(CASES[case])
    step = loop(model, batch, whole=True)
    Path(out).write_text(json.dumps([step() for _ in range(steps + 1)]), encoding="utf-8")


LIBRARIES = (
    "torch.distributed.fsdp", "torch.distributed.pipelining", "sennit.run.parallelize",
    "torch._export.non_strict_utils", "torch._export.serde.serialize", "torch._functorch._aot_autograd.autograd_cache",
    "timm.models.swin_transformer",
)  # fmt: skip


def warm_libraries() -> None:
    """What any contender imports, also what torch.export imports when it is first used, before memory is counted.

    Nothing is computed: ranks are forked from here, and autograd's threads do not survive that.
    """
    from importlib import import_module
    from importlib.util import find_spec

    from sennit.testing.families_torch import transformers_module

    transformers_module()  # clears the way for torchvision, which timm imports
    for name in LIBRARIES:
        if find_spec(name) is not None:  # the private ones come and go with versions of torch
            import_module(name)


def first_uses() -> None:
    """Torch imports hundreds of modules more when it first captures something: done here on one product, in each rank
    of every contender, so that what is counted of a contender is what it keeps of its model. `--libraries` prints how
    much they are.
    """
    from sennit.capture import capture_call

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight).sum()

    capture_call(Product(), (torch.ones(2, 2),), {}, training=True)


def libraries_main(cases: list[str]) -> dict[str, tuple[int, float]]:
    """What is resident in a process that imported torch; and what each of these adds, and its seconds: the libraries
    that contenders share, what a first capture imports, and for each case what a data-parallel model of one rank takes,
    its parameters included, compiled in a child and in this process.
    """
    import sennit
    from sennit.plan import zoo

    found, last, clock = {"torch": (resident("VmRSS"), 0.0)}, resident("VmRSS"), time.perf_counter()

    def lap(name: str) -> None:
        nonlocal last, clock
        seconds = time.perf_counter() - clock
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        found[name], last = (resident("VmRSS") - last, seconds), resident("VmRSS")
        clock = time.perf_counter()

    torch.set_num_threads(1)
    warm_libraries()
    lap("libraries of all contenders")
    first_uses()
    lap("of a first capture")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    kept = []
    for case in cases:
        model, batch = build(CASES[case])
        lap(f"model and batch of {case}")
        for where in ("child", "here"):
            kept.append(
                sennit.parallelize(
                    model, batch, plan=zoo.data_parallel, mesh="dp=1", certify=False, compile_in=where,
                    losses=["loss"] if CASES[case].family == "evoformer" else None,
                )
            )  # fmt: skip
            lap(f"{case}, compile_in={where!r}")
    dist.destroy_process_group()
    return found


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


_MMAP_THRESHOLD = -3  # of malloc.h
_TCP_INFO, _BYTES_SENT = 11, 200  # of linux/tcp.h: the option, and where tcpi_bytes_sent lies in its answer


def sent_bytes() -> int:
    """What this process's TCP connections have sent so far, without headers."""
    total = 0
    for connection in tcp_connections():
        answer = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
        if len(answer) >= _BYTES_SENT + 8:
            total += struct.unpack_from("=Q", answer, _BYTES_SENT)[0]
    return total
