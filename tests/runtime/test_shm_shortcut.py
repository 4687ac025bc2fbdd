"""The short way into the core: what it runs is what was learned, with the right addresses; whatever is unusual it
leaves to the long way.

The core is a function of this file here, which writes down how it was called. That the two ways give the same results
is what `test_shm_group.py` and `test_backend_collectives.py` see between real processes, where every call is made often
enough to go both.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d

from sennit.collective.runtime.private_torch import options_examples
from sennit.collective.runtime.shm_shortcut import FROM_ROOT, PLAIN, ROWS, SUMS

_shm_call = pytest.importorskip("sennit.collective.runtime._shm_call", reason="the short way was not built")

GROUP = 0x1000
KINDS = ("all_reduce", "all_gather", "broadcast")
DTYPES = (np.dtype(np.float32), np.dtype(np.int32), np.dtype(np.float64))
REDUCTIONS = ("sum", "max", None)


class Made:
    """A shortcut, and the calls that reached the core: plan's number, source, target, staged."""

    def __init__(
        self,
        status: int = 0,
        rest: Callable[..., None] | None = None,
        reads_options: bool = True,
        has_turn: bool = True,
    ) -> None:
        self.calls: list[tuple[int, int, int, int]] = []
        self.groups: list[int | None] = []
        self.lock: Any = _shm_call.Turn() if has_turn else threading.Lock()
        self.waiting = deque[int]()
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
        )

        def start(group: int | None, call: int, source: int, target: int, staged: int) -> int:
            self.groups.append(group)
            self.calls.append((call, source, target, staged))
            assert self.lock.locked()
            return status

        self.start = kind(start)
        address = ctypes.cast(self.start, ctypes.c_void_p).value
        starts = address, 0, 0  # none that is brief
        described = torch.Tensor.__dlpack_c_exchange_api__
        knows = torch.Tensor, dist.ReduceOp.SUM, described
        self.short: Any = _shm_call.Shortcut(self.lock, self.waiting, rest or self.never, GROUP, starts, knows)
        if reads_options:
            assert all(self.short.know_options(examples) for examples in options_examples())

    def never(self, *_: object) -> None:
        raise AssertionError("the core ended the call")

    def learn(self, number: int, kind: str, array: Any, out: Any, *, dtype: Any = None, reduction: Any = None) -> None:
        facts = ("plan", number, 1, array.nbytes, out.nbytes, True)
        self.short.learn_arrays(facts, kind, array, out, dtype, reduction, None)

    def call(self, kind: str, array: Any, out: Any, *, dtype: Any = None, reduction: Any = None) -> Any:
        return self.short.arrays(kind, array, out, dtype, reduction, None, "context")


drawn = st.tuples(
    st.sampled_from(KINDS),
    st.sampled_from(DTYPES),
    st.sampled_from(REDUCTIONS),
    st.integers(1, 6),
    st.integers(1, 6),
    st.sampled_from((None, 0, 1)),
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), drawn), max_size=120))
def test_a_call_runs_the_plan_that_was_learned_last_for_it(steps: list[tuple[bool, Any]]) -> None:
    made, known = Made(), dict[Any, int]()
    for number, (learns, key) in enumerate(steps, 1):
        kind, dtype, reduction, inputs, outputs, root = key
        array, out = np.zeros(inputs, dtype), np.zeros(outputs, dtype)
        if learns:
            facts = (f"plan {number}", number, number % 2, array.nbytes, out.nbytes, True)
            made.short.learn_arrays(facts, kind, array, out, None, reduction, root)
            known[key] = number
        made.calls.clear()
        ran = made.short.arrays(kind, array, out, None, reduction, root, None)
        if ran:
            assert made.calls == [(known[key], array.ctypes.data, out.ctypes.data, known[key] % 2)]
        else:
            assert ran is None
            assert not made.calls
            assert not learns, "what was just learned is known"
        assert not made.lock.locked()


def test_all_calls_of_a_program_are_kept() -> None:
    made = Made()
    arrays = [np.zeros(n, np.float32) for n in range(1, 101)]
    for number, array in enumerate(arrays, 1):
        made.learn(number, "all_reduce", array, array)
    kept = sum(made.call("all_reduce", array, array) is True for array in arrays)
    assert kept >= 90  # there are 512 places, in sets of four: which, depends on addresses


