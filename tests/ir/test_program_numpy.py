"""The program interpreter on small programs written by hand, against the same computation on whole arrays."""

from __future__ import annotations

import numpy as np
import pytest

from sennit.errors import ProgramError
from sennit.ir.program import Program
from sennit.ir.program_numpy import run_program


def run(text: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    program = Program.parse(text)
    assert Program.parse(str(program)) == program
    return run_program(program, inputs)


def fault(text: str, **inputs: np.ndarray) -> str:
    with pytest.raises(ProgramError) as caught:
        run(text, **inputs)
    return str(caught.value)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def close(left: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(left, right, rtol=1e-13, atol=1e-13)


# ---- one lane --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "rows"), [(2, 4), (3, 8), (4, 3)])  # even, uneven, with an empty piece
def test_data_parallel_linear_layer(dp: int, rows: int) -> None:
    text = f"""
    program "dp" {{
      mesh m = dp={dp}
      lane all on 0-{dp - 1} {{
        param %w : f64[3,5] of %w on m "w"
        input %x : f64[{rows}{{dp}},3] of %x on m "x"
        input %dy : f64[{rows}{{dp}},5] of %dy on m "dy"
        forward %y : f64[{rows}{{dp}},5] of %y on m = aten.mm.default(%x, %w) for %y "fc"
        forward %part : f64[]{{sum:dp}} of %loss on m = aten.sum.default(%y)
        all_reduce %loss : f64[] of %loss on m = %part over dp
        free %y
        backward %xt : f64[3,{rows}{{dp}}] of %xt on m = aten.t.default(%x)
        backward %dwp : f64[3,5]{{sum:dp}} of %dw on m = aten.mm.default(%xt, %dy)
        all_reduce %dw : f64[3,5] of %dw on m = %dwp over dp
        loss %loss
        gradient "w" %dw
      }}
    }}"""
    w, x, dy = normal(3, 5), normal(rows, 3), normal(rows, 5)
    result = run(text, w=w, x=x, dy=dy)
    close(result["loss"], (x @ w).sum())
    close(result["w"], x.T @ dy)


def test_column_then_row_split() -> None:
    text = """
    program "tp" {
      mesh m = dp=2,tp=2
      lane all on 0-3 {
        param %a : f64[3,8{tp}] of %a on m "a"
        param %b : f64[8{tp},6] of %b on m "b"
        input %x : f64[4{dp},3] of %x on m "x"
        forward %h : f64[4{dp},8{tp}] of %h on m = aten.mm.default(%x, %a)
        forward %g : f64[4{dp},8{tp}] of %g on m = aten.tanh.default(%h)
        forward %p : f64[4{dp},6]{sum:tp} of %y on m = aten.mm.default(%g, %b)
        reduce_scatter %s : f64[4{dp},6{tp}] of %y on m = %p over tp
        all_gather %y : f64[4{dp},6] of %y on m = %s over tp
        result "sharded" %s
        result "y" %y
      }
    }"""
    a, b, x = normal(3, 8), normal(8, 6), normal(4, 3)
    result = run(text, a=a, b=b, x=x)
    close(result["y"], np.tanh(x @ a) @ b)
    assert np.array_equal(result["sharded"], result["y"])


@pytest.mark.parametrize(
    ("source", "collective", "target", "axes"),
    [
        ("[8{a},6]", "all_gather", "[8,6]", "a"),
        ("[8{a:1},6]", "all_gather", "[8,6]", "a"),
        ("[8{a:2,b:1},6]", "all_gather", "[8{b:1},6]", "a"),
        ("[8{a,b},6]", "all_gather", "[8{b:2},6]", "a"),
        ("[8{a:1},6]{sum:b}", "reduce_scatter", "[8{b:2,a:1},6]", "b"),
        ("[8,6]{sum:a,b}", "reduce_scatter", "[8{b:2,a:1},6]", "a, b"),
        ("[8,6]{max:b}", "all_reduce", "[8,6]", "b"),
        ("[8{a:2},6]", "all_to_all", "[8,6{a:1}]", "a"),
        ("[8{a},6{b:1}]", "all_to_all", "[8{a:1},6{b:1}]", "a"),
        ("[8{a},6{b}]", "all_to_all", "[8{b:1},6{a:1}]", "a, b"),
        ("[7{a},5]", "all_to_all", "[7,5{a}]", "a"),
    ],
)
def test_collectives_keep_the_array(source: str, collective: str, target: str, axes: str) -> None:
    text = f"""
    program "move" {{
      mesh m = a=2,b=2
      lane all on 0-3 {{
        input %x : f64{source} of %x on m "x"
        {collective} %y : f64{target} of %x on m = %x over {axes}
        result "x" %y
      }}
    }}"""
    shape = (7, 5) if "7" in source else (8, 6)
    x = normal(*shape)
    assert np.array_equal(run(text, x=x)["x"], x)


def test_partial_and_slice_move_nothing() -> None:
    text = """
    program "local" {
      mesh m = a=2,b=2
      lane all on 0-3 {
        input %x : f64[8{b:1},3] of %x on m "x"
        input %s : f64[] of %s on m "s"
        forward %cut : f64[8{a:4,b:1},3] of %x on m = sennit.slice(%x)
        forward %part : f64[8{b:1},3]{sum:a} of %x on m = sennit.partial(%x)
        all_reduce %back : f64[8{b:1},3] of %x on m = %part over a
        forward %low : f64[]{min:a,b} of %s on m = sennit.partial(%s)
        result "cut" %cut
        result "part" %part
        result "back" %back
        result "low" %low
      }
    }"""
    x, s = normal(8, 3), np.asarray(2.5)
    result = run(text, x=x, s=s)
    assert all(np.array_equal(result[name], x) for name in ("cut", "part", "back"))
    assert result["low"] == 2.5


def test_concat_puts_times_together_in_index_order() -> None:
    text = """
    program "concat" {
      mesh m = dp=2;mb=2
      lane all on 0-1 {
        input %x0 : f64[8{dp:4,mb:1}] of %x on m at mb=0 "x"
        input %x1 : f64[8{dp:4,mb:1}] of %x on m at mb=1 "x"
        forward %y1 : f64[8{dp:4,mb:1}] of %y on m at mb=1 = aten.mul.Scalar(%x1, 2)
        forward %y0 : f64[8{dp:4,mb:1}] of %y on m at mb=0 = aten.mul.Scalar(%x0, 2)
        forward %y : f64[8{dp}] of %y on m = sennit.concat(%y1, %y0)
        result "y" %y
      }
    }"""
    x = normal(8)
    assert np.array_equal(run(text, x=x)["y"], 2 * x)
    assert "1 pieces at 1 times, where %y : f64[8{dp}] is made of 2" in fault(text.replace("(%y1, %y0)", "(%y1)"), x=x)


def test_a_view_of_two_split_dims() -> None:
    """Sizes among the arguments are local; the merged dim is split with a stride."""
    text = """
    program "view" {
      mesh m = a=2,b=2
      lane all on 0-3 {
        input %x : f64[4{a},6{b}] of %x on m "x"
        forward %y : f64[24{a:12,b:3}] of %y on m = aten.view.default(%x, [6])
        all_gather %whole : f64[24] of %y on m = %y over a, b
        result "y" %whole
      }
    }"""
    x = normal(4, 6)
    assert np.array_equal(run(text, x=x)["y"], x.reshape(24))
    wrong = fault(text.replace("[6])", "[5])"), x=x)
    assert wrong.startswith("aten.view.default cannot be computed on ([2, 3], (5,))")
    assert "where: device 0 of lane 'all' at step 0: aten.view.default %y" in wrong


# ---- pipelines -------------------------------------------------------------------------------------------------------


def pipeline() -> str:
    """Two stages of a linear layer each, two devices a stage, two micro-batches; loss = sum(x @ a @ b)."""
    first = second = ""
    for mb in (0, 1):
        first += f"""
        forward %x{mb} : f64[8{{mb,dp}},3] of %x on m0 at mb={mb} = sennit.slice(%x)
        forward %h{mb} : f64[8{{mb,dp}},4] of %h on m0 at mb={mb} = aten.mm.default(%x{mb}, %a)
        send %h{mb} to second
        free %h{mb}"""
        second += f"""
        receive %h{mb} : f64[8{{mb,dp}},4] of %h on m1 at mb={mb} from first
        forward %y{mb} : f64[8{{mb,dp}},2] of %y on m1 at mb={mb} = aten.mm.default(%h{mb}, %b)
        forward %loss{mb} : f64[]{{sum:dp,mb}} of %loss on m1 at mb={mb} = aten.sum.default(%y{mb})
        backward %dy{mb} : f64[8{{mb,dp}},2] of %dy on m1 at mb={mb} = aten.ones_like.default(%y{mb})
        free %y{mb}
        backward %ht{mb} : f64[4,8{{mb,dp}}] of %ht on m1 at mb={mb} = aten.t.default(%h{mb})
        backward %db{mb} : f64[4,2]{{sum:dp,mb}} of %db on m1 at mb={mb} = aten.mm.default(%ht{mb}, %dy{mb})
        backward %bt{mb} : f64[2,4] of %bt on m1 = aten.t.default(%b)
        backward %dh{mb} : f64[8{{mb,dp}},4] of %dh on m1 at mb={mb} = aten.mm.default(%dy{mb}, %bt{mb})
        send %dh{mb} to first"""
    for mb in (0, 1):
        first += f"""
        receive %dh{mb} : f64[8{{mb,dp}},4] of %dh on m0 at mb={mb} from second
        backward %xt{mb} : f64[3,8{{mb,dp}}] of %xt on m0 at mb={mb} = aten.t.default(%x{mb})
        backward %da{mb} : f64[3,4]{{sum:dp,mb}} of %da on m0 at mb={mb} = aten.mm.default(%xt{mb}, %dh{mb})"""
    return f"""
    program "pipeline" {{
      mesh m0 = dp=2;mb=2
      mesh m1 = dp=2;mb=2@2-3
      lane first on 0-1 {{
        param %a : f64[3,4] of %a on m0 "a"
        input %x : f64[8{{dp:2}},3] of %x on m0 "x"
        {first}
        backward %dap : f64[3,4]{{sum:dp}} of %da on m0 = sennit.accumulate(%da0, %da1)
        all_reduce %da : f64[3,4] of %da on m0 = %dap over dp
        gradient "a" %da
      }}
      lane second on 2-3 {{
        param %b : f64[4,2] of %b on m1 "b"
        {second}
        forward %lossp : f64[]{{sum:dp}} of %loss on m1 = sennit.accumulate(%loss0, %loss1)
        all_reduce %loss : f64[] of %loss on m1 = %lossp over dp
        backward %dbp : f64[4,2]{{sum:dp}} of %db on m1 = sennit.accumulate(%db0, %db1)
        reduce_scatter %db : f64[4{{dp}},2] of %db on m1 = %dbp over dp
        loss %loss
        gradient "b" %db
      }}
    }}"""


def test_pipeline_with_micro_batches() -> None:
    a, b, x = normal(3, 4), normal(4, 2), normal(8, 3)
    result = run(pipeline(), a=a, b=b, x=x)
    dy = np.ones((8, 2))
    close(result["loss"], (x @ a @ b).sum())
    close(result["a"], x.T @ (dy @ b.T))
    close(result["b"], (x @ a).T @ dy)


def test_faults_of_time() -> None:
    given = {"a": normal(3, 4), "b": normal(4, 2), "x": normal(8, 3)}
    twice = fault(pipeline().replace("accumulate(%da0, %da1)", "accumulate(%da0, %da0)"), **given)
    assert "are not different times of one pending axis" in twice
    opened = fault(pipeline().replace('gradient "b" %db', 'gradient "b" %db0'), **given)
    assert "is not whole in time" in opened
    swapped = pipeline().replace("%dh on m0 at mb=0 from", "%dh on m0 at mb=1 from")
    assert "2 devices send %dh0 : f64[8{mb,dp},4] at mb=0 of %dh" in fault(swapped, **given)


SHARED = """
program "shared" {
  mesh m = pp=2
  lane a on 0 {
    input %x : f64[4{pp}] of %x on m "x"
    forward %p : f64[]{sum:pp} of %s on m = aten.sum.default(%x)
    all_reduce %s : f64[] of %s on m = %p over pp
    result "s" %s
    result "x" %x
  }
  lane b on 1 {
    input %x : f64[4{pp}] of %x on m "x"
    forward %twice : f64[4{pp}] of %t on m = aten.mul.Scalar(%x, 2)
    free %twice
    forward %q : f64[]{sum:pp} of %s on m = aten.sum.default(%x)
    all_reduce %s : f64[] of %s on m = %q over pp
    result "s" %s
    result "x" %x
  }
}"""


def test_a_collective_may_span_lanes() -> None:
    x = normal(4)
    result = run(SHARED, x=x)
    close(result["s"], x.sum())
    assert np.array_equal(result["x"], x)
    one_lane = run(SHARED.replace('    result "s" %s\n', "", 1), x=x)  # the replica of the other lane is enough
    assert one_lane["s"] == result["s"]
    absent = fault(SHARED.replace('    result "x" %x\n', "", 1), x=x)
    assert absent == "devices [0] do not return their pieces of [4{pp}]\n  where: output 'x'"


def test_lanes_must_bring_one_layout() -> None:
    text = SHARED.replace("%q : f64[]{sum:pp} of %s", "%q : f64[] of %s")
    assert "lanes bring different layouts to one collective" in fault(text, x=normal(4))


@pytest.mark.parametrize(
    ("mesh", "message"),
    [("pp=2", "replicas of layout [] disagree at (1,)"), ("one=1@1", "lanes return different values")],
)
def test_lanes_that_disagree(mesh: str, message: str) -> None:
    text = f"""
    program "disagree" {{
      mesh m = pp=2
      mesh n = {mesh}
      lane a on 0 {{
        forward %s : f64[] of %s on m = aten.full.default([], 1, dtype=f64)
        result "s" %s
      }}
      lane b on 1 {{
        forward %s : f64[] of %s on n = aten.full.default([], 2, dtype=f64)
        result "s" %s
      }}
    }}"""
    assert fault(text) == f"{message}\n  where: output 's'"


# ---- faults ----------------------------------------------------------------------------------------------------------

EXCHANGE = """
program "exchange" {
  mesh ma = one=1
  mesh mb = one=1@1
  lane a on 0 {
    input %x : f64[2] of %x on ma "x"
    send %x to b
    receive %y : f64[2] of %y on ma from b
    result "y" %y
  }
  lane b on 1 {
    input %y : f64[2] of %y on mb "y"
    send %y to a
    receive %x : f64[2] of %x on mb from a
    result "x" %x
  }
}"""


def test_exchange() -> None:
    x, y = normal(2), normal(2) + 1
    result = run(EXCHANGE, x=x, y=y)
    assert np.array_equal(result["x"], x)
    assert np.array_equal(result["y"], y)


def test_deadlock_says_where_each_lane_stands() -> None:
    text = """
    program "deadlock" {
      mesh ma = one=1
      mesh mb = one=1@1
      lane a on 0 {
        input %x : f64[2] of %x on ma "x"
        receive %y : f64[2] of %y on ma from b
        send %x to b
      }
      lane b on 1 {
        input %y : f64[2] of %y on mb "y"
        forward %z : f64[2] of %z on mb = aten.neg.default(%y)
        receive %x : f64[2] of %x on mb from a
        send %y to a
      }
    }"""
    assert fault(text, x=normal(2), y=normal(2)) == (
        "program 'deadlock' deadlocks: no lane can go on\n"
        "  where: lane 'a' at step 0: receive %y from b; lane 'b' at step 1: receive %x from a\n"
        "  fix: bring the steps that wait for each other into one order on all lanes"
    )


def test_a_collective_that_one_lane_skips_is_a_deadlock() -> None:
    text = SHARED.replace(
        "all_reduce %s : f64[] of %s on m = %q over pp", "all_reduce %s : f64[] of %other on m = %q over pp"
    )
    message = fault(text, x=normal(4))
    assert "lane 'a' at step 1: all_reduce %s = %p over pp" in message
    assert "lane 'b' at step 3: all_reduce %s = %q over pp" in message


def test_a_transfer_left_over() -> None:
    text = EXCHANGE.replace("    receive %x : f64[2] of %x on mb from a\n", "").replace(
        'result "x" %x', 'result "x" %y'
    )
    assert "lane 'b' never receives %x from lane 'a'" in fault(text, x=normal(2), y=normal(2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("free %twice", "free %x", "buffer %x is used after it was freed\n  where: lane 'b' at step 2: aten.sum"),
        ("free %twice", "free %twice\nfree %twice", "buffer %twice is used after it was freed"),
        ("free %twice", "free %later", "buffer %later is used before it is defined"),
        ("%twice : f64[4{pp}] of %t", "%x : f64[4{pp}] of %t", "buffer %x is written twice"),
        (
            "%twice : f64[4{pp}] of %t",
            "%twice : f64[4] of %t",
            "%twice : f64[4] is float64[4] on device 1, and its piece is float64[2]",
        ),
        ("%twice : f64[4{pp}] of %t", "%twice : f32[4{pp}] of %t", "its piece is float64[2]"),
        ("%twice : f64[4{pp}] of %t", "%twice : f64[4{pp}] of %t on m, %two : f64[4{pp}] of %t", "1 results where 2"),
        (
            "aten.mul.Scalar(%x, 2)",
            "sennit.slice(%x)\nforward %u : f64[4] of %x on m = sennit.slice(%x)",
            "is not inside",
        ),
    ],
)
def test_faults_of_buffers(old: str, new: str, message: str) -> None:
    assert message in fault(SHARED.replace(old, new), x=normal(4))


def test_a_collective_that_changes_an_axis_it_does_not_name() -> None:
    text = """
    program "wrong" {
      mesh m = a=2,b=2
      lane all on 0-3 {
        input %x : f64[8{a,b}] of %x on m "x"
        all_gather %y : f64[8] of %x on m = %x over a
        result "x" %y
      }
    }"""
    assert "a collective over ['a'] goes from [8{a,b}] on a=2,b=2 to [8] on a=2,b=2" in fault(text, x=normal(8))


def test_inputs_must_be_given() -> None:
    assert fault(EXCHANGE, x=normal(2)) == "no array is given for input 'y'\n  where: lane 'b'"
