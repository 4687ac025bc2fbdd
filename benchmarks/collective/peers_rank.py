"""One rank of one peer of `peers.py`: it connects to the coordinator, and then does what it is told, blocked on the
socket between.

    python peers_rank.py PEER SOCKET PLACE RANKS [RANK STORE [LIBRARY]]        STORE: a file for torch's; LIBRARY: of programs by hand

MPI gives rank and size itself. A peer is a class with `collective(name, source, target)` and `barrier()`; arrays are
numpy's, in f32. What each is told to be: the calls that its users would make, in place where that is the habit
(all-reduce, broadcast). `collective` returns what makes so many of them.
"""

from __future__ import annotations

import ctypes
import datetime
import mmap
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

Floats = NDArray[np.float32]
_ONE_TENSOR_EACH = (
    *("_allgather_base", "_reduce_scatter_base", "alltoall_base"),
    *("all_gather_single", "reduce_scatter_single", "all_to_all_single"),  # from torch 2.13 on
)
SLOW = 180.0  # seconds after which a call counts as stuck
BY_HAND = ("all_gather", "all_to_all", "broadcast", "all_reduce", "reduce_scatter")  # in the order of by_hand.h

Calls = Callable[[int], object]  # so many of them


class Peer(Protocol):
    rank: int
    size: int
    version: str
    checks: bool  # whether its results mean anything

    def collective(self, name: str, source: Floats, target: Floats) -> Calls: ...

    def barrier(self) -> None: ...


def placed(peer: Peer, array: Floats) -> Floats:
    """The same array where this peer wants it."""
    if not (isinstance(peer, Torch) and peer.inside and array.size):
        return array
    import sennit.backend

    found: Floats = sennit.backend.empty(array.size).numpy()
    found[...] = array
    return found


def repeated(call: Callable[[], object]) -> Calls:
    def calls(count: int) -> None:
        for _ in range(count):
            call()

    return calls


