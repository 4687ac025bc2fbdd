"""What ranks do in the tests of the c10d backend. Each function runs on a gloo rank and makes its own sennit groups."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import random_calls
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import sennit.backend
from sennit.collective.runtime import group_torch
from sennit.collective.runtime.rendezvous_torch import host_identity
from sennit.collective.selection import Row, SelectionTable
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveName


def sennit_group(ranks: list[int] | None = None, timeout: float = 30.0) -> Any:
    sennit.backend.register()
    return dist.new_group(ranks, backend="sennit", timeout=timedelta(seconds=timeout))


def pretend_hosts(rank: int, hosts: list[str] | None) -> None:
    """Let ranks believe that they are on different hosts, so that they use sockets between them; None: on the one that
    they are on.
    """
    group_torch.host_identity = host_identity if hosts is None else lambda: hosts[rank]


def compare_sequences(rank: int, first: int, count: int, hosts: list[str] | None = None) -> list[str]:
    warnings.simplefilter("ignore", FutureWarning)
    sennit.backend.register()
    pretend_hosts(rank, hosts)
    return random_calls.compare_many(rank, first, count, groups_every=50)[1]


def raised(call: Any) -> str:
    try:
        call()
    except (CollectiveError, RuntimeError) as error:
        return str(error)
    return ""


def large_all_reduces(rank: int, hosts: list[str] | None) -> list[str]:
    """Arrays of several tiles, of sizes that nothing divides, and calls in a row of which each needs the one before."""
    pretend_hosts(rank, hosts)
    group = sennit_group()
    size = dist.get_world_size()
    wrong: list[str] = []
    for numel in (1 << 19, 1_000_003):
        x = torch.arange(numel, dtype=torch.int32) + rank
        dist.all_reduce(x, group=group)
        if not torch.equal(x, size * torch.arange(numel, dtype=torch.int32) + sum(range(size))):
            wrong.append(f"{numel} elements")
    chained = torch.stack((torch.full((50_000,), rank + 1.0), torch.zeros(50_000)), dim=-1)[..., 0]
    works = [dist.all_reduce(chained, group=group, async_op=True) for _ in range(3)]
    works.append(dist.broadcast(chained, 1, group, async_op=True))
    works.append(dist.all_reduce(chained, dist.ReduceOp.MAX, group, async_op=True))
    for work in works:
        work.wait()
    if not torch.equal(chained, torch.full((50_000,), size * (size + 1) / 2 * size**2)):
        wrong.append(f"in a row: {chained}")
    dist.destroy_process_group(group)
    return wrong


# ---- forms that gloo has not, or that the sequences do not draw ------------------------------------------------------


def special_forms(rank: int) -> list[str]:
    """The names of the forms whose result is wrong."""
    pretend_hosts(rank, None)
    group = sennit_group()
    size = dist.get_world_size()
    wrong: list[str] = []

    def check(name: str, got: Tensor, wanted: Tensor) -> None:
        if not torch.equal(got, wanted):
            wrong.append(f"{name}: {got} is not {wanted}")

    outs = [torch.zeros(r + 1) for r in range(size)]
    dist.all_gather(outs, torch.full((rank + 1,), float(rank)), group)
    check("uneven all_gather", torch.cat(outs), torch.cat([torch.full((r + 1,), float(r)) for r in range(size)]))

    part = torch.zeros(rank + 1)
    dist.reduce_scatter(part, [torch.full((r + 1,), float(rank)) for r in range(size)], group=group)
    check("uneven reduce_scatter", part, torch.full((rank + 1,), float(sum(range(size)))))

    outs = [torch.zeros(r + 2 * rank) for r in range(size)]
    dist.all_to_all(outs, [torch.full((rank + 2 * r,), 10.0 * rank + r) for r in range(size)], group)
    check(
        "uneven all_to_all",
        torch.cat(outs),
        torch.cat([torch.full((r + 2 * rank,), 10.0 * r + rank) for r in range(size)]),
    )

    scaled = torch.ones(3)
    dist.all_reduce(scaled, dist._make_nccl_premul_sum(rank + 1.0), group)
    check("premul_sum", scaled, torch.full((3,), size * (size + 1) / 2))

    z = torch.full((2, 2), complex(rank, 1)).t()
    dist.all_reduce(z, group=group)
    check("complex", z, torch.full((2, 2), complex(sum(range(size)), size)))
    dist.broadcast(z, 0, group)

    averaged = torch.full((2,), 2 * rank)
    dist.all_reduce(averaged, dist.ReduceOp.AVG, group)
    check("average of integers", averaged, torch.full((2,), size - 1))

    flags = torch.tensor([rank == 1, False])
    dist.all_reduce(flags, group=group)
    check("sum of bools", flags, torch.tensor([True, False]))

    for kind in (torch.int16, torch.float8_e4m3fn, torch.uint16, torch.complex128):
        moved = torch.full((3,), rank).to(kind)
        dist.broadcast(moved, 1, group)
        check(f"broadcast of {kind}", moved.float() if kind != torch.complex128 else moved.real.float(), torch.ones(3))

    wide = torch.arange(4.0 * size).view(size, 4).t().contiguous().t() + rank  # columns first
    out = torch.zeros(4)
    dist.reduce_scatter_tensor(out, wide, group=group)
    check("strided reduce_scatter", out, size * torch.arange(4.0 * rank, 4.0 * rank + 4) + sum(range(size)))

    works = []
    with dist._coalescing_manager(group, async_ops=True) as manager:
        gathered = [torch.zeros(2 * size), torch.zeros(3 * size)]
        for out in gathered:
            dist.all_gather_into_tensor(out, torch.full((len(out) // size,), float(rank)), group)
    manager.wait()
    for out in gathered:
        check("coalesced gathers", out, torch.arange(float(size)).repeat_interleave(len(out) // size))

    if rank == 0:
        found = torch.zeros(1)
        sources = [dist.recv(found, group=group, tag=3) for _ in range(size - 1)]
        check("sources", torch.tensor(sorted(sources)), torch.arange(1, size))
    else:
        dist.send(torch.ones(1), 0, group, tag=3)

    after, before = (rank + 1) % size, (rank - 1) % size
    big = torch.zeros(1 << 20)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, big, before, group),
            dist.P2POp(dist.isend, torch.full((1 << 20,), 1.0 * rank), after, group),
        ]
    )
    for work in works:
        work.wait()
    check("batch", big[-1:], torch.tensor([1.0 * before]))

    x = torch.full((4,), rank + 1.0)
    future = dist.all_reduce(x, group=group, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    check("future", future.wait(), torch.full((4,), size * (size + 1.0)))
    y = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", group.group_name)
    check("functional", torch.ops._c10d_functional.wait_tensor(y), torch.full((2,), 1.0 * size))
    group.monitored_barrier()
    dist.destroy_process_group(group)
    return wrong


def short_ways(rank: int) -> list[str]:
    """Calls that were made before take the short way; ranks of one call may take different ones; what does not fit it
    takes the long one.
    """
    pretend_hosts(rank, None)
    group = sennit_group()
    size = dist.get_world_size()
    total = float(sum(range(1, size + 1)))
    whole, part = torch.full((size * 6,), rank + 1.0), torch.zeros(6)
    own = torch.full((6,), rank + 1.0)
    calls = {
        "all_reduce": (lambda: dist.all_reduce(whole.fill_(rank + 1.0), group=group), lambda: whole, total),
        "average": (
            lambda: dist.all_reduce(whole.fill_(rank + 1.0), dist.ReduceOp.AVG, group),
            lambda: whole,
            total / size,
        ),
        "broadcast": (lambda: dist.broadcast(whole.fill_(rank + 1.0), 1, group), lambda: whole, 2.0),
        "all_gather": (lambda: dist.all_gather_into_tensor(whole, own, group), lambda: whole.view(size, -1)[-1], size),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(part, whole.fill_(rank + 1.0), group=group),
            lambda: part,
            total,
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(whole, torch.full_like(whole, rank + 1.0), group=group),
            lambda: whole.view(size, -1)[0],
            1.0,
        ),
    }
    wrong = []
    long_way = group._call
    for name, (call, got, wanted) in calls.items():
        call()
        group._call = lambda *_, name=name: wrong.append(f"{name} goes the long way")
        for _ in range(3):
            call()
        express = group._express
        if group.short is not None and name != "average":  # from the third call on C makes it
            start, express._start = express._start, lambda *_, name=name: wrong.append(f"{name} is not made in C")
            call()
            express._start = start
        group._call = long_way
        if not bool((got() == wanted).all()):
            wrong.append(f"{name}: {got()}")
    strided = torch.full((size * 6, 2), rank + 1.0)[:, 0]
    mixed = strided if rank == 0 else whole.fill_(rank + 1.0)
    dist.all_reduce(mixed, group=group)  # here rank 0 alone goes the long way
    for _ in range(2):
        work = dist.all_reduce(mixed.fill_(1.0), group=group, async_op=rank == 1)
        if work is not None:
            work.wait()
    inside = torch.zeros(size, 6)
    inside[rank] = rank + 1.0
    for _ in range(2):
        dist.all_gather_into_tensor(inside.view(-1), inside[rank], group)  # in place: they overlap
    for name, got, wanted in (("mixed", mixed, torch.full((size * 6,), 1.0 * size)), ("in place", inside[:, 0], None)):
        wanted = torch.arange(1.0, size + 1) if wanted is None else wanted
        if not torch.equal(got, wanted):
            wrong.append(f"{name}: {got}")
    dist.destroy_process_group(group)
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return wrong + ([] if "closed" in raised(lambda: group.allreduce([whole], options)) else ["it is not closed"])


def plain_round(calls: Any, me: int, count: int, strided: bool) -> list[str]:
    """Each of `sennit.backend.calls` once; the names of those with a wrong result.

    `strided`: what they are given does not fit the short way.
    """
    everyone = [torch.arange(5.0 * count).view(count, 5) + 100 * rank for rank in range(count)]
    mine, total = everyone[me], torch.stack(everyone).sum(0)
    whole, part = torch.empty(count, 5, 2)[..., 0] if strided else torch.empty(count, 5), torch.empty(5)
    calls.all_reduce(whole.copy_(mine))
    wrong = [] if torch.equal(whole, total) else ["all_reduce"]
    calls.broadcast(whole.copy_(mine), 1)
    wrong += [] if torch.equal(whole, everyone[1]) else ["broadcast"]
    calls.all_gather(whole, mine[0].clone())
    wrong += [] if torch.equal(whole, torch.stack([each[0] for each in everyone])) else ["all_gather"]
    calls.reduce_scatter(part, mine)
    wrong += [] if torch.equal(part, total[me]) else ["reduce_scatter"]
    calls.all_to_all(whole, mine)
    return wrong + ([] if torch.equal(whole, torch.stack([each[me] for each in everyone])) else ["all_to_all"])


def plain_calls(rank: int) -> list[str]:
    """`sennit.backend.calls`, the first time and later: of the world, of other ranks, and across hosts."""
    wrong: list[str] = []
    size = dist.get_world_size()
    world, hosts = list(range(size)), ["a", "b"] * (size // 2)
    for believed, members in ((None, world), (None, world[1:]), (hosts, world)):
        pretend_hosts(rank, believed)
        group = sennit_group(members)
        if rank in members:
            calls, me = sennit.backend.calls(group), members.index(rank)
            for turn in range(4):
                found = plain_round(calls, me, len(members), strided=turn == 3 and me == 1)
                wrong += [f"{name}, hosts {believed}, ranks {members}, turn {turn}" for name in found]
            dist.destroy_process_group(group)
    return wrong + ([] if "group of" in raised(lambda: sennit.backend.calls(dist.group.WORLD)) else ["gloo is taken"])


def inference(rank: int, hosts: list[str] | None) -> list[str]:
    """Tensors made in torch's inference mode, which only that mode may write to, and which calls write to on several threads."""
    pretend_hosts(rank, hosts)
    group = sennit_group()
    size = dist.get_world_size()
    wrong: list[str] = []
    with torch.inference_mode():
        strided, averaged = torch.full((2, 3), rank + 1.0).t(), torch.full((3,), float(rank))
        parts = [torch.zeros(2) for _ in range(size)]
        futures = [
            dist.all_reduce(strided, group=group, async_op=True).get_future(),
            dist.all_reduce(averaged, dist.ReduceOp.AVG, group, async_op=True).get_future(),
            dist.all_gather(parts, torch.full((2,), float(rank)), group, async_op=True).get_future(),
        ]
        received = torch.zeros(4, 2)[:, 0]
        message = dist.irecv(received, (rank - 1) % size, group)
    torch.futures.wait_all(futures)  # so the calls run on the group's thread
    dist.barrier(group)
    dist.send(torch.full((4,), float(rank)), (rank + 1) % size, group)
    message.wait()
    for _ in range(4):
        dist.all_reduce(averaged, dist.ReduceOp.AVG, group)  # outside of the mode, the short way too
    for name, got, wanted in (
        ("strided", strided, size * (size + 1) / 2),
        ("averaged", averaged, (size - 1) / 2),
        ("part", parts[-1], size - 1.0),
        ("received", received, float((rank - 1) % size)),
    ):
        if not bool((got == wanted).all()):
            wrong.append(f"{name}: {got} is not {wanted}")
    dist.destroy_process_group(group)
    return wrong


