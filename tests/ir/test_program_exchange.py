"""Exchanges and `sennit.take`: hand-written programs against whole arrays, refusals in the user's words, and the table
of transfers against the meaning, on random layouts with a time axis.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.errors import ProgramError
from sennit.ir.dtype import DType
from sennit.ir.layout import Layout, Split
from sennit.ir.mesh import Axis, AxisKind, Mesh
from sennit.ir.program import Buffer, Exchange, Program, defines, reads, stream_of
from sennit.ir.program_check import check_program, describe_step
from sennit.ir.program_exchange import exchange_meetings, exchange_transfers
from sennit.ir.program_numpy import run_program
from sennit.ir.program_regions import first_device_lacking


def run(text: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    program = Program.parse(text)
    assert Program.parse(str(program)) == program
    check_program(program)
    return run_program(program, inputs)


def refusal(text: str) -> str:
    with pytest.raises(ProgramError) as caught:
        check_program(Program.parse(text))
    return str(caught.value)


def between(source: str, source_mesh: str, result: str, result_mesh: str, shape: tuple[int, ...]) -> None:
    """One exchange between two meshes, over as many lanes as the meshes make."""
    given, taken = Mesh.parse(source_mesh), Mesh.parse(result_mesh)
    only_give, only_take = (
        sorted(set(given.devices) - set(taken.devices)),
        sorted(set(taken.devices) - set(given.devices)),
    )
    both = sorted(set(given.devices) & set(taken.devices))
    parts = [(n, d) for n, d in (("givers", only_give), ("both", both), ("takers", only_take)) if d]
    among = ", ".join(name for name, _ in parts)
    text = f'program "exchange" {{ mesh a = {source_mesh}\n mesh b = {result_mesh}\n'
    for name, devices in parts:
        text += f"lane {name} on {','.join(map(str, devices))} {{\n"
        if name != "takers":
            text += f'input %x : f64{source} of %x on a "x"\n'
        taking = f"%y : f64{result} of %x on b = " if name != "givers" else ""
        text += f'exchange "x" {taking}{"nothing" if name == "takers" else "%x"} among {among}\n'
        text += 'result "y" %y }\n' if name != "givers" else "}\n"
    x = np.random.default_rng(0).standard_normal(shape)
    assert np.array_equal(run(text + "}", x=x)["y"], x)


@pytest.mark.parametrize(
    ("source", "source_mesh", "result", "result_mesh", "shape"),
    [
        ("[8{dp},6]", "dp=2@0-1", "[8{dp},6]", "dp=2@2-3", (8, 6)),  # the plain case of send and receive
        ("[8{dp},6]", "dp=4@0-3", "[8{dp},6{tp}]", "dp=2,tp=2@4-7", (8, 6)),  # other axes
        ("[8{dp},6]", "dp=4@0-3", "[8,6{tp}]", "tp=2@4-5", (8, 6)),  # fewer devices
        ("[8,6]", "dp=2@0-1", "[8{dp},6]", "dp=4@2-5", (8, 6)),  # from replicas, to more devices
        ("[8{dp},6]", "dp=2@0-1", "[8{all},6]", "all=4@0-3", (8, 6)),  # the takers contain the givers
        ("[8{all:1},6]", "all=4@0-3", "[8{dp},6]", "dp=2@1-2", (8, 6)),  # the givers contain the takers
        ("[8{dp},6]", "dp=3@0-2", "[8{dp},6]", "dp=3@1-3", (8, 6)),  # overlapping, uneven
        ("[8{dp},6]", "dp=4@0-3", "[8{dp},6]", "dp=4@3,1,0,2", (8, 6)),  # the same devices reordered
        ("[7{dp},5{tp}]", "dp=2,tp=2@0-3", "[7{x},5]", "x=4@2,3,4,5", (7, 5)),  # uneven on both sides
        ("[3{dp}]", "dp=4@0-3", "[3{dp}]", "dp=2@4-5", (3,)),  # an empty piece
        ("[]", "dp=2@0-1", "[]", "dp=3@1-3", ()),  # a number
    ],
)
def test_an_exchange_keeps_the_array(
    source: str, source_mesh: str, result: str, result_mesh: str, shape: tuple[int, ...]
) -> None:
    between(source, source_mesh, result, result_mesh, shape)


INTERLACED = """
program "interlaced" {
  mesh all = pp=2,dp=2;mb=2
  mesh s0 = dp=2;mb=2@0-1
  mesh s1 = dp=2;mb=2@2-3
  lane first on 0-1 {
    param %e : f64[6{pp},4] of %e on all "e"
    param %a : f64[4,4] of %a on s0 "a"
    input %x : f64[8,6{pp}] of %x on all "x"
FIRST
    result "y" %y
    result "h" %hall
  }
  lane second on 2-3 {
    param %e : f64[6{pp},4] of %e on all "e"
    param %b : f64[4,4] of %b on s1 "b"
    input %x : f64[8,6{pp}] of %x on all "x"
SECOND
    result "y" %y
    result "h" %hall
  }
}
"""


def interlaced() -> str:
    """An embedding split over all devices, a layer on each half, and the result back on all devices split by columns."""
    first, second = "", ""
    for mb in (0, 1):
        rows = f"at mb={mb}"
        head = f"""
    forward %x{mb} : f64[8{{mb,dp}},6{{pp}}] of %x on all {rows} = sennit.slice(%x)
    forward %p{mb} : f64[8{{mb,dp}},4]{{sum:pp}} of %h on all {rows} = aten.mm.default(%x{mb}, %e)
    all_reduce %h{mb} : f64[8{{mb,dp}},4] of %h on all {rows} = %p{mb} over pp"""
        tail = f"%y{mb} : f64[8{{mb,dp}},4{{pp}}] of %y on all {rows}"
        first += f"""{head}
    forward %t{mb} : f64[8{{mb,dp}},4] of %h on s0 {rows} = sennit.take(%h{mb})
    forward %u{mb} : f64[8{{mb,dp}},4] of %u on s0 {rows} = aten.mm.default(%t{mb}, %a)
    exchange "u at mb={mb}" %u{mb} among first, second
    exchange "y at mb={mb}" {tail} = nothing among first, second"""
        second += f"""{head}
    exchange "u at mb={mb}" %u{mb} : f64[8{{mb,dp}},4] of %u on s1 {rows} = nothing among first, second
    forward %v{mb} : f64[8{{mb,dp}},4] of %y on s1 {rows} = aten.mm.default(%u{mb}, %b)
    exchange "y at mb={mb}" {tail} = %v{mb} among first, second"""
    both = """
    forward %y : f64[8{dp:2},4{pp}] of %y on all = sennit.concat(%y0, %y1)
    forward %hall : f64[8{dp:2},4] of %h on all = sennit.concat(%h0, %h1)"""
    return INTERLACED.replace("FIRST", first + both).replace("SECOND", second + both)


def test_an_interlaced_pipeline_with_micro_batches() -> None:
    draw = np.random.default_rng(1).standard_normal
    e, a, b, x = draw((6, 4)), draw((4, 4)), draw((4, 4)), draw((8, 6))
    result = run(interlaced(), e=e, a=a, b=b, x=x)
    np.testing.assert_allclose(result["h"], x @ e, rtol=1e-13)
    np.testing.assert_allclose(result["y"], x @ e @ a @ b, rtol=1e-13)


def test_the_parts_of_an_exchange_step() -> None:
    program = Program.parse(interlaced())
    steps = {(lane.name, s.label): s for lane in program.lanes for s in lane.steps if isinstance(s, Exchange)}
    give, take, both = steps["first", "u at mb=0"], steps["second", "u at mb=0"], steps["second", "y at mb=0"]
    assert (reads(give), defines(give), stream_of(give)) == (("u0",), (), "give among first,second")
    assert (reads(take), [b.name for b in defines(take)], stream_of(take)) == ((), ["u0"], "take among first,second")
    assert stream_of(both) == "give and take among first,second"
    assert describe_step(both) == "exchange 'y at mb=0' (gives %v0 and takes %y0 at mb=0)"
    meeting = exchange_meetings(program)["y at mb=1"]
    assert (meeting.givers, meeting.takers) == (("second",), ("first", "second"))


PLAIN = """
program "plain" {
  mesh m0 = dp=2@0-1
  mesh m1 = dp=2@2-3
  mesh m2 = dp=4
  lane first on 0-1 {
    input %x : f64[8{dp},6] of %x on m0 "x"
    input %w : f64[8{dp},6] of %w on m0 "w"
    exchange "x" %x among first, second
    exchange "w" %w among first, second
  }
  lane second on 2-3 {
    exchange "x" %y : f64[8{dp},6] of %x on m1 = nothing among first, second
    exchange "w" %v : f64[8{dp},6] of %w on m1 = nothing among first, second
    result "y" %y
    result "v" %v
  }
}
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'exchange "x" %x among',
            'exchange "z" %x among',
            ("'z' waits for lane 'second' (devices 2-3)", "never comes"),
        ),
        ('exchange "w" %w among', 'exchange "x" %w among', ("'x' is twice in lane 'first'", "a label of its own")),
        ("%x among first, second", "nothing among first, second", ("neither gives nor takes", "'first'")),
        ("%x among first, second", "%x among first, third", ("lane 'third', which does not exist", "first, second")),
        ("%x among first, second", "%x among second", ("names the lanes second", "lane 'first' among them")),
        ("of %x on m1", "of %w on m1", ("takes", "tensor %w", "gives", "tensor %x", "take the tensor that is given")),
        ("%y : f64[8{dp},6] of %x on m1", "%y : f32[8{dp},6] of %x on m1", ("f32[8{dp},6]", "f64[8{dp},6]")),
        ("%y : f64[8{dp},6] of %x on m1", "%y : f64[8{dp},6] of %x on m2", ("devices 0-1 of it take nothing",)),
        ('%x : f64[8{dp},6] of %x on m0 "x"', '%x : f64[8,6]{sum:dp} of %x on m0 "x"', ("have to reduce", "over dp")),
        ('%x : f64[8{dp},6] of %x on m0 "x"', '%x : f64[8{dp},6] of %x on m2 "x"', ("devices 2-3 of it give nothing",)),
    ],
)
def test_a_wrong_exchange_is_refused(old: str, new: str, words: tuple[str, ...]) -> None:
    assert PLAIN.count(old) == 1
    check_program(Program.parse(PLAIN))
    message = refusal(PLAIN.replace(old, new))
    assert [word for word in words if word not in message] == [], message


