"""The search: shallow graphs, probes against the simulator, the choice under memory, the bound, pins and errors."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.capture import capture
from sennit.cluster import Figure, load
from sennit.demo.gpt import GPT, GPTConfig
from sennit.errors import PlanError
from sennit.ir.graph import OutputKind, Role
from sennit.ir.mesh import Mesh
from sennit.plan import lower, propagate
from sennit.plan.grid import Durations, times
from sennit.plan.search import (
    Choice,
    Keep,
    Kind,
    Part,
    Space,
    Way,
    differences,
    mesh_of,
    planner_of,
    probes_of,
    search,
)
from sennit.plan.search import choose as chooser
from sennit.plan.search.baselines import published
from sennit.plan.search.choose import Group, Option, choose
from sennit.plan.search.config import (
    Config,
    Fixed,
    in_flight,
    partition,
    pattern_of,
    shortened,
    steady_interval,
    units_of,
)
from sennit.plan.search.probe import Wires, probe
from sennit.plan.search.relax import Lanes, UnitOption, least_step
from sennit.plan.search.shallow import shallow
from sennit.plan.search.ways import plan_of
from sennit.plan.verify import verify
from sennit.sim import fuse_attention, optimizer, simulate, simulate_fully

CONFIG = GPTConfig(vocabulary=512, context=128, width=256, heads=8, layers=6)


def graph_of(layers: int, batch: int = 32):
    config = replace(CONFIG, layers=layers)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros((batch, config.context), dtype=torch.int64)
    return capture(model, (tokens, tokens))


@pytest.fixture(scope="module")
def graph():
    return graph_of(6)


@pytest.fixture(scope="module")
def cluster():
    return load("dgx-h100")


def small_cluster(cluster, memory: float):
    device = cluster.device
    figure = Figure(memory, device.memory.basis, "set by a test")
    return type(cluster)(**{**_fields(cluster), "device": type(device)(**{**_fields(device), "memory": figure})})


def _fields(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


# ---- shallow graphs and probes ---------------------------------------------------------------------------------------


def test_a_shallow_graph_is_the_graph_of_three_layers(graph):
    found = shallow(graph)
    assert [(item.copies, len(item.modules)) for item in found.items] == [(1, 0), (1, 1), (4, 4), (1, 1), (1, 0)]
    three = graph_of(3)
    assert [op.kind for op in found.graph.ops] == [op.kind for op in three.ops]
    assert [op.results[0].type for op in found.graph.ops] == [op.results[0].type for op in three.ops]
    assert len(found.graph.outputs) == len(three.outputs)
    lower(propagate(plan_of(Way(tp=2), found)(found.graph, Mesh.parse("dp=4,tp=2"))))


def test_a_copy_may_be_a_pair_of_units() -> None:
    """Blocks of two kinds in turn: forward and backward keep the same pair."""

    class Block(torch.nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.up, self.shift = torch.nn.Linear(8, 8), shift

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.nn.functional.gelu(self.up(x.roll(self.shift, 1) if self.shift else x))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block(number % 2) for number in range(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    graph = capture(Model(), (torch.zeros(2, 4, 8),))
    assert graph.repeats
    assert any(repeat.units < 12 for repeat in graph.repeats)
    assert [unit.module for unit in units_of(shallow(graph)) if unit.module] == [f"blocks.{i}" for i in range(12)]
    found = shallow(graph).graph
    held = {item.path for item in found.inputs if item.role is Role.PARAM}
    assert {output.path for output in found.outputs if output.kind is OutputKind.GRADIENT} == held


def test_lists_beside_a_run_are_units_too() -> None:
    """As in a Swin, whose long resolution repeats and whose others do not."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = ((8, 2), (16, 8))
            self.layers = torch.nn.ModuleList(
                torch.nn.ModuleDict(
                    {
                        "blocks": torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count)),
                        "merge": torch.nn.Linear(width, 16),
                    }
                )
                for width, count in sizes
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                for block in layer["blocks"]:
                    x = x + torch.nn.functional.gelu(block(x))
                x = layer["merge"](x)
            return x.square().mean()

    found = shallow(capture(Model(), (torch.zeros(2, 8),)))
    units = [(item.name, item.copies) for item in found.items if item.modules]
    assert [name for name, _ in units[:2]] == ["layers.0.blocks.0", "layers.0.blocks.1"]
    assert sum(copies for _, copies in units) == 10


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", ["plain", "tp=4", "tp=4,sp", "tp=2,keep=none"])
def test_a_probe_adds_up_to_the_simulated_step(graph, cluster, way, fused):
    """One micro-batch, no replicas: the sum over items is what the simulator says of the deep graph, with either form
    of attention.
    """
    chosen, model = Way.parse(way), shallow(graph)
    mesh, wires = chosen.mesh(1), Wires(cluster)
    costs = probe(model, plan_of(chosen, model), mesh, wires, optimizer("sgd"), fused_attention=fused)
    total = sum(item.copies * cost.seconds for item, cost in zip(model.items, costs, strict=True))
    program = lower(propagate(plan_of(chosen, shallow_of_itself(graph))(graph, mesh)))
    measured = simulate(fuse_attention(program) if fused else program, cluster).span
    assert total == pytest.approx(measured, rel=0.05)