class Torch:
    """torch.distributed on a backend.

    Of the backend "torch" the calls return at once, with nothing done: what is timed is torch itself. Those of "calls"
    are made without it, those of "inside" on tensors in memory of the group. Behind those of "floor" are programs by
    hand.
    """

    def __init__(self, backend: str, rank: int, size: int, store: str, hand: Hand | None = None) -> None:
        import torch
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if backend == "gloo":  # the others have one thread, as torchrun sets it
            torch.set_num_threads(max(1, min(len(os.sched_getaffinity(0)), (os.cpu_count() or 1) // size)))
        alone, plain, inside = (backend == kind for kind in ("torch", "calls", "inside"))
        backend = backend if backend == "gloo" else "sennit"
        if backend == "sennit":
            import sennit.backend

            sennit.backend.register()

        limit = datetime.timedelta(seconds=SLOW)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
        self.rank, self.size, self.dist, self.torch = rank, size, dist, torch
        self.checks, self.calls, self.hand, self.inside = not alone, None, hand, inside
        self.version = f"{backend} of torch {torch.__version__}" if backend == "gloo" else "sennit, c10d backend"
        if inside:
            self.version = "sennit, c10d backend, tensors of sennit.backend.empty"
        if plain:
            self.version, self.calls = "sennit, calls without torch.distributed", sennit.backend.calls()
        if alone or hand is not None:
            self.version = f"the c10d calls with {'nothing' if hand is None else 'programs by hand'} behind them"
            group: Any = dist.group.WORLD
            call = None if hand is None else hand.library.hand_call  # both return None, so that torch does not wait
            for name in ("allreduce", "broadcast", *_ONE_TENSOR_EACH):
                setattr(group, name, (lambda *_: None) if call is None else lambda *_: call())

    def collective(self, name: str, source: Floats, target: Floats) -> Calls:
        dist = self.dist
        if self.hand is not None:
            self.hand.collective(name, source, target)
        x, y = self.torch.from_numpy(source), self.torch.from_numpy(target)
        if (calls := self.calls) is not None:
            plain = {
                "all_reduce": lambda: calls.all_reduce(y),
                "broadcast": lambda: calls.broadcast(y, 0),
                "all_gather": lambda: calls.all_gather(y, x),
                "reduce_scatter": lambda: calls.reduce_scatter(y, x),
                "all_to_all": lambda: calls.all_to_all(y, x),
            }
            return repeated(plain[name])
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the first names are those of 2.13,
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)  # where the others warn each time
        ways = {
            "all_reduce": lambda: dist.all_reduce(y),
            "broadcast": lambda: dist.broadcast(y, 0),
            "all_gather": lambda: gather(y, x),
            "reduce_scatter": lambda: scatter(y, x),
            "all_to_all": lambda: dist.all_to_all_single(y, x),
        }
        return repeated(ways[name])

    def barrier(self) -> None:
        self.dist.barrier()


class Core:
    """The shared-memory group of sennit, on numpy arrays, without torch."""

    def __init__(self, rank: int, size: int, gather: Callable[[bytes], list[bytes]]) -> None:
        from sennit.collective.runtime.shm_group import ShmGroup

        self.rank, self.size, self.version, self.checks = rank, size, "sennit, ShmGroup on numpy", True
        self.group = ShmGroup.create(rank, size, gather, timeout=SLOW)

    def collective(self, name: str, source: Floats, target: Floats) -> Calls:
        group = self.group
        ways = {
            "all_reduce": lambda: group.all_reduce(target),
            "broadcast": lambda: group.broadcast(target, 0),
            "all_gather": lambda: group.all_gather(source, target),
            "reduce_scatter": lambda: group.reduce_scatter(source, target),
            "all_to_all": lambda: group.all_to_all(source, target),
        }
        return repeated(ways[name])

    def barrier(self) -> None:
        self.group.barrier()


class Mpi:
    """mpi4py, on the library that MPI4PY_MPIABI and LD_LIBRARY_PATH name."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank, self.size, self.checks = self.world.rank, self.world.size, True
        self.version = " ".join(MPI.Get_library_version().replace("\x00", "").split("\n")[0].split(",")[0].split())

    def collective(self, name: str, source: Floats, target: Floats) -> Calls:
        world, here = self.world, self.mpi.IN_PLACE
        ways = {
            "all_reduce": lambda: world.Allreduce(here, target),
            "broadcast": lambda: world.Bcast(target, 0),
            "all_gather": lambda: world.Allgather(source, target),
            "reduce_scatter": lambda: world.Reduce_scatter_block(source, target),
            "all_to_all": lambda: world.Alltoall(source, target),
        }
        return repeated(ways[name])

    def barrier(self) -> None:
        self.world.Barrier()


class Hand:
    """The programs of by_hand.h, in a loop of C: in the fastest of their ways, which is found out from the arrays of
    each collective and size.
    """

    def __init__(self, rank: int, size: int, library: str, gather: Callable[[bytes], list[bytes]]) -> None:
        self.rank, self.size, self.version, self.checks = rank, size, "programs by hand, in a loop of C", True
        self.way = ""
        self.library = hand = ctypes.CDLL(library)
        hand.hand_bytes.restype, hand.hand_choose.restype, hand.hand_call.restype = (
            ctypes.c_size_t,
            ctypes.c_double,
            None,
        )
        hand.hand_choose.argtypes = [ctypes.c_int, ctypes.c_size_t, *[ctypes.c_void_p] * 3, ctypes.c_int]
        descriptor, nbytes = -1, int(hand.hand_bytes(size))
        if rank == 0:
            descriptor = os.memfd_create("sennit-by-hand")
            os.ftruncate(descriptor, nbytes)
        place = gather(f"/proc/{os.getpid()}/fd/{descriptor}".encode())[0]
        if rank:
            descriptor = os.open(place, os.O_RDWR)
        self.memory = mmap.mmap(descriptor, nbytes)
        gather(b"")  # all have mapped it
        os.close(descriptor)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        hand.hand_join(ctypes.c_void_p(address), rank, size)

    def collective(self, name: str, source: Floats, target: Floats) -> Calls:
        before, way = target.copy(), ctypes.create_string_buffer(64)
        in_place = name in ("all_reduce", "broadcast")
        nbytes, part = max(source.nbytes, target.nbytes), max(source.nbytes, target.nbytes) // self.size
        if part % 64:
            raise ValueError(f"programs by hand are for parts of whole lines, not of {part} bytes")
        own = (target if in_place else source).ctypes.data
        self.library.hand_choose(BY_HAND.index(name), nbytes, own, target.ctypes.data, way, 64)
        target[...] = before
        self.library.hand_meet()
        self.way = way.value.decode()
        return self.library.hand_calls  # type: ignore[no-any-return]

    def barrier(self) -> None:
        self.library.hand_meet()


# ---- arrays and their check ------------------------------------------------------------------------------------------


PERIOD = 31


def filled(ranks: Sequence[int], elements: int, first: int = 0) -> Floats:
    """Whole numbers that tell ranks and places apart, of several ranks added up: sums of them are exact.

    They repeat themselves, so that checks of large arrays are quick.
    """
    places = np.arange(first, first + PERIOD, dtype=np.int64)
    pattern = sum((places * 7 + rank * 13) % PERIOD for rank in ranks)
    return np.tile(np.asarray(pattern, np.float32), -(-elements // PERIOD))[:elements].copy()


def arrays_for(name: str, rank: int, size: int, nbytes: int) -> tuple[Floats, Floats]:
    """Source and target; the larger has about `nbytes`. All-reduce and broadcast work on the target alone."""
    part = max(1, nbytes // 4 // size)
    match name:
        case "all_reduce" | "broadcast":
            return np.zeros(0, np.float32), filled([rank], max(1, nbytes // 4))
        case "all_gather":
            return filled([rank], part), np.full(part * size, np.nan, np.float32)
        case "reduce_scatter":
            return filled([rank], part * size), np.full(part, np.nan, np.float32)
        case _:
            return filled([rank], part * size), np.full(part * size, np.nan, np.float32)


def is_right(name: str, rank: int, size: int, nbytes: int, target: Floats) -> bool:
    part, whole, everyone = max(1, nbytes // 4 // size), max(1, nbytes // 4), range(size)
    match name:
        case "all_reduce":
            goal = filled(everyone, whole)
        case "broadcast":
            goal = filled([0], whole)
        case "all_gather":
            goal = np.concatenate([filled([r], part) for r in everyone])
        case "reduce_scatter":
            goal = filled(everyone, part, rank * part)
        case _:
            goal = np.concatenate([filled([r], part, rank * part) for r in everyone])
    return bool(np.array_equal(target, goal))


# ---- what the coordinator asks for -----------------------------------------------------------------------------------


class Worker:
    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.ready: Calls = lambda count: None
        self.kept: list[Any] = []

    def prepare(self, name: str, nbytes: int) -> bool:
        """Make the arrays, call once, and say whether the result is right."""
        peer = self.peer
        source, target = (placed(peer, array) for array in arrays_for(name, peer.rank, peer.size, nbytes))
        self.kept = [source, target]
        self.ready = peer.collective(name, source, target)
        self.ready(1)
        return not peer.checks or is_right(name, peer.rank, peer.size, nbytes, target)

    def time(self, batch: int) -> float:
        """Seconds of one call, in a batch that all ranks begin together.

        Calls come before it that are not timed, so that a peer finds its arrays and its code in the caches, where the
        peer before has left its own.
        """
        self.ready(max(1, batch // 4))
        self.peer.barrier()
        start = time.perf_counter()
        self.ready(batch)
        return (time.perf_counter() - start) / batch

    def forget(self) -> bool:
        self.kept, self.ready = [], lambda count: None
        return True

    def way(self) -> str:
        """Of the peers that have several: the one that is timed."""
        hand = self.peer.hand if isinstance(self.peer, Torch) else self.peer
        return hand.way if isinstance(hand, Hand) else ""


def keep_to_share(rank: int, ranks: int) -> None:
    """Run on this rank's share of the cores only."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // ranks)
    first = rank * share % len(cores)
    os.sched_setaffinity(0, cores[first : first + share])


def main() -> None:
    kind, socket, place, size = *sys.argv[1:4], int(sys.argv[4])
    launched = next((os.environ[name] for name in ("PMI_RANK", "PMIX_RANK") if name in os.environ), None)
    if place == "share":
        keep_to_share(int(sys.argv[5] if launched is None else launched), size)
    mpi = Mpi() if kind in ("mpich", "openmpi") else None
    rank = mpi.rank if mpi is not None else int(sys.argv[5])
    connection = Client(socket, family="AF_UNIX")
    connection.send(rank)

    def gather(told: bytes) -> list[bytes]:
        connection.send(("gather", told))
        return list(connection.recv())

    try:
        peer: Peer
        if mpi is not None:
            peer = mpi
        elif kind == "core":
            peer = Core(rank, size, gather)
        elif kind == "hand":
            peer = Hand(rank, size, sys.argv[7], gather)
        else:
            peer = Torch(
                kind, rank, size, sys.argv[6], Hand(rank, size, sys.argv[7], gather) if kind == "floor" else None
            )
        connection.send(("ready", peer.version))
        worker = Worker(peer)
        while True:
            name, arguments = connection.recv()
            connection.send(("done", getattr(worker, name)(*arguments)))
    except EOFError:
        os._exit(0)  # the coordinator has closed: end at once, MPI's own end would wait for all ranks
    except Exception:  # whatever goes wrong is told to the coordinator, which says it
        connection.send(("error", traceback.format_exc()))
        os._exit(1)


if __name__ == "__main__":
    main()