def test_unusual_arrays_go_the_long_way() -> None:
    wide = np.zeros(64, np.float32)
    made = Made()
    one, two, sealed = wide[:8], wide[16:24], np.zeros(8, np.float32)
    made.learn(1, "all_gather", one, two)
    assert made.call("all_gather", one, two) is True
    sealed.flags.writeable = False
    unusual = {
        "out is sealed": (one, sealed),
        "strides": (wide[:16:2], two),
        "strides of the output": (one, wide[:16:2]),
        "they overlap": (one, wide[4:12]),
        "no buffer": ([0.0] * 8, two),
        "none": (None, two),
        "no output": (one, None),
        "another size": (wide[:9], two),
        "another type": (one.view(np.int32), two.view(np.int32)),
        "another root": None,
    }
    for what, arrays in unusual.items():
        answer = (
            made.call("all_gather", *arrays) if arrays else made.short.arrays("all_gather", one, two, None, None, 1, 0)
        )
        assert answer is None, what
    assert made.short.arrays("all_gather", one, two, None, None, "no root", 0) is None
    assert made.short.arrays("all_gather", None, None, None, None, "no root", 0) is None
    assert made.short.arrays("all_gather", bytearray(32), bytearray(32), None, None, None, 0) is None  # no type
    assert len(made.calls) == 1
    assert made.call("all_gather", sealed, two) is True  # an input may be
    empty = np.zeros(0, np.float32)
    made.learn(2, "all_gather", empty, empty)
    assert made.call("all_gather", empty, empty) is None


def test_one_array_only_where_the_plan_allows_it() -> None:
    made, array = Made(), np.zeros(8, np.float32)
    made.short.learn_arrays(("plan", 1, 1, 32, 32, False), "all_to_all", array, array, None, None, None)
    assert made.call("all_to_all", array, array) is None
    assert made.call("all_to_all", array, np.zeros(8, np.float32)) is True


@pytest.mark.parametrize("has_turn", [True, False])
def test_while_another_call_is_under_way_it_is_left_alone(has_turn: bool) -> None:
    made, array = Made(has_turn=has_turn), np.zeros(8, np.float32)
    made.learn(1, "all_reduce", array, array)
    with made.lock:
        assert made.call("all_reduce", array, array) is None
    made.waiting.append(1)
    assert made.call("all_reduce", array, array) is None
    assert not made.lock.locked()
    made.waiting.clear()
    assert made.call("all_reduce", array, array) is True


@pytest.mark.parametrize("has_turn", [True, False])
def test_the_rest_of_a_call_that_waits_is_finished_with_the_lock_held(has_turn: bool) -> None:
    told: list[tuple[object, ...]] = []

    def rest(*said: object) -> None:
        told.append((*said, made.lock.locked()))
        if len(told) > 1:
            raise TimeoutError("rank 1 did not come")

    made, array = Made(status=1, rest=rest, has_turn=has_turn), np.zeros(8, np.float32)
    made.learn(1, "all_reduce", array, array)
    assert made.call("all_reduce", array, array) is True
    assert told == [("plan", 1, "context", True)]
    with pytest.raises(TimeoutError, match="rank 1"):
        made.call("all_reduce", array, array)
    assert not made.lock.locked()


def test_small_calls_begin_briefly_and_go_on_where_they_must_wait() -> None:
    told: list[str] = []
    started = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32
    )
    going = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    waits = [True]
    begin = started(lambda *_: told.append("start") or 0)
    briefly = started(lambda *_: told.append("briefly") or int(waits[0]))
    go_on = going(lambda *_: told.append("run") or 0)
    starts = tuple(ctypes.cast(entry, ctypes.c_void_p).value for entry in (begin, briefly, go_on))
    knows = torch.Tensor, dist.ReduceOp.SUM, torch.Tensor.__dlpack_c_exchange_api__
    rest = pytest.fail
    short = _shm_call.Shortcut(_shm_call.Turn(), deque(), rest, GROUP, starts, knows)
    small, large = np.zeros(8, np.float32), np.zeros(1 << 14, np.float32)
    for array in (small, large):
        short.learn_arrays(("plan", 1, 1, array.nbytes, array.nbytes, True), "sum", array, array, None, None, None)
    assert short.arrays("sum", small, small, None, None, None, None) is True
    assert told == ["briefly", "run"]
    waits[0] = False
    assert short.arrays("sum", small, small, None, None, None, None) is True
    assert told[2:] == ["briefly"]
    assert short.arrays("sum", large, large, None, None, None, None) is True
    assert told[3:] == ["start"]


