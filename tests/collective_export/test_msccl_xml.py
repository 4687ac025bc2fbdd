"""MSCCL XML: what is written is read back, what the executor cannot hold or would run wrongly is refused with its
place.
"""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hand_made import all_pairs_all_reduce, chunk, ring_all_gather, ring_all_reduce
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.compile import compile_algorithm
from sennit.collective.export_xml import MscclLimits, XmlOptions, cut_messages, msccl_xml
from sennit.collective.import_xml import read_msccl_xml
from sennit.collective.library import Options, recipe, recipes
from sennit.collective.normal_form import normal_form
from sennit.collective.protocol import Protocol
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveName, CollectiveSpec, Scratch
from sennit.ir.schedule import Block, Instruction, Opcode, RankSchedule, Schedule, Wait


def schedules() -> st.SearchStrategy[Schedule]:
    return st.one_of(
        st.builds(ring_all_reduce, st.integers(2, 6), st.integers(1, 3)),
        st.builds(all_pairs_all_reduce, st.integers(2, 5), st.integers(1, 3)),
        st.builds(ring_all_gather, st.integers(2, 6), st.integers(1, 3)),
    )


@given(schedules(), st.sampled_from(Protocol))
@settings(derandomize=True, deadline=None, max_examples=60)
def test_what_is_written_is_read_back(schedule: Schedule, protocol: Protocol) -> None:
    text = msccl_xml(schedule, XmlOptions(protocol, max_bytes=1 << 16))
    assert read_msccl_xml(text) == normal_form(schedule)


@pytest.mark.parametrize("name", [known.name for known in recipes()])
def test_the_library_is_read_back(name: str) -> None:
    schedule = compile_algorithm(recipe(name).build(2, 2, Options(instances=2, pieces=2)))
    text = msccl_xml(schedule, XmlOptions(Protocol.LL))
    assert read_msccl_xml(text) == normal_form(schedule)


def one_rank(*blocks: Block, scratch: int = 4) -> Schedule:
    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, 1, 4)
    return Schedule("one", spec, 1, (RankSchedule(0, blocks, (Scratch(0, "s", scratch),)),))


def local(*code: Instruction) -> Block:
    return Block(None, None, 0, code)


@given(st.data())
@settings(derandomize=True, deadline=None, max_examples=60)
def test_random_local_programs_are_read_back(data: st.DataObject) -> None:
    """No collective: instructions and waits of any shape."""
    blocks: list[Block] = []
    for number in range(data.draw(st.integers(1, 4))):
        code: list[Instruction] = []
        for _ in range(data.draw(st.integers(0, 4))):
            opcode = data.draw(st.sampled_from([Opcode.COPY, Opcode.REDUCE]))
            source = chunk(data.draw(st.sampled_from(["input", "s"])), data.draw(st.integers(0, 3)))
            target = chunk(data.draw(st.sampled_from(["output", "s"])), data.draw(st.integers(0, 3)))
            steps = [Wait(b, s) for b in range(number) for s in range(len(blocks[b].instructions))]
            waits = data.draw(st.lists(st.sampled_from(steps), max_size=4)) if steps else []
            code.append(Instruction(opcode, source, target, tuple(waits)))
        blocks.append(local(*code))
    schedule = one_rank(*blocks)
    assert read_msccl_xml(msccl_xml(schedule), verify=False) == normal_form(schedule)


def test_the_attributes_that_the_executor_requires_are_there() -> None:
    algo = ElementTree.fromstring(msccl_xml(ring_all_gather(4), XmlOptions(Protocol.LL, 1024, 65536)))
    assert algo.attrib == {
        "name": "gather 4",
        "proto": "LL",
        "nchannels": "1",
        "nchunksperloop": "4",
        "ngpus": "4",
        "coll": "allgather",
        "inplace": "0",
        "outofplace": "1",
        "minBytes": "1024",
        "maxBytes": "65536",
        "slots": "2",
    }
    steps = algo.findall("gpu/tb/step")
    assert {tuple(step.attrib) for step in steps} == {
        ("s", "type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps", "hasdep")
    }