def arguments(rank: int) -> list[str]:
    """What the backend says of arguments that cannot be meant. The group and its messages are good after each: the last is a sum."""
    group = sennit_group()
    size = dist.get_world_size()
    shared = torch.zeros(1).expand(4)
    factor: Any = dist._make_nccl_premul_sum(0.5)
    said = [
        raised(lambda: dist.all_reduce(shared, group=group)),
        raised(lambda: dist.all_gather([shared] * size, torch.zeros(4), group)),
        raised(lambda: dist.recv(shared, (rank + 1) % size, group)),
        raised(lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG, group)),
        raised(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), factor, group)),
        raised(lambda: group.send([torch.ones(1)], size, 0)),
        raised(lambda: group.broadcast([torch.ones(1)], size)),
    ]
    message = dist.irecv(torch.zeros(1), (rank - 1) % size, group)
    dist.send(torch.ones(1), (rank + 1) % size, group)
    message.wait()
    x = torch.ones(1)
    group.allreduce(x).wait()  # of no options: a sum
    dist.destroy_process_group(group)
    return [*said, f"{x.item():.0f}"]


def callback_waits(rank: int) -> list[str]:
    """A callback waits for the future of a call that it makes, as PowerSGD's hook does."""
    group = sennit_group()

    def again(future: Any) -> Tensor:
        return dist.all_reduce(future.value()[0], group=group, async_op=True).get_future().wait()[0]

    def total() -> None:
        future = (
            dist.all_reduce(torch.ones(3), group=group, async_op=True)
            .get_future()
            .then(again)
            .then(lambda f: f.value())
        )
        if float(future.wait()[0]) != dist.get_world_size() ** 2:
            raise RuntimeError(f"a sum of sums is {future.value()}")

    said = [raised(total) for _ in range(5)]
    dist.destroy_process_group(group)
    return [each for each in said if each]