def test_closed_and_forgotten() -> None:
    made, array = Made(), np.zeros(8, np.float32)
    made.learn(1, "all_reduce", array, array)
    made.short.forget()
    assert made.call("all_reduce", array, array) is None
    made.learn(1, "all_reduce", array, array)
    assert made.call("all_reduce", array, array) is True
    assert made.groups == [GROUP]
    made.short.close()
    made.learn(1, "all_reduce", array, array)  # by a call that was under way
    made.call("all_reduce", array, array)
    assert made.groups == [GROUP, None]  # the core says that the group is of no use


def test_plans_are_held_as_long_as_they_are_known() -> None:
    made, array, plan = Made(), np.zeros(8, np.float32), object()
    before = sys.getrefcount(plan)
    for _ in range(3):
        made.short.learn_arrays((plan, 1, 1, 32, 32, True), "all_reduce", array, array, None, None, None)
        assert made.call("all_reduce", array, array) is True
    assert sys.getrefcount(plan) == before + 1
    made.short.forget()
    assert sys.getrefcount(plan) == before
    made.short.learn_arrays((plan, 1, 1, 32, 32, True), "all_reduce", array, array, None, None, None)
    del made
    gc.collect()
    assert sys.getrefcount(plan) == before


# ---- through c10d ----------------------------------------------------------------------------------------------------


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    made.asyncOp = False
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def learn(made: Made, number: int, kind: str, what: int, output: torch.Tensor, input: torch.Tensor, root: int) -> None:
    sizes = input.numel() * input.element_size(), output.numel() * output.element_size()
    made.short.learn_tensors(("plan", number, 1, *sizes, True), kind, what, output, input, root)


def method(made: Made, kind: str, what: int) -> Callable[..., bool | None]:
    """As c10d calls it: True of a call that was made in C, None of one that went the long way."""

    def long_way(*given: object, **named: object) -> None:
        return None

    found: Callable[..., bool | None] = made.short.method(kind, what, long_way, True)
    return found


both_ways = pytest.mark.parametrize("reads_options", [True, False], ids=["read", "asked"])


@both_ways
def test_an_all_reduce_of_a_tensor(reads_options: bool) -> None:
    made, x = Made(reads_options=reads_options), torch.zeros(4, 6)
    learn(made, 1, "all_reduce", SUMS, x, x, -1)
    opts = options(c10d.AllreduceOptions)
    all_reduce = method(made, "all_reduce", SUMS)

    def call(tensors: Any, opts: Any = opts) -> Any:
        return all_reduce(tensors, opts)

    assert call([x]) is True
    assert made.calls == [(1, x.data_ptr(), x.data_ptr(), 1)]
    same = torch.zeros(30)[6:]
    assert call([same]) is True
    assert made.calls[-1][1] == same.data_ptr()
    assert call([torch.zeros(24, requires_grad=True)]) is True
    assert call([torch.zeros(1, 24, 1).transpose(0, 2)]) is True  # dims of one have no say
    unusual = {
        "two tensors": [x, x],
        "a tuple": (x,),
        "strides": [torch.zeros(6, 4).t()],
        "gaps": [torch.zeros(48)[::2]],
        "expanded": [torch.zeros(1).expand(24)],
        "another type": [torch.zeros(24, dtype=torch.int32)],
        "half of the size": [torch.zeros(24, dtype=torch.bfloat16)],
        "a parameter": [torch.nn.Parameter(torch.zeros(24))],
        "sparse": [torch.zeros(4, 6).to_sparse()],
        "meta": [torch.zeros(24, device="meta")],
        "no tensor": [np.zeros(24, np.float32)],
        "empty": [torch.zeros(0)],
    }
    for what, tensors in unusual.items():
        assert call(tensors) is None, what
    for name, value in (("asyncOp", True), ("reduceOp", dist.ReduceOp.MAX), ("reduceOp", dist.ReduceOp.AVG)):
        assert call([x], options(c10d.AllreduceOptions, **{name: value})) is None, (name, value)
    assert call([x], None) is None
    assert call([x], object()) is None
    assert len(made.calls) == 4


