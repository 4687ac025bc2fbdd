"""Plans of the zoo on four real ranks over slow links, beside what torch has for the same models.

    sudo python benchmarks/plan/special.py [--rate 200mbit] [--cases t5-128k swin-128] [--steps 5]    # four hosts: network namespaces
    python benchmarks/plan/special.py --links paced --jobs 2                                          # one host: sockets that send at the rate
    python benchmarks/plan/special.py --links none                                                    # one host, as fast as it is
    python benchmarks/plan/special.py --libraries [CASE ...]                                          # what imported modules and compiled models take

Four gloo ranks, one thread each. Models are in `special_models.py`, what is measured of a rank in `special_rank.py`.
One global batch and one optimizer for all contenders, each in processes of its own; a contender whose losses differ
from the serial model's by more than 1e-3 (relative, float32 under AdamW) is an error.

Torch's contenders are swept: DDP over bucket sizes and with the buffers of rank 0 sent in each step or not, FSDP2 by
blocks with parameters let go of after forward or kept, both with and without activation checkpoints, torch's own
pipelining with 1F1B and zero-bubble schedules over numbers of micro-batches. Ours are the zoo's plans, swept over
micro-batches or pieces.

`link s` is what was sent over the rate: how long the link of the busiest rank was busy. A paced socket is limited by
itself, so a rank that sends to several peers at once has more than the rate: see that no row's time is below its link
seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from special_models import CASES
from special_rank import OURS, libraries_main, rank_main, serial_main, warm_libraries

RANKS = 4
SWEEP = {
    "t5": (
        "interlaced:mb=4", "interlaced:mb=8", "interlaced:mb=8,checkpoint=yes",
        "ddp:bucket=1", "ddp:bucket=25", "ddp:bucket=100", "ddp:bucket=25,checkpoint=yes",
        "fsdp2:reshard=yes", "fsdp2:reshard=no", "fsdp2:reshard=yes,checkpoint=yes",
    ),
    "swin": (
        "co_shard:pieces=2", "co_shard:pieces=4", "co_shard:pieces=4,level=2",
        "ddp:bucket=1", "ddp:bucket=25", "ddp:bucket=25,checkpoint=yes", "ddp:bucket=25,buffers=no", "ddp:bucket=25,checkpoint=yes,buffers=no",
        "fsdp2:reshard=yes", "fsdp2:reshard=no", "fsdp2:reshard=yes,checkpoint=yes",
        "pipelining:schedule=1F1B,mb=4", "pipelining:schedule=1F1B,mb=8", "pipelining:schedule=ZBVZeroBubble,mb=8",
        "pipelining:schedule=InterleavedZeroBubble,mb=8", "pipelining:schedule=1F1B,mb=8,checkpoint=yes",
    ),
    "evoformer": (
        "recycled:mb=4", "recycled:mb=8", "recycled:mb=8,in_flight=4", "recycled:mb=8,checkpoint=yes",
        "ddp:bucket=1", "ddp:bucket=25", "ddp:bucket=25,checkpoint=yes",
        "fsdp2:reshard=yes", "fsdp2:reshard=no", "fsdp2:reshard=yes,checkpoint=yes",
    ),
    "gpt": (
        "data_parallel", "zero:level=1", "zero:level=3", "pipeline:schedule=1F1B,mb=4", "pipeline:schedule=1F1B,mb=8",
        "pipeline:schedule=zero bubble H1,mb=8",
        "ddp:bucket=1", "ddp:bucket=25", "ddp:bucket=100", "fsdp2:reshard=yes", "fsdp2:reshard=no",
        "pipelining:schedule=1F1B,mb=4", "pipelining:schedule=1F1B,mb=8", "pipelining:schedule=ZBVZeroBubble,mb=8",
        "pipelining:schedule=InterleavedZeroBubble,mb=8",
    ),
}  # fmt: skip
UNITS = {"mbit": 1e6, "gbit": 1e9}
AGREE = 1e-3


@dataclass(slots=True)
class Running:
    """The ranks of a contender, and the file that rank 0 writes."""

    contender: str
    ranks: list[Any]  # processes: forked from this one, or started on a host of their own
    cores: tuple[str, ...]
    out: Path
    end: float
    undo: ExitStack

    def codes(self) -> list[int | None]:
        return [rank.poll() if isinstance(rank, subprocess.Popen) else rank.exitcode for rank in self.ranks]

    def is_over(self) -> bool:
        codes = self.codes()
        return None not in codes or any(codes) or time.monotonic() > self.end

    def finish(self) -> dict[str, Any]:
        codes = self.codes()
        self.undo.close()
        if any(code != 0 for code in codes) or not self.out.exists():
            return {"error": f"ranks ended with {codes}"}
        return json.loads(self.out.read_text(encoding="utf-8"))


def start(case: str, contender: str, cores: tuple[str, ...], folder: Path, options: argparse.Namespace) -> Running:
    """Start the ranks of a contender. None outlives the end of its `Running`."""
    undo, out = ExitStack(), folder / f"{case} {contender}.json"
    shared = {"WORLD_SIZE": str(RANKS), "MASTER_PORT": str(free_port())}
    shared["SENNIT_BENCH_PACE"] = options.rate if options.links == "paced" else ""
    if options.links == "namespaces":
        from sennit.testing.testbed import network

        net = undo.enter_context(network(RANKS, options.rate))
        argv = [sys.executable, __file__, "--rank-of", case, contender, str(options.steps)]
        ranks: list[Any] = [
            net.run(rank, [*argv, cores[rank], str(out)], env={**shared, "RANK": str(rank)}) for rank in range(RANKS)
        ]
    else:
        local = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks = []
        for rank in range(RANKS):
            variables = {**shared, **local, "RANK": str(rank)}
            ranks.append(forked(rank_main, case, contender, options.steps, cores[rank], str(out), variables))
            undo.callback(end, ranks[-1])
    return Running(contender, ranks, cores, out, time.monotonic() + options.timeout, undo)


def forked(work: Callable[..., None], *arguments: Any) -> Any:
    """A process that starts with everything imported. This one has one thread, so that a copy of it is sound."""
    process = get_context("fork").Process(target=work, args=arguments)
    process.start()
    return process


def end(process: Any) -> None:
    process.kill()
    process.join()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def sets_of_cores(jobs: int) -> list[tuple[str, ...]]:
    """For each job, cores for each rank; empty where there are not enough to give each rank one."""
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // (jobs * RANKS)
    if each == 0:
        return [("",) * RANKS] * jobs
    runs = ["+".join(str(core) for core in cores[at * each : (at + 1) * each]) for at in range(jobs * RANKS)]
    return [tuple(runs[job * RANKS : (job + 1) * RANKS]) for job in range(jobs)]


def chosen(case: str, only: list[str]) -> list[str]:
    """The contenders of a case that have one of `only` in their names; a whole name is that contender alone."""
    names = SWEEP[CASES[case].family]
    whole = [part for part in only if part in names]
    parts = [part for part in only if part not in names]
    return [name for name in names if not only or name in whole or any(part in name for part in parts)]


def compare(
    case: str, options: argparse.Namespace, folder: Path, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All contenders of a case, `--jobs` at a time, and the serial model's losses; what there is so far is saved after
    each.
    """
    waiting = chosen(case, options.only)
    order, rows = list(waiting), {}
    free, running = sets_of_cores(options.jobs), []
    serial = forked(serial_main, case, options.steps, str(folder / f"{case}.json"))
    try:
        serial.join()  # before anything is timed
        losses = json.loads((folder / f"{case}.json").read_text(encoding="utf-8"))
        while waiting or running:
            while waiting and free:
                running.append(start(case, waiting.pop(0), free.pop(), folder, options))
            for item in [item for item in running if item.is_over()]:
                running.remove(item)
                rows[item.contender] = item.finish()
                print(f"{case} {item.contender}: {json.dumps(rows[item.contender])}", file=sys.stderr, flush=True)
                free.append(item.cores)
                save({"serial": losses, "rows": {name: rows[name] for name in order if name in rows}})
            time.sleep(0.05)
    finally:
        for item in running:
            item.undo.close()
        end(serial)
    return {"serial": losses, "rows": {name: rows[name] for name in order}}