def test_exchanges_from_one_lane_to_another_come_in_one_order() -> None:
    second = PLAIN[PLAIN.index("lane second") :]
    lines = second.splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    message = refusal(PLAIN.replace(second, "\n".join(lines)))
    assert "gives in exchange 'x' before 'w'" in message
    assert "takes in 'w' (step 0) before 'x' (step 1)" in message
    assert "in the same order in both lanes" in message


def test_lanes_that_name_different_partners() -> None:
    third = (
        '  lane third on 4-5 { input %x : f64[8{dp},6] of %x on m3 "x"\n exchange "x" %x among first, second, third }\n'
    )
    text = PLAIN.replace("  mesh m2", "  mesh m3 = dp=2@4-5\n  mesh m2").rstrip()[:-1] + third + "}"
    assert "is among first, second, third here, and among first, second in lane 'first'" in refusal(text)


def test_what_is_given_in_both_directions_before_it_is_taken_does_not_deadlock() -> None:
    """The forward runs ahead: exchanges in opposite directions need no common order, and no rendezvous."""
    text = """
    program "ahead" { mesh a = @0
      mesh b = @1
      lane one on 0 {
        input %h0 : f64[2] of %h0 on a "h0"
        input %h1 : f64[2] of %h1 on a "h1"
        exchange "h0" %h0 among one, two
        exchange "h1" %h1 among one, two
        exchange "g0" %g0 : f64[2] of %g0 on a = nothing among one, two
        result "g0" %g0 }
      lane two on 1 {
        exchange "h0" %h0 : f64[2] of %h0 on b = nothing among one, two
        backward %g0 : f64[2] of %g0 on b = aten.mul.Scalar(%h0, 2)
        exchange "g0" %g0 among one, two
        exchange "h1" %h1 : f64[2] of %h1 on b = nothing among one, two
        result "h1" %h1 } }"""
    h = np.arange(2.0)
    assert np.array_equal(run(text, h0=h, h1=h)["g0"], 2 * h)


