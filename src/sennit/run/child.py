"""Work in a forked process, whose memory goes back to the system with it.

A compiler leaves much behind in the process that it ran in: caches of libraries, and freed memory between what is kept,
which allocators do not give back. A training run needs none of it. So `in_child` forks, the child does the work and
sends the answer through a pipe, and the parent has the answer alone.

It is a fork and not a new process: the model and the plan need not be picklable, and all libraries are loaded. Only the
answer is pickled. Objects that were there before the fork (`shared`) go by their number, so that the answer holds the
parent's own; so do classes that no import finds.

What a fork does not copy is threads. The child therefore computes with one thread (OpenMP's would be waited for in
vain), never collects garbage that is older than itself (destructors of process groups join their threads), leaves by
`os._exit`, and dies with its parent. Where that is not enough `Unfit` is raised: on an accelerator, which no child can
use; where autograd has threads for one; where the answer cannot be pickled. The caller then does the work itself.

An error of the work is raised here as it was there, with the traceback of the child as its cause. A child that is
killed, or that does not answer in time, is an error that says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import logging
import os
import pickle
import select
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar, cast

import torch

from sennit.errors import RunError

__all__ = ["LIMIT", "CompileIn", "Unfit", "compiled_in", "in_child", "why_not"]

T = TypeVar("T")
CompileIn = Literal["child", "here"] | None  # None: in a child where that is possible

_log = logging.getLogger(__name__)

LIMIT = 1800.0  # seconds: as long as torch's process groups wait for each other
_HEADER = struct.Struct("=Q")
_POLL = 1.0  # seconds between two looks at whether the child is there
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of linux/prctl.h


class Unfit(Exception):  # noqa: N818 - no error: the work can be done, only not in a child
    """The work must be done in this process; the text says why."""


class _ChildTraceback(Exception):  # noqa: N818 - as in concurrent.futures: shown as the cause of the error
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"in the compiling process\n{self.text}"


def why_not(device: torch.device) -> str | None:
    """Why a child cannot do work on this device; None where it can."""
    if sys.platform != "linux":
        return f"a fork of a process with threads is not safe on {sys.platform}"
    if device.type not in ("cpu", "meta"):
        return f"the model is on {device}, which a forked process cannot use"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "CUDA is initialised in this process, and does not survive a fork"
    return None


def compiled_in(where: CompileIn, device: torch.device, work: Callable[[], T], shared: Sequence[object] = ()) -> T:
    """`work`, which compiles for `device`, in a child or in this process."""
    if where == "here":
        return work()
    reason = why_not(device)
    if reason is None:
        try:
            return in_child(work, "compile the model", shared=shared)
        except Unfit as unfit:
            reason = str(unfit)
    if where == "child":
        raise RunError(f"a child cannot compile the model: {reason}", fix='leave compile_in out, or pass "here"')
    _log.info("compiling in this process: %s", reason)
    return work()


def in_child(work: Callable[[], T], what: str, *, shared: Sequence[object] = (), seconds: float = LIMIT) -> T:
    """`work()` in a forked process.

    `what` names the work in errors; `shared` are objects of this process that the answer may hold.
    """
    _flush()  # or what is buffered would be written twice
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of a fork beside threads, and so does JAX where it is loaded, which the child never calls: the
        # module's docstring says what is done about them
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        pid = os.fork()
    if pid == 0:
        _serve(work, shared, writer)
    os.close(writer)
    child = _Child(pid, reader, what, time.monotonic() + seconds, seconds)
    try:
        message = child.answer()
    finally:
        child.end()
    return cast(T, _opened(message, shared))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # as in a process without a terminal
            stream.flush()


# ---- the parent ------------------------------------------------------------------------------------------------------


class _Child:
    def __init__(self, pid: int, reader: int, what: str, end: float, seconds: float) -> None:
        self.pid, self.reader, self.what, self.deadline, self.seconds = pid, reader, what, end, seconds
        self.status: int | None = None
        self.is_gone = False

    def answer(self) -> bytes:
        """The whole message, or an error that says what became of the child."""
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size:
            ready, _, _ = select.select([self.reader], [], [], _POLL)
            if ready:
                part = os.read(self.reader, min(size, 1 << 20))
                if not part:
                    raise self._death()
                parts.append(part)
                size -= len(part)
            elif self._reaped():
                raise self._death()  # a third process may hold the other end of the pipe: its death is not seen there
            elif time.monotonic() > self.deadline:
                raise RunError(
                    f"the process that was to {self.what} did not answer within {self.seconds:g} s",
                    fix='pass compile_in="here" to do it in this process; a thread that held a lock during the fork is one cause',
                )
        return b"".join(parts)

    def _reaped(self) -> bool:
        if not self.is_gone:
            try:
                found, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # someone else waited for it
                self.is_gone = True
            else:
                self.is_gone = found == self.pid
                self.status = status if self.is_gone else None
        return self.is_gone

    def _death(self) -> RunError:
        end = time.monotonic() + _POLL
        while not self._reaped() and time.monotonic() < end:
            time.sleep(0.01)  # its end of the pipe is closed a moment before it is gone
        if self.status is None:
            how = "is gone"
        elif os.WIFSIGNALED(self.status):
            how = f"was killed by {signal.Signals(os.WTERMSIG(self.status)).name}"
        else:
            how = f"ended with status {os.waitstatus_to_exitcode(self.status)}"
        return RunError(
            f"the process that was to {self.what} {how} before it answered",
            fix='see whether the machine ran out of memory; compile_in="here" does it in this process',
        )

    def end(self) -> None:
        """Leave nothing behind: no process, no descriptor."""
        os.close(self.reader)
        if not self._reaped():
            # it has answered, or is not wanted any more; it has nothing to clean up
            os.kill(self.pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
            self.is_gone = True


def _opened(message: bytes, shared: Sequence[object]) -> object:
    kind, *answer = _Unpickler(message, shared).load()
    match kind:
        case "made":
            return answer[0]
        case "unfit":
            raise Unfit(answer[0])
        case "raised":
            parts, text = answer
            raise _revived(*parts) from _ChildTraceback(text)
        case _:
            raise AssertionError(kind)


# ---- the child -------------------------------------------------------------------------------------------------------


def _serve(work: Callable[[], object], shared: Sequence[object], writer: int) -> NoReturn:
    status = 1
    try:
        _settle()
        older = frozenset(map(id, _classes()))
        message = memoryview(_outcome(work, shared, older))
        _flush()  # what the work printed; from here on the parent may end this process
        for part in (memoryview(_HEADER.pack(len(message))), message):
            while part:
                part = part[os.write(writer, part) :]
        status = 0
    finally:
        os._exit(status)


def _settle() -> None:
    """Let go of what belongs to the parent."""
    gc.freeze()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    torch.set_num_threads(1)


def _outcome(work: Callable[[], object], shared: Sequence[object], older: frozenset[int]) -> bytes:
    try:
        _try_autograd()
        made = work()
    except Unfit as reason:
        return pickle.dumps(("unfit", str(reason)))
    except Exception as error:
        return _raised(error, traceback.format_exc(), older)
    try:
        return _packed(("made", made), shared, older)
    except Exception as error:  # pickle raises what the objects raise
        return pickle.dumps(("unfit", f"the result cannot be sent: {type(error).__name__}: {error}"))


def _try_autograd() -> None:
    x = torch.zeros((), requires_grad=True)
    try:
        torch.autograd.grad(x * 2, x)
    except RuntimeError as error:  # it had threads for a GPU before the fork
        raise Unfit(f"autograd cannot run in a forked process: {error}") from error


def _raised(error: Exception, text: str, older: frozenset[int]) -> bytes:
    """The error in its parts, which need not fit its `__init__`; one of its text where they cannot be sent or do not
    make the same.
    """
    reduced: Any = error.__reduce__()
    made_with = reduced[1] if reduced[0] is type(error) else error.args
    parts = (type(error), made_with, error.args, vars(error))
    try:
        if str(_revived(*parts)) == str(error):
            return _packed(("raised", parts, text), (), older)
    except Exception:  # whatever a user's class raises
        _log.debug("%s cannot be sent as it is", type(error).__name__, exc_info=True)
    same = RunError(f"{type(error).__name__}: {error}")
    return pickle.dumps(("raised", (RunError, same.args, same.args, vars(same)), text))


def _revived(
    cls: type[Exception], made_with: tuple[Any, ...], args: tuple[Any, ...], attributes: dict[str, Any]
) -> Exception:
    try:
        error = cls(*made_with)  # as pickle does; some keep what they were made with outside of Python's reach
    except Exception:  # it wants other arguments than it passed on
        error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(attributes)
    return error


# ---- what goes through the pipe --------------------------------------------------------------------------------------


def _packed(message: tuple[object, ...], shared: Sequence[object], older: frozenset[int]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, shared, older).dump(message)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """`older` are the addresses of the classes that were there before the fork: the parent has them at the same ones."""

    def __init__(self, stream: io.BytesIO, shared: Sequence[object], older: frozenset[int]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.older = older
        # what pickle copies as well, and equal, is not worth a number
        self.numbers = {id(value): number for number, value in enumerate(shared) if not isinstance(value, _PLAIN)}

    def persistent_id(self, value: Any) -> tuple[str, int] | None:
        number = self.numbers.get(id(value))
        if number is not None:
            return "shared", number
        if isinstance(value, type) and id(value) in self.older and not _is_importable(value):
            return "class", id(value)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: bytes, shared: Sequence[object]) -> None:
        super().__init__(io.BytesIO(message))
        self.shared = shared

    def persistent_load(self, found: Any) -> object:
        kind, number = found
        if kind == "shared":
            return self.shared[number]
        return next(cls for cls in _classes() if id(cls) == number)


_PLAIN = (int, float, str, bytes, bool, type(None))


def _is_importable(cls: type) -> bool:
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is cls


def _classes() -> set[type]:
    found: set[type] = set()
    new = [object]
    while new:
        cls = new.pop()
        if cls not in found:
            found.add(cls)
            new += type.__subclasses__(cls)
    return found