def off_serial(row: dict[str, Any], found: dict[str, Any]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(row["losses"], found["serial"], strict=True))


def report(case: str, found: dict[str, Any], rate: str) -> None:
    rows = {name: row for name, row in found["rows"].items() if "error" not in row}
    peers = {name: row for name, row in rows.items() if name.partition(":")[0] not in OURS}
    fastest = min((min(row["seconds"]) for row in peers.values()), default=float("nan"))
    leanest = min((row["bytes"] for row in peers.values()), default=float("nan"))
    speed = float(rate[:-4]) * UNITS[rate[-4:]] / 8
    print(f"\n{case}: {CASES[case].shape}")
    print(
        f"  {'contender':44s} {'least s':>8s} {'median':>8s} {'x best peer':>12s} {'standing':>8s} {'peak MB':>8s} {'x leanest':>10s} "
        f"{'MB sent':>8s} {'link s':>7s}  loss, off serial by"
    )
    for name, row in found["rows"].items():
        if "error" in row:
            print(f"  {name:44s} {row['error']}")
            continue
        off = off_serial(row, found)
        least = min(row["seconds"])
        print(
            f"  {name:44s} {least:8.3f} {median(row['seconds']):8.3f} {fastest / least:11.2f}x {row['standing'] / 1e6:8.0f} {row['bytes'] / 1e6:8.0f} "
            f"{leanest / row['bytes']:9.2f}x {row['sent'] / 1e6:8.2f} {row['sent'] / speed:7.3f}  {row['losses'][-1]:.5f} {off:.0e}"
            + ("" if off <= AGREE else "  WRONG")
        )
    sys.stdout.flush()