def test_a_ring_of_exchanges_that_wait_for_each_other_is_a_deadlock() -> None:
    text = 'program "ring" { mesh m0 = @0\n mesh m1 = @1\n mesh m2 = @2\n'
    for lane in range(3):
        after, before = (lane + 1) % 3, (lane - 1) % 3
        pair = f"among l{min(lane, before)}, l{max(lane, before)}"
        text += (
            f'lane l{lane} on {lane} {{ exchange "t{before}" %x : f64[2] of %t{before} on m{lane} = nothing {pair}\n'
        )
        text += f"forward %y : f64[2] of %t{lane} on m{lane} = aten.mul.Scalar(%x, 2)\n"
        text += f'exchange "t{lane}" %y among l{min(lane, after)}, l{max(lane, after)} }}\n'
    message = refusal(text + "}")
    assert "deadlock: 3 communications wait for each other" in message
    assert "exchange 't0' (gives %y), comes after step 1" in message


# ---- take ------------------------------------------------------------------------------------------------------------

TAKE = """
program "take" {
  mesh all = pp=2,dp=2
  mesh s0 = dp=2@0-1
  mesh s1 = dp=2@2-3
  lane first on 0-1 {
    input %x : f64[8{dp},6] of %x on all "x"
    forward %y : f64[8{dp},6] of %x on s0 = sennit.take(%x)
    result "y" %y
  }
  lane second on 2-3 {
    input %x : f64[8{dp},6] of %x on all "x"
    input %p : f64[8,6]{sum:dp} of %p on all "p"
    forward %q : f64[8,6]{sum:dp} of %p on s1 = sennit.take(%p)
    all_reduce %r : f64[8,6] of %p on s1 = %q over dp
    forward %z : f64[8{dp},6] of %p on s1 = sennit.take(%r)
    result "r" %r
    result "z" %z
  }
}
"""


