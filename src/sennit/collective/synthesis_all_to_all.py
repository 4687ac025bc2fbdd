"""All-to-all for a network: ways balanced over the links, chunks matched to links over time, and a bound that says how
good that is.

**Bound.** Give every link a a length l(a) >= 0 and let d(i, j) be the shortest way from i to j. Each byte from i to j
uses up at least d(i, j) of the total length that the links can carry in a second, sum of l(a) capacity(a). So no
algorithm, with any routing, takes less than

    sum over pairs of d(i, j)  /  sum over links of l(a) capacity(a)         seconds, for a byte from each device to each other

and the best lengths give exactly the optimum of the multicommodity flow (by duality). They are found by multiplicative
weights: lengthen the links that the shortest ways load most, again and again, and keep the best bound met. Every set of
lengths is a proof, so stopping early costs tightness, not truth.

**Ways.** The shortest ways met on the search are the candidates of a pair. Each chunk takes the one that leaves the
fullest of its links least full, and then, in two more passes, may change its mind. That is tried with all ways, and
with those of fewest relays alone.

**Matching.** A *hop* goes from a device to the next through switches only and holds every link of its way, each for
bytes / capacity; a device between the two ends relays. Chunks wait for hops in order of (earliest start, most hops
left, distance round the ranks); the one whose links are free first goes. This is list scheduling on the time-expanded
network.

The certificate's ratio is the bound over the schedule's time. It is 1 on switched and fully joined nodes; elsewhere
greedy loses some, and says how much.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, inf

from sennit.collective.synthesis import Certificate, Synthesis
from sennit.collective.synthesis_network import Network
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, Chunks, CollectiveName, CollectiveSpec, Move, MoveKind, Scratch

__all__ = ["all_to_all_bound", "synthesize_all_to_all"]

Candidates = dict[tuple[int, int], dict[tuple[int, ...], None]]  # by pair of devices, an ordered set of paths


def synthesize_all_to_all(network: Network, *, pieces: int = 1, rounds: int = 60) -> Synthesis:
    """An out-of-place all-to-all in `pieces` chunks a pair: more pieces spread over more ways.

    `rounds` of tightening the bound.
    """
    if network.devices < 2 or pieces < 1:
        raise CollectiveError(
            f"all_to_all over {network.devices} devices in {pieces} pieces", fix="use 2 devices and 1 piece or more"
        )
    bound, tight, candidates = _search(network, rounds)
    schedule = min(
        (_matched(network, pieces, choice) for choice in (_fewest_hops(candidates, network.devices), candidates)),
        key=lambda matching: matching.finish,
    )
    spec = CollectiveSpec(CollectiveName.ALL_TO_ALL, network.devices, pieces)
    own = [
        Move(MoveKind.COPY, Chunks(r, "input", r * pieces, pieces), Chunks(r, "output", r * pieces, pieces))
        for r in range(network.devices)
    ]
    scratch = tuple(Scratch(rank, "relay", count) for rank, count in sorted(schedule.relayed.items()))
    algorithm = Algorithm("matched_all_to_all", spec, (*own, *schedule.moves), scratch)
    # an array of one byte a device is 1 / devices a pair
    rate = network.unit * network.devices
    certificate = Certificate(CollectiveName.ALL_TO_ALL, rate / schedule.finish, rate / bound, tight)
    return Synthesis(algorithm, certificate, ())


def all_to_all_bound(network: Network, rounds: int = 60) -> tuple[float, tuple[str, ...]]:
    """The least time, in bytes / capacity, for a byte from each device to each other; and the links that matter most to
    it.
    """
    bound, tight, _ = _search(network, rounds)
    return bound, tight


def _search(network: Network, rounds: int) -> tuple[float, tuple[str, ...], Candidates]:
    """The bound, the links it rests on, and the ways that were shortest at some time."""
    links = {(arc.tail, arc.head): arc.capacity for arc in network.arcs}
    lengths = {ends: 1.0 / capacity for ends, capacity in links.items()}
    candidates: Candidates = {}
    best, kept = 0.0, lengths
    for step in range(max(rounds, 1)):
        load: Counter[tuple[int, int]] = Counter()
        total = 0.0
        near: list[list[tuple[int, float]]] = [[] for _ in network.names]
        for (tail, head), length in lengths.items():
            near[tail].append((head, length))
        for source in range(network.devices):
            distances, before = _shortest(network, near, source)
            for target in range(network.devices):
                if target != source:
                    total += distances[target]
                    path = _path(before, source, target)
                    load.update(pairwise(path))
                    candidates.setdefault((source, target), {})[path] = None
        bound = total / sum(lengths[ends] * capacity for ends, capacity in links.items())
        if bound > best:
            best, kept = bound, dict(lengths)
        worst = max(load[ends] / capacity for ends, capacity in links.items())
        pace = 1.0 / (1 + step / 8)
        for ends, capacity in links.items():
            lengths[ends] *= exp(pace * (load[ends] / capacity / worst - 1))
    heaviest = sorted(links, key=lambda ends: -kept[ends] * links[ends])[:3]
    names = ", ".join(f"{network.names[tail]} > {network.names[head]}" for tail, head in heaviest)
    return best, (f"the length of all ways over that of all links, which weighs most on {names}",), candidates


def _path(before: list[int], source: int, target: int) -> tuple[int, ...]:
    path = [target]
    while path[-1] != source:
        path.append(before[path[-1]])
    return tuple(reversed(path))


def _shortest(network: Network, near: list[list[tuple[int, float]]], source: int) -> tuple[list[float], list[int]]:
    """Distances from `source`, and the vertex before each.

    `near` has the links out of each vertex, with their lengths.
    """
    distances, before = [inf] * len(near), [source] * len(near)
    distances[source] = 0.0
    heap = [(0.0, source)]
    while heap:
        distance, vertex = heapq.heappop(heap)
        if distance > distances[vertex]:
            continue
        for head, length in near[vertex]:
            if distance + length < distances[head] * (1 - 1e-12):
                distances[head], before[head] = distance + length, vertex
                heapq.heappush(heap, (distance + length, head))
    lost = next((device for device in range(network.devices) if distances[device] == inf), None)
    if lost is not None:
        raise CollectiveError(
            f"{network.names[lost]} cannot be reached from {network.names[source]}",
            where="the links of the network",
            fix="join them by links, directly or through switches",
        )
    return distances, before


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A chunk and its way; `held` is where it lies, before hop `hop`."""

    source: int
    target: int
    piece: int
    hops: tuple[tuple[int, ...], ...]
    held: Chunks
    hop: int = 0


