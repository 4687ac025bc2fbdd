"""Several hosts on one machine: network namespaces, joined by links of a stated rate whose bytes are counted.

    with network(hosts=2, rate="1gbit") as net:
        ranks = [net.run(host, ["python", "train.py"], env={"RANK": str(host)}) for host in net.hosts]
        ...
        net.bytes_sent(0)

| hosts | wiring |
|---|---|
| 2 | one pair of virtual Ethernet interfaces, the rate limited at either end |
| more | one pair a host to a bridge in a namespace of its own, the rate limited at either end of each pair |

So a host sends at most `rate` and receives at most `rate`, at the same time. The limit is a token bucket (`tc ...
tbf`): a burst of up to `burst` bytes passes at once, so time transfers that are large against it. A host sees its own
loopback and its link, nothing of this machine's network; the file system, the memory and the cores are shared with
everything else on the machine.

**Order.** A packet waits in the queue of the core that sent it, to be received there. A host's packets leave by
several: what acknowledges one is received where the other host sent it, and lets the next ones go from there. So they
would overtake each other, which they do on no cable; TCP takes that for a loss, sends again and sends less for a while
(`benchmarks/fuse/link_order.py` counts them). So each interface gives all that it receives to one core (receive packet
steering, `rps_cpus`): that of its host, of those that this process may use, in turns. A kernel without it (CONFIG_RPS)
leaves them out of order.

Names hold the process id, and nothing but namespaces is made: an interface goes with its namespace. So the end of the
`with` removes all of it, whatever was raised, processes first; and what a killed process (SIGKILL) left behind is swept
by the next `network` on the machine.

Linux, root, `ip` and `tc` (iproute2) are needed. `why_no_network` says what is missing, for a test to skip with.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sennit.errors import RunError

__all__ = ["Host", "Network", "network", "why_no_network"]

_PREFIX = "sennit"
_SUBNET = "10.77"
_INTERFACE = "link0"
_MOST_HOSTS = 250
_GRACE = 2.0  # seconds between asking a process to end and killing it


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace. `address` is how the other hosts reach it."""

    index: int
    namespace: str
    address: str
    interface: str = _INTERFACE