def test_take_keeps_the_array_on_another_mesh() -> None:
    draw = np.random.default_rng(2).standard_normal
    x, p = draw((8, 6)), draw((8, 6))
    result = run(TAKE, x=x, p=p)
    assert np.array_equal(result["y"], x)
    assert np.array_equal(result["r"], p)
    assert np.array_equal(result["z"], p)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("mesh s0 = dp=2@0-1", "mesh s0 = dp=2@1,0", ("device 0 has the indices (0:4,0:6)", "(4:8,0:6)", "exchange")),
        ("f64[8{dp},6] of %x on s0", "f64[8,6] of %x on s0", ("device 0 has the indices (0:4,0:6)", "(0:8,0:6)")),
        ("f64[8{dp},6] of %x on s0", "f32[8{dp},6] of %x on s0", ("element type from f64 to f32",)),
        ("f64[8{dp},6] of %x on s0", "f64[8{dp},6] of %p on s0", ("the tensor from %x to %p",)),
        ("f64[8,6]{sum:dp} of %p on s1", "f64[8,6] of %p on s1", ("from sum over dp=2 to nothing",)),
        ("mesh s1 = dp=2@2-3", "mesh s1 = dp=2@3,2", ("device 2 along dp", "pending", "reduce it over dp first")),
    ],
)
def test_a_wrong_take_is_refused(old: str, new: str, words: tuple[str, ...]) -> None:
    assert TAKE.count(old) == 1
    message = refusal(TAKE.replace(old, new))
    assert [word for word in words if word not in message] == [], message


