"""The program checker: golden programs pass, and each of their single-fault mutants is refused in the user's words."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from program_texts import ACROSS_LANES, DATA_PARALLEL, PIPELINE, TENSOR_PARALLEL, one_forward_one_backward

from sennit.errors import ProgramError
from sennit.ir.program import Program
from sennit.ir.program_check import check_program, describe_step


@pytest.mark.parametrize("text", [DATA_PARALLEL, TENSOR_PARALLEL, ACROSS_LANES, PIPELINE])
def test_good_programs_pass_and_print_back(text: str) -> None:
    program = Program.parse(text)
    check_program(program)
    assert Program.parse(str(program)) == program


def test_a_long_pipeline_passes() -> None:
    check_program(Program.parse(one_forward_one_backward(64)))


@dataclass(frozen=True)
class Mutant:
    """One line changed: `old`, which stands once in the text, becomes `new`; the message has all the `words`."""

    rule: str
    text: str
    old: str
    new: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return self.rule


MUTANTS = [
    # ---- structure
    Mutant("two lanes of one name", ACROSS_LANES, "lane second", "lane first", ("'first'", "devices 2-3", "own name")),
    Mutant("a device in two lanes", ACROSS_LANES, "second on 2-3", "second on 1-2", ("device 1", "'first'", "once")),
    Mutant(
        "defined twice",
        DATA_PARALLEL,
        "forward %y :",
        "forward %x :",
        ("%x of tensor %y is defined twice", "devices 0-3", "a name of its own"),
    ),
    Mutant(
        "read before its definition",
        DATA_PARALLEL,
        "aten.mm.default(%x, %w)",
        "aten.mm.default(%x, %dw)",
        ("reads %dw before step 5", "module 'h.0'", "devices 0-3", "move it behind step 5"),
    ),
    Mutant(
        "read of an unknown buffer",
        DATA_PARALLEL,
        "aten.mm.default(%x, %w)",
        "aten.mm.default(%x, bias=%v)",
        ("reads %v", "does not define", "receive it"),
    ),
    Mutant(
        "read after free",
        DATA_PARALLEL,
        "free %y\n",
        "free %dw.part\n",
        ("step 5 reads %dw.part", "step 4", "has freed", "devices 0-3", "behind its last read"),
    ),
    Mutant(
        "freed twice",
        DATA_PARALLEL,
        "    free %dw.part",
        "    free %y",
        ("frees %y", "step 4", "remove this second free"),
    ),
    Mutant(
        "free of an unknown buffer", DATA_PARALLEL, "free %y\n", "free %v\n", ("frees %v", "devices 0-3", "define %v")
    ),
    Mutant("an output that is not there", DATA_PARALLEL, "loss %loss\n", "loss %v\n", ("loss", "%v", "devices 0-3")),
    Mutant(
        "a freed output",
        DATA_PARALLEL,
        "free %dw.part",
        "free %dw",
        ("'h.0.weight'", "%dw", "step 6", "remove the free"),
    ),
    Mutant(
        "a mesh without the lane's devices",
        PIPELINE,
        "param %w : f32[8,8] of %w1 on m1",
        "param %w : f32[8,8] of %w1 on m0",
        ("%w of tensor %w1", "devices 2-3", "'stage1'", "mesh of the lane's devices"),
    ),
    Mutant(
        "times missing",
        TENSOR_PARALLEL,
        "%x1 : f32[8{dp,mb},8] of %x on m0 at mb=1",
        "%x1 : f32[8{dp,mb},8] of %x on m0",
        ("%x1 of tensor %x", "at no time", "time axes mb", "devices 0-3", "fix: give `at`"),
    ),
    Mutant(
        "times of a replicated axis",
        TENSOR_PARALLEL,
        "%y : f32[8{dp},8{tp}] of %y on m0 =",
        "%y : f32[8{dp},8{tp}] of %y on m0 at mb=0 =",
        ("%y of tensor %y is at mb=0", "(none)", "fix: give `at`"),
    ),
    Mutant(
        "a time out of range",
        TENSOR_PARALLEL,
        "%x1 : f32[8{dp,mb},8] of %x on m0 at mb=1",
        "%x1 : f32[8{dp,mb},8] of %x on m0 at mb=2",
        ("mb=2 of mb=2", "tensor %x", "devices 0-3", "mb=0 to 1"),
    ),
    Mutant(
        "several times of a split axis",
        TENSOR_PARALLEL,
        "%x1 : f32[8{dp,mb},8] of %x on m0 at mb=1",
        "%x1 : f32[8{dp,mb},8] of %x on m0 at mb=0+1",
        ("mb=0+1", "split", "one of mb=0 to 1"),
    ),
    Mutant(
        "a time named twice",
        PIPELINE,
        "{sum:dp,mb} of %dw0 on m0 at mb=0+1+2 =",
        "{sum:dp,mb} of %dw0 on m0 at mb=0+1+1 =",
        ("%s2 of tensor %dw0", "mb=0+1+1", "devices 0-1", "distinct"),
    ),
    Mutant(
        "mixed reductions",
        ACROSS_LANES,
        "%a : f32[4]{sum:pp,dp} of %dw on m0 = aten.mul.Tensor(%w, 2.0)",
        "%a : f32[4]{sum:pp;max:dp} of %dw on m0 = aten.mul.Tensor(%w, 2.0)",
        ("%a of tensor %dw", "pending max and a pending sum", "devices 0-1", "one of them first"),
    ),
    # ---- outputs
    Mutant(
        "a pending loss",
        DATA_PARALLEL,
        "loss %loss\n",
        "loss %loss.part\n",
        ("loss is still a pending sum over dp on devices 0-3", "%loss.part of tensor %loss", "all_reduce it over dp"),
    ),
    Mutant(
        "a gradient that was not reduced",
        ACROSS_LANES,
        '    all_reduce %c : f32[4] of %dw on m0 = %b over pp\n    gradient "embed.weight" %c',
        '    gradient "embed.weight" %b',
        (
            "gradient 'embed.weight' is still a pending sum over pp on devices 2-3",
            "tensor %dw",
            "all_reduce it over pp",
        ),
    ),
    Mutant(
        "a gradient of one micro-batch",
        TENSOR_PARALLEL,
        'gradient "mlp.down.weight" %dw2',
        'gradient "mlp.down.weight" %g1',
        ("'mlp.down.weight' is still a pending sum over dp, mb", "accumulate it over all coordinates of mb", "over dp"),
    ),
    # ---- collectives
    Mutant(
        "gather of a pending buffer",
        DATA_PARALLEL,
        "all_reduce %dw :",
        "all_gather %dw :",
        ("all_gather over dp", "%dw.part of tensor %dw, a pending sum", "devices 0-3", "fix: all_reduce over dp"),
    ),
    Mutant(
        "reduction of a split buffer",
        TENSOR_PARALLEL,
        "all_gather %r0",
        "all_reduce %r0",
        ("%s0 of tensor %x, split on dim 1", "fix: all_gather over tp"),
    ),
    Mutant(
        "reduction that stays pending",
        DATA_PARALLEL,
        "all_reduce %dw : f32[4,8] of",
        "all_reduce %dw : f32[4,8]{sum:dp} of",
        ("into %dw, a pending sum over dp", "nothing changes"),
    ),
    Mutant(
        "scatter to a replicated result",
        TENSOR_PARALLEL,
        "reduce_scatter %y0 : f32[8{dp,mb},8{tp}]",
        "reduce_scatter %y0 : f32[8{dp,mb},8]",
        ("%p0 of tensor %y, a pending sum", "into %y0, replicated", "fix: all_reduce over tp"),
    ),
    Mutant(
        "all_to_all that changes nothing",
        TENSOR_PARALLEL,
        "all_to_all %y1 : f32[8{dp,mb},8{tp}]",
        "all_to_all %y1 : f32[8{dp,mb,tp},8]",
        ("all_to_all over tp", "%q1 of tensor %y", "leave tp out"),
    ),
    Mutant(
        "reduction over a wrong axis",
        TENSOR_PARALLEL,
        "%dw2 on m0 = %g over dp",
        "%dw2 on m0 = %g over tp",
        ("changes axis dp", "a pending sum to replicated", "%g of tensor %dw2"),
    ),
    Mutant(
        "reduction over time",
        TENSOR_PARALLEL,
        "%dw2 on m0 = %g over dp",
        "%dw2 on m0 = %g over dp, mb",
        ("'mb', a time axis", "tensor %dw2", "sennit.accumulate"),
    ),
    Mutant(
        "reduction over an unknown axis",
        DATA_PARALLEL,
        "%dw.part over dp",
        "%dw.part over tp",
        ("'tp', no axis of its mesh dp=4", "space axes (dp=4)"),
    ),
    Mutant("an axis twice", DATA_PARALLEL, "%dw.part over dp", "%dw.part over dp, dp", ("['dp', 'dp']", "once")),
    Mutant(
        "a collective that renames the tensor",
        DATA_PARALLEL,
        "%dw : f32[4,8] of %dw on",
        "%dw : f32[4,8] of %w on",
        ("changes the tensor from %dw to %w", "devices 0-3", "fix: give %dw the tensor of %dw.part"),
    ),
    Mutant(
        "a collective that converts",
        DATA_PARALLEL,
        "%dw : f32[4,8] of %dw on",
        "%dw : bf16[4,8] of %dw on",
        ("changes the element type from f32 to bf16",),
    ),
    Mutant(
        "a collective that reshapes",
        DATA_PARALLEL,
        "%dw : f32[4,8] of %dw on",
        "%dw : f32[8,4] of %dw on",
        ("changes the shape from (4, 8) to (8, 4)",),
    ),
    Mutant(
        "a collective that changes the micro-batch",
        TENSOR_PARALLEL,
        "%r0 : f32[8{dp,mb},8] of %x on m0 at mb=0",
        "%r0 : f32[8{dp,mb},8] of %x on m0 at mb=1",
        ("the times of mb from 0 to 1", "%s0 of tensor %x"),
    ),
    # ---- local moves
    Mutant(
        "slice of a pending axis",
        TENSOR_PARALLEL,
        "reduce_scatter %y0 : f32[8{dp,mb},8{tp}] of %y on m0 at mb=0 = %p0 over tp",
        "forward %y0 : f32[8{dp,mb},8{tp}] of %y on m0 at mb=0 = sennit.slice(%p0)",
        ("sennit.slice", "%p0 of tensor %y, a pending sum", "fix: reduce_scatter over tp"),
    ),
    Mutant(
        "slice that changes nothing",
        TENSOR_PARALLEL,
        "%s0 : f32[8{dp,mb},8{tp}] of",
        "%s0 : f32[8{dp,mb},8] of",
        ("sennit.slice changes nothing", "%x0 and %s0", "remove the step"),
    ),
    Mutant(
        "partial that splits",
        TENSOR_PARALLEL,
        "%b : f32[8]{sum:tp} of",
        "%b : f32[8{tp}] of",
        ("sennit.partial", "%bias", "replicated over tp", "fix: sennit.slice"),
    ),
    Mutant(
        "a micro-batch counted twice",
        PIPELINE,
        "accumulate(%s1, %g2)\n    free %x2",
        "accumulate(%s1, %g1)\n    free %x2",
        ("mb=1 of tensor %dw0 twice", "%s1 is at mb=0+1", "devices 0-1", "once"),
    ),
    Mutant(
        "a sum that claims more than it has",
        PIPELINE,
        "%s1 : f32[8,8]{sum:dp,mb} of %dw1 on m1 at mb=0+1 =",
        "%s1 : f32[8,8]{sum:dp,mb} of %dw1 on m1 at mb=0+1+2 =",
        ("gives %s1 of tensor %dw1", "at mb=0+1+2", "devices 2-3", "covers mb=0+1:"),
    ),
    Mutant(
        "a sum resolved too early",
        PIPELINE,
        "%s2 : f32[8,8]{sum:dp,mb} of %dw1 on m1 at mb=0+1+2 =",
        "%s2 : f32[8,8]{sum:dp} of %dw1 on m1 =",
        ("gives %s2 of tensor %dw1, replicated over mb", "covers mb=0+1+2"),
    ),
    Mutant(
        "a whole sum that stays pending",
        PIPELINE,
        "%s3 : f32[8,8]{sum:dp} of %dw1 on m1 =",
        "%s3 : f32[8,8]{sum:dp,mb} of %dw1 on m1 at mb=0+1+2+3 =",
        ("gives %s3 of tensor %dw1, a pending sum over mb", "replicated over it"),
    ),
    Mutant(
        "a sum of two tensors",
        TENSOR_PARALLEL,
        "%g1 : f32[16{tp},8]{sum:dp,mb} of %dw2",
        "%g1 : f32[16{tp},8]{sum:dp,mb} of %dw1",
        ("sennit.accumulate", "the tensor from %dw2 to %dw1"),
    ),
    Mutant(
        "pieces out of order",
        TENSOR_PARALLEL,
        "sennit.concat(%y0, %y1)",
        "sennit.concat(%y1, %y0)",
        ("sennit.concat of tensor %y", "%y1 at mb=1; %y0 at mb=0", "in order from 0"),
    ),
    Mutant(
        "a piece missing",
        TENSOR_PARALLEL,
        "sennit.concat(%y0, %y1)",
        "sennit.concat(%y0)",
        ("sennit.concat of tensor %y", "each coordinate"),
    ),
    Mutant(
        "a number where a buffer belongs",
        TENSOR_PARALLEL,
        "sennit.accumulate(%g0, %g1)",
        "sennit.accumulate(%g0, %g1, 1.0)",
        ("2 buffers among 3 arguments", "give it 2"),
    ),
    # ---- micro-batches
    Mutant(
        "two micro-batches in one operator",
        PIPELINE,
        "aten.mm.default(%h2, %y2)",
        "aten.mm.default(%h2, %y1)",
        (
            "mixes %h2 of tensor %h at mb=2 with %y1 of tensor %y at mb=1",
            "module 'h.1'",
            "devices 2-3",
            "coordinate of mb",
        ),
    ),
    # ---- matching
    Mutant(
        "a send without a receive",
        PIPELINE,
        "    send %dh3 to stage0\n",
        "    send %dh3 to stage0\n    send %dh3 to stage0\n",
        ("send 4 of %dh3", "'stage1' (devices 2-3)", "'stage0' (devices 0-1)", "add a receive"),
    ),
    Mutant(
        "a receive without a send",
        PIPELINE,
        "    send %h3 to stage1\n",
        "",
        ("receive 3 of %h3 in lane 'stage1' (devices 2-3)", "sends 3 times", "add a send"),
    ),
    Mutant(
        "a send of the wrong micro-batch",
        PIPELINE,
        "send %h2 to stage1",
        "send %h1 to stage1",
        ("receive 2 from lane 'stage0'", "tensor %h", "at mb=1 there and at mb=2 here", "in the order"),
    ),
    Mutant(
        "a send of another tensor",
        PIPELINE,
        "send %h2 to stage1",
        "send %x2 to stage1",
        ("%x2 of tensor %x", "the tensor is %x there and %h here", "devices 0-1"),
    ),
    Mutant(
        "a receive in another layout",
        PIPELINE,
        "%h1 : f32[16{dp,mb},8] of %h on m1",
        "%h1 : f32[16{mb,dp},8] of %h on m1",
        ("the layout is [16{dp,mb},8] there and [16{mb,dp},8] here",),
    ),
    Mutant(
        "a receive of another type",
        PIPELINE,
        "%h1 : f32[16{dp,mb},8] of %h on m1",
        "%h1 : bf16[16{dp,mb},8] of %h on m1",
        ("element type is f32 there and bf16 here",),
    ),
    Mutant(
        "devices in another order",
        PIPELINE,
        "dp=2;mb=4@2-3",
        "dp=2;mb=4@3,2",
        ("device 0 sends its piece of tensor %h at dp=0 to device 2", "dp=1", "same order"),
    ),
    Mutant(
        "lanes of unequal numbers of devices",
        PIPELINE,
        "stage1 on 2-3",
        "stage1 on 2",
        ("from 2 devices to the 1 of", "as many devices"),
    ),
    Mutant("a send to nowhere", PIPELINE, "send %h2 to stage1", "send %h2 to stage2", ("'stage2' does not exist",)),
    Mutant("a send to itself", PIPELINE, "send %h2 to stage1", "send %h2 to stage0", ("'stage0' is this lane itself",)),
    Mutant(
        "a collective that one lane lacks",
        ACROSS_LANES,
        '    all_reduce %c : f32[4] of %dw on m0 = %b over pp\n    gradient "embed.weight" %c',
        "",
        ("collective 0 over pp", "no partner in lane 'second' (devices 2-3)", "add it to lane 'second'"),
    ),
    Mutant(
        "a mesh with another device",
        ACROSS_LANES,
        "mesh m0 = pp=2,dp=2",
        "mesh m0 = pp=2,dp=2@0-2,4",
        ("does not have the devices 3", "devices 2-3"),
    ),
    Mutant(
        "a collective with a device without a lane",
        DATA_PARALLEL,
        "lane all on 0-3",
        "lane all on 0-2",
        ("waits for device 3, which runs no lane", "devices 0-2", "add a lane for device 3"),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutants_are_refused(mutant: Mutant) -> None:
    assert mutant.text.count(mutant.old) == 1
    program = Program.parse(mutant.text.replace(mutant.old, mutant.new))
    with pytest.raises(ProgramError) as caught:
        check_program(program)
    assert caught.value.fix is not None
    assert caught.value.where is not None
    assert "device" in str(caught.value)
    for word in mutant.words:
        assert word in str(caught.value)


def test_lanes_must_agree_on_what_they_reduce() -> None:
    other = "%a : f32[4]{sum:pp,dp} of %dw on m0 = aten.mul.Tensor(%w, 3.0)"
    tail = ACROSS_LANES[ACROSS_LANES.index("lane second") :]
    assert other in tail
    text = ACROSS_LANES.replace(tail, tail.replace("of %dw on", "of %dv on"))
    with pytest.raises(ProgramError, match=r"tensor %dv here, and .* of tensor %dw in lane 'first' \(devices 0-1\)"):
        check_program(Program.parse(text))


def test_a_collective_inside_each_lane_needs_no_partner() -> None:
    line = "    all_reduce %b : f32[4]{sum:pp} of %dw on m0 = %a over dp\n"
    extra = "    all_reduce %b2 : f32[4]{sum:pp} of %dw on m0 = %a over dp\n"
    check_program(Program.parse(ACROSS_LANES.replace(line, line + extra, 1)))


def test_a_lane_without_devices_is_refused() -> None:
    program = Program.parse(DATA_PARALLEL)
    lane = program.lanes[0]
    empty = type(lane)(lane.name, (), lane.inputs, lane.steps, lane.outputs)
    with pytest.raises(ProgramError, match="no device"):
        check_program(Program(program.name, (empty,)))


def test_steps_are_described_in_one_line() -> None:
    stage0, stage1 = Program.parse(PIPELINE).lanes
    assert [describe_step(step) for step in stage0.steps[:4]] == [
        "forward %x0 at mb=0 = sennit.slice",
        "forward %h0 at mb=0 = aten.mm.default (op %h, module 'h.0')",
        "send %h0 to stage1",
        "forward %x1 at mb=1 = sennit.slice",
    ]
    assert describe_step(stage1.steps[0]) == "receive %h0 at mb=0 from stage0"
    assert describe_step(stage1.steps[-1]) == "all_reduce %dw = %s3 over dp"
    assert describe_step(stage1.steps[-2]) == "free %dh3"


def test_a_large_program_is_checked() -> None:
    """Ten thousand steps and more: no rule takes quadratic time, or this test would be felt."""
    text = DATA_PARALLEL
    line = '    forward %y : f32[16{dp},8] of %y on m0 = aten.mm.default(%x, %w) for %y "h.0"\n'
    more = "".join(line.replace("%y :", f"%y{k} :") + f"    free %y{k}\n" for k in range(5000))
    check_program(Program.parse(text.replace(line, line + more)))