def test_further_waits_become_nops_before_the_step() -> None:
    code = [local(Instruction(Opcode.COPY, chunk("input", i), chunk("output", i))) for i in range(3)]
    last = local(Instruction(Opcode.COPY, chunk("output", 0), chunk("s", 0), (Wait(0, 0), Wait(1, 0), Wait(2, 0))))
    steps = ElementTree.fromstring(msccl_xml(one_rank(*code, last))).findall("gpu/tb[@id='3']/step")
    assert [(step.get("s"), step.get("type"), step.get("depid")) for step in steps] == [
        ("0", "nop", "0"),
        ("1", "nop", "1"),
        ("2", "cpy", "2"),
    ]


def test_reductions_that_the_executor_would_join_wrongly_are_kept_apart() -> None:
    wide = Instruction(Opcode.REDUCE, chunk("s", 0, 2), chunk("output", 0, 2))
    narrow = Instruction(Opcode.REDUCE, chunk("s", 2), chunk("output", 0))
    same = Instruction(Opcode.REDUCE, chunk("s", 2, 2), chunk("output", 0, 2))
    text = msccl_xml(one_rank(local(wide, narrow)))
    assert [s.get("hasdep") for s in ElementTree.fromstring(text).iter("step")] == ["1", "0"]
    assert 'hasdep="1"' not in msccl_xml(one_rank(local(wide, same)))
    with pytest.raises(CollectiveError, match="the executor joins this reduction"):
        read_msccl_xml(text.replace('hasdep="1"', 'hasdep="0"'), verify=False)


def test_cutting_messages_keeps_order_and_waits() -> None:
    schedule = all_pairs_all_reduce(3, width=2)
    cut = cut_messages(schedule, 1)
    block = cut.ranks[0].blocks[0].instructions
    assert [item.opcode.value for item in block] == ["send"] * 2 + ["receive"] * 2 + ["send"] * 2 + ["receive"] * 2
    assert block[4].after == (Wait(2, 5),)
    assert not block[5].after


@pytest.mark.parametrize(
    ("schedule", "options", "message", "where"),
    [
        (ring_all_reduce(4, channels=33), XmlOptions(), "channel 32 is beyond", "rank 0, block 32"),
        (ring_all_gather(3, chunks=72), XmlOptions(), "of 72 chunks, the executor holds 71", "rank 0, block 0, step 0"),
        (
            ring_all_reduce(40),
            XmlOptions(limits=MscclLimits(steps=64)),
            "79 steps, of which 0 are for further waits; the executor holds 64",
            "rank 0, block 0",
        ),
        (all_pairs_all_reduce(34), XmlOptions(), "33 thread blocks send on channel 0", "rank 0"),
        (replace(ring_all_reduce(3), slots=3), XmlOptions(), "needs 3 slots a connection, protocol Simple has 2", ""),
        (replace(ring_all_reduce(3), name="x" * 64), XmlOptions(), "the name has 64 characters", ""),
    ],
)
def test_what_the_executor_cannot_hold_is_refused(
    schedule: Schedule, options: XmlOptions, message: str, where: str
) -> None:
    with pytest.raises(CollectiveError, match=message) as error:
        msccl_xml(schedule, options)
    assert (error.value.where or "").endswith(where)


def test_a_message_that_takes_more_slots_than_there_are_is_refused() -> None:
    schedule = ring_all_gather(4, chunks=3)
    with pytest.raises(
        CollectiveError, match="sends 1 of a message's chunks a slot, and with the 2 slots of protocol Simple"
    ):
        msccl_xml(schedule)
    assert msccl_xml(schedule, XmlOptions(Protocol.LL128))
    assert msccl_xml(schedule, XmlOptions(max_bytes=4 << 20))  # a message of 1 MiB fits a slot


def test_sizes_that_are_no_range_are_refused() -> None:
    with pytest.raises(CollectiveError, match="4096 to 1024 bytes"):
        XmlOptions(min_bytes=4096, max_bytes=1024)


# ---- files that no one here wrote ------------------------------------------------------------------------------------


