"""Work in a forked process: its answer, its errors, its death, and that nothing is left of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sennit.errors import PlanError, RunError
from sennit.run.child import Unfit, compiled_in, in_child, why_not

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a child compiles on Linux alone")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No descriptor and no process more than before."""
    before = descriptors()
    yield
    assert descriptors() == before
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    assert not [pid for pid in children if "pytest" in Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_an_answer_of_tensors_and_tuples() -> None:
    large = torch.arange(3_000_000)  # more than a pipe holds
    found, tensor = in_child(lambda: ((1, "two", None), large * 2), "double")
    assert found == (1, "two", None)
    assert torch.equal(tensor, large * 2)


def test_what_the_child_changes_is_not_changed_here() -> None:
    seen: list[int] = []
    assert in_child(lambda: seen.append(os.getpid()) or len(seen), "append") == 1
    assert not seen


def test_autograd_and_kernels_run_in_the_child() -> None:
    """After this process has used its threads: the child has none of them."""
    a = torch.randn(300, 300, requires_grad=True)

    def gradient() -> Tensor:
        (found,) = torch.autograd.grad((a @ a).relu().sum(), a)
        return found

    here = gradient()
    assert torch.allclose(in_child(gradient, "differentiate"), here, rtol=1e-4, atol=1e-4)


def test_objects_of_this_process_come_back_as_themselves() -> None:
    class Local:
        pass

    @dataclass
    class Structure:
        part: Local

    mine = Local()
    found = in_child(lambda: (Structure(mine), Structure), "wrap", shared=[mine])
    assert type(found[0]) is Structure is found[1]
    assert found[0].part is mine


def test_an_error_is_the_same_error() -> None:
    def fail() -> None:
        raise PlanError("7 is not even", where="here", fix="use 8")

    with pytest.raises(PlanError) as caught:
        in_child(fail, "fail")
    assert (caught.value.what, caught.value.where, caught.value.fix) == ("7 is not even", "here", "use 8")
    assert 'raise PlanError("7 is not even"' in str(caught.value.__cause__)
    with pytest.raises(ZeroDivisionError, match="by zero"):
        in_child(lambda: 1 // 0, "divide")
    with pytest.raises(AssertionError, match="our own"):
        compiled_in(None, CPU, lambda: (_ for _ in ()).throw(AssertionError("our own")))


def test_an_error_that_pickle_does_not_take() -> None:
    """It is the same where its parts can be sent, though its class is local and its `__init__` wants others."""

    class OddError(Exception):
        def __init__(self, one: int, two: object) -> None:
            super().__init__(f"{one} and 2")
            self.two = two

    def fail(two: object) -> None:
        raise OddError(1, two)

    with pytest.raises(OddError, match="1 and 2") as caught:
        in_child(lambda: fail(2), "fail")
    assert caught.value.two == 2
    with pytest.raises(RunError, match="OddError: 1 and 2"):
        in_child(lambda: fail(lambda: 2), "fail")
    with pytest.raises(UnicodeDecodeError, match="can't decode byte 0xff"):
        in_child(lambda: b"\xff".decode(), "decode")
    with pytest.raises(FileNotFoundError, match="/no such"):
        in_child(lambda: Path("/no such").read_bytes(), "read")


def test_a_killed_child_is_one_clear_error() -> None:
    with pytest.raises(RunError, match=r"to compile was killed by SIGKILL before it answered"):
        in_child(lambda: os.kill(os.getpid(), signal.SIGKILL), "compile")
    with pytest.raises(RunError, match=r"to compile ended with status 3 before it answered"):
        in_child(lambda: os._exit(3), "compile")


def test_a_child_that_does_not_answer() -> None:
    start = time.monotonic()
    with pytest.raises(RunError, match=r"to sleep did not answer within 0\.2 s"):
        in_child(lambda: time.sleep(600), "sleep", seconds=0.2)
    assert time.monotonic() - start < 300  # that it did not wait for the work, not how fast it was


def test_an_interrupted_parent_ends_the_child() -> None:
    def interrupt() -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    # a shell that starts this in the background has interrupts ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_child(interrupt, "interrupt")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_child_dies_with_its_parent() -> None:
    """A rank that is killed while it compiles leaves no compiler behind."""

    def parent() -> int:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            in_child(lambda: (os.write(writer, str(os.getpid()).encode()), time.sleep(600)), "sleep")
        grandchild = int(os.read(reader, 20))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return grandchild

    grandchild = in_child(parent, "start")
    end = time.monotonic() + 60
    while is_running(grandchild) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_running(grandchild)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_what_cannot_be_sent_is_done_here() -> None:
    with pytest.raises(Unfit, match="the result cannot be sent"):
        in_child(lambda: lambda: 1, "make")
    assert compiled_in(None, CPU, lambda: (os.getpid(), lambda: 1))[0] == os.getpid()
    with pytest.raises(RunError, match="a child cannot compile the model: the result cannot be sent"):
        compiled_in("child", CPU, lambda: lambda: 1)


def test_where_work_is_done() -> None:
    assert compiled_in("here", CPU, os.getpid) == os.getpid()
    assert compiled_in("child", CPU, os.getpid) != os.getpid()
    assert compiled_in(None, CPU, os.getpid) != os.getpid()
    gpu = torch.device("cuda", 0)
    assert why_not(gpu) == "the model is on cuda:0, which a forked process cannot use"
    assert compiled_in(None, gpu, os.getpid) == os.getpid()
    with pytest.raises(RunError, match="a child cannot compile the model: the model is on cuda:0"):
        compiled_in("child", gpu, os.getpid)


def test_what_is_printed_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    sys.stdout.write("before ")
    in_child(lambda: sys.stdout.write("inside"), "print")
    assert capfd.readouterr().out == "before inside"