def shallow_of_itself(graph):
    return shallow(replace(graph, repeats=()))


def test_computing_again_takes_time_and_saves_memory(graph, cluster):
    model, wires = shallow(graph), Wires(cluster)
    middle = 2
    costs = {
        keep: probe(model, plan_of(Way(tp=2, keep=keep), model), Way(tp=2).mesh(32), wires, optimizer("adam"))[middle]
        for keep in Keep
    }
    assert costs[Keep.ALL].seconds < costs[Keep.PRODUCTS].seconds < costs[Keep.NONE].seconds * 1.01
    assert costs[Keep.ALL].activations > costs[Keep.PRODUCTS].activations > costs[Keep.NONE].activations
    assert costs[Keep.ALL].parameters == costs[Keep.NONE].parameters


def test_pieces_take_less_working_memory(graph, cluster):
    model, wires = shallow(graph), Wires(cluster)
    whole = probe(model, plan_of(Way(keep=Keep.NONE), model), Way().mesh(32), wires, optimizer("adam"))[2]
    way = Way(keep=Keep.NONE, pieces=4)
    pieces = probe(model, plan_of(way, model), way.mesh(32), wires, optimizer("adam"), {"co": 4})[2]
    assert pieces.working < 0.6 * whole.working
    assert pieces.parameters == whole.parameters
    assert pieces.seconds > whole.seconds


# ---- choices under memory --------------------------------------------------------------------------------------------

options = st.builds(
    Option, st.sampled_from([1.0, 1.5, 2.0, 3.0]), st.sampled_from([1, 2, 5, 9]), st.sampled_from([0, 3, 6])
)
groups = st.lists(
    st.builds(Group, st.integers(1, 4), st.integers(1, 4), st.lists(options, min_size=1, max_size=3).map(tuple)),
    min_size=1,
    max_size=3,
)


def seconds_of(groups, counts):
    return sum(
        number * option.seconds
        for group, row in zip(groups, counts, strict=True)
        for number, option in zip(row, group.options, strict=True)
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(groups, st.integers(1, 150))
def test_the_solver_agrees_with_trying_all(groups, room):
    found, solved = choose(groups, room), chooser._solve(groups, room)
    if found is None or solved is None:
        assert found is None
        assert solved is None
        return
    assert seconds_of(groups, solved) == pytest.approx(seconds_of(groups, found))
    (first, *_) = groups
    choices = [
        UnitOption(option.seconds / 2, option.seconds / 4, option.seconds / 4, option.activations, option.working)
        for option in first.options
    ]
    alone, lanes = choose([first], room), Lanes(((0,),), (first.in_flight,))
    least, exact = (least_step(lanes, choices, first.count, 0.0, room, whole=whole) for whole in (False, True))
    assert least <= exact + 1e-6
    if alone is not None:
        assert exact == pytest.approx(seconds_of([first], alone), rel=1e-3)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=1, max_size=9), st.integers(1, 9))
