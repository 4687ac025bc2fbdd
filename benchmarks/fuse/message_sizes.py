"""What messages of one size take that queue behind each other on a slow link, size by size.

    python benchmarks/fuse/message_sizes.py [--ranks 4] [--rate 1gbit] [--links namespaces | paced] [--sizes 480 512 520 512 520 ...] [--sysctl NAME=VALUE ...]

Milliseconds of an all-reduce of so many KiB in a queue, of the slowest rank, and nanoseconds for each byte that a ring
puts on a link. `profile_torch.py` says what this is for: segments of a little over 64 KiB can take twice as long as
others (with 4 ranks, 512 to 520 KiB), and do not with `--sysctl net.ipv4.tcp_autocorking=0`. The effect comes and goes:
name such sizes several times.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from slow_links import link_parser, pace, pin, run

SIZES = (64, 128, 192, 256, 320, 384, 448, 480, 512, 520, 544, 576, 640, 768, 896, 1024, 1280, 2048)
BYTES, MOST, ROUNDS = 3 << 20, 24, 5


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from sennit.fuse.network_threads import network_first
    from sennit.fuse.profile_torch import queued, slowest
    from sennit.fuse.serial_group_torch import serial_group

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    pin(rank, count)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = serial_group()
    pace()
    network_first()
    for kibi in arguments.sizes:
        size = kibi << 10
        messages = max(2, min(MOST, BYTES // size))
        seconds = slowest(group, queued(group, size, ROUNDS, messages, None)[0], "cpu") / messages
        if rank == 0:
            on_a_link = 2 * size * (count - 1) / count
            print(f"{kibi:6d} KiB  {1e3 * seconds:7.2f} ms  {1e9 * seconds / on_a_link:6.2f} ns a byte", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = link_parser(__doc__, ranks=4)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="KiB")
    parser.set_defaults(json=None)
    run(parser.parse_args(), rank_main)


if __name__ == "__main__":
    main()