def main() -> int:
    if sys.argv[1:2] == ["--rank-of"]:
        rank_main(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5], sys.argv[6], {})
        return 0
    if sys.argv[1:2] == ["--libraries"]:
        for name, (size, seconds) in libraries_main(sys.argv[2:]).items():
            print(f"{name:40s} {size / 1e6:6.0f} MB {seconds:6.1f} s")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that no rank is left behind
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument(
        "--only", nargs="+", default=[], help="contenders whose names are one of these, or have one in them"
    )
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--links", choices=["namespaces", "paced", "none"], default="namespaces")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="contenders at a time, each rank on cores of its own")
    parser.add_argument("--cores", help="those that ranks may have, as 8-15")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one contender")
    parser.add_argument("--json", type=Path, help="written after each contender")
    options = parser.parse_args()
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {RANKS} ranks, "
        f"links {options.links} at {options.rate}, {options.jobs} at a time"
    )
    found: dict[str, Any] = {}
    wrong = False
    if options.cores:
        first, _, last = options.cores.partition("-")
        os.sched_setaffinity(0, range(int(first), int(last or first) + 1))
    torch.set_num_threads(1)
    warm_libraries()
    folder = Path(tempfile.mkdtemp(prefix="special-"))

    def save(case: str, rows: dict[str, Any]) -> None:
        found[case] = rows
        if options.json:
            text = json.dumps({"rate": options.rate, "links": options.links, **found}, indent=1)
            options.json.write_text(text, encoding="utf-8")

    for case in options.cases:
        found[case] = compare(case, options, folder, partial(save, case))
        report(case, found[case], options.rate)
        wrong |= any("error" in row or off_serial(row, found[case]) > AGREE for row in found[case]["rows"].values())
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