def test_partition_is_optimal(weights, parts):
    parts = min(parts, len(weights))
    cuts = partition(weights, parts)
    assert len(cuts) == parts
    assert [begin for begin, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == len(weights)
    assert all(end > begin for begin, end in cuts)
    greatest = max(sum(weights[begin:end]) for begin, end in cuts)
    best = min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *inner, len(weights))))
        for inner in itertools.combinations(range(1, len(weights)), parts - 1)
    )
    assert greatest == pytest.approx(best)


def all_cuts(count, parts):
    for inner in itertools.combinations(range(1, count), parts - 1):
        yield list(itertools.pairwise((0, *inner, count)))


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=1, max_size=7), st.integers(1, 7), st.data())
def test_a_cut_keeps_what_is_fixed(weights, parts, data):
    places = st.integers(0, len(weights) - 1)
    stages = data.draw(st.dictionaries(places, st.integers(0, parts - 1), max_size=2))
    begins = data.draw(st.sets(places, max_size=2))

    def keeps(cuts):
        held = all(cuts[stage][0] <= place < cuts[stage][1] for place, stage in stages.items())
        return held and all(any(begin == place for begin, _ in cuts) for place in begins)

    allowed = [cuts for cuts in all_cuts(len(weights), parts) if keeps(cuts)] if parts <= len(weights) else []
    fixed = Fixed(tuple(stages.items()), tuple(begins))
    if not fixed and parts > len(weights):
        return
    found = fixed.partition(weights, parts)
    assert (found is None) == (not allowed)
    if found is not None:
        assert keeps(found)
        greatest = [max(sum(weights[a:b]) for a, b in cuts) for cuts in (found, *allowed)]
        assert greatest[0] == pytest.approx(min(greatest[1:]))


kinds = st.sampled_from([kind for kind in Kind if kind is not Kind.GPIPE and pattern_of(kind, 2, 4, 2)])
parts = st.sampled_from([0.5, 1.0, 1.3, 2.0])


@settings(derandomize=True, deadline=None, max_examples=40)
@given(kinds, st.integers(1, 4), st.integers(8, 14), st.integers(0, 3), st.data())
def test_a_long_schedule_is_as_long_as_its_beginning_says(kind, lanes, rounds, more, data):
    chunks = 2 if kind in (Kind.INTERLEAVED, Kind.DUAL_PIPE_V) else 1
    microbatches = rounds * lanes + (more % lanes if kind is not Kind.INTERLEAVED else 0)
    config = Config(Way(), lanes, 1, 1, microbatches)
    durations = [Durations(data.draw(parts), data.draw(parts), data.draw(parts)) for _ in range(lanes * chunks)]
    whole, short = (pattern_of(kind, lanes, count, chunks) for count in (microbatches, shortened(config)))
    assert whole is not None
    assert short is not None
    beginning = times(short, durations)
    expected = beginning.span + (microbatches - short.microbatches) * steady_interval(beginning)
    assert times(whole, durations).span == pytest.approx(expected, rel=0.02)


