"""The least step of a schedule, relaxed: a program over how many units each stage has and what they keep.

A schedule says which stages a lane has, and how many micro-batches k_s of stage s are in flight. With M micro-batches,
n_sc units in stage s that take option c (f_c, b_c and w_c seconds of F, B and W for a micro-batch, a_c bytes of
activations for each one in flight, z_c of working memory), q bytes of parameters, gradients and state and o seconds of
the optimizer for a unit, r_l and p_l lane l's share of the seconds and bytes of the rest of the model, and i_l the
first stage of lane l:

    minimise    T
    subject to  ahead_l + M work_l + o n_l                              <=  T         for each lane l             (own)
                ahead_l + M work'_l + behind_l + o n_0                  <=  T         for each lane l             (back)
                sum over s on l, c of  n_sc (q + k_s a_c)  +  p_l + z_l <=  memory    for each lane l
                z_l >= z_c n_sc / n,  z_l >= the least z_c              for s on l
                sum over s, c of n_sc = n,  sum of r_l, and of p_l = those of the rest
                y_s <= 1,  y_s <= sum over c of n_sc,  sum of y_s >= stages - items of the rest

    ahead_l  = sum over s < i_l, c of n_sc f_c          work_l  = r_l + sum over s on l, c of n_sc (f_c + b_c + w_c)
    behind_l = sum over s < i_l, c of n_sc b'_c         work'_l = the same without w_c and r_l where W is apart; b' = b, else b + w

**No plan with this schedule has a shorter step.** *(own)*: the first task of lane l is F of stage i_l (F of a lane's
later stages, B and W need it), which needs F of all stages before it for the same micro-batch: the lane starts at
`ahead_l`, and then runs M times all its work, and its optimizer. *(back)*: of the lane's tasks other than W, each one
of micro-batch m is before B of stage i_l for m (dependencies), so the last of these B's ends after all of them; behind
it, B of the stages before i_l follow one after another, down to stage 0, whose lane then runs its optimizer. Memory: in
the state with the most micro-batches in flight the lane holds k_s a_c for each unit, and the working memory of one of
them. No stage is empty: those without a unit have an item of the rest each. Units are taken as divisible, in any order,
and the rest of the model too; sums of gradients and transfers between stages are left out: each can only make the step
longer. For equal stages (own) and (back) are the bubbles of 1F1B, interleaved 1F1B and, with b = w, of zero bubble H1
and DualPipeV.

With `whole`, n_sc are whole numbers and z_l >= z_c wherever n_sc > 0: an integer program, of which HiGHS's bound is
taken when its time is over. `Counted` says which parts are in; each one leaves the bound valid, so that the gap can be
taken apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

__all__ = ["Counted", "Lanes", "Rest", "UnitOption", "least_step"]


@dataclass(frozen=True, slots=True)
class Counted:
    """What a bound counts besides the seconds of units and what they hold: what replicas exchange beside units (ZeRO),
    the memory of the rest of the model, working memory, the bubble (`ahead` and `behind`), the optimizer, and that
    units are whole.
    """

    traffic: bool = True
    rest: bool = True
    working: bool = True
    bubble: bool = True
    optimizer: bool = True
    whole: bool = True


@dataclass(frozen=True, slots=True)
class UnitOption:
    forward: float
    backward: float
    weights: float
    activations: float
    working: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.weights


@dataclass(frozen=True, slots=True)
class Lanes:
    """A schedule as the bound sees it: the stages of each lane, micro-batches in flight by stage, how many there are,
    whether W is apart.
    """

    stages: tuple[tuple[int, ...], ...]
    in_flight: tuple[int, ...]
    microbatches: int = 1
    split: bool = False


@dataclass(frozen=True, slots=True)
class Rest:
    """What of the model is not of these units: how many items, seconds of a micro-batch; bytes of parameters, gradients
    and state, and the least of activations.
    """

    items: int = 0
    seconds: float = 0.0
    static: float = 0.0


def least_step(
    lanes: Lanes,
    options: Sequence[UnitOption],
    units: int,
    static: float,
    memory: float,
    rest: Rest | None = None,
    *,
    optimizer: float = 0.0,
    bubble: bool = True,
    whole: bool = False,
    limit: float = 1.0,
) -> float:
    """The program's optimum, or a bound below it; infinite where nothing fits.

    `static` and `optimizer` are q and o of the module's text; `limit` is in seconds of an integer program.
    """
    rest = rest or Rest()
    scale = lanes.microbatches * (max(option.seconds for option in options) * units + rest.seconds)
    program = _Program(lanes, options, units, static, memory, whole)
    for lane in range(len(lanes.stages)):
        program.time(lane, scale, optimizer, bubble)
        program.room(lane)
    program.filled(rest.items)
    program.shared("seconds", rest.seconds * lanes.microbatches / scale)
    program.shared("bytes", rest.static / memory)
    return program.solve(limit) * scale


class _Program:
    """Columns: T, n by stage and option, and for each lane its share of the rest's seconds and bytes, and its working
    memory. Seconds are counted in parts of all work on one lane, bytes in parts of the memory.
    """

    def __init__(
        self,
        lanes: Lanes,
        options: Sequence[UnitOption],
        units: int,
        static: float,
        memory: float,
        whole: bool,
    ) -> None:
        import highspy

        self.lanes, self.options, self.units, self.static, self.memory = lanes, options, units, static, memory
        self.whole = whole
        self.solver = highspy.Highs()  # type: ignore[no-untyped-call]
        self.solver.setOptionValue("output_flag", False)
        self.count = 0
        self.total = self._column(cost=1.0)
        stages = range(len(lanes.in_flight))
        self.number = {
            (stage, which): self._column(high=float(units), integral=whole)
            for stage in stages
            for which in range(len(options))
        }
        self.share = {
            (what, lane): self._column()
            for what in ("seconds", "bytes", "working")
            for lane in range(len(lanes.stages))
        }
        every = list(self.number.values())
        self._row(float(units), float(units), dict.fromkeys(every, 1.0))

    def _column(self, *, cost: float = 0.0, high: float = inf, integral: bool = False) -> int:
        import highspy

        self.solver.addCol(cost, 0.0, high, 0, [], [])
        if integral:
            self.solver.changeColIntegrality(self.count, highspy.HighsVarType.kInteger)
        self.count += 1
        return self.count - 1

    def _row(self, low: float, high: float, entries: dict[int, float]) -> None:
        self.solver.addRow(low, high, len(entries), list(entries), list(entries.values()))

    def time(self, lane: int, scale: float, optimizer: float, bubble: bool) -> None:
        """(own) and (back) of a lane."""
        lanes, microbatches = self.lanes, self.lanes.microbatches
        own = lanes.stages[lane]
        before = range(min(own)) if bubble else range(0)
        zero = next(stages for stages in lanes.stages if 0 in stages)
        for back in (False, True) if bubble else (False,):
            row = {self.total: -1.0}

            def add(stage: int, which: int, seconds: float, row: dict[int, float] = row) -> None:
                column = self.number[stage, which]
                row[column] = row.get(column, 0.0) + seconds / scale

            if not (back and lanes.split):
                row[self.share["seconds", lane]] = 1.0
            for which, option in enumerate(self.options):
                work = option.forward + option.backward + (0.0 if back and lanes.split else option.weights)
                behind = option.backward + (0.0 if lanes.split else option.weights)
                for stage in own:
                    add(stage, which, microbatches * work)
                for stage in before:
                    add(stage, which, option.forward + (behind if back else 0.0))
                for stage in zero if back else own:
                    add(stage, which, optimizer)
            self._row(-inf, 0.0, row)

    def room(self, lane: int) -> None:
        """What a lane holds, and its working memory."""
        working = self.share["working", lane]
        row = {working: 1.0, self.share["bytes", lane]: 1.0}
        least = min(option.working for option in self.options) / self.memory
        self._row(least, inf, {working: 1.0})
        for stage in self.lanes.stages[lane]:
            for which, option in enumerate(self.options):
                column = self.number[stage, which]
                held = self.static + self.lanes.in_flight[stage] * option.activations
                row[column] = held / self.memory
                if option.working > least * self.memory:
                    used = column
                    if self.whole:
                        used = self._column(high=1.0, integral=True)
                        self._row(-inf, 0.0, {column: 1.0 / self.units, used: -1.0})
                    size = option.working / self.memory / (1.0 if self.whole else self.units)
                    self._row(0.0, inf, {working: 1.0, used: -size})
        self._row(-inf, 1.0, row)

    def filled(self, others: int) -> None:
        """No stage is empty."""
        stages = range(len(self.lanes.in_flight))
        used = [self._column(high=1.0) for _ in stages]
        for stage, column in zip(stages, used, strict=True):
            units = {self.number[stage, which]: 1.0 for which in range(len(self.options))}
            self._row(0.0, inf, {**units, column: -1.0})
        self._row(float(len(used) - others), inf, dict.fromkeys(used, 1.0))

    def shared(self, what: str, amount: float) -> None:
        self._row(amount, amount, {self.share[what, lane]: 1.0 for lane in range(len(self.lanes.stages))})

    def solve(self, limit: float) -> float:
        import highspy

        if self.whole:
            self.solver.setOptionValue("time_limit", limit)
            self.solver.setOptionValue("mip_rel_gap", 1e-4)
        self.solver.run()
        status = self.solver.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal and not self.whole:
            return float(self.solver.getInfo().objective_function_value)
        if status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
            return max(0.0, float(self.solver.getInfo().mip_dual_bound))
        return inf