def edited(pattern: str, replacement: str) -> str:
    text, count = re.subn(pattern, replacement, msccl_xml(all_pairs_all_reduce(3)), count=1, flags=re.DOTALL)
    assert count == 1
    return text


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("<algo", "not XML", "line 1"),
        ("<program/>", "the file holds <program>", None),
        ('<!DOCTYPE algo [<!ENTITY a "b">]><algo/>', "declares a document type", None),
        (edited('coll="allreduce"', 'coll="allsum"'), "unknown collective 'allsum'", "algo 'all pairs 3'"),
        (edited('coll="allreduce"', 'coll="custom"'), "does not say what the result must be", "algo 'all pairs 3'"),
        (edited('proto="Simple"', 'proto="LL256"'), "unknown protocol 'LL256'", None),
        (edited(' proto="Simple"', ""), "<algo> has no 'proto'", "algo 'all pairs 3'"),
        (edited('ngpus="3"', 'ngpus="4"'), "ngpus is 4, but 3 gpu elements follow", "algo 'all pairs 3'"),
        (edited('nchunksperloop="3"', 'nchunksperloop="2"'), "i_chunks is 3, the collective has 2", "rank 0"),
        (edited('gpu id="1"', 'gpu id="0"'), "two <gpu> elements have id 0", "algo 'all pairs 3'"),
        (edited('tb id="1"', 'tb id="7"'), "<tb> 1 is missing; there are 3", "rank 0"),
        (edited('send="1"', 'send="0"'), "send is 0", "rank 0, block 0"),
        (edited('send="1"', 'send="9"'), "send is 9", "rank 0, block 0"),
        (edited('chan="0"', 'chan="-2"'), "chan is -2", "rank 0, block 0"),
        (edited('send="1" recv="1"', 'send="-1" recv="1"'), "no peer to send to", "rank 0, block 0, step 0"),
        (edited('step s="1"', 'step s="5"'), "s is 5", "rank 0, block 0, step 1"),
        (edited('type="s"', 'type="send"'), "unknown type 'send'", "rank 0, block 0, step 0"),
        (edited('cnt="1"', 'cnt="0"'), "cnt is 0", "rank 0, block 0, step 0"),
        (edited('srcoff="1"', 'srcoff="3"'), r"'s' names input\[3:4\], which has 3", "rank 0, block 0, step 0"),
        (edited('srcoff="1"', 'srcoff="one"'), "srcoff is 'one', no integer", "rank 0, block 0, step 0"),
        (edited('srcbuf="i"', 'srcbuf="x"'), "srcbuf is 'x'", "rank 0, block 0, step 0"),
        (edited('depid="2" deps="2"', 'depid="2" deps="9"'), "waits for block 2, step 9", "rank 0, block 0, step 2"),
        (edited('hasdep="1"', 'hasdep="0"'), "whose hasdep is 0: it would wait forever", "rank 0, block 2, step 1"),
        (edited('hasdep="1"', 'hasdep="2"'), "hasdep is 2", "rank 0, block 0, step 1"),
        (edited('<step s="3".*?/>', ""), "rank 1 sends 2 messages to rank 0 on channel 0, which receives 1", "block 0"),
        (
            edited('type="cpy" (.*?)depid="-1"(.*?)/>', r'type="nop" \1depid="0"\2/>'),
            "it waits for block 0, step -1, which does not exist",
            "rank 0, block 2, step 1",
        ),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(text: str, message: str, where: str | None) -> None:
    with pytest.raises(CollectiveError, match=message) as error:
        read_msccl_xml(text, verify=False)
    assert where is None or where in (error.value.where or "")


def test_a_block_that_ends_with_a_nop_is_refused() -> None:
    text = edited(
        "</tb>",
        '<step s="4" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="1" deps="0" hasdep="0"/></tb>',
    )
    with pytest.raises(CollectiveError, match="ends with a nop, whose wait the executor loses"):
        read_msccl_xml(text, verify=False)


def test_messages_of_different_lengths_are_refused() -> None:
    text = msccl_xml(all_pairs_all_reduce(3, width=2)).replace('cnt="2"', 'cnt="1"', 1)
    with pytest.raises(CollectiveError, match="message 0 of channel 0 has 1 chunks at rank 0 and 2 at rank 1"):
        read_msccl_xml(text, verify=False)


def test_two_blocks_on_one_connection_are_refused() -> None:
    text = msccl_xml(ring_all_reduce(3, channels=2)).replace('chan="1"', 'chan="0"')
    with pytest.raises(CollectiveError, match="blocks 0 and 1 both send to rank 1 on channel 0"):
        read_msccl_xml(text, verify=False)