# ---- random buffers --------------------------------------------------------------------------------------------------


@st.composite
def buffers(draw: st.DrawFn, shape: tuple[int, ...], micro: int, time_dim: int | None, at: int) -> Buffer:
    """A tensor on any few devices of 0 to 5, in blocks, at one micro-batch of `micro` where `time_dim` is split by it."""
    sizes = draw(st.sampled_from([(2,), (3,), (2, 2), (4,), (1,), (5,), (3, 2), (2, 3)]))
    count = int(np.prod(sizes))
    devices = tuple(draw(st.permutations(range(6)))[:count])
    axes = tuple(Axis(name, size) for name, size in zip("ab", sizes, strict=False))
    mesh = Mesh((*axes, Axis("mb", micro, AxisKind.TIME)), devices)
    dims: dict[int, list[str]] = {}
    if time_dim is not None:
        dims[time_dim] = ["mb"]
    for axis in axes:
        if shape and draw(st.integers(0, 3)):
            dims.setdefault(draw(st.integers(0, len(shape) - 1)), []).append(axis.name)
    layout = Layout.block(mesh, shape, {d: a for d, a in dims.items() if d != time_dim})
    if time_dim is not None:
        # the outer digit of the dim is time, as for micro-batches; the rest lies inside
        inner = -(-shape[time_dim] // micro)
        layout = layout.with_entry("mb", Split(time_dim, max(inner, 1)))
        for axis in dims[time_dim][1:2]:
            inner = max(1, -(-inner // mesh.size(axis)))
            if layout.split("mb") == Split(time_dim, inner * mesh.size(axis)):
                layout = layout.with_entry(axis, Split(time_dim, inner))
    return Buffer("x", "t", DType.F64, layout, (("mb", (at,)),) if time_dim is not None else ())


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Buffer, Buffer]:
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=3)))
    micro = draw(st.integers(1, 3))
    time_dim = draw(st.integers(0, len(shape) - 1)) if shape and draw(st.booleans()) else None
    at = draw(st.integers(0, micro - 1))
    return draw(buffers(shape, micro, time_dim, at)), draw(buffers(shape, micro, time_dim, at))


@settings(derandomize=True, deadline=None, max_examples=150)
@given(pairs())
def test_the_transfers_tile_every_region_and_come_from_holders(pair: tuple[Buffer, Buffer]) -> None:
    source, result = pair
    table = exchange_transfers(source, result)
    assert len({(t.sender, t.receiver) for t in table}) == len(table)  # one message for each pair of devices
    for device in result.layout.mesh.devices:
        needed = result.layout.region(result.point(device))
        count = np.zeros(result.layout.shape, dtype=np.int64)
        for transfer in (t for t in table if t.receiver == device):
            assert transfer.region.size > 0
            assert source.layout.region(source.point(transfer.sender)).contains(transfer.region)
            count[np.ix_(*transfer.region.indices())] += 1
        wanted = np.zeros_like(count)
        wanted[np.ix_(*needed.indices())] = 1
        assert np.array_equal(count, wanted)
        if device in source.layout.mesh.devices:  # what a device has it does not ask for
            own = source.layout.region(source.point(device)).intersect(needed).size
            assert own == sum(t.region.size for t in table if t.receiver == t.sender == device)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(pairs())
def test_which_device_lacks_an_index(pair: tuple[Buffer, Buffer]) -> None:
    source, result = pair
    devices = sorted(set(source.layout.mesh.devices) & set(result.layout.mesh.devices))
    lacking = [
        device
        for device in devices
        if not source.layout.region(source.point(device)).contains(result.layout.region(result.point(device)))
    ]
    assert first_device_lacking(source, result, devices) == (lacking[0] if lacking else None)
