from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from reshard_strategies import Pair, even_pairs

from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard import Candidate, Mode, StepKind, plan
from sennit.reshard.ends import Ends
from sennit.reshard.normal_form import Digits, Problem, constructive, search
from sennit.reshard.one_mesh import problem_of


def problem(pair: Pair) -> Problem:
    return problem_of(Ends.of(pair[0].refined(), pair[1].refined()))


def split_by(of: Problem, digits: Digits) -> int:
    return prod(of.sizes[axis] for axis in digits)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(even_pairs())
def test_the_constructive_plan_always_exists_and_is_flat(pair: Pair) -> None:
    of = problem(pair)
    for form in (constructive(of), search(of)):
        assert dict(of.source).items() <= dict(form.sliced).items()
        assert dict(of.target).items() <= dict(form.ungathered).items()
        assert split_by(of, form.sliced) == split_by(of, form.ungathered)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(even_pairs())
def test_collective_plans_are_in_normal_form_within_the_bound(pair: Pair) -> None:
    found = plan(*pair, mode=Mode.COLLECTIVE)
    flat = (StepKind.ALL_TO_ALL, StepKind.PERMUTE, StepKind.EXCHANGE)
    order = [0 if s.kind is StepKind.SLICE else 1 if s.kind in flat else 2 for s in found.steps]
    assert order == sorted(set(order))
    for step in found.steps:
        if step.kind in flat:
            assert step.source.local_elements() == step.result.local_elements()
    assert found.certificate.peak <= found.certificate.peak_bound
    searched = {Candidate.SEARCH} & {c.candidate for c in (found.certificate, *found.alternatives)}
    # the theorem: on aligned digits the plan receives the minimum
    assert searched or found.certificate.received == pytest.approx(found.certificate.received_bound)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(even_pairs())
def test_searching_is_never_worse_in_bytes(pair: Pair) -> None:
    found = plan(*pair, mode=Mode.COLLECTIVE)
    received = {c.candidate: c.received for c in (found.certificate, *found.alternatives)}
    if Candidate.SEARCH in received:
        assert received[Candidate.SEARCH] <= received[Candidate.CONSTRUCTIVE]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(even_pairs())
def test_a_direct_exchange_receives_the_minimum(pair: Pair) -> None:
    certificate = plan(*pair, mode=Mode.DIRECT).certificate
    assert certificate.received == pytest.approx(certificate.received_bound)


@pytest.mark.parametrize(
    ("mesh", "source", "target", "kinds"),
    [
        ("x=4", "[8{x},8]", "[8,8{x}]", ["all_to_all"]),
        ("x=4", "[8{x},8]", "[8,8]", ["all_gather"]),
        ("x=4", "[8,8]", "[8,8{x}]", ["slice"]),
        ("x=2,y=2", "[8{x},8]", "[8{y},8]", ["permute"]),
        ("x=2,y=2", "[8{x,y},8]", "[8{y,x},8]", ["permute"]),
        # slicing the free axis first leaves only a gather
        ("x=2,y=2", "[8{x},8]", "[8,8{y}]", ["slice", "all_gather"]),
        ("x=2,y=2", "[8{x,y},8]", "[8{x},8{y}]", ["all_to_all"]),
        # part of an axis takes the digit of the other part, which moves on to a local one
        ("x=4", "[8{x},8]", "[8{x:1},8]", ["exchange"]),
        # the paper's example of why primes matter: 2 blocks to 3 blocks
        ("x=2,y=3", "[6{x}]", "[6{y}]", ["slice", "permute", "all_gather"]),
        ("x=2,y=2", "[8]{sum:x}", "[8{x}]", ["reduce_scatter"]),
        ("x=4", "[8]{sum:x}", "[8]", ["all_reduce"]),
        ("x=4", "[8]", "[8]{sum:x}", ["partial"]),
        ("x=4", "[8{x}]", "[8]{sum:x}", ["all_gather", "partial"]),
        ("x=4", "[7{x}]", "[7]", ["exchange"]),
    ],
)
def test_known_plans(mesh: str, source: str, target: str, kinds: list[str]) -> None:
    on = Mesh.parse(mesh)
    found = plan(Layout.parse(source, on), Layout.parse(target, on), mode=Mode.COLLECTIVE)
    assert [step.kind.value for step in found.steps] == kinds


def test_two_blocks_to_three_receive_what_the_search_can_keep() -> None:
    mesh = Mesh.parse("x=2,y=3")
    source, target = Layout.parse("[6{x}]", mesh), Layout.parse("[6{y}]", mesh)
    assert plan(source, target, mode=Mode.DIRECT).certificate.received == 1
    found = plan(source, target, mode=Mode.COLLECTIVE).certificate
    assert found.received == pytest.approx(5 / 3)
    assert found.peak == found.peak_bound == 3


def test_twelve_prime_axes() -> None:
    names = [f"a{position}" for position in range(12)]
    mesh = Mesh.make(dict.fromkeys(names, 2))
    source = Layout.block(mesh, (4096, 4096), {0: names[:6], 1: names[6:10]})
    target = Layout.block(mesh, (4096, 4096), {0: names[::-2], 1: names[::4]})
    for mode in Mode:
        certificate = plan(source, target, mode=mode).certificate
        assert certificate.received == pytest.approx(certificate.received_bound)
