"""Predicted against measured: the tables of docs/cluster.md.

    python benchmarks/sim/accuracy.py [--only steps operators memory allocator busbw] [--measured h200_profile.json]

**steps**: forward and backward of the blocks of blocks.py on one H200, replayed from a CUDA graph, against the sum of
their operators' predicted times. For each block the profile is fitted without every measured call that the block makes,
so nothing of it was seen. **operators**: those calls alone, by family. **memory**: peak bytes of a step, from a trace
without a GPU. **allocator**: what torch's caching allocator reserved for a step, against its model with the same
allocations. **busbw**: all-reduce of 4 GiB against published bus bandwidth. Errors are signed: + is predicted too long,
or too much.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from fit_profile import fit, measured
from measured_rows import Reader

from sennit.cluster import Algorithm, Device, Topology, load
from sennit.cost import OperatorCosts, Profile, collective
from sennit.cost.profile import Family, Reference
from sennit.ir.program import CollectiveKind
from sennit.sim.allocator import CachingAllocator

PUBLISHED = (  # GB/s, and where
    ("dgx-a100", 200.0, 236.0, "nccl-tests#149"),
    ("dgx-h100", 480.0, 480.0, "nccl-tests#212"),
    ("h200x8", 475.0, 475.0, "nccl-tests#272"),
    ("gb200-nvl72", 835.0, 847.0, "coreweave/nccl-tests#43"),
    ("b200x8", 830.0, 840.0, "nccl#1807"),
    ("dgx-h100 ring", 370.0, 370.0, "nccl-tests#212"),
)


def key_of(op: str, args: Any, kwargs: Any) -> str:
    return json.dumps([op, args, kwargs or None])


class Measured:
    """What profile_h200.py wrote, and profiles fitted to parts of it."""

    def __init__(self, path: Path, device: Device) -> None:
        self.data = json.loads(path.read_text(encoding="utf-8"))
        self.device, self.reference, self.reader = device, Reference.of(device), Reader()
        rows = [*self.data["rows"], *self.data["replayed"]]
        self.points = list(measured(rows, self.reader))
        self.full: dict[str, Family] = {item.name: item for item in fit(self.points, self.reference)}

    def without(self, calls: set[str]) -> OperatorCosts:
        """Costs by a profile that has not seen these calls; lengths and noises are those of the full one."""
        changed = {
            name for point in self.points if point.key in calls for name in (point.work.family, point.work.general)
        }
        points = [point for point in self.points if point.key not in calls]
        again = fit(points, self.reference, self.full, {name for name in changed if name is not None})
        kept = [family for name, family in self.full.items() if name not in changed]
        return OperatorCosts(self.device, Profile(self.device.kind, "", self.reference, (*kept, *again)))

    def calls(self, step: dict[str, Any]) -> list[tuple[str, Any, Any]]:
        """What a step ran on the device: no views, no empty tensors."""
        found = []
        for number, made, _ in step["ops"]:
            op, args, kwargs = self.data["calls"][number]
            name = op.split(".")[1]
            if (made or name.endswith("_")) and not name.startswith(("empty", "new_empty")):
                found.append((op, args, kwargs))
        return found


def steps(source: Measured) -> None:
    print(
        f"\n{source.data['about']['device']}, torch {source.data['about']['torch']}, forward and backward, simulated against measured\n"
    )
    print("| block | operators | measured, ms | predicted, ms | off by | eager, ms |\n|---|---|---|---|---|---|")
    errors: dict[str, float] = {}
    for step in source.data["steps"]:
        calls = source.calls(step)
        costs = source.without({key_of(*call) for call in calls})
        total = 0.0
        for op, args, kwargs in calls:
            call = source.reader.call(op, args, kwargs)
            if call is not None and call.step.results:
                total += costs.cost(call.step, call.types, call.orders).seconds
        real, eager = median(step["graphed"]), median(step["eager_events"])
        errors[step["name"]] = total / real - 1
        print(
            f"| {step['name']} | {len(calls)} | {real * 1e3:.2f} | {total * 1e3:.2f} | {total / real - 1:+.1%} | {eager * 1e3:.2f} |",
            flush=True,
        )
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(f"\nmedian {median(map(abs, errors.values())):.1%} (target 5%), worst {errors[worst]:+.1%}: {worst}")


def operators(source: Measured) -> None:
    print("\n| family | points | half within | nine tenths within |\n|---|---|---|---|")
    for family in sorted(source.full.values(), key=lambda item: -len(item.points)):
        print(f"| {family.name} | {len(family.points)} | {family.median_error:.1%} | {family.most_error:.0%} |")
    weighed = [(family.median_error, len(family.points)) for family in source.full.values()]
    print(f"\nleaving one out, {sum(count for _, count in weighed)} points in {len(weighed)} families: ", end="")
    ordered = sorted(error for error, count in weighed for _ in range(count))
    print(f"half of them within {ordered[len(ordered) // 2]:.1%} (by the median of their family)")


def memory(source: Measured) -> None:
    from blocks import CASES
    from step_memory import traced_peak

    print("\nPeak memory of a step beyond what was there before it, one H200\n")
    print("| block | measured, MB | predicted, MB | off by |\n|---|---|---|---|")
    real = {step["name"]: step["peak"] - step["before"] for step in source.data["steps"] if step.get("peak")}
    errors: dict[str, float] = {}
    for case in CASES:
        guess = traced_peak(case)
        errors[case.name] = guess / real[case.name] - 1
        print(
            f"| {case.name} | {real[case.name] / 1e6:.1f} | {guess / 1e6:.1f} | {errors[case.name]:+.1%} |", flush=True
        )
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(f"\nmedian {median(map(abs, errors.values())):.1%} (target 3%), worst {errors[worst]:+.1%}: {worst}")


def allocator() -> None:
    """The recorded step begins with what was cached before: one free block of that size stands for it."""
    recorded = json.loads(Path(__file__).with_name("h200_memory.json").read_text(encoding="utf-8"))
    print(f"\nMemory reserved for a step, {recorded['about']['device']}, the recorded allocations replayed\n")
    print(
        "| block | live, MB | model, MB | off by | reserved, MB | model, MB | off by |\n|---|---|---|---|---|---|---|"
    )
    errors: dict[str, float] = {}
    for step in recorded["steps"]:
        model = CachingAllocator()
        cached = step["reserved_before"] - step["before"]
        model.cache(cached)
        for what, block, size in step["trace"]:
            if what == "alloc":
                model.allocate(block, size)
            elif what == "free":
                model.release(block)
        live, taken = step["peak"] - step["before"], step["reserved"] - step["before"]
        errors[step["name"]] = model.most_reserved / taken - 1
        print(
            f"| {step['name']} | {live / 1e6:.0f} | {model.most_live / 1e6:.0f} | {model.most_live / live - 1:+.1%} | "
            f"{taken / 1e6:.0f} | {model.most_reserved / 1e6:.0f} | {errors[step['name']]:+.1%} |"
        )
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(f"\nreserved: median {median(map(abs, errors.values())):.1%}, worst {errors[worst]:+.1%}: {worst}")


def busbw() -> None:
    print("\nAll-reduce of 4 GiB: published and simulated bus bandwidth\n")
    print("| cluster | published, GB/s | simulated, GB/s | off by |\n|---|---|---|---|")
    size = 4 << 30
    for name, low, high, where in PUBLISHED:
        cluster = load(name.split()[0])
        if name.endswith("ring"):
            cluster = msgspec.structs.replace(cluster, algorithms=(Algorithm.RING,))
        topology = Topology.of(cluster)
        count = topology.cluster.devices
        seconds = collective(topology, CollectiveKind.ALL_REDUCE, range(count), size).seconds(topology)
        rate = 2 * (count - 1) / count * size / seconds / 1e9
        middle = (low + high) / 2
        span = f"{low:g} to {high:g}" if low != high else f"{low:g}"
        print(f"| `{name}` | {span} ({where}) | {rate:.0f} | {rate / middle - 1:+.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("steps", "operators", "memory", "allocator", "busbw")
    parser.add_argument("--only", nargs="*", choices=sections, default=sections)
    parser.add_argument("--measured", type=Path, default=Path(__file__).with_name("h200_profile.json"))
    options = parser.parse_args()
    needs = {"steps", "operators", "memory"} & set(options.only)
    source = Measured(options.measured, load("h200x8").device) if needs else None
    for name in options.only:
        if name in ("busbw", "allocator"):
            {"busbw": busbw, "allocator": allocator}[name]()
        else:
            assert source is not None
            {"steps": steps, "operators": operators, "memory": memory}[name](source)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
