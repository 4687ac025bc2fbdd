"""Symmetries of a network: permutations of its vertices that keep every link and its capacity.

Clusters are made of identical nodes of identical devices, so the candidates are few: every node becomes the next one,
every device the next in its node (or the next but one, ...), or devices change places in pairs (i becomes i xor 1, xor
2, xor 4: the corners of a cube). `symmetries` keeps those that are automorphisms, and of these as many generators as
still make a group in which only the identity keeps a device where it is. Then each device has as many images as the
group has members, and what is made for one device can be copied to all of them.

**A candidate moves devices; where do switches go?** (`_extended`) By colour refinement on two copies of the network at
once, in one of which device d has the colour d, in the other the colour of the device that it comes from. A switch goes
to one of the same colour; twins, which have the same links, go in order. Then every link is checked: what is returned
is an automorphism, whatever the colours said.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from sennit.collective.synthesis_network import Network

__all__ = ["Permutation", "Symmetries", "symmetries"]

Permutation = tuple[int, ...]  # where each vertex goes


class Symmetries:
    """A group of automorphisms, by its elements; the identity first.

    Only the identity leaves any device in its place.
    """

    __slots__ = ("elements", "generators", "representatives", "to_representative")

    def __init__(self, devices: int, elements: list[Permutation], generators: list[Permutation]) -> None:
        self.elements, self.generators = elements, generators
        self.representatives: list[int] = []
        self.to_representative: dict[
            int, tuple[int, Permutation]
        ] = {}  # by device: its representative, and the way there
        for device in range(devices):
            if device not in self.to_representative:
                self.representatives.append(device)
                for element in elements:
                    self.to_representative[element[device]] = device, element

    def arc_orbits(self, network: Network) -> dict[tuple[int, int], int]:
        """By link: the number of its orbit."""
        orbits: dict[tuple[int, int], int] = {}
        count = 0
        for arc in network.arcs:
            if (arc.tail, arc.head) not in orbits:
                for element in self.elements:
                    orbits[element[arc.tail], element[arc.head]] = count
                count += 1
        return orbits


def symmetries(network: Network) -> Symmetries:
    """The largest group that the candidates give, one generator after another."""
    identity = tuple(range(len(network.names)))
    elements = [identity]
    generators: list[Permutation] = []
    for candidate in _candidates(network):
        if any(element[: network.devices] == candidate for element in elements):
            continue
        generator = _extended(network, candidate)
        if generator is None:
            continue
        larger = _with_generator(elements, [*generators, generator], network.devices)
        if larger is not None:
            elements = larger
            generators.append(generator)
        if len(elements) == network.devices:
            break
    return Symmetries(network.devices, elements, generators)


def _candidates(network: Network) -> Iterator[tuple[int, ...]]:
    """Permutations of the devices, as where each goes."""
    size = Counter(network.node).most_common(1)[0][1] if network.node else network.devices
    if network.devices % size or (network.node and any(network.node[d] != d // size for d in range(network.devices))):
        return
    nodes = network.devices // size
    for step in (s for s in range(1, nodes) if nodes % s == 0):
        yield tuple((device + step * size) % network.devices for device in range(network.devices))
    for step in (s for s in range(1, size) if size % s == 0):
        yield tuple(device - device % size + (device + step) % size for device in range(network.devices))
    bit = 1
    while 2 * bit <= size and size % (2 * bit) == 0:
        yield tuple(device - device % size + (device % size ^ bit) for device in range(network.devices))
        bit *= 2


def _with_generator(
    elements: list[Permutation], generators: list[Permutation], devices: int
) -> list[Permutation] | None:
    """The group of these generators, `elements` being that of all but the last; None where some element keeps a device
    in place.
    """
    found = dict.fromkeys(elements)
    fresh = [tuple(generators[-1][vertex] for vertex in element) for element in elements]
    while fresh:
        element = fresh.pop()
        if element in found:
            continue
        if len(found) >= devices or any(element[device] == device for device in range(devices)):
            return None
        found[element] = None
        fresh += [tuple(other[vertex] for vertex in element) for other in generators]
    return list(found)


def _extended(network: Network, devices: tuple[int, ...]) -> Permutation | None:
    """The automorphism that moves devices like this, or None where there is none."""
    outward: list[list[tuple[int, int]]] = [[] for _ in network.names]
    inward: list[list[tuple[int, int]]] = [[] for _ in network.names]
    for arc in network.arcs:
        outward[arc.tail].append((arc.head, arc.capacity))
        inward[arc.head].append((arc.tail, arc.capacity))
    switches = range(network.devices, len(network.names))
    before = [*(devices[d] for d in range(network.devices)), *(-1 for _ in switches)]  # named as what they become
    after = [*range(network.devices), *(-1 for _ in switches)]
    while True:
        names: dict[tuple[object, ...], int] = {}

        def refined(colours: list[int], names: dict[tuple[object, ...], int] = names) -> list[int]:
            result = colours[: network.devices]
            for switch in switches:
                key = (
                    colours[switch],
                    tuple(sorted((colours[head], capacity) for head, capacity in outward[switch])),
                    tuple(sorted((colours[tail], capacity) for tail, capacity in inward[switch])),
                )
                result.append(-1 - names.setdefault(key, len(names) + 1))
            return result

        new_before, new_after = refined(before), refined(after)
        if len(set(new_before)) == len(set(before)) and len(set(new_after)) == len(set(after)):
            break
        before, after = new_before, new_after
    classes: defaultdict[int, list[int]] = defaultdict(list)
    for switch in reversed(switches):
        classes[after[switch]].append(switch)
    image = list(devices)
    for switch in switches:
        if not classes[before[switch]]:
            return None
        image.append(classes[before[switch]].pop())
    links = {(arc.tail, arc.head): arc.capacity for arc in network.arcs}
    kept = all(links.get((image[tail], image[head])) == capacity for (tail, head), capacity in links.items())
    return tuple(image) if kept else None
