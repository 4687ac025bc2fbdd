"""Whether packets overtake each other between the namespaces of the test network, and what that costs.

    python benchmarks/fuse/link_order.py [--ranks 2] [--rate 1gbit] [--messages 400] [--size 1024] [--as-they-come]

All-reduces of so many KiB behind each other, two at a time, while the rank's thread computes products on the same core,
as in a training step. Printed, of the slowest rank: milliseconds of a message, median and what one in ten and one in a
hundred exceeds; and of all ranks what TCP counted (`/proc/net/netstat`): packets that came out of order, and packets
sent again. With `--as-they-come` interfaces leave packets to the core that sent them, in place of one core each
(`sennit.testing.network`).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from slow_links import link_parser, pin, run

COUNTED = ("TCPOFOQueue", "TCPFastRetrans")
STEERING = Path("/sys/class/net/link0/queues/rx-0/rps_cpus")


def counted() -> list[int]:
    lines = [line.split() for line in Path("/proc/net/netstat").read_text().splitlines() if line.startswith("TcpExt")]
    values = dict(zip(*lines, strict=True))
    return [int(values[name]) for name in COUNTED]


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from sennit.fuse.network_threads import network_first
    from sennit.fuse.serial_group_torch import serial_group

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pin(rank, count)
    torch.set_num_threads(1)
    if arguments.as_they_come:
        STEERING.write_text("0")
    dist.init_process_group("gloo")
    group = serial_group()
    network_first()
    flats, factor = [torch.zeros(arguments.size << 8) for _ in range(2)], torch.randn(192, 192)
    works = [dist.all_reduce(flat, group=group, async_op=True) for flat in flats]
    before, ends = counted(), [time.perf_counter()]
    for message in range(arguments.messages):
        while not works[message % 2].is_completed():
            torch.mm(factor, factor)
        ends.append(time.perf_counter())
        works[message % 2] = dist.all_reduce(flats[message % 2], group=group, async_op=True)
    told = torch.tensor([after - start for after, start in zip(counted(), before, strict=True)])
    for work in works:
        work.wait()
    spent = torch.tensor([after - start for start, after in pairwise(ends[2:])])
    found = torch.stack([torch.quantile(spent, share) for share in (0.5, 0.9, 0.99)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    dist.all_reduce(told)
    if rank == 0:
        times = " ".join(f"{1e3 * value:7.2f}" for value in found.tolist())
        counts = ", ".join(f"{name} {value}" for name, value in zip(COUNTED, told.tolist(), strict=True))
        print(f"{arguments.size} KiB, {count} ranks: median, p90, p99 {times} ms; {counts}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = link_parser(__doc__)
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--size", type=int, default=1024, help="KiB of a message")
    parser.add_argument("--as-they-come", action="store_true")
    parser.set_defaults(json=None)
    arguments = parser.parse_args()
    if arguments.links != "namespaces":
        parser.error("packets are counted between namespaces")
    run(arguments, rank_main)


if __name__ == "__main__":
    main()