def sparse_sums(rank: int, hosts: list[str] | None) -> list[str]:
    """All-reduces of sparse tensors against those of dense ones: other entries on each rank, some of them none, twice the
    same, of odd sizes; other types and reductions; in inference mode or not; DDP of an embedding.
    """
    pretend_hosts(rank, hosts)
    group = sennit_group()
    size = dist.get_world_size()
    wrong: list[str] = []
    chosen = torch.Generator().manual_seed(rank)
    sum_, average, factor = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist._make_nccl_premul_sum(0.5)
    cases: list[tuple[torch.dtype, Any, tuple[int, ...], int, int]] = [
        (torch.float32, sum_, (7,), 1, 3 * rank),
        (torch.float32, average, (5, 3), 1, 2 + rank),
        (torch.float64, factor, (4, 5, 3), 2, 5),
        (torch.bfloat16, sum_, (3, 1), 2, 4),
        (torch.int64, average, (6, 2), 1, 9),
        (torch.float16, sum_, (6,), 1, rank % 2),
        (torch.uint8, sum_, (3, 0), 1, 2),
        (torch.float32, sum_, (4, 4), 2, 0),
    ]
    for number, (kind, operation, shape, dims, count) in enumerate(cases):
        places = torch.stack([torch.randint(length, (count,), generator=chosen) for length in shape[:dims]])
        entries = torch.randint(1, 5, (count, *shape[dims:]), generator=chosen).to(kind)
        with torch.inference_mode(number % 2 == 1):
            x = torch.sparse_coo_tensor(places, entries, shape, check_invariants=True)
            dense = x.to_dense()
        work = dist.all_reduce(x, operation, group, async_op=number > 3)
        if work is not None and work.get_future().wait()[0] is not x:
            wrong.append(f"case {number}: its future has another tensor")
        dist.all_reduce(dense, operation, group)
        if not x.is_coalesced() or x.is_inference() != (number % 2 == 1) or not torch.equal(x.to_dense(), dense):
            wrong.append(f"case {number}: {x} is not {dense}")
    torch.manual_seed(0)
    table = nn.Embedding(11, 4, sparse=True)
    model = DistributedDataParallel(table, process_group=group)
    seen = torch.tensor([[rank, 5], [10, rank]])
    for _ in range(3):
        model(seen).sum().backward()
    wanted = torch.zeros(11, 4)
    for other in range(size):
        wanted.index_add_(0, torch.tensor([other, 5, 10, other]), torch.full((4, 4), 3.0 / size))
    torch.optim.SparseAdam(model.parameters()).step()  # it writes to what the gradient holds
    gradient = table.weight.grad
    if gradient is None or not torch.allclose(gradient.to_dense(), wanted):
        wrong.append(f"DDP: {gradient} is not {wanted}")
    other = torch.eye(3 + (rank == 1)).to_sparse()
    said = raised(lambda: dist.all_reduce(other, group=group))
    if "shapes [3, 3]" not in said:
        wrong.append(f"of other shapes on rank 1: {said}")
    dist.destroy_process_group(group)
    return wrong