def _parcels(network: Network, pieces: int, candidates: Candidates) -> list[_Parcel]:
    """Every chunk with the way it takes."""
    capacities = {(arc.tail, arc.head): arc.capacity for arc in network.arcs}
    load: Counter[tuple[int, int]] = Counter()
    chosen: dict[tuple[int, int, int], tuple[int, ...]] = {}

    def fullness(path: tuple[int, ...]) -> tuple[float, float]:
        after = [(load[ends] + 1) / capacities[ends] for ends in pairwise(path)]
        return max(after), sum(after)

    devices = network.devices
    for _ in range(3):
        for turn in range(1, devices):
            for source in range(devices):
                for piece in range(pieces):
                    key = source, (source + turn) % devices, piece
                    load.subtract(pairwise(chosen.get(key, ())))
                    chosen[key] = min(candidates[key[:2]], key=fullness)
                    load.update(pairwise(chosen[key]))
    return [
        _Parcel(source, target, piece, _hops(path, devices), Chunks(source, "input", target * pieces + piece, 1))
        for (source, target, piece), path in chosen.items()
    ]


def _hops(path: tuple[int, ...], devices: int) -> tuple[tuple[int, ...], ...]:
    """A path cut at the devices that it passes."""
    stops = [place for place, vertex in enumerate(path) if vertex < devices]
    return tuple(path[first : last + 1] for first, last in pairwise(stops))


def _fewest_hops(candidates: Candidates, devices: int) -> Candidates:
    chosen: Candidates = {}
    for pair, paths in candidates.items():
        least = min(sum(vertex < devices for vertex in path) for path in paths)
        chosen[pair] = {path: None for path in paths if sum(vertex < devices for vertex in path) == least}
    return chosen


def _matched(network: Network, pieces: int, candidates: Candidates) -> _Matching:
    matching = _Matching(network, pieces)
    matching.run(_parcels(network, pieces, candidates))
    return matching


@dataclass(slots=True)
class _Matching:
    network: Network
    pieces: int
    moves: list[Move] = field(default_factory=list)
    relayed: Counter[int] = field(default_factory=Counter)
    finish: float = 0.0

    def run(self, parcels: list[_Parcel]) -> None:
        capacities = {(arc.tail, arc.head): arc.capacity for arc in self.network.arcs}
        free = dict.fromkeys(capacities, 0.0)
        heap = [(0.0, *self._order(parcel), number) for number, parcel in enumerate(parcels)]
        heapq.heapify(heap)
        while heap:
            ready, *_, number = heapq.heappop(heap)
            parcel = parcels[number]
            links = list(pairwise(parcel.hops[parcel.hop]))
            start = max(free[ends] for ends in links)
            if start > ready:  # its links were taken meanwhile
                heapq.heappush(heap, (start, *self._order(parcel), number))
                continue
            for ends in links:
                free[ends] = ready + 1 / (self.pieces * capacities[ends])
            arrival = max(free[ends] for ends in links)
            self.finish = max(self.finish, arrival)
            parcels[number] = parcel = self._carry(parcel)
            if parcel.hop < len(parcel.hops):
                heapq.heappush(heap, (arrival, *self._order(parcel), number))

    def _order(self, parcel: _Parcel) -> tuple[int, int, int]:
        return parcel.hop - len(parcel.hops), (parcel.target - parcel.source) % self.network.devices, parcel.source

    def _carry(self, parcel: _Parcel) -> _Parcel:
        via = parcel.hops[parcel.hop][-1]
        if via == parcel.target:
            place = Chunks(via, "output", parcel.source * self.pieces + parcel.piece, 1)
        else:
            place = Chunks(via, "relay", self.relayed[via], 1)
            self.relayed[via] += 1
        line = f"chunk {parcel.piece} from device {parcel.source} to device {parcel.target}"
        self.moves.append(Move(MoveKind.COPY, parcel.held, place, line=line))
        return replace(parcel, held=place, hop=parcel.hop + 1)
