"""Hosts as network namespaces: they reach each other at the stated rate, bytes are counted, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sennit.errors import RunError
from sennit.testing import Network, network, why_no_network
from sennit.testing.testbed import _mask

SKIP = pytest.mark.skipif(why_no_network() is not None, reason=str(why_no_network()))

SEND = textwrap.dedent(
    """
    import socket, sys
    host, size = sys.argv[1], int(sys.argv[2])
    with socket.create_server((host, 7000)) as server:
        print("ready", flush=True)
        peer, _ = server.accept()
        with peer:
            peer.sendall(bytes(size))
            peer.recv(1)
    """
)
RECEIVE = textwrap.dedent(
    """
    import socket, sys
    left = int(sys.argv[2])
    with socket.create_connection((sys.argv[1], 7000)) as peer:
        while left:
            left -= len(peer.recv(min(left, 1 << 20)))
        peer.sendall(b"!")
    """
)


def namespaces() -> set[str]:
    folder = Path("/run/netns")
    return {entry.name for entry in folder.glob("sennit-*")} if folder.is_dir() else set()


def own_namespaces() -> set[str]:
    return {name for name in namespaces() if name.startswith(f"sennit-{os.getpid()}-")}


def transfer(net: Network, source: int, target: int, size: int) -> None:
    address = net.hosts[source].address
    sender = net.run(source, [sys.executable, "-c", SEND, address, str(size)], stdout=subprocess.PIPE)
    assert sender.stdout is not None
    assert sender.stdout.readline() == b"ready\n"
    receiver = net.run(target, [sys.executable, "-c", RECEIVE, address, str(size)])
    assert receiver.wait(60) == 0
    assert sender.wait(60) == 0
    sender.stdout.close()


@SKIP
def test_two_hosts_send_bytes_that_are_counted() -> None:
    size = 1 << 20
    with network(2, rate="1gbit") as net:
        before = net.bytes_sent(0), net.bytes_received(1)
        transfer(net, 0, 1, size)
        sent, received = net.bytes_sent(0) - before[0], net.bytes_received(1) - before[1]
        assert size < sent < 1.1 * size
        assert size < received < 1.1 * size
    assert not own_namespaces()


@SKIP
def test_three_hosts_reach_each_other_through_a_switch() -> None:
    with network(3, rate="500mbit") as net:
        transfer(net, 0, 1, 1 << 16)
        transfer(net, 2, 0, 1 << 16)
        assert len({host.address for host in net.hosts}) == 3
        assert net.bytes_sent(2) > 1 << 16
    assert not own_namespaces()


@SKIP
@pytest.mark.skipif(not Path("/sys/class/net/lo/queues/rx-0/rps_cpus").exists(), reason="a kernel without RPS")
@pytest.mark.parametrize("hosts", [2, 3])
def test_one_core_receives_what_comes_by_an_interface(hosts: int) -> None:
    """Else packets overtake each other."""
    allowed = os.sched_getaffinity(0)
    with network(hosts) as net:
        for host in net.hosts:
            steering = f"/sys/class/net/{host.interface}/queues/rx-0/rps_cpus"
            told = net.run(host, ["cat", steering], stdout=subprocess.PIPE).communicate(timeout=30)[0].decode()
            words = [int(word, 16) for word in told.strip().split(",")]
            cores = [
                32 * place + bit for place, word in enumerate(reversed(words)) for bit in range(32) if word >> bit & 1
            ]
            assert len(cores) == 1
            assert cores[0] in allowed


def test_cores_in_words() -> None:
    assert [_mask(core) for core in (0, 5, 31, 32, 70)] == ["1", "20", "80000000", "1,0", "40,0,0"]


@SKIP
def test_a_command_knows_the_network() -> None:
    script = "import os; print(os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME'], os.environ['RANK'])"
    with network(2) as net:
        process = net.run(1, [sys.executable, "-c", script], env={"RANK": "5"}, stdout=subprocess.PIPE)
        output, _ = process.communicate(timeout=30)
        assert output.decode().split() == [net.hosts[0].address, "link0", "5"]


@SKIP
def test_what_runs_ends_with_the_network() -> None:
    with network(2) as net:
        process = net.run(0, ["sleep", "600"])
    assert process.returncode == -signal.SIGTERM


@SKIP
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_after_an_error(error: type[BaseException]) -> None:
    def fail() -> None:
        with network(2) as net:
            net.run(0, ["sleep", "600"])
            raise error

    with pytest.raises(error):
        fail()
    assert not own_namespaces()


@SKIP
def test_nothing_is_left_after_a_failed_set_up() -> None:
    with pytest.raises(RunError, match="fast"), network(2, rate="fast"):
        pass
    assert not own_namespaces()


@SKIP
def test_what_a_killed_process_left_is_swept() -> None:
    script = (
        "import sys, time; from sennit.testing import network\n"
        "with network(2): print('up', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    left = {name for name in namespaces() if name.startswith(f"sennit-{process.pid}-")}
    assert len(left) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    with network(2):
        pass
    assert not left & namespaces()


@SKIP
def test_the_rate_holds() -> None:
    """Not a matter of this machine's speed: no machine may send faster than the bucket lets it."""
    size = 4 << 20
    with network(2, rate="100mbit") as net:
        start = time.monotonic()
        transfer(net, 0, 1, size)
        assert time.monotonic() - start > 0.8 * size * 8 / 100e6


def test_a_wrong_number_of_hosts_is_refused() -> None:
    with pytest.raises(RunError, match="1 hosts"), network(1):
        pass


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sennit.testing.testbed.shutil.which", lambda name: None)
    assert why_no_network() == "the command ip (package iproute2) is missing"
    with pytest.raises(RunError, match="iproute2"), network(2):
        pass


def test_root_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sennit.testing.testbed.shutil.which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr("sennit.testing.testbed.os.geteuid", lambda: 1000)
    assert why_no_network() == "network namespaces need root, and this is user 1000"
