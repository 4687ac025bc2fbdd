"""Fill in what a plan leaves open: a strategy for every operator on every axis, a stage and a moment for each.

**Layouts.** Operators are visited in order, one axis at a time; axes are independent, but for the digits of a dim: a
later axis takes only what the earlier ones left free. A decided operator does what the plan says, and so do the
parameters it reads, through their transposes. Any other follows what its reads have: among the strategies of its rule
(`capture/rules/`) take the one with the fewest bytes to move now, then the least work. So a split travels until an
operator needs the whole, a contraction over a split dim leaves a pending sum, and the sum travels through linear
operators only where that is free. Five rules make the decisions of Megatron give Megatron's collectives, forward and
backward:

- *join*: a pending sum passes only through operators that move values, scale them, or add sums that are all pending
  (`Letters.carries`); anything else resolves it. Where autograd adds the gradients of several readers, a whole one joins as a part;
- *hoist*: a redistribution sits at the root of a chain of views and serves all of them (`plan/lower.py`);
- *return*: a pending gradient that must be reduced is scattered to where the value lies that it is the gradient of,
  also where nothing
  else that its reader reads is split (a factor of positions, the weight of a norm);
- *home*: the gradient of a parameter that is split where it is used is made in the parameter's piece where that moves
  less than reducing the whole
  (a table of words, against the gradients of one micro-batch's tokens), also where it is a sum over several readers (tied weights);
- *mirror*: a product of the backward pass is split as the forward product that it is a derivative of. With y = x w and
  letters m, k, n:
  dx = g w' sums over n, dw = x' g sums over m, so each letter of the forward product names one of the backward product. By
  bytes alone it might be cheaper to gather a weight than a gradient, once; but then its derivative is in the wrong place.

**Sources.** Operators that read nothing but the seed (positions, masks made of them, random numbers, fills) can be made
in any piece, and so can what is made of whole inputs (the one-hot rows of targets), and what repeats whole values along
a new dim (a bias of relative positions, added to the mask of each sample: whole, it has the scores of all samples).
They are decided last, backwards: split as all their readers want them, whole where readers differ, since a slice is
free.

**Time.** A time axis (micro-batches) is propagated like any other, with one difference: nothing can be gathered over it
while micro-batches are in flight. Four moments make it work:

- *before*: operators that no parameter and no micro-batch flows into run once, on the whole batch. The number of
  targets that
  are not ignored is such a value: so a mean stays the mean over the whole batch. What of it is read one micro-batch at a time alone, on its own
  stage, is made with each of them;
- *during*: operators on a split of the time axis run once per micro-batch;
- *after*: operators on values that are pending over the time axis run once, on the accumulated sums. A sum is
  accumulated where it is smallest, so those that make it
  smaller run during;
- *each*: what could run before, and makes much of little (a bias for every pair of positions, gathered from a table),
  runs in every task that reads it and is let go with the task
  (`plan/propagate_time.py` has both rules).

An operator that needs the whole of something that depends on parameters (batch statistics, say) cannot be split in
time.

**Meshes.** Each operator lies on the mesh of its stage. An axis that a stage does not have makes one piece there, and
one of another size as many as that: where a value comes from such a stage, its split counts with the stride of as many
blocks, and a pending sum as the whole, since it is reduced before it leaves.

**Homes of parameters.** A plan may cut a parameter where it lives (ZeRO) without saying anything of its readers: views
and casts follow the cut, and any other reader gets the whole.

**Stages.** Operators placed by the plan stay; a backward operator goes with its forward one, or to the least stage that
it has gradients from, if that is less; a sum of gradients goes to the least stage of its terms; anything else to the
greatest stage that it reads from, or the least that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sennit.capture.rules import RuleBook, Source, Strategy
from sennit.ir.graph import Graph, Op, Phase
from sennit.ir.layout import Entry
from sennit.ir.mesh import Axis, AxisKind
from sennit.plan.plan import Plan
from sennit.plan.propagate_axis import AxisPass
from sennit.plan.propagate_index import Entries, Moment, PlanIndex

__all__ = ["Decisions", "Entries", "Moment", "propagate", "stages_of"]


@dataclass(frozen=True, slots=True)
class Decisions:
    """A complete plan.

    `values` gives the entries that each value has where it is made, `inputs` those that an input of the graph has on a
    stage that reads it.
    """

    plan: Plan
    strategies: Mapping[str, Mapping[str, Strategy]]  # operator -> axis -> strategy; absent axes are replicated
    values: Mapping[str, Entries]
    inputs: Mapping[tuple[str, int], Entries]
    stage: Mapping[str, int]
    moment: Mapping[str, Moment]

    def need(self, op: Op, position: int) -> Entries:
        """What an operator wants of its read at `position`."""
        return {axis: strategy.reads[position] for axis, strategy in self.strategies[op.name].items()}

    def makes(self, op: Op, position: int) -> Entries:
        return {axis: strategy.results[position] for axis, strategy in self.strategies[op.name].items()}


def propagate(plan: Plan, sources: Sequence[Source] = ()) -> Decisions:
    """Decide what the plan leaves open. `sources` give rules for operators that neither users nor our table know."""
    graph = plan.graph
    stage = stages_of(plan)
    index = PlanIndex(plan, RuleBook(graph.types(), sources), stage)
    strategies: dict[str, dict[str, Strategy]] = {op.name: {} for op in graph.ops}
    values: dict[str, dict[str, Entry | None]] = {value.name: {} for op in graph.ops for value in op.results}
    inputs: dict[tuple[str, int], dict[str, Entry | None]] = {
        (name, holder): {} for name, holders in index.holders.items() for holder in holders
    }
    moment = {op.name: Moment.BEFORE for op in graph.ops}
    for axis in _by_freedom(plan):
        AxisPass(index, axis.name, axis.kind is AxisKind.TIME, strategies, values, inputs).run(moment)
    if not any(axis.size > 1 for axis in plan.mesh.time):
        moment = {op.name: Moment.DURING for op in graph.ops}
    return Decisions(plan, strategies, values, inputs, stage, moment)


def _by_freedom(plan: Plan) -> list[Axis]:
    """The axes with the least choice first: in time nothing can be moved, and the batch is cut as the plan says."""
    cut = {axis for split in plan.inputs for axis in split.axes}
    axes: dict[str, Axis] = {}
    for mesh in plan.stages:
        axes.update({axis.name: axis for axis in mesh.axes if axis.size > 1 and axis.name not in axes})
    return sorted(axes.values(), key=lambda axis: (axis.kind is not AxisKind.TIME, axis.name not in cut))


# ---- stages ----------------------------------------------------------------------------------------------------------


def stages_of(plan: Plan) -> dict[str, int]:
    """The stage of every operator: where the plan placed it, or as the rules above say."""
    placed = dict(plan.places)
    graph = plan.graph
    if len(plan.stages) == 1:
        return {op.name: 0 for op in graph.ops}
    producers = graph.producers()
    stage: dict[str, int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD:
            _place_forward(op, placed, producers, stage)
    _place_sources(graph, stage)
    home_of = _homes_of_backward(graph, stage)
    for op in graph.ops:
        if op.phase is Phase.BACKWARD:
            above = [producers[name] for name in op.reads if name in producers]
            # gradients flow from late stages to early ones: nothing waits for the gradients of a stage before its own
            latest = min((stage[maker.name] for maker in above if maker.phase is Phase.BACKWARD), default=None)
            if op.name in placed:
                stage[op.name] = placed[op.name]
                continue
            home = home_of.get((op.seq, op.module), home_of.get((op.seq, None)))
            if home is None:
                terms = [stage[maker.name] for maker in above]
                home = (min if op.seq is None else max)(terms, default=0)
            stage[op.name] = home if latest is None else min(home, latest)
    return stage


def _homes_of_backward(graph: Graph, stage: Mapping[str, int]) -> dict[tuple[int | None, str | None], int]:
    """Where the backward of an autograd node belongs: by its number and module, and by its number alone (None).

    One node can trace to several operators, and its backward goes with the last of them. Operators that autograd does
    not follow (masks, positions) carry the number of the node that comes next, whatever module that is in: so the
    module is asked first.
    """
    found: dict[tuple[int | None, str | None], int] = {}
    for op in graph.ops:
        if op.phase is Phase.FORWARD and op.seq is not None:
            for key in ((op.seq, op.module), (op.seq, None)):
                found[key] = max(found.get(key, 0), stage[op.name])
    return found


def _place_forward(op: Op, placed: Mapping[str, int], producers: Mapping[str, Op], stage: dict[str, int]) -> None:
    if op.name in placed:
        stage[op.name] = placed[op.name]
        return
    above = [stage[producers[name].name] for name in op.reads if name in producers and producers[name].name in stage]
    if above:
        stage[op.name] = max(above)


def _place_sources(graph: Graph, stage: dict[str, int]) -> None:
    """Forward operators that read nothing placed go to the least stage that reads them."""
    users: dict[str, list[Op]] = {}
    for op in graph.ops:
        for name in op.reads:
            users.setdefault(name, []).append(op)
    for op in reversed(graph.ops):
        if op.phase is Phase.FORWARD and op.name not in stage:
            below = [
                stage[user.name] for value in op.results for user in users.get(value.name, []) if user.name in stage
            ]
            stage[op.name] = min(below, default=0)