unit_options = st.builds(
    UnitOption,
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([0, 2]),
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(kinds, st.integers(1, 3), st.integers(0, 3), st.lists(unit_options, min_size=1, max_size=3), st.data())
def test_no_plan_is_below_the_bound_of_its_schedule(kind, lanes, more, choices, data):
    """Any units in any stages, with any options: the recurrence is not below the program of `relax.py`, whole or not."""
    chunks = 2 if kind in (Kind.INTERLEAVED, Kind.DUAL_PIPE_V) else 1
    microbatches = 2 * lanes + (lanes * more if kind is Kind.INTERLEAVED else more)
    pattern = pattern_of(kind, lanes, microbatches, chunks)
    assert pattern is not None
    counts = st.lists(st.integers(0, 2), min_size=len(choices), max_size=len(choices)).filter(any)
    stages = [data.draw(counts) for _ in range(lanes * chunks)]
    split = any(task.work.value == "W" for task in pattern.rows[0])

    def total(stage, name):
        return sum(number * getattr(option, name) for number, option in zip(stages[stage], choices, strict=True))

    durations = [
        Durations(total(stage, "forward"), total(stage, "backward"), total(stage, "weights"))
        for stage in range(len(stages))
    ]
    flying = in_flight(pattern)
    memory = 1e-9 + max(
        sum(flying[stage] * total(stage, "activations") for stage in own)
        + max(option.working for stage in own for n, option in zip(stages[stage], choices, strict=True) if n)
        for own in pattern.stages
    )
    units = sum(map(sum, stages))
    found = Lanes(pattern.stages, flying, microbatches, split)
    bounds = [least_step(found, choices, units, 0.0, memory, whole=whole) for whole in (False, True)]
    assert bounds[0] <= bounds[1] * (1 + 2e-4)
    assert bounds[1] <= times(pattern, durations).span * (1 + 1e-6)


def test_a_bound_counts_the_bubble_of_equal_stages():
    """For 1F1B and interleaved 1F1B it is exact."""
    for kind, chunks in ((Kind.ONE_F_ONE_B, 1), (Kind.INTERLEAVED, 2)):
        pattern = pattern_of(kind, 4, 8, chunks)
        option = UnitOption(1.0, 1.5, 0.5, 1.0)
        found = least_step(Lanes(pattern.stages, in_flight(pattern), 8), [option], 4 * chunks, 0.0, 1e9, whole=True)
        assert found == pytest.approx(times(pattern, [Durations(1.0, 1.5, 0.5)] * (4 * chunks)).span, rel=2e-4)


# ---- search ----------------------------------------------------------------------------------------------------------

SMALL = Space(tps=(1, 2), sequence=(False,), sizes=(1, 4), zeros=(0, 1), chunks=(2,), fused_attention=False)


@pytest.fixture(scope="module")
def found(graph, cluster):
    return search(graph, cluster, space=SMALL, optimizer="adam")


def test_the_result_is_above_its_bound_and_prints(found):
    choice = found.choice
    assert choice.bound <= choice.step
    assert choice.pp * choice.dp * choice.way.devices == 8
    assert choice.dp * choice.size * choice.microbatches == 32
    assert Choice.parse(str(choice)) == choice
    assert all(other.step >= choice.step for other in found.alternatives)
    parts = found.breakdown
    total = parts.compute + parts.recompute + parts.talk + parts.bubble + parts.sync + parts.optimizer
    assert total == pytest.approx(choice.step)
    assert "compute" in found.why()
    assert f"{100 * choice.gap:.2f} %" in found.certificate()
    if found.lowest is not None:
        seconds = [bound for _, bound in found.lowest.parts]
        assert all(before <= after * (1 + 1e-9) for before, after in itertools.pairwise(seconds))


def test_differences(found):
    other = replace(found.choice, kind=Kind.GPIPE, zero=2, step=1.0)
    rows = {name: (old, new) for name, old, new in differences(found.choice, other)}
    assert rows["zero"] == (str(found.choice.zero), "2")
    assert "schedule" in rows
    assert "way" not in rows
    assert differences(found.choice, found.choice) == ()


def test_pins_hold(graph, cluster):
    pins = {"*": {"tp": 2, "pp": 2, "size": 4}, "blocks.*": {"keep": "none"}}
    found = search(graph, cluster, space=SMALL, optimizer="adam", pins=pins)
    assert (found.choice.way.tp, found.choice.pp, found.choice.size) == (2, 2, 4)
    keeps = {part.keep for stage in found.choice.stages for part in stage if part.item.startswith("blocks")}
    assert keeps == {Keep.NONE}


def test_one_lane_is_exact(graph, cluster):
    found = search(graph, cluster, space=replace(SMALL, most_pp=1), optimizer="adam")
    assert found.choice.gap < 0.001


def test_published_baselines_take_one_option_for_all_layers(graph, cluster):
    probes = probes_of(graph, cluster, "adam")
    for space in published():
        found = search(graph, cluster, space=replace(space, sizes=(4,), tps=(1,)), probes=probes)
        parts = [part for stage in found.choice.stages for part in stage if part.item.startswith("blocks")]
        assert {part.keep for part in parts} == set(space.keeps)


def test_pins_that_contradict_each_other(graph, cluster):
    with pytest.raises(PlanError, match=r"'\*' \(tp = 2\) and '\*\.up' \(tp = 4\) contradict"):
        search(graph, cluster, pins={"*": {"tp": 2}, "*.up": {"tp": 4}})
    with pytest.raises(PlanError, match="both match 'blocks"):
        search(graph, cluster, pins={"blocks.*": {"keep": "all"}, "*.up": {"keep": "none"}})


def test_stages_by_module_name(graph, cluster):
    pins = {
        "*": {"tp": 1, "pp": 4, "size": 4, "schedule": "1f1b"},
        "blocks.3|blocks.3.*": {"stage": 1},
        "head": {"stage": 3},
    }
    found = search(graph, cluster, space=SMALL, optimizer="adam", pins={**pins, "blocks.5.*": {"cut": True}})
    counts = [sum(part.units for part in stage if part.item.startswith("blocks")) for stage in found.choice.stages]
    assert sum(counts[:2]) >= 4  # blocks.0 to blocks.3
    assert counts[0] <= 3
    assert sum(counts[3:]) == 1 or sum(counts[2:]) == 1  # a stage begins at blocks.5
    assert any(part.item.startswith("behind") for part in found.choice.stages[3])


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        (
            {"blocks.1.*": {"stage": 2}, "blocks.4.*": {"stage": 1}},
            r"'blocks\.1\.\*' \(stage = 2\) and 'blocks\.4\.\*' \(stage = 1\) contradict .*'blocks\.1' comes before 'blocks\.4'",
        ),
        (
            {"blocks.1.*": {"stage": 1}, "*.1.up": {"stage": 0}},
            r"'blocks\.1\.\*' \(stage = 1\) and '\*\.1\.up' \(stage = 0\) contradict each other: both match 'blocks\.1'",
        ),
        (
            {"blocks.1.*|blocks.4.*": {"stage": 1}, "blocks.3.*": {"cut": True}},
            r"\(stage = 1\) and 'blocks\.3\.\*' \(cut at 'blocks\.3'\) contradict each other: 'blocks\.1' and 'blocks\.4' are in one stage",
        ),
        ({"blocks.1.*": {"stage": 0}, "blocks.2.*": {"stage": 3}}, "there are 0 units between"),
        ({"blocks.1.*": {"stage": 5}}, "which has 2 units before it"),
        (
            {"blocks.4.*": {"stage": 3}, "*": {"pp": 2, "schedule": "1f1b"}},
            r"no cut into 2 stages keeps the pins 'blocks",
        ),
        (
            {"*": {"pp": 1}, "blocks.*": {"schedule": "1f1b"}},
            r"\(pp = 1\) and 'blocks\.\*' \(schedule = 1f1b\) contradict",
        ),
        ({"blocks.9.*": {"stage": 1}}, r"'blocks\.9\.\*' matches no module"),
        ({"blocks.1.*": {"stage": -1}}, "at least 0"),
    ],
)
def test_stages_that_cannot_be(graph, cluster, pins, message):
    with pytest.raises(PlanError, match=message):
        search(graph, cluster, space=SMALL, optimizer="adam", pins=pins)


