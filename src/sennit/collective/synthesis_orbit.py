"""Trees for one device of each orbit, copied to all others by symmetry.

Let a group G of symmetries move every device (`synthesis_symmetry.py`). If the trees from the representatives of the
orbits of devices put a load l(e) on link e, then all their copies together put on e

    |G| / |orbit of e|  *  sum of l over the orbit of e,

the same on every link of an orbit. So trees for the representatives need not spread their load over the links
themselves: only the *sums over orbits* count, of which there are few. With `share` trees from each device at the rate
of the cut bound, an orbit O of links of capacity c holds

    budget(O) = floor( share * c * |O| / |G| / x* )          x* of `synthesis_bound.py`.

**Packing** (`orbit_trees`). A *hop* from one device to another goes over the shortest way through switches; also over
the shortest that begins with another orbit of links, where there are several. Its use of each orbit is the same for all
hops that a symmetry maps to one another. A tree grows hop by hop: of the hops to a new device that the budgets allow,
one that leaves the fullest orbit least full; among those, one near the root. Half of a root's trees are grown as one,
then half of the rest, and so on: few different trees, of which the last, small ones fill what is left of the budgets.
That is no proof that a packing is found where one exists. If a tree cannot be finished, they are grown one by one, then
more trees a root are tried, and in the end the general method is used. What is found is right by construction, and
optimal if it keeps the budgets: the certificate adds up the copies' loads on every link.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from itertools import pairwise

from sennit.collective.synthesis_network import Network
from sennit.collective.synthesis_pack import Tree
from sennit.collective.synthesis_symmetry import Symmetries

__all__ = ["OrbitForest", "orbit_trees"]

Path = tuple[int, ...]
Use = tuple[tuple[int, int], ...]  # (orbit, how often)


@dataclass(frozen=True, slots=True)
class OrbitForest:
    """Trees from every device, and by path how many of them go over it."""

    share: int
    trees: tuple[Tree, ...]
    paths: dict[Path, int]


def orbit_trees(network: Network, group: Symmetries, ratio: Fraction, shares: tuple[int, ...]) -> OrbitForest | None:
    """Trees at the rate 1/ratio, with as many from each root as the first of `shares` that works; None where none does."""
    packer = _Packer(network, group)
    for share in shares:
        halves: list[int] = []
        while (left := share - sum(halves)) > 0:
            halves.append((left + 1) // 2)
        for counts in (halves, [1] * share):
            found = packer.pack(ratio, counts)
            if found is not None:
                return _copied(group, share, found)
    return None


@dataclass(slots=True)
class _Grown:
    """`count` trees from a representative: their hops in order, each with the path that its representative takes."""

    root: int
    count: int
    hops: list[tuple[int, int, Path]]


class _Packer:
    def __init__(self, network: Network, group: Symmetries) -> None:
        self.network, self.group = network, group
        self.orbits = group.arc_orbits(network)
        self.size = Counter(self.orbits.values())
        self.capacity = {self.orbits[arc.tail, arc.head]: arc.capacity for arc in network.arcs}
        self.hops: dict[int, list[tuple[int, Use, Path]]] = {}  # by representative: target, use, path
        for device in group.representatives:
            self.hops[device] = self._hops_from(device)
        self.uses = sorted({use for hops in self.hops.values() for _, use, _ in hops})

    def _hops_from(self, device: int) -> list[tuple[int, Use, Path]]:
        neighbours: list[list[int]] = [[] for _ in self.network.names]
        for arc in self.network.arcs:
            neighbours[arc.tail].append(arc.head)
        found: dict[tuple[int, Use], Path] = {}
        first: dict[int, list[int]] = {}
        for head in neighbours[device]:
            first.setdefault(self.orbits[device, head], []).append(head)
        for starts in (neighbours[device], *first.values()):
            came: dict[int, int] = dict.fromkeys(starts, device)
            todo = deque(starts)
            while todo:
                vertex = todo.popleft()
                if vertex < self.network.devices:  # a device ends a hop
                    path = [vertex]
                    while path[-1] != device:
                        path.append(came[path[-1]])
                    path.reverse()
                    if self._leaves_its_node(path):
                        continue
                    use = Counter(self.orbits[ends] for ends in pairwise(path))
                    found.setdefault((vertex, tuple(sorted(use.items()))), tuple(path))
                    continue
                for head in neighbours[vertex]:
                    if head not in came and head != device:
                        came[head] = vertex
                        todo.append(head)
        return [(target, use, path) for (target, use), path in found.items()]

    def _leaves_its_node(self, path: list[int]) -> bool:
        """From a node to itself through a NIC and the network: no cluster routes like that."""
        node, names = self.network.node, self.network.names
        inside = {names[vertex].startswith("node ") for vertex in path[1:-1]}
        return bool(node) and node[path[0]] == node[path[-1]] and len(inside) == 2

    def pack(self, ratio: Fraction, counts: list[int]) -> list[_Grown] | None:
        """Trees from each representative, so many alike; None where the budgets do not allow it."""
        members = len(self.group.elements)
        budget = {
            orbit: sum(counts) * capacity * self.size[orbit] * ratio // members
            for orbit, capacity in self.capacity.items()
        }
        used = dict.fromkeys(budget, 0)
        grown: list[_Grown] = []
        for root in self.group.representatives:
            for count in counts:
                tree = self._grow(_Grown(root, count, []), budget, used)
                if tree is None:
                    return None
                grown.append(tree)
        return grown

    def _grow(self, tree: _Grown, budget: dict[int, int], used: dict[int, int]) -> _Grown | None:
        covered = {tree.root}
        count = tree.count
        heaps: dict[Use, list[tuple[int, int, int, Path]]] = {use: [] for use in self.uses}
        self._offer(tree.root, 0, heaps)
        while len(covered) < self.network.devices:
            best: tuple[float, int, Use] | None = None
            for use, heap in heaps.items():
                while heap and heap[0][2] in covered:
                    heappop(heap)
                if not heap or any(used[orbit] + count * times > budget[orbit] for orbit, times in use):
                    continue
                fullest = max((used[orbit] + count * times) / budget[orbit] for orbit, times in use)
                if best is None or (fullest, heap[0][0]) < best[:2]:
                    best = fullest, heap[0][0], use
            if best is None:
                return None
            depth, tail, head, path = heappop(heaps[best[2]])
            for orbit, times in best[2]:
                used[orbit] += count * times
            covered.add(head)
            tree.hops.append((tail, head, path))
            self._offer(head, depth + 1, heaps)
        return tree

    def _offer(self, device: int, depth: int, heaps: dict[Use, list[tuple[int, int, int, Path]]]) -> None:
        """The hops from a device that is reached: those of its representative, moved.

        A path is moved when it is taken.
        """
        representative, element = self.group.to_representative[device]
        for target, use, path in self.hops[representative]:
            heappush(heaps[use], (depth, device, element[target], path))


def _copied(group: Symmetries, share: int, grown: list[_Grown]) -> OrbitForest:
    """Equal trees from a root are one with a count."""
    same: Counter[tuple[int, tuple[tuple[int, int], ...]]] = Counter()
    taken: Counter[Path] = Counter()
    for tree in grown:
        same[tree.root, tuple((tail, head) for tail, head, _ in tree.hops)] += tree.count
        for tail, _, path in tree.hops:
            _, element = group.to_representative[tail]
            taken[tuple(element[vertex] for vertex in path)] += tree.count
    trees: list[Tree] = []
    paths: Counter[Path] = Counter()
    for element in group.elements:
        for (root, edges), count in same.items():
            trees.append(Tree(element[root], count, tuple((element[tail], element[head]) for tail, head in edges)))
        for path, count in taken.items():
            paths[tuple(element[vertex] for vertex in path)] += count
    trees.sort(key=lambda tree: tree.root)
    return OrbitForest(share, tuple(trees), dict(paths))
