"""What the ranks of a host tell each other when they make a group, and what they find out from it.

    Facts        of a rank: who it is, which process, which machine runs its calls, its cores and their cache, and a secret in its memory
    everyone     the facts of all ranks, checked: they are the ranks of one group, on one host
    threads_of   how many threads each rank has for its calls
    sees         whether this rank may read the memory of others: it finds their secrets there
    shared_cache bytes of the cache that the cores share
    processor_maker who made the cores
    kept_bytes   of them, what arrays may fill so that they are best written through it
    shared_room  bytes of memory that a rank may have for arrays which the others read where they are

The secret is a few random bytes. A rank that the kernel lets read the memory of another (the same user and `ptrace`
rights, no filter of a container in the way) finds them where the other says they are; one that finds anything else has
met another process.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from sennit.collective.runtime.liveness import Identity, own_identity
from sennit.collective.runtime.shm_machine import CompiledMachine, Machine
from sennit.collective.runtime.shm_plan import SharedCache
from sennit.collective.runtime.shm_segment import Capacity, Exchange
from sennit.collective.runtime.shm_strips import cpu_quota, threads_for
from sennit.errors import RunError

__all__ = [
    "Facts",
    "Secret",
    "everyone",
    "kept_bytes",
    "processor_maker",
    "sees",
    "shared_cache",
    "shared_room",
    "threads_of",
]

_SECRET = 16  # bytes
_NEAR = frozenset({"AuthenticAMD", "HygonGenuine"})  # who make cores in complexes, each around a cache of its own


class Secret:
    """Random bytes at an address of this process; they stay as long as this does."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = ctypes.create_string_buffer(secrets.token_bytes(_SECRET), _SECRET)

    @property
    def text(self) -> str:
        return self._bytes.raw.hex()

    @property
    def address(self) -> int:
        return ctypes.addressof(self._bytes)


@dataclass(frozen=True, slots=True)
class Facts:
    rank: int
    size: int
    host: str
    pid: int
    started: int
    machine: str
    cores: tuple[int, ...]
    cache: int  # bytes that the cores share
    keeps: int  # of them, what arrays may fill so that they are best written through it
    room: int  # bytes for arrays that the others read where they are
    threads: int | None  # for its calls, if it was told; else its share of the cores, within
    quota: float | None  # the cores that the system lets its container use at a time
    sharers: int  # processes that share the host with it
    busy: int  # threads that it computes with
    secret: str
    secret_at: int

    @classmethod
    def own(
        cls,
        rank: int,
        size: int,
        machine: Machine,
        secret: Secret,
        *,
        threads: int | None = None,
        sharers: int = 1,
        busy: int = 1,
    ) -> Facts:
        me, cores = own_identity(), tuple(sorted(os.sched_getaffinity(0)))
        cache = shared_cache()
        keeps = kept_bytes(cache, processor_maker())
        return cls(
            rank=rank,
            size=size,
            host=me.host,
            pid=me.pid,
            started=me.started,
            machine=machine.name,
            cores=cores,
            cache=cache,
            keeps=keeps,
            room=shared_room(size),
            threads=threads,
            quota=cpu_quota(),
            sharers=max(size, sharers),
            busy=busy,
            secret=secret.text,
            secret_at=secret.address,
        )

    @property
    def identity(self) -> Identity:
        return Identity(self.host, self.pid, self.started)


def everyone(own: Facts, exchange: Exchange) -> list[Facts]:
    """The facts of all ranks, in their order."""
    told = [json.loads(said) for said in exchange(json.dumps(asdict(own)).encode())]
    found = [Facts(**{**said, "cores": tuple(said["cores"])}) for said in told]
    where = f"a group of {own.size} ranks"
    listed, sizes = [said.rank for said in found], [said.size for said in found]
    if listed != list(range(own.size)) or set(sizes) != {own.size}:
        raise RunError(
            f"the exchange returned ranks {listed} of groups of {sizes}",
            where=where,
            fix="let it return what all ranks gave, in the order of ranks",
        )
    other = next((said.rank for said in found if said.host != found[0].host), None)
    if other is not None:
        raise RunError(
            f"rank {other} is on another host or in another container than rank 0",
            where=where,
            fix="make a group of the ranks of each host",
        )
    return found


def threads_of(ranks: Sequence[Facts]) -> int:
    """Threads of each rank: one where calls are interpreted in Python."""
    if any(facts.machine != ranks[0].machine or facts.machine != "compiled" for facts in ranks):
        return 1
    told = [facts.threads for facts in ranks if facts.threads is not None]
    quotas = [facts.quota for facts in ranks if facts.quota is not None]
    if told:
        return min(told)
    return threads_for(
        [set(facts.cores) for facts in ranks],
        quota=min(quotas, default=None),
        sharers=max(facts.sharers for facts in ranks),
        busy=max(facts.busy for facts in ranks),
    )


def sees(machine: Machine, others: Sequence[Facts]) -> bool:
    """Whether this rank may read the memory of all others."""
    if not isinstance(machine, CompiledMachine):
        return False
    found = ctypes.create_string_buffer(_SECRET)
    peek, place = machine.library.sennit_peek, ctypes.addressof(found)
    return all(peek(other.pid, place, other.secret_at, _SECRET) and found.raw.hex() == other.secret for other in others)


def shared_room(ranks: int) -> int:
    """Of one of so many ranks of a host: half of its memory is theirs, all together. Pages cost nothing until they are
    touched; addresses do where a process may have few of them, or files be no longer.
    """
    least = Capacity().arena
    if any(
        resource.getrlimit(kind)[0] != resource.RLIM_INFINITY for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    ):
        return least
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(least, whole // (2 * ranks) // least * least)


def shared_cache() -> int:
    """Of the third level, as Linux says for the first core."""
    with suppress(OSError, ValueError):
        return int(Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip().removesuffix("K")) << 10
    return SharedCache().bytes


def processor_maker() -> str | None:
    """As x86 processors call themselves; None where Linux does not say."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in islice(lines, 8):
            name, _, value = line.partition(":")
            if name.strip() == "vendor_id":
                return value.strip()
    return None


def kept_bytes(cache: int, maker: str | None) -> int:
    """Of a shared cache: what the arrays of all ranks may fill so that outputs are better written through it than past
    it, and staged in it than read in other processes. 0 where it is the other way round.

    This was measured on two machines (`benchmarks/collective/shm_variants.py`). On 2 cores of AMD's, with 2, 4 and 8
    ranks, through the cache was faster up to 24 of its 32 MiB, by up to a half, at 32 now faster and now slower, and
    slower from there on. On 16 cores of Intel's, which share a cache over a mesh, past it was faster from 1 MiB on.
    """
    return cache // 4 * 3 if maker in _NEAR else 0