def test_a_reduction_from_elsewhere_becomes_a_copy_and_a_reduction() -> None:
    """As files of msccl-tools have it: dst = src + message."""
    steps = """<step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="rrc" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>"""
    gpu = (
        '<gpu id="{0}" i_chunks="1" o_chunks="1" s_chunks="0"><tb id="0" send="{1}" recv="{1}" chan="0">'
        + steps
        + "</tb></gpu>"
    )
    text = (
        '<algo name="swap" proto="Simple" nchannels="1" nchunksperloop="1" ngpus="2" coll="allreduce" inplace="0">'
        + gpu.format(0, 1)
        + gpu.format(1, 0)
        + "</algo>"
    )
    schedule = read_msccl_xml(text)
    assert schedule.slots == 2
    assert [item.opcode for item in schedule.ranks[0].blocks[0].instructions] == [
        Opcode.SEND,
        Opcode.COPY,
        Opcode.RECEIVE_REDUCE,
    ]


def foreign_all_pairs(ranks: int) -> str:
    """In the manner of msccl-tools: everything in the input buffer, `o_chunks` 0, a thread block a message, waits in
    chains, unused operands as the sender saw them.
    """
    lines = [f'<algo name="pairs" proto="Simple" nchannels="{2 * ranks}" nchunksperloop="{ranks}" ngpus="{ranks}"']
    lines[0] += ' coll="allreduce" inplace="1" outofplace="0" minBytes="1024" maxBytes="65536">'
    step = '<step s="0" type="{}" srcbuf="i" srcoff="{}" dstbuf="i" dstoff="{}" cnt="1" depid="{}" deps="{}" hasdep="{}"/></tb>'
    for rank in range(ranks):
        peers = [peer for peer in range(ranks) if peer != rank]
        count = len(peers)
        lines.append(f'<gpu id="{rank}" i_chunks="{ranks}" o_chunks="0" s_chunks="0">')
        for n, peer in enumerate(peers):  # add what arrives for my chunk, one peer after another
            after = (n - 1, 0) if n else (-1, -1)
            lines.append(f'<tb id="{n}" send="-1" recv="{peer}" chan="{rank}">')
            lines.append(step.format("rrc", rank, rank, *after, 1))
        for n, peer in enumerate(peers):  # send the peer its chunk, then my sum
            lines.append(f'<tb id="{count + n}" send="{peer}" recv="-1" chan="{peer}">')
            lines.append(step.format("s", peer, peer, -1, -1, 1))
            lines.append(f'<tb id="{2 * count + n}" send="{peer}" recv="-1" chan="{ranks + rank}">')
            lines.append(step.format("s", rank, rank, count - 1, 0, 0))
            lines.append(f'<tb id="{3 * count + n}" send="-1" recv="{peer}" chan="{ranks + peer}">')
            lines.append(step.format("r", peer, peer, count + n, 0, 0))
        lines.append("</gpu>")
    return "\n".join([*lines, "</algo>"])


def test_a_foreign_file_is_read_and_verified() -> None:
    schedule = read_msccl_xml(foreign_all_pairs(4))
    assert schedule.collective == CollectiveSpec(CollectiveName.ALL_REDUCE, 4, 4, in_place=True)
    assert [len(rank.blocks) for rank in schedule.ranks] == [12] * 4
    assert read_msccl_xml(msccl_xml(schedule)) == normal_form(schedule)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('depid="2" deps="0" hasdep="0"', 'depid="-1" deps="-1" hasdep="0"'),  # sends the sum before it is one
        ('depid="1" deps="0" hasdep="1"', 'depid="-1" deps="-1" hasdep="1"'),  # two blocks add to one chunk at once
        ('type="rrc" srcbuf="i" srcoff="0"', 'type="rrc" srcbuf="i" srcoff="1"'),  # adds to another chunk
        ('type="rrc"', 'type="r"'),  # loses my own part
        ('outofplace="0"', 'outofplace="1"'),  # works in the input, so in place alone
    ],
)
def test_a_foreign_file_that_does_something_else_is_refused(old: str, new: str) -> None:
    text = foreign_all_pairs(4)
    assert old in text
    with pytest.raises(CollectiveError) as error:
        read_msccl_xml(text.replace(old, new, 1))
    assert "rank 0" in str(error.value)