def test_a_pin_that_matches_nothing(graph, cluster):
    with pytest.raises(PlanError, match=r"'\*\.mlp' matches no module"):
        search(graph, cluster, pins={"*.mlp": {"tp": 2}})
    with pytest.raises(PlanError, match="did you mean 'keep'"):
        search(graph, cluster, pins={"*": {"keeps": "all"}})


def test_a_cluster_too_small_says_by_how_much(graph, cluster):
    with pytest.raises(PlanError, match=r"does not fit: .* lacks [0-9.]+ GB") as caught:
        search(graph, small_cluster(cluster, 2e6), space=SMALL, optimizer="adam")
    assert "such devices" in str(caught.value)


def test_less_memory_makes_units_compute_again(graph, cluster, found):
    pins = {"*": {"tp": 1, "pp": 1, "size": 4, "zero": 1}}
    rich = search(graph, cluster, space=SMALL, optimizer="adam", pins=pins)
    tight = search(graph, small_cluster(cluster, 0.75 * rich.choice.memory), space=SMALL, optimizer="adam", pins=pins)
    assert tight.choice.step > rich.choice.step
    assert tight.choice.memory <= 0.75 * rich.choice.memory
    assert any(part.keep is not Keep.ALL for stage in tight.choice.stages for part in stage)


