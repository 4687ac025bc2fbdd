"""Random sequences of collective calls, made from a seed alike on all ranks, run on two backends, three times on the
one under test, and what differs.

A sequence has 2 to 8 calls on the world or a sub-group of it. All that a call passes (type, shape, strides, reduction,
root, sizes, whether it is asynchronous) is drawn from the seed; values also from the rank, and whether tensors lie in
memory of the group. Asynchronous calls are waited for at the end, in an order that each rank draws for itself.

Gloo takes the memory of a tensor as it lies, from its first element on, whatever its strides: of a view with gaps it
moves the wrong bytes, or refuses it. So it gets contiguous copies, and the other backend the views.

**Equal** means equal bits, but for sums, averages and products of floating numbers by three ranks or more: there the
order of the terms is a matter of the algorithm. With p ranks, terms x_r and unit roundoff u of the type, two orders
differ by at most 2 p u sum |x_r| (a product: 2 p u |product|).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8)
SIZES = (0, 1, 2, 3, 7, 64, 1000, 4097, 20011)
ARITHMETIC = ("SUM", "PRODUCT", "MIN", "MAX")
BITS = ("BAND", "BOR", "BXOR")


@dataclass(frozen=True, slots=True)
class Group:
    """The same ranks on either backend."""

    ranks: tuple[int, ...]
    handles: dict[str, Any]


@dataclass(slots=True)
class Call:
    """One call. `run(handle, me, plain)` issues it and gives what it will have written; `me` is the rank in the group,
    `plain` allows contiguous tensors only.
    """

    name: str
    group: Group
    asynchronous: bool
    run: Callable[[Any, int, bool], tuple[list[Any], list[Any]]]  # outputs, works
    tolerance: Callable[[int], list[Tensor]] | None = None  # for each output, of a rank


def make_groups(rank: int, size: int, seed: int) -> list[Group]:
    """The world and some sub-groups, on both backends."""
    draw = random.Random(seed)
    members = [tuple(range(size))]
    members += [tuple(sorted(draw.sample(range(size), draw.randint(1, size)))) for _ in range(3)]
    return [
        Group(ranks, {name: dist.new_group(list(ranks), backend=name) for name in ("gloo", "sennit")})
        for ranks in members
    ]


def drop_groups(rank: int, groups: Sequence[Group]) -> None:
    for group in groups:
        for handle in group.handles.values():
            if rank in group.ranks:
                dist.destroy_process_group(handle)


def differences(rank: int, groups: Sequence[Group], seed: int) -> list[str]:
    """Run sequence `seed` on both backends; a line for each call with another result."""
    results: dict[str, list[tuple[Call, list[Any]]]] = {}
    for turn, backend in (("gloo", "gloo"), ("first", "sennit"), ("again", "sennit"), ("the third time", "sennit")):
        results[turn] = run_sequence(rank, sequence(groups, seed), backend, seed)
    found: list[str] = []
    for turn in (
        "first",
        "again",
        "the third time",
    ):  # a call that was made before goes a shorter way, and then one shorter still
        for (call, wanted), (_, got) in zip(results["gloo"], results[turn], strict=True):
            me = call.group.ranks.index(rank)
            bounds = call.tolerance(me) if call.tolerance is not None else [None] * len(wanted)
            if len(wanted) != len(got) or not all(map(equal, wanted, got, bounds)):
                where = f"sequence {seed}, {turn}, rank {rank} of {call.group.ranks}"
                found.append(f"{where}: {call.name}: {_first(wanted, got)}")
    return found


def _first(wanted: Sequence[Any], got: Sequence[Any]) -> str:
    """Where two results differ first."""
    for index, (one, other) in enumerate(zip(wanted, got, strict=False)):
        if not isinstance(one, Tensor) or one.shape != other.shape:
            if isinstance(one, Tensor) or one != other:
                return f"output {index} is {other!s:.60}, not {one!s:.60}"
        elif len(places := (one != other).flatten().nonzero()):
            at = int(places[0])
            count = f"{len(places)} of {one.numel()}"
            return (
                f"output {index} differs in {count} elements, at {at}: {other.flatten()[at]}, not {one.flatten()[at]}"
            )
    return f"{len(got)} outputs, not {len(wanted)}"


def equal(wanted: Any, got: Any, bound: Tensor | None) -> bool:
    if not isinstance(wanted, Tensor):
        return bool(wanted == got)
    if bound is None or wanted.numel() == 0:
        return torch.equal(wanted, got)
    return bool(((wanted.double() - got.double()).abs() <= bound).all())


def run_sequence(rank: int, calls: Sequence[Call], backend: str, seed: int) -> list[tuple[Call, list[Any]]]:
    done: list[tuple[Call, list[Any]]] = []
    works: list[Any] = []
    for call in calls:
        if rank in call.group.ranks:
            outputs, pending = call.run(call.group.handles[backend], call.group.ranks.index(rank), backend == "gloo")
            works += pending
            done.append((call, outputs))
    random.Random(seed * 1000 + rank).shuffle(works)
    for work in works:
        work.wait()
    return done


def sequence(groups: Sequence[Group], seed: int) -> list[Call]:
    draw = random.Random(seed)
    return [_Maker(draw, draw.choice(groups), seed * 100 + index).make() for index in range(draw.randint(2, 8))]


@dataclass(slots=True)
class _Maker:
    """Draws one call."""

    draw: random.Random
    group: Group
    seed: int
    size: int = field(init=False)
    plain: bool = True
    handle: Any = None
    me: int = 0

    def __post_init__(self) -> None:
        self.size = len(self.group.ranks)

    def make(self) -> Call:
        kinds = [
            self.reductions,
            self.gathers,
            self.rooted,
            self.exchanges,
            self.messages,
            self.objects,
            self.coalesced,
        ]
        return self.draw.choice(kinds)()

    def call(self, name: str, run: Any, tolerance: Any = None) -> Call:
        asynchronous = self.draw.random() < 0.5
        issue = partial(self._issue, run, asynchronous)
        return Call(f"{name}{' async' if asynchronous else ''}", self.group, asynchronous, issue, tolerance)

    def _issue(self, run: Any, asynchronous: bool, handle: Any, me: int, plain: bool) -> tuple[list[Any], list[Any]]:
        self.plain, self.handle, self.me = plain, handle, me
        outputs, work = run(handle, me, asynchronous)
        works = work if isinstance(work, list) else [work]
        return outputs, [item for item in works if item is not None]

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def kind(self) -> torch.dtype:
        return self.draw.choice((*FLOATS, *WHOLE, torch.bool))

    def numel(self) -> int:
        return self.draw.choice(SIZES)

    def reduction(self, kind: torch.dtype) -> str:
        if kind is torch.bool:
            return self.draw.choice(("PRODUCT", "MIN", "MAX", *BITS))  # gloo adds up bools as bytes
        if kind in WHOLE:
            return self.draw.choice((*ARITHMETIC, *BITS))
        return self.draw.choice((*ARITHMETIC, "AVG"))

    def values(self, me: int, kind: torch.dtype, numel: int, part: int = 0) -> Tensor:
        """What rank `me` of the group puts in."""
        generator = torch.Generator().manual_seed((self.seed * 64 + me) * 64 + part)
        if kind is torch.bool:
            return torch.rand(numel, generator=generator) < 0.5
        if kind in WHOLE:
            return torch.randint(0 if kind is torch.uint8 else -100, 100, (numel,), generator=generator).to(kind)
        signs = torch.where(torch.rand(numel, generator=generator) < 0.5, -1.0, 1.0)
        return (signs * (0.5 + torch.rand(numel, generator=generator))).to(kind)

    def strides(self) -> Callable[[Tensor], Tensor]:
        """Perhaps the same values in a tensor that is not contiguous, or in memory of the group."""
        gaps, inside = self.draw.random() < 0.3, self.draw.random() < 0.6

        def place(x: Tensor) -> Tensor:
            if gaps and not self.plain:
                return torch.stack((x, x), dim=-1)[..., 0]
            if inside and not self.plain and (self.seed + self.me) % 3:
                return self.handle.allocate_tensor(x.numel(), dtype=x.dtype).view(x.shape).copy_(x)
            return x.clone()

        return place

    def bound(self, kind: torch.dtype, op: str, terms: Callable[[int], Tensor]) -> Tensor | None:
        if kind not in FLOATS or op not in ("SUM", "AVG", "PRODUCT") or (self.size < 3 and op != "AVG"):
            return None
        values = torch.stack([terms(rank).double().abs() for rank in range(self.size)])
        magnitude = values.prod(0) if op == "PRODUCT" else values.sum(0)
        unit = torch.finfo(kind).eps / 2
        return 2 * self.size * unit * magnitude + torch.finfo(kind).tiny

    # ---- calls -------------------------------------------------------------------------------------------------------

    def reductions(self) -> Call:
        kind, numel, place = self.kind(), self.numel(), self.strides()
        op = self.reduction(kind)
        form = self.draw.choice(
            ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor in place")
        )
        root = self.draw.randrange(self.size)
        reduce_op = getattr(dist.ReduceOp, op)
        ranks = self.group.ranks

        def run(handle: Any, me: int, asynchronous: bool) -> tuple[list[Any], Any]:
            if form in ("all_reduce", "reduce"):
                x = place(self.values(me, kind, numel))
                if form == "all_reduce":
                    return [x], dist.all_reduce(x, reduce_op, handle, asynchronous)
                work = dist.reduce(x, ranks[root], reduce_op, handle, asynchronous)
                return [x] if me == root else [], work
            parts = [self.values(me, kind, numel, part) for part in range(self.size)]
            out = place(torch.zeros(numel, dtype=kind))
            if form == "reduce_scatter":
                return [out], dist.reduce_scatter(out, [place(x) for x in parts], reduce_op, handle, asynchronous)
            x = place(torch.cat(parts))
            if form == "reduce_scatter_tensor in place" and x.is_contiguous() and not self.plain:
                out = x[me * numel : (me + 1) * numel]
            return [out], dist.reduce_scatter_tensor(out, x, reduce_op, handle, asynchronous)

        def tolerance(me: int) -> list[Any]:
            part = me if form.startswith("reduce_scatter") else 0
            bound = self.bound(kind, op, lambda rank: self.values(rank, kind, numel, part))
            return [bound] if form != "reduce" or me == root else []

        return self.call(f"{form} {op} of {numel} {kind}", run, tolerance)

    def gathers(self) -> Call:
        kind, numel, place = self.kind(), self.numel(), self.strides()
        form = self.draw.choice(("all_gather", "all_gather_into_tensor", "all_gather_into_tensor in place"))

        def run(handle: Any, me: int, asynchronous: bool) -> tuple[list[Any], Any]:
            x = place(self.values(me, kind, numel))
            if form == "all_gather":
                outs = [place(torch.zeros(numel, dtype=kind)) for _ in range(self.size)]
                return outs, dist.all_gather(outs, x, handle, asynchronous)
            out = place(torch.zeros(numel * self.size, dtype=kind))
            if form == "all_gather_into_tensor in place" and out.is_contiguous() and not self.plain:
                x = out[me * numel : (me + 1) * numel].copy_(x)
            return [out], dist.all_gather_into_tensor(out, x, handle, asynchronous)

        return self.call(f"{form} of {numel} {kind}", run)

    def rooted(self) -> Call:
        kind, numel, place = self.kind(), self.numel(), self.strides()
        form = self.draw.choice(("broadcast", "gather", "scatter"))
        root = self.draw.randrange(self.size)
        at = self.group.ranks[root]

        def run(handle: Any, me: int, asynchronous: bool) -> tuple[list[Any], Any]:
            x = place(self.values(me, kind, numel))
            if form == "broadcast":
                return [x], dist.broadcast(x, at, handle, asynchronous)
            if form == "gather":
                outs = [place(torch.zeros(numel, dtype=kind)) for _ in range(self.size)] if me == root else None
                return outs or [], dist.gather(x, outs, at, handle, asynchronous)
            parts = [place(self.values(me, kind, numel, part)) for part in range(self.size)] if me == root else None
            return [x], dist.scatter(x, parts, at, handle, asynchronous)

        return self.call(f"{form} of {numel} {kind} at {root}", run)

    def exchanges(self) -> Call:
        kind, place = self.kind(), self.strides()  # gloo takes lists of equal sizes only
        form = self.draw.choice(("even", "even in place", "splits", "splits over it", "list"))
        width = self.draw.choice((1, 3))
        table = [[self.draw.randrange(5) for _ in range(self.size)] for _ in range(self.size)]
        rows = self.draw.randrange(5)

        def run(handle: Any, me: int, asynchronous: bool) -> tuple[list[Any], Any]:
            split = form.startswith("splits")
            sends = table[me] if split else [rows] * self.size
            gets = [table[rank][me] for rank in range(self.size)] if split else [rows] * self.size
            x = place(self.values(me, kind, sum(sends) * width).view(-1, width))
            out = place(torch.zeros(sum(gets), width, dtype=kind))
            if form == "list" and self.plain:  # gloo has this form from torch 2.13 on
                return list(out.split(gets)), dist.all_to_all_single(out, x, group=handle, async_op=asynchronous)
            if form == "list":
                outs, ins = list(out.split(gets)), list(x.split(sends))
                return outs, dist.all_to_all(outs, ins, handle, asynchronous)
            if form == "even in place" and not self.plain:
                out = x = x.contiguous()
            if form == "splits over it" and not self.plain:
                room = x.new_zeros(max(len(x), len(out)), width)
                x, out = room[: len(x)].copy_(x), room[: len(out)]
            splits = (gets, sends) if split else (None, None)
            return [out], dist.all_to_all_single(out, x, *splits, group=handle, async_op=asynchronous)

        return self.call(f"all_to_all {form} of {kind}", run)

    def messages(self) -> Call:
        kind, numel, place = self.kind(), self.numel(), self.strides()
        tags = self.draw.sample(range(100), 2)
        ranks = self.group.ranks

        def run(handle: Any, me: int, asynchronous: bool) -> tuple[list[Any], Any]:
            if self.size == 1:
                return [], None
            after, before = ranks[(me + 1) % self.size], ranks[(me - 1) % self.size]
            outs = [place(torch.zeros(numel, dtype=kind)) for _ in tags]
            works = [dist.isend(place(self.values(me, kind, numel, tag)), after, handle, tag) for tag in tags]
            works += [dist.irecv(out, before, handle, tag) for out, tag in zip(outs, reversed(tags), strict=True)]
            return outs, works

        return self.call(f"messages of {numel} {kind}", run)

    def objects(self) -> Call:
        root = self.draw.randrange(self.size)
        at = self.group.ranks[root]

        def run(handle: Any, me: int, asynchronous: bool) -> tuple[list[Any], Any]:
            everything: list[Any] = [None] * self.size
            dist.all_gather_object(everything, {"rank": me, "list": list(range(me * 10))}, handle)
            told = [("from", me), "x" * (me + 1)]
            dist.broadcast_object_list(told, at, handle)
            dist.barrier(handle)
            return [everything, told], None

        return self.call("objects", run)

    def coalesced(self) -> Call:
        kind = self.draw.choice((torch.float64, torch.int32, torch.float32))
        sizes = [self.numel() for _ in range(3)]
        op = self.draw.choice(("SUM", "MAX"))
        reduce_op = getattr(dist.ReduceOp, op)

        def run(handle: Any, me: int, asynchronous: bool) -> tuple[list[Any], Any]:
            tensors = [self.values(me, kind, numel, part) for part, numel in enumerate(sizes)]
            return tensors, dist.all_reduce_coalesced(tensors, reduce_op, handle, asynchronous)

        def tolerance(me: int) -> list[Any]:
            return [
                self.bound(kind, op, lambda rank, part=part, numel=numel: self.values(rank, kind, numel, part))
                for part, numel in enumerate(sizes)
            ]

        return self.call(f"all_reduce_coalesced {op} of {sizes} {kind}", run, tolerance)


def compare_many(rank: int, first: int, count: int, groups_every: int) -> tuple[int, list[str]]:
    """On a rank: run sequences, with new groups every so often. The number of calls, and what differs."""
    size = dist.get_world_size()
    found: list[str] = []
    calls = 0
    groups: list[Group] = []
    for seed in range(first, first + count):
        if (seed - first) % groups_every == 0:
            drop_groups(rank, groups)
            groups = make_groups(rank, size, seed)
        calls += sum(rank in call.group.ranks for call in sequence(groups, seed))
        found += differences(rank, groups, seed)
    drop_groups(rank, groups)
    return calls, found