@both_ways
def test_collectives_of_two_tensors(reads_options: bool) -> None:
    made, part, whole = Made(reads_options=reads_options), torch.zeros(6), torch.zeros(2, 6)
    learn(made, 1, "all_gather", PLAIN, whole, part, -1)
    learn(made, 2, "reduce_scatter", SUMS, part, whole, -1)
    learn(made, 3, "all_to_all", ROWS, whole, torch.zeros(2, 6), -1)
    learn(made, 4, "broadcast", FROM_ROOT, part, part, 1)
    gather, scatter = options(c10d.AllgatherOptions), options(c10d.ReduceScatterOptions)
    exchange = options(c10d.AllToAllOptions)
    all_gather, all_to_all = method(made, "all_gather", PLAIN), method(made, "all_to_all", ROWS)
    reduce_scatter, broadcast = method(made, "reduce_scatter", SUMS), method(made, "broadcast", FROM_ROOT)
    assert all_gather(whole, part, gather) is True
    assert made.calls[-1] == (1, part.data_ptr(), whole.data_ptr(), 1)
    assert reduce_scatter(part, whole, scatter) is True
    assert made.calls[-1] == (2, whole.data_ptr(), part.data_ptr(), 1)
    other = torch.zeros(2, 6)
    assert all_to_all(other, whole, [], [], exchange) is True
    assert made.calls[-1] == (3, whole.data_ptr(), other.data_ptr(), 1)
    assert broadcast([part], options(c10d.BroadcastOptions, rootRank=1)) is True
    assert made.calls[-1] == (4, part.data_ptr(), part.data_ptr(), 1)
    count = len(made.calls)
    assert all_gather(whole, part.double(), gather) is None
    assert all_gather(whole.flatten()[3:9], part, gather) is None
    assert all_gather(whole, whole.flatten()[3:9], gather) is None  # they overlap
    flat = torch.zeros(12)
    assert all_to_all(flat, torch.zeros(12), [], [], exchange) is None  # other rows
    assert all_to_all(other, flat, [], [], exchange) is None
    assert all_to_all(other, whole, [1, 1], [], exchange) is None
    assert all_to_all(other, whole, [], (), exchange) is None
    assert all_to_all(other, whole, exchange) is None
    assert broadcast([part], options(c10d.BroadcastOptions, rootRank=0)) is None
    assert len(made.calls) == count


reductions = st.sampled_from([getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "MAX", "BXOR")]) | st.floats(
    0.5, 2.0
).map(dist._make_nccl_premul_sum)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.booleans(), reductions, st.integers(0, 2))
def test_options_that_are_read_say_what_they_say_when_asked(waits: bool, reduction: Any, root: int) -> None:
    x, y = torch.zeros(6), torch.zeros(6)
    cases = (
        ("all_reduce", SUMS, options(c10d.AllreduceOptions, asyncOp=not waits, reduceOp=reduction)),
        ("reduce_scatter", SUMS, options(c10d.ReduceScatterOptions, asyncOp=not waits, reduceOp=reduction)),
        ("all_gather", PLAIN, options(c10d.AllgatherOptions, asyncOp=not waits)),
        ("broadcast", FROM_ROOT, options(c10d.BroadcastOptions, asyncOp=not waits, rootRank=root)),
    )
    for kind, what, opts in cases:
        answers = []
        for reads_options in (True, False):
            made = Made(reads_options=reads_options)
            learn(made, 1, kind, what, x, y, 1)
            answers.append(method(made, kind, what)(x, y, opts))
        sums = what != SUMS or reduction == dist.ReduceOp.SUM
        known = what != FROM_ROOT or root == 1
        assert answers == [True if waits and sums and known else None] * 2, kind


def test_options_whose_fields_are_not_where_the_examples_have_them_are_not_known() -> None:
    short = Made(reads_options=False).short
    examples = next(options_examples())
    assert short.know_options(examples[:1]) is False  # one example fits many places
    assert short.know_options(tuple((opts, 1 - waits, op, root) for opts, waits, op, root in examples)) is False
    assert short.know_options(tuple((opts, waits, op, 1) for opts, waits, op, _ in examples)) is False
    with pytest.raises(TypeError):
        short.know_options(list(examples))
    assert short.know_options(examples) is True


