"""All-reduce over two hosts: the hierarchical schedule of the sennit backend against gloo's flat ring, with the bytes
on the link counted.

    python benchmarks/collective/two_hosts.py [--ranks 4] [--rates 1gbit 2gbit] [--sizes 65536 16777216] [--repeat 9] [--alone] [--json FILE]

Hosts are network namespaces of this machine, joined by a link of a stated rate (`sennit.testing`; needs root). The
ranks of both hosts share this machine's cores, which real hosts do not. Both backends run in the same processes, in
turn, time and again; a time is the median of those runs, of the slowest rank. Bytes are those that host 0 sent over its
link, by the counter of its interface, headers included.

A flat ring over 2 g ranks sends 2 (2g - 1) / (2g) of the array over the link in each direction, 1.75 with g = 4; the
hierarchical schedule 1.0. So where the link is the limit, it is at most 1.75 times as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

PORT = "29511"
SIZES = (65_536, 1_048_576, 4_194_304, 16_777_216, 67_108_864)
BACKENDS = ("gloo", "sennit")
HOSTS = 2


def measure(sizes: list[int], repeat: int) -> list[dict[str, float]] | None:
    """On a rank: times and bytes for each size. Rank 0 returns them."""
    import torch
    import torch.distributed as dist

    import sennit.backend

    sennit.backend.register()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    rank, size = dist.get_rank(), dist.get_world_size()
    counter = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics", "tx_bytes")
    rows: list[dict[str, float]] = []
    for nbytes in sizes:
        tensors = {name: torch.full((nbytes // 4,), rank + 1.0) for name in BACKENDS}
        seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
        sent: dict[str, list[int]] = {name: [] for name in BACKENDS}
        for turn in range(repeat + 1):
            for name in BACKENDS if turn % 2 else reversed(BACKENDS):
                tensors[name].fill_(rank + 1.0)
                dist.barrier()
                before, start = int(counter.read_text()), time.perf_counter()
                dist.all_reduce(tensors[name], group=groups[name])
                took = torch.tensor([time.perf_counter() - start])
                dist.barrier(groups[name])
                if turn:  # the first is for warming up
                    sent[name].append(int(counter.read_text()) - before)
                    dist.all_reduce(took, dist.ReduceOp.MAX)
                    seconds[name].append(float(took))
                wrong = (tensors[name] != size * (size + 1) / 2).sum().item()
                if wrong:
                    raise SystemExit(f"{name} at {nbytes} bytes: {wrong} elements are wrong")
        row: dict[str, float] = {"bytes": nbytes}
        for name in BACKENDS:
            row[f"{name}_seconds"] = statistics.median(seconds[name])
            row[f"{name}_link_bytes"] = statistics.median(sent[name])
        rows.append(row)
    dist.destroy_process_group()
    return rows if rank == 0 else None


def run(rate: str, per_host: int, sizes: list[int], repeat: int, alone: bool) -> list[dict[str, float]]:
    """Start the ranks on two hosts; the rows that rank 0 prints."""
    from sennit.testing import network

    with network(HOSTS, rate) as net:
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(HOSTS * per_host):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(HOSTS * per_host),
                "MASTER_PORT": PORT,
                "OMP_NUM_THREADS": "1",
            }
            priority = ["chrt", "--rr", "1"] if alone else []
            argv = [
                *priority,
                sys.executable,
                __file__,
                "--worker",
                "--repeat",
                str(repeat),
                "--sizes",
                *map(str, sizes),
            ]
            pipe = subprocess.PIPE if rank == 0 else None
            processes.append(net.run(rank // per_host, argv, env=variables, stdout=pipe))
        output, _ = processes[0].communicate()
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
    rows: list[dict[str, float]] = json.loads(output.splitlines()[-1])
    return rows


def print_table(rate: str, per_host: int, rows: list[dict[str, float]]) -> None:
    print(f"\n{HOSTS} hosts of {per_host} ranks, {rate} each way, all-reduce of float32; median times")
    print(
        f"{'bytes':>10} {'gloo ms':>9} {'sennit ms':>9} {'faster':>7} {'gloo link':>10} {'sennit link':>11}   (link: bytes / array)"
    )
    for row in rows:
        gloo, ours = row["gloo_seconds"], row["sennit_seconds"]
        links = row["gloo_link_bytes"] / row["bytes"], row["sennit_link_bytes"] / row["bytes"]
        print(
            f"{row['bytes']:>10.0f} {gloo * 1e3:>9.2f} {ours * 1e3:>9.2f} {gloo / ours:>6.2f}x {links[0]:>10.3f} {links[1]:>11.3f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="All-reduce over two hosts with a link of limited rate.")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of each host")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "2gbit"], help="rates of the link, in the units of tc")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes of the array")
    parser.add_argument("--repeat", type=int, default=9, help="runs of each")
    parser.add_argument(
        "--alone", action="store_true", help="real-time priority, so that other processes do not disturb"
    )
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        rows = measure(arguments.sizes, arguments.repeat)
        if rows is not None:
            print(json.dumps(rows))
        return 0
    found = {}
    for rate in arguments.rates:
        found[rate] = run(rate, arguments.ranks, arguments.sizes, arguments.repeat, arguments.alone)
        print_table(rate, arguments.ranks, found[rate])
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps({"ranks": arguments.ranks, "rates": found}, indent=1) + "\n", encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
