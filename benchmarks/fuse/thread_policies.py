"""What the kernel's scheduling of gloo's threads costs: queued all-reduces beside a thread that computes on the same
core.

    python benchmarks/fuse/thread_policies.py [--links namespaces | paced] [--rate 1gbit] [--cores 1] [--rounds 3]

For each preference of `fuse/network_threads.py` that is granted here: milliseconds of a message of 0.5, 2 and 8 MB in a
queue, the least and the median of the rounds, the slowest rank's, and the share of the time in which the computing
thread had its core. Preferences take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from slow_links import link_parser, pace, pin, run_ranks

QUEUES = {1 << 19: 16, 1 << 21: 6, 1 << 23: 2}  # bytes of a message -> how many


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from sennit.fuse.network_threads import Preference, gloo_threads, is_granted, ordinary
    from sennit.fuse.profile_torch import Products, queued, slowest
    from sennit.fuse.serial_group_torch import serial_group

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pin(rank, count, arguments.cores)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = serial_group()
    pace()
    threads = gloo_threads()
    products = Products.of(5)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for _ in range(arguments.rounds):
        for size, messages in QUEUES.items():
            for name in ("alone", *(preference.value for preference in Preference)):
                ordinary(threads)
                if name != "alone" and not all(is_granted(thread, Preference(name)) for thread in threads):
                    continue
                spent, share = queued(group, size, 2, messages, None if name == "alone" else products)
                found.setdefault((name, size), []).append((slowest(group, spent, "cpu") / messages, share))
    if rank == 0:
        print(f"{len(threads)} threads of gloo, {arguments.cores} core(s) a rank")
        for (name, size), values in found.items():
            each = [seconds for seconds, _ in values]
            share = statistics.median(share for _, share in values)
            beside = "" if name == "alone" else f", computing at {share:.0%} of its speed alone"
            print(
                f"  {name:16s} {size / (1 << 20):4.1f} MiB  least {1e3 * min(each):6.2f} median {1e3 * statistics.median(each):6.2f} ms a message{beside}"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = link_parser(__doc__)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        run_ranks(arguments.ranks, arguments.links, arguments.rate, out, arguments.timeout, arguments.sysctl)


if __name__ == "__main__":
    main()
