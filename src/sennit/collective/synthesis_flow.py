"""Maximum flow with integer capacities: Dinic's algorithm, started by a greedy sweep.

A residual graph is a list of dicts: `residual[u][v]` is what can still go from u to v. Both directions of an edge have
a key, also where one of them is 0, so the keys of `residual[v]` are the vertices with an edge to v too.

`augment` raises a flow until it reaches `limit` or a cut is full, and leaves the residual graph behind, so that a flow
can be repaired after a small change instead of found anew. The sweep walks backwards from the sink, depth first, and
pushes each path to the source that it meets. It is no proof of a maximum, but on the long rings of collectives it finds
in one walk what Dinic's algorithm finds in as many phases as the ring has members. Dinic's phases then finish and prove
it.

Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

__all__ = ["Residual", "add_edge", "augment", "reachable"]

Residual = list[dict[int, int]]


def add_edge(residual: Residual, tail: int, head: int, capacity: int) -> None:
    residual[tail][head] = residual[tail].get(head, 0) + capacity
    residual[head].setdefault(tail, 0)


def augment(residual: Residual, source: int, sink: int, limit: int) -> int:
    """Push up to `limit` more from `source` to `sink`; how much went."""
    pushed = _sweep(residual, source, sink, limit)
    while pushed < limit:
        levels = _levels(residual, source, sink)
        if levels is None:
            break
        pushed += _blocking(residual, source, sink, levels, limit - pushed)
    return pushed


def reachable(residual: Residual, source: int) -> set[int]:
    """The vertices that the residual graph still reaches: the source's side of a minimum cut, once the flow is maximal."""
    found, stack = {source}, [source]
    while stack:
        for head, left in residual[stack.pop()].items():
            if left > 0 and head not in found:
                found.add(head)
                stack.append(head)
    return found


def _push(residual: Residual, path: list[int], amount: int) -> int:
    """Along `path`; how many of its vertices, from the start, are left before the first edge that is now full."""
    kept = len(path)
    for place in range(len(path) - 2, -1, -1):
        tail, head = path[place], path[place + 1]
        residual[tail][head] -= amount
        residual[head][tail] += amount
        if not residual[tail][head]:
            kept = place + 1
    return kept


def _pull(residual: Residual, path: list[int], amount: int) -> int:
    """As `_push`, along a path that lies backwards, from the sink."""
    kept = len(path)
    for place in range(len(path) - 1, 0, -1):
        tail, head = path[place], path[place - 1]
        residual[tail][head] -= amount
        residual[head][tail] += amount
        if not residual[tail][head]:
            kept = place
    return kept


def _sweep(residual: Residual, source: int, sink: int, limit: int) -> int:
    pushed = 0
    path, seen = [sink], {sink}
    widths = [limit]
    todo: list[Iterator[int]] = [iter(tuple(residual[sink]))]
    while path and pushed < limit:
        head = path[-1]
        if (direct := residual[source].get(head, 0)) > 0 and head != source:
            amount = min(direct, widths[-1], limit - pushed)
            pushed += amount
            kept = _pull(residual, [*path, source], amount)
            del path[kept:], todo[kept:]
            widths = [width - amount for width in widths[:kept]]
            continue
        for tail in todo[-1]:
            if tail not in seen and tail != source and (left := residual[tail].get(head, 0)) > 0:
                seen.add(tail)
                path.append(tail)
                widths.append(min(widths[-1], left))
                todo.append(iter(tuple(residual[tail])))
                break
        else:
            path.pop(), todo.pop(), widths.pop()
    return pushed


def _levels(residual: Residual, source: int, sink: int) -> dict[int, int] | None:
    """Steps to the sink by vertex, from the sink to where the source is found."""
    levels = {sink: 0}
    frontier = [sink]
    while frontier and source not in levels:
        reached: list[int] = []
        for head in frontier:
            for tail in residual[head]:
                if tail not in levels and residual[tail][head] > 0:
                    levels[tail] = levels[head] + 1
                    reached.append(tail)
        frontier = reached
    return levels if source in levels else None


def _blocking(residual: Residual, source: int, sink: int, levels: dict[int, int], limit: int) -> int:
    pushed = 0
    path = [source]
    todo = {source: list(residual[source])}
    while path and pushed < limit:
        tail = path[-1]
        if tail == sink:
            amount = min(residual[a][b] for a, b in pairwise(path))
            amount = min(amount, limit - pushed)
            pushed += amount
            del path[_push(residual, path, amount) :]
            continue
        heads = todo[tail]
        while heads:
            head = heads[-1]
            if residual[tail][head] > 0 and levels.get(head, -1) == levels[tail] - 1:
                path.append(head)
                todo.setdefault(head, list(residual[head]))
                break
            heads.pop()
        else:
            path.pop()
            if path:
                todo[path[-1]].pop()  # it leads nowhere
    return pushed