@dataclass(slots=True, eq=False)
class Network:
    """The hosts, and what runs on them. Made by `network`."""

    hosts: tuple[Host, ...]
    rate: str
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(
        self, host: int | Host, argv: Sequence[str], *, env: Mapping[str, str] | None = None, **popen: Any
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host.

        It gets this process's environment, what torch.distributed needs to know of the network (the interface, and host
        0 as the master), and `env`. It ends with the network, if not before.
        """
        here = self._host(host)
        variables = {**os.environ, **self.variables(here), **(env or {})}
        process = subprocess.Popen(
            ["ip", "netns", "exec", here.namespace, *argv], env=variables, start_new_session=True, **popen
        )
        self.running.append(process)
        return process

    def variables(self, host: int | Host) -> dict[str, str]:
        """The environment variables that make gloo, NCCL and the rendezvous of torch use the link."""
        here = self._host(host)
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        return {"MASTER_ADDR": self.hosts[0].address, **dict.fromkeys(names, here.interface)}

    def bytes_sent(self, host: int | Host) -> int:
        """Bytes that the host has sent over its link so far, headers included.

        Segments are counted as the kernel hands them to the link, before they are cut to packets, so headers are
        counted less often than on a cable.
        """
        return self._counter(host, "tx")

    def bytes_received(self, host: int | Host) -> int:
        return self._counter(host, "rx")

    def stop(self) -> None:
        """End what runs on the hosts: ask, then kill."""
        for process in self.running:
            _signal_session(process, signal.SIGTERM)
        for process in self.running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            _signal_session(process, signal.SIGKILL)  # also what the command started and left behind
            process.wait()
        self.running.clear()

    def _host(self, host: int | Host) -> Host:
        index = host if isinstance(host, int) else host.index
        if not 0 <= index < len(self.hosts):
            raise RunError(f"host {index} of {len(self.hosts)}", fix=f"use 0 to {len(self.hosts) - 1}")
        return self.hosts[index]

    def _counter(self, host: int | Host, direction: str) -> int:
        here = self._host(host)
        answer = _tool("ip", "-n", here.namespace, "-s", "-j", "link", "show", "dev", here.interface)
        return int(json.loads(answer)[0]["stats64"][direction]["bytes"])


@contextmanager
def network(hosts: int = 2, rate: str = "1gbit", *, burst: str = "256k", latency: str = "100ms") -> Iterator[Network]:
    """Hosts joined by links of `rate` each way, in the units of `tc` ("1gbit", "200mbit").

    `burst` is the size of the token bucket, `latency` how long a packet may wait in the queue before it is dropped.
    """
    if not 2 <= hosts <= _MOST_HOSTS:
        raise RunError(f"a network of {hosts} hosts", fix=f"use 2 to {_MOST_HOSTS}")
    if (reason := _missing()) is not None:
        raise RunError(f"no network of {hosts} hosts can be made: {reason}", where="sennit.testing.network")
    _sweep()
    limit = ("tbf", "rate", rate, "burst", burst, "latency", latency)
    with ExitStack() as undo:
        stem = f"{_PREFIX}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        made = tuple(Host(i, f"{stem}-{i}", f"{_SUBNET}.0.{i + 1}") for i in range(hosts))
        for host in made:
            _add_namespace(host.namespace, undo)
        if hosts == 2:
            _join(made[0].namespace, _INTERFACE, made[1].namespace, _INTERFACE)
        else:
            _add_switch(f"{stem}-switch", made, limit, undo)
        for host in made:
            _tool("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", _INTERFACE)
            _set_up(host.namespace, _INTERFACE, limit, _core_of(host.index, hosts))
        net = Network(made, rate)
        undo.callback(net.stop)  # before the namespaces go: a namespace lives as long as a process in it
        yield net


def why_no_network() -> str | None:
    """Why `network` would fail here, or None.

    Tries the real thing once: a kernel may lack namespaces or token buckets.
    """
    if (reason := _missing()) is not None:
        return reason
    try:
        with network(2):
            return None
    except RunError as error:
        return error.what


def _missing() -> str | None:
    if sys.platform != "linux":
        return f"network namespaces are a matter of Linux, and this is {sys.platform}"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool} (package iproute2) is missing"
    return None if os.geteuid() == 0 else f"network namespaces need root, and this is user {os.geteuid()}"


def _add_namespace(name: str, undo: ExitStack) -> None:
    undo.callback(_remove_namespace, name)  # first: an interrupt may come while the command runs
    _tool("ip", "netns", "add", name)
    _tool("ip", "-n", name, "link", "set", "lo", "up")


def _remove_namespace(name: str) -> None:
    if Path("/run/netns", name).exists():
        _tool("ip", "netns", "delete", name)


def _join(one: str, one_end: str, other: str, other_end: str) -> None:
    """A virtual Ethernet pair, made inside the two namespaces, so that no name can meet one of this machine."""
    _tool("ip", "link", "add", one_end, "netns", one, "type", "veth", "peer", "name", other_end, "netns", other)


def _set_up(namespace: str, interface: str, limit: Sequence[str], core: int) -> None:
    _tool("ip", "-n", namespace, "link", "set", interface, "up")
    _tool("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *limit)
    steering = f"/sys/class/net/{interface}/queues/rx-0/rps_cpus"  # not in every kernel
    command = f"[ ! -e {steering} ] || echo {_mask(core)} > {steering}"
    _tool("ip", "netns", "exec", namespace, "sh", "-c", command)


def _core_of(host: int, hosts: int) -> int:
    """Far from those of the others, as long as there are enough."""
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[host * max(1, len(allowed) // hosts) % len(allowed)]


def _mask(core: int) -> str:
    """One core, as the kernel writes sets of them: words of 32 bits."""
    return ",".join([f"{1 << core % 32:x}", *["0"] * (core // 32)])


def _add_switch(name: str, hosts: Sequence[Host], limit: Sequence[str], undo: ExitStack) -> None:
    _add_namespace(name, undo)
    _tool("ip", "-n", name, "link", "add", "bridge0", "type", "bridge")
    _tool("ip", "-n", name, "link", "set", "bridge0", "up")
    for host in hosts:
        port = f"port{host.index}"
        _join(host.namespace, _INTERFACE, name, port)
        _tool("ip", "-n", name, "link", "set", port, "master", "bridge0")
        _set_up(name, port, limit, _core_of(host.index, len(hosts)))


def _sweep() -> None:
    """Remove namespaces of processes that are gone."""
    folder = Path("/run/netns")
    for entry in sorted(folder.glob(f"{_PREFIX}-*-*-*")) if folder.is_dir() else ():
        owner = entry.name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            for process in _tool("ip", "netns", "pids", entry.name).split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _remove_namespace(entry.name)


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # all of the session is gone already
        os.killpg(process.pid, number)


def _tool(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(
            f"{' '.join(command)} failed with status {done.returncode}: {done.stderr.strip()}",
            where="sennit.testing.network",
        )
    return done.stdout