def joined(rank: int) -> list[str]:
    """DDP with fewer inputs on rank 0: there C++ waits for a work that nobody in Python holds any more."""
    pretend_hosts(rank, None)
    group = sennit_group()
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(5, 5, bias=False), process_group=group)
    wrong: list[str] = []
    with net.join(divide_by_initial_world_size=False):
        for step in range(3 if rank == 0 else 5):
            net.zero_grad()
            net(torch.full((1, 5), 50.0)).sum().backward()
            gradient = net.module.weight.grad
            if gradient is None or not torch.allclose(gradient, torch.full((5, 5), 50.0)):
                wrong.append(f"step {step}: {gradient}")
    dist.destroy_process_group(group)
    return wrong


def compiled(rank: int) -> list[str]:
    """Collectives of compiled programs, called by Python and by C++ (the buffers of DDP), break its graph and run."""
    pretend_hosts(rank, None)
    group = sennit_group()
    size = dist.get_world_size()
    calls = sennit.backend.calls(group)

    def program(x: Tensor) -> Tensor:
        y = x * 2
        dist.broadcast(y, 1, group)
        work = dist.all_reduce(y, group=group, async_op=True)
        work.wait()
        parts = [torch.empty_like(y) for _ in range(size)]
        dist.all_gather(parts, y, group)
        calls.all_reduce(y)
        dist.barrier(group)
        return y + parts[0]

    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the compiler cannot trace in torch's own part
        faster = torch.compile(program, backend="eager")
        model = torch.compile(DistributedDataParallel(module, process_group=group), backend="eager")
        wrong = []
        for _ in range(4):
            got = faster(torch.full((3,), rank + 1.0))
            model(torch.ones(4, 4)).sum().backward()
            if not torch.equal(got, torch.full((3,), 4.0 * size * size + 4.0 * size)):
                wrong.append(f"{got}")
    torch.compiler.reset()
    dist.destroy_process_group(group)
    return wrong


