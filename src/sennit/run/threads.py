"""All ranks in one process, one thread each: the same source as real processes, for tests and for looking.

Communication is by rendezvous on a shared board. A member posts its tensor under (kind, group, how many of these it has
posted before) and goes on; a handle waits until the others have posted too. Reductions run in the order of the group,
so all members compute the same bits.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sennit.errors import RunError
from sennit.ir.layout import Reduction
from sennit.ir.program import Program
from sennit.ir.program_exchange import Channel
from sennit.run.emit import emit_lane
from sennit.run.load import load_source
from sennit.run.pieces import assemble_outputs, inputs_of
from sennit.run.rank import Group, Rank, seat_of

__all__ = ["run_in_process"]


def run_in_process(program: Program, state: Mapping[str, Tensor], *, timeout: float = 60.0) -> dict[str, Tensor]:
    """Run one step on all devices of the program.

    `state` has the whole parameters and inputs by path, all on one device of torch's.
    """
    board = _Board(timeout, next(iter(state.values())).device if state else torch.device("cpu"))
    results: dict[int, Mapping[str, Tensor]] = {}
    errors: list[tuple[int, BaseException]] = []
    cores = torch.get_num_threads()

    def one(device: int, step: Callable[..., Mapping[str, Tensor]], rank: Rank, inputs: Mapping[str, Tensor]) -> None:
        torch.set_num_threads(cores)  # kernels that sum in parallel give other bits with another number of threads
        try:
            with torch.no_grad():
                results[device] = step(rank, inputs)
        except BaseException as error:  # reported by the caller's thread, below
            errors.append((device, error))
            board.fail()

    threads = []
    for lane in program.lanes:
        step = load_source(emit_lane(program, lane), f"{program.name} {lane.name}")
        for device in lane.devices:
            rank = Rank(seat_of(program, lane, device), _BoardCommunicator(board, device))
            arguments = (device, step, rank, inputs_of(lane, device, state))
            threads.append(threading.Thread(target=one, args=arguments, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        device, error = next(((d, e) for d, e in errors if not isinstance(e, _AbandonedError)), errors[0])
        raise RunError(
            f"device {device} failed: {type(error).__name__}: {error}", where=f"program {program.name!r}"
        ) from error
    return assemble_outputs(program, results)


class _AbandonedError(Exception):
    """Another rank failed, or no one came."""


class _Board:
    """Where ranks leave tensors for each other; `device` is where these are."""

    def __init__(self, timeout: float, device: torch.device) -> None:
        self.timeout, self.device = timeout, device
        self.posted: dict[tuple[object, ...], dict[int, Tensor]] = defaultdict(dict)
        self.taken: dict[tuple[object, ...], int] = defaultdict(int)
        self.changed = threading.Condition()
        self.failed = False

    def post(self, key: tuple[object, ...], rank: int, tensor: Tensor) -> None:
        with self.changed:
            self.posted[key][rank] = tensor
            self.changed.notify_all()

    def collect(self, key: tuple[object, ...], members: Group, readers: int) -> dict[int, Tensor]:
        """What all members posted under `key`; the last of `readers` to collect it clears it."""
        with self.changed:
            arrived = self.changed.wait_for(lambda: self.failed or len(self.posted[key]) == len(members), self.timeout)
            if self.failed or not arrived:
                missing = sorted(set(members) - set(self.posted[key]))
                raise _AbandonedError(f"no answer from devices {missing} in {self.timeout} s")
            found = self.posted[key]
            self.taken[key] += 1
            if self.taken[key] == readers:
                del self.posted[key], self.taken[key]
            return found

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Collecting:
    board: _Board
    key: tuple[object, ...]
    members: Group
    readers: int
    combine: Callable[[list[Tensor]], Tensor]

    def wait(self) -> Tensor:
        found = self.board.collect(self.key, self.members, self.readers)
        return self.combine([found[member] for member in self.members])


class _BoardCommunicator:
    def __init__(self, board: _Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.counts: dict[tuple[object, ...], int] = defaultdict(int)

    @property
    def device(self) -> torch.device:
        return self.board.device

    def _meet(self, group: Group, tensor: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> _Collecting:
        key = (group, self.counts[group])
        self.counts[group] += 1
        self.board.post(key, self.rank, tensor)
        return _Collecting(self.board, key, group, len(group), combine)

    def all_reduce(self, group: Group, tensor: Tensor, op: Reduction, *, in_place: bool = False) -> _Collecting:
        # others read what is posted, so it is never written to
        return self._meet(group, tensor, lambda parts: _reduce(parts, op))

    def all_gather(self, group: Group, tensor: Tensor) -> _Collecting:
        return self._meet(group, tensor, torch.stack)

    def reduce_scatter(self, group: Group, tensor: Tensor, op: Reduction) -> _Collecting:
        mine = group.index(self.rank)
        return self._meet(group, tensor, lambda parts: _reduce([part[mine] for part in parts], op))

    def all_to_all(self, group: Group, tensor: Tensor) -> _Collecting:
        mine = group.index(self.rank)
        return self._meet(group, tensor, lambda parts: torch.stack([part[mine] for part in parts]))

    def _message(self, source: int, target: int) -> tuple[object, ...]:
        pair = ("message", source, target)
        self.counts[pair] += 1
        return (*pair, self.counts[pair])

    def send(self, tensor: Tensor, to: int) -> None:
        self.board.post(self._message(self.rank, to), self.rank, tensor)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, origin: int) -> _Collecting:
        key = self._message(origin, self.rank)
        return _Collecting(self.board, key, (origin,), 1, lambda parts: parts[0])

    def exchange(
        self,
        channel: Channel,
        number: int,
        sends: Sequence[tuple[Tensor, int]],
        receives: Sequence[tuple[Tensor, int]],
    ) -> Callable[[], None]:
        for tensor, to in sends:
            self.board.post(self._parcel(number, self.rank, to), self.rank, tensor)
        coming = [(place, origin, self._parcel(number, origin, self.rank)) for place, origin in receives]

        def arrive() -> None:
            for place, origin, key in coming:
                place.copy_(self.board.collect(key, (origin,), 1)[origin])

        return arrive

    def _parcel(self, number: int, source: int, target: int) -> tuple[object, ...]:
        pair = ("exchange", number, source, target)
        self.counts[pair] += 1
        return (*pair, self.counts[pair])

    def finish(self) -> None:
        """Nothing is left under way: posting is all there is to sending."""


def _reduce(parts: list[Tensor], op: Reduction) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        match op:
            case Reduction.SUM:
                total = total + part
            case Reduction.PROD:
                total = total * part
            case Reduction.MAX:
                total = torch.maximum(total, part)
            case Reduction.MIN:
                total = torch.minimum(total, part)
    return total