def test_ways_print_and_parse():
    for text in ("plain", "tp=8,sp,vocab", "cp=4", "tp=2,co=4,keep=none", "ep=8,keep=products"):
        assert str(Way.parse(text)) == text
    assert str(Part("h.1", 3, Keep.NONE, 2)) == '"h.1" * 3 as "co=2,keep=none"'


# ---- what a choice means ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide():
    """Of a width at which products and not launches decide, as they do where plans are searched for."""
    config = replace(CONFIG, width=2048, context=512, vocabulary=4096)
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros((32, config.context), dtype=torch.int64)
    return capture(model, (tokens, tokens))


@pytest.mark.parametrize(
    ("pins", "step", "memory"),  # how far the estimate may be off
    [
        ({"*": {"tp": 2, "pp": 1, "size": 4, "zero": 0}}, 0.05, 0.05),
        ({"*": {"tp": 2, "pp": 2, "size": 4, "zero": 0, "schedule": "1f1b"}}, 0.05, 0.05),
        ({"*": {"tp": 1, "pp": 2, "size": 4, "zero": 0, "schedule": "zero-bubble-h1"}}, 0.05, 0.25),
        ({"*": {"tp": 1, "pp": 2, "size": 4, "zero": 0, "schedule": "1f1b"}, "blocks.*": {"keep": "none"}}, 0.05, 0.1),
        ({"*": {"tp": 1, "pp": 1, "size": 1, "zero": 2}}, 0.1, 0.1),
        ({"*": {"tp": 1, "pp": 2, "size": 1, "zero": 3, "schedule": "1f1b"}}, 0.15, 0.25),
        ({"*": {"tp": 2, "pp": 1, "size": 4, "zero": 0}, "blocks.*": {"co": 4}}, 0.1, 0.1),
        ({"*": {"tp": 1, "pp": 4, "size": 1, "zero": 0, "schedule": "interlaced"}}, 0.25, 0.1),
    ],
)
def test_an_estimate_is_near_the_simulation_of_the_lowered_plan(wide, cluster, pins, step, memory):
    found = search(wide, cluster, space=replace(SMALL, keeps=(Keep.ALL,)), optimizer="adam", pins=pins)
    plan = planner_of(found.choice)(wide, mesh_of(found.choice))
    program = lower(propagate(plan))
    verify(program, plan.graph)
    simulated = simulate_fully(program, cluster, optimizer=optimizer("adam")).timeline
    assert found.choice.step == pytest.approx(simulated.span, rel=step)
    assert found.choice.memory == pytest.approx(max(simulated.peak_memory(device) for device in range(8)), rel=memory)


def test_an_estimate_with_fused_attention_is_near_the_simulation_of_the_lowered_plan(wide, cluster):
    pins = {"*": {"tp": 2, "pp": 2, "size": 4, "zero": 0, "schedule": "1f1b"}}
    space = replace(SMALL, keeps=(Keep.ALL,), fused_attention=True)
    found = search(wide, cluster, space=space, optimizer="adam", pins=pins)
    program = fuse_attention(lower(propagate(planner_of(found.choice)(wide, mesh_of(found.choice)))))
    simulated = simulate_fully(program, cluster, optimizer=optimizer("adam")).timeline
    assert found.choice.step == pytest.approx(simulated.span, rel=0.15)
    assert found.choice.memory == pytest.approx(max(simulated.peak_memory(device) for device in range(8)), rel=0.25)


def test_a_choice_is_for_one_model(found):
    with pytest.raises(PlanError, match=r"the plan names 'h\.7', which graph 'GPT' has not"):
        planner_of(replace(found.choice, stages=((Part("h.7", 1),),)))(graph_of(2), mesh_of(found.choice))