def profiled(rank: int) -> dict[str, int]:
    """How often each kind of call stands in a trace; none of those before and after it do."""
    group = sennit_group()
    right, left = (rank + 1) % 4, (rank - 1) % 4

    def calls() -> None:
        x, wide = torch.ones(1000), torch.empty(4000)
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 0, group=group)
        dist.all_to_all_single(wide, torch.ones(4000), group=group)
        dist.barrier(group=group)
        assert x[999] == 4
        assert wide[3999] == 1

    for _ in range(4):  # they are made in C from the third time on
        calls()
    with torch.profiler.profile() as profile:
        calls()
        x = torch.ones(1000)
        works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        sent = dist.isend(x, right, group=group)
        dist.recv(torch.empty(1000), left, group=group)
        sent.wait()
    calls()
    dist.destroy_process_group(group)
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("sennit:")))


def refusals(rank: int) -> list[str]:
    """What the backend says of calls that it cannot serve. The group is good after each."""
    group = sennit_group()
    size = dist.get_world_size()
    said = [
        raised(lambda: dist.broadcast(torch.eye(2).to_sparse(), 0, group)),
        raised(lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX, group)),
        raised(lambda: dist.all_reduce(torch.eye(2).to_sparse_csr(), group=group)),
        raised(lambda: dist.all_reduce(torch.empty(2, device="meta"), group=group)),
        raised(lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group)),
        raised(lambda: group.allreduce([torch.ones(2, dtype=torch.uint16)], dist.AllreduceOptions())),
        raised(lambda: dist.all_gather_into_tensor(torch.empty(3), torch.empty(2), group)),
        raised(lambda: dist.all_to_all_single(torch.empty(size + 1), torch.empty(size + 1), group=group)),
    ]
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    return [*said, f"{x.item():.0f}", raised(lambda: group.allreduce([x], dist.AllreduceOptions()))]