def test_a_method_passes_on_what_it_does_not_make() -> None:
    told: list[tuple[object, ...]] = []

    def long_way(*given: object, **named: object) -> str:
        told.append((given, named))
        if given == ("wrong",):
            raise ValueError("no tensor")
        return "a work"

    made, x = Made(), torch.zeros(6)
    opts = options(c10d.AllreduceOptions)
    learn(made, 1, "all_reduce", SUMS, x, x, -1)
    call = made.short.method("all_reduce", SUMS, long_way, None)
    assert call([x], opts) is None
    assert not told
    assert call([x]) == call([x], opts=opts) == call(tensors=[x], opts=opts) == call([x], opts, a=1) == "a work"
    assert told == [
        (([x],), {}),
        (([x],), {"opts": opts}),
        ((), {"tensors": [x], "opts": opts}),
        (([x], opts), {"a": 1}),
    ]
    with pytest.raises(ValueError, match="no tensor"):
        call("wrong")
    assert len(made.calls) == 1
    made.waiting.append(1)  # another call comes first
    assert call([x], opts) == "a work"


def test_what_the_rest_of_a_call_raises_comes_out_of_a_method() -> None:
    def rest(*_: object) -> None:
        raise TimeoutError("rank 1 did not come")

    made, x = Made(status=1, rest=rest), torch.zeros(6)
    learn(made, 1, "all_reduce", SUMS, x, x, -1)
    with pytest.raises(TimeoutError, match="rank 1"):
        made.short.method("all_reduce", SUMS, made.never, None)([x], options(c10d.AllreduceOptions))
    assert not made.lock.locked()


def test_methods_in_a_circle_are_collected() -> None:
    class Group:
        call: Any

        def all_reduce(self, *_: object) -> None:
            pass

    made, group = Made(), Group()
    group.call = made.short.method("all_reduce", SUMS, group.all_reduce, None)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None


def test_methods_give_way_to_a_word() -> None:
    made, x = Made(), torch.zeros(8)
    words: dict[str, object] = {}
    learn(made, 1, "all_reduce", SUMS, x, x, -1)
    call = made.short.method("all_reduce", SUMS, lambda *_: "the long way", "the short way")
    made.short.give_way(words, "traced")
    given = [x], options(c10d.AllreduceOptions)
    for value, way in ((None, "short"), (True, "long"), (False, "short"), (1, "short")):
        words["traced"] = value
        assert call(*given) == f"the {way} way"
    words.clear()
    assert call(*given) == "the short way"
    with pytest.raises(TypeError, match="a dict and a word"):
        made.short.give_way([], "traced")  # type: ignore[arg-type]


def test_wrong_counts_of_arguments_are_said() -> None:
    short = Made().short
    for call in (short.arrays, short.now, short.method, short.learn_arrays, short.learn_tensors):
        with pytest.raises(TypeError, match="arguments"):
            call()


def test_a_thousand_calls_keep_no_reference() -> None:
    made, array, out, tensor = Made(), np.zeros(8, np.float32), np.zeros(8, np.float32), torch.zeros(8)
    kind, reduction, context = "".join(["all", "_reduce"]), object(), object()
    opts, tensors = options(c10d.AllreduceOptions), [tensor]
    plan = object()
    facts = (plan, 1, 1, 32, 32, True)
    watched = [kind, reduction, context, opts, tensors, tensor, array, out, array.dtype, plan, facts, made.lock]
    if sys.version_info < (3, 12):
        watched.append(None)  # later ones do not count its references, but code for 3.11's interface does (PEP 683)
    all_reduce = method(made, kind, SUMS)

    def calls() -> None:
        for _ in range(1000):
            made.short.learn_arrays(facts, kind, array, out, None, reduction, None)
            made.short.arrays(kind, array, out, None, reduction, None, context)
            made.short.arrays(kind, array[::2], out, None, reduction, None, context)
            made.short.learn_tensors(facts, kind, SUMS, tensor, tensor, -1)
            all_reduce(tensors, opts)
            all_reduce([tensor[::2]], opts)
            all_reduce(tensors, opts=opts)
            made.short.now(kind, SUMS, tensor, tensor, -1)
        made.calls.clear()
        made.groups.clear()

    calls()
    before = [sys.getrefcount(each) for each in watched]
    calls()
    after = [sys.getrefcount(each) for each in watched]
    assert max(abs(a - b) for a, b in zip(after, before, strict=True)) < 100
