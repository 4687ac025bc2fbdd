"""Ranks of a benchmark, each a process with a core of its own, joined by links of a stated rate.

Two ways to have such links:

| way | needs | is |
|---|---|---|
| namespaces | root, ip, tc | a network namespace a rank, joined by virtual Ethernet with a token bucket (`sennit.testing.network`) |
| paced | Linux | ranks on the loopback interface whose TCP sockets send at most at the rate (SO_MAX_PACING_RATE) |

The second needs no privilege and is the same to gloo for two ranks, and for a ring of more: each rank sends on one
socket of a group at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_PACING = 47  # SO_MAX_PACING_RATE, which Python has no name for
_UNITS = {"mbit": 1e6, "gbit": 1e9}


def run_ranks(count: int, way: str, rate: str, out: Path, timeout: float, sysctl: Sequence[str] = ()) -> None:
    """Run this script again as `count` ranks with the same arguments, and wait for them.

    `sysctl` are settings of the namespaces in place of the machine's, as `net.ipv4.tcp_autocorking=0`.
    """
    variables = {
        "WORLD_SIZE": str(count),
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
        "SENNIT_BENCH_OUT": str(out),
        "SENNIT_BENCH_PACE": rate if way == "paced" else "",
    }
    command = [sys.executable, *sys.argv]
    if way == "namespaces":
        from sennit.testing import network

        with network(hosts=count, rate=rate) as net:
            if sysctl:
                _wait([net.run(host, ["sysctl", "-qw", *sysctl]) for host in net.hosts], timeout)
            ranks = [net.run(host, command, env={**variables, "RANK": str(host.index)}) for host in net.hosts]
            _wait(ranks, timeout)
        return
    local = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **variables, **local, "RANK": str(rank)}) for rank in range(count)
    ]
    try:
        _wait(ranks, timeout)
    finally:
        for process in ranks:
            process.kill()


def _free_port() -> int:
    """A port that nobody has, drawn below those that systems give away, so that two runs which begin together hardly
    get the same.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> None:
    if any(process.wait(timeout) for process in ranks):
        raise SystemExit("a rank failed")


def pin(rank: int, ranks: int, cores: int = 1) -> None:
    """So many cores for this rank, far from those of the others: neighbours may be two threads of one core."""
    allowed = sorted(os.sched_getaffinity(0))
    apart = max(1, len(allowed) // (ranks * cores))
    os.sched_setaffinity(0, {allowed[(rank * cores + core) * apart % len(allowed)] for core in range(cores)})


def tcp_connections() -> Iterator[socket.socket]:
    """The TCP connections that this process has now, each open while it is looked at."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # it was closed meanwhile
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                yield connection


def pace() -> int:
    """Limit every TCP connection that this process has now, if ranks are paced; how many.

    Call it after groups are made.
    """
    rate = os.environ.get("SENNIT_BENCH_PACE", "")
    if not rate:
        return 0
    bits = float(rate[:-4]) * _UNITS[rate[-4:]]
    limited = 0
    for connection in tcp_connections():
        connection.setsockopt(socket.SOL_SOCKET, _PACING, int(bits / 8))
        limited += 1
    return limited


def link_parser(text: str | None, *, ranks: int = 2, timeout: float = 300.0) -> argparse.ArgumentParser:
    """Of a script of ranks: what `run` asks for but `--json`."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--links", choices=["namespaces", "paced"], default="namespaces")
    parser.add_argument("--sysctl", nargs="*", default=(), help="settings of the namespaces, as NAME=VALUE")
    parser.add_argument("--timeout", type=float, default=timeout)
    return parser


def run(arguments: argparse.Namespace, rank_main: Callable[[argparse.Namespace], None]) -> None:
    """What a script of ranks does: a rank runs `rank_main`, the process that was started by hand runs the ranks and
    keeps what they write.
    """
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        run_ranks(arguments.ranks, arguments.links, arguments.rate, out, arguments.timeout, arguments.sysctl)
        if arguments.json is not None:
            arguments.json.write_text(out.read_text())