def tuned(rank: int) -> list[str]:
    """A group with a table of its own: which code it runs for two sizes, and what it says of tables that do not fit."""
    pretend_hosts(rank, None)
    sennit.backend.register()
    size = dist.get_world_size()
    name = CollectiveName.ALL_REDUCE
    rows = (Row(name, 0, "all_pairs_all_reduce", 1.0, "", 4096), Row(name, 4096, "ring_all_reduce", 1.0, ""))
    table = SelectionTable("here", 1, size, "made up", rows)
    group = dist.new_group(backend="sennit", pg_options=table)
    for numel in (10, 5000):
        x = torch.ones(numel)
        dist.all_reduce(x, group=group)
        assert float(x.sum()) == numel * size
    codes = [group._communicator.group.code(name, nbytes).name for nbytes in (40, 20_000)]
    wrong = SelectionTable("there", 2, size, "made up", rows)
    said = raised(lambda: dist.new_group(backend="sennit", pg_options=wrong))
    dist.destroy_process_group(group)
    return [*codes, said]


def alone(rank: int) -> list[float]:
    """Groups of one rank."""
    sennit.backend.register()
    groups = [dist.new_group([r], backend="sennit") for r in range(dist.get_world_size())]
    group, x = groups[rank], torch.full((2,), rank + 1.0)
    out, piece = torch.zeros(2), [torch.zeros(2)]
    dist.all_reduce(x, group=group)
    dist.all_gather_into_tensor(out, x, group)
    dist.all_gather(piece, x, group)
    dist.reduce_scatter_tensor(piece[0], out, group=group)
    dist.all_to_all_single(out, piece[0], group=group)
    dist.broadcast(out, rank, group)
    dist.barrier(group)
    return [float(value) for value in out]


def memory_of_the_group(rank: int, hosts: list[str] | None, shares: bool) -> list[str]:
    """Tensors that the ranks of a host share: like any others, in any call, from any of the ranks."""
    warnings.simplefilter("ignore", FutureWarning)
    pretend_hosts(rank, hosts)
    group, size = sennit_group(), dist.get_world_size()
    found, told, handler = list[str](), list[str](), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sennit").addHandler(handler)

    def check(holds: bool, what: str) -> None:
        found.extend([] if holds else [what])

    def empty(*shape: Any, dtype: torch.dtype | None = None) -> Tensor:
        return sennit.backend.empty(*shape, dtype=dtype, group=group)

    for x, shape, dtype in (
        (empty(3, 5), (3, 5), torch.float32),
        (empty((4,), dtype=torch.bfloat16), (4,), torch.bfloat16),
        (empty(2, 0, dtype=torch.bool), (2, 0), torch.bool),
        (empty([7], dtype=torch.complex128), (7,), torch.complex128),
    ):
        check((tuple(x.shape), x.dtype, x.is_contiguous()) == (shape, dtype, True), f"{x.shape}, {x.dtype}")
    n = 1 << 18
    whole, part = empty(size * n), empty(n)
    for turn in range(4):  # the long way, and the shorter ones
        part.fill_(rank + turn)
        dist.all_gather_into_tensor(whole, part, group)
        check(whole.view(size, n).mean(1).tolist() == [r + turn for r in range(size)], "all_gather")
        whole.fill_(rank)
        dist.reduce_scatter_tensor(part, whole, group=group)
        check(float(part.mean()) == size * (size - 1) / 2, "reduce_scatter")
        out = torch.empty_like(whole)
        dist.all_to_all_single(out, whole, group=group)
        check(out.view(size, n).mean(1).tolist() == list(range(size)), "all_to_all")
        whole.fill_(-1)
        own = whole.view(size, n)[rank].fill_(rank)
        dist.all_gather_into_tensor(whole, own, group)
        check(whole.view(size, n).mean(1).tolist() == list(range(size)), "all_gather in place")
        whole.fill_(rank + turn)
        dist.all_reduce(whole, group=group)
        check(float(whole[-1]) == size * (size - 1) / 2 + size * turn, "all_reduce")
        whole.fill_(rank)
        dist.broadcast(whole, turn % size, group)
        check(float(whole[n]) == turn % size, "broadcast")
    whole.requires_grad_()
    (whole * 2).sum().backward()
    check(float(whole.grad[0]) == 2, "gradients")  # type: ignore[index]
    communicator = getattr(group._communicator, "row", group._communicator)
    room = communicator.group._layout.capacity.arena if shares else 1 << 20
    for _ in range(8):  # what is let go comes back
        empty(room // 2, dtype=torch.uint8)
    check(told == [], f"logged: {told}")
    two = [empty(room + 1, dtype=torch.uint8) for _ in range(2)]  # more than there is: ordinary memory, never touched
    used_up = [line for line in told if "bytes do not fit" in line and "ordinary memory" in line]
    check(len(used_up) == len(told) == shares, f"used up: {told}")
    check(two[1].numel() == room + 1, "ordinary memory")
    dist.barrier(group)
    dist.destroy_process_group(group)
    check(float(whole.detach()[n]) == 3 % size, "after the end")
    check("closed" in raised(lambda: empty(3)), "made after the end")
    check("ProcessGroup" in raised(lambda: sennit.backend.empty(3)), "of a group of gloo")
    logging.getLogger("sennit").removeHandler(handler)
    return found


# ---- programs of others ----------------------------------------------------------------------------------------------


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8))


def train(model: nn.Module, rank: int, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        loss = model(torch.randn(4, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    state = {}
    for name, value in model.state_dict().items():
        state[name.removeprefix("module.")] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return state


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def train_ddp(rank: int, group: Any) -> dict[str, Tensor]:
    model = DistributedDataParallel(make_model(), process_group=group, bucket_cap_mb=0.001)
    train(model, rank)
    return weights(model)


def train_fsdp(rank: int, group: Any, folder: str) -> dict[str, Tensor]:
    """Train, save a checkpoint, load it into a new model, train on."""
    mesh = DeviceMesh.from_group(group, "cpu")
    model = make_model()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, process_group=group)
    fresh = make_model()
    for layer in fresh:
        fully_shard(layer, mesh=mesh)
    fully_shard(fresh, mesh=mesh)
    for module in fresh.modules():
        if isinstance(module, FSDPModule):  # from here on in memory of the group, if it has some
            module.set_allocate_memory_from_process_group_for_comm(True)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    fresh.load_state_dict(state["model"])
    train(fresh, rank, steps=1)
    return weights(fresh)


def redistribute(rank: int, group: Any) -> dict[str, Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(60.0).view(6, 10)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product = columns @ distribute_tensor(whole.t().contiguous(), mesh, [Shard(0)])
    return {
        "columns": columns.to_local(),
        "full": rows.full_tensor(),
        "product": product.redistribute(mesh, [Replicate()]).to_local(),
        "scattered": product.redistribute(mesh, [Shard(0)]).full_tensor(),
    }


def programs(rank: int, hosts: list[str] | None = None) -> dict[str, float]:
    """The largest difference between gloo and sennit in what DDP, FSDP2 with checkpoints, and DTensor compute."""
    pretend_hosts(rank, hosts)
    gloo, ours = dist.new_group(backend="gloo"), sennit_group()
    if hosts is None:
        ours._communicator.group.shared_from = 0
    found = {
        "ddp": largest_difference(train_ddp(rank, gloo), train_ddp(rank, ours)),
        "dtensor": largest_difference(redistribute(rank, gloo), redistribute(rank, ours)),
    }
    folder = [tempfile.mkdtemp(prefix="sennit-dcp-")]
    dist.broadcast_object_list(folder, 0)
    states = [train_fsdp(rank, group, str(Path(folder[0]) / name)) for name, group in (("gloo", gloo), ("ours", ours))]
    found["fsdp and checkpoint"] = largest_difference(*states)
    dist.destroy_process_group(ours)
    return found
