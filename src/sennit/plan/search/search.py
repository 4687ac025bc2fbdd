"""Search: which way to split, how many stages and replicas, which micro-batches, schedule and sharing are fastest and
fit.

The space is finite: every way that `space` lists, times every mesh pp x dp that uses all devices, times the sizes of
micro-batches that divide the batch, times what replicas share, times the schedules. `search` walks it best first:

1. each schedule of each config has a bound from one probe of its way (`Estimator.bound`), and a guess: the bound, and
   the bubble that the schedule has with
   equal stages;
2. the one with the least guess is bounded again, by a linear program with the memory of its lanes, and waits for its
   turn;
3. when that comes, it is estimated. The walk ends when no guess is below the best step found, or after
   `Space.estimates` of them;
4. then the least bounds of what was left are sharpened: by their linear programs, then by whole units, until the least
   of all is as sharp as we know.

The least bound of all is a certificate: no plan of the space, under any of its schedules, any cut into stages and any
choice of what to keep, is faster. `Found.why` says where the step goes, which is why it is above the bound.

Pins limit the space by module (`pins.py`). `pins={"*": {"tp": 4}, "*.h.*": {"keep": "none"}}`: `keep`, `co`, `stage`
and `cut` hold for the units that the glob matches, everything else (`tp`, `sp`, `cp`, `ep`, `vocab`, `pp`, `dp`,
`size`, `zero`, `schedule`) for the whole plan, since all units share their devices.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import count

from sennit.cluster import Cluster
from sennit.errors import PlanError
from sennit.ir.graph import Graph, Role
from sennit.plan.search.choice import Choice, Kind
from sennit.plan.search.config import Config, Estimate, Shortage
from sennit.plan.search.costs import CostBook, Probes
from sennit.plan.search.estimate import Estimator
from sennit.plan.search.found import Found, Lowest
from sennit.plan.search.pins import Pins
from sennit.plan.search.probe import Wires
from sennit.plan.search.relax import Counted
from sennit.plan.search.shallow import shallow
from sennit.plan.search.space import Space
from sennit.plan.search.unequal import UnequalStages
from sennit.plan.search.ways import Keep, Way
from sennit.sim.optimizer import Optimizer
from sennit.sim.optimizer import optimizer as named_optimizer

__all__ = ["batch_of", "probes_of", "search"]

_TOLERANCE = 1e-4  # relative: within which integer programs are solved
_UNLIKE = (
    1.25  # how much longer the longest unit takes than the shortest where stages may have different numbers of replicas
)
_MOST_UNEQUAL = 8  # lanes of such plans
_RECYCLING = (Kind.SEVERAL_FORWARD, Kind.ONE_F_ONE_B)


def search(
    graph: Graph,
    cluster: Cluster,
    *,
    space: Space | None = None,
    optimizer: Optimizer | str = "adamw-master",
    pins: Mapping[str, Mapping[str, object]] | None = None,
    say: Callable[[str], None] = lambda message: None,
    most_alternatives: int = 8,
    probes: Probes | None = None,
) -> Found:
    """The fastest plan that fits on all devices of the cluster.

    The batch of the graph is that of a whole step. Searches of several spaces for one model share their `probes`
    (`probes_of`). A model whose units run several times on their own results, of which the last is trained, has
    pipelines of its own: 3F1B, and passes one after another (`Estimator.recycled`).
    """
    space = space or Space()
    probes = probes or probes_of(graph, cluster, optimizer, fused_attention=space.fused_attention)
    return _Search(graph, cluster, space, probes, pins or {}, say, most_alternatives).run()


def probes_of(
    graph: Graph, cluster: Cluster, optimizer: Optimizer | str = "adamw-master", *, fused_attention: bool = True
) -> Probes:
    """What units cost, to be found as searches ask for it."""
    chosen = named_optimizer(optimizer) if isinstance(optimizer, str) else optimizer
    return Probes(shallow(graph), Wires(cluster), chosen, batch_of(graph), fused_attention=fused_attention)


def batch_of(graph: Graph) -> int:
    """Samples of a step: the first dim of what the model is called with."""
    sizes = {item.value.type.shape[0] for item in graph.inputs if item.role is Role.INPUT and item.value.type.shape}
    if len(sizes) != 1:
        raise PlanError(
            f"the inputs of graph {graph.name!r} have first dims of {sorted(sizes)}",
            fix="give every input the batch as its first dim",
        )
    return sizes.pop()


class _Search:
    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        space: Space,
        probes: Probes,
        pins: Mapping[str, Mapping[str, object]],
        say: Callable[[str], None],
        most: int,
    ) -> None:
        self.graph, self.cluster, self.say, self.most = graph, cluster, say, most
        self.batch = probes.batch
        self.model = probes.model
        self.pins = Pins.read(pins, graph, self.model)
        self.space = self.pins.limit(space)
        self.book = CostBook(
            self.model,
            probes.wires,
            probes.optimizer,
            self.batch,
            keeps=self.space.keeps,
            pieces=self.space.pieces,
            pinned=self.pins.units,
            probes=probes,
        )
        self.estimator = Estimator(self.book, self.pins.fixed, equal_stages=space.equal_stages, counted=space.counted)
        self.found: list[Estimate] = []
        self.shortages: list[Shortage] = []
        self.estimated = 0
        self.cuttable: dict[int, bool] = {}  # numbers of stages that pins allow, or do not
        self.open: list[
            tuple[float, int, Config, tuple[Kind, int]]
        ] = []  # bounds of schedules that were not estimated, or were
        self.lowest: Lowest | None = None
        self.exact: dict[Config, float] = {}  # bounds of configs with one lane that were estimated
        self.roomy: set[Config] = set()  # configs, less what replicas share, in which every unit can keep everything

    def run(self) -> Found:
        configs = list(self.configs())
        if not configs:
            raise PlanError(
                f"no mesh of {self.cluster.devices} devices divides a batch of {self.batch}",
                where=f"pins {self.pins}" if self.pins.given else f"cluster {self.cluster.name!r}",
                fix="change the batch size, the number of devices, or the pins",
            )
        self.check_passes()
        stages = {config.pp * chunks for config in configs for _, chunks in self.named(config)}
        stages |= {config.pp for config in configs if config.pp > 1 and self.space.interlaced}
        if not any(map(self.keeps_pins, stages)):
            raise self.pins.cannot_be_cut(sorted(stages))
        best = self.walk(configs)
        least = self.certify(best)
        if self.estimator.passes != 1:
            for kind in self.recycling():
                estimate = partial(self.estimator.recycled, kind=kind)
                least = min(least, self.special(configs, best, self.estimator.bound, estimate))
                best = min([best, *(found.step for found in self.found)])
        elif self.space.interlaced:
            configs = [config for config in configs if config.zero < 2]
            least = min(least, self.special(configs, best, self.estimator.interlaced_bound, self.estimator.interlaced))
        least = min(least, self.unequal(min([best, *(found.step for found in self.found)])))
        if not self.found:
            raise self.does_not_fit()
        return self.result(least)

    def unequal(self, best: float) -> float:
        """Stages with different numbers of replicas, where units differ and pins leave replicas and sizes open: the
        least bound of all.
        """
        stages, least = UnequalStages(self.estimator, self.space.sizes), float("inf")
        if not self.space.unequal or {"dp", "size", "zero"} & set(self.pins.given) or not stages.is_worth_it():
            return least
        configs = [
            config
            for way in self.ways()
            for config in stages.configs(way, self.batch, self.cluster.devices, self.space.most_pp)
            if self.pins.allows(pp=config.pp)
        ]
        for kind in (Kind.ONE_F_ONE_B, Kind.ZERO_BUBBLE_H1):
            if kind in self.space.kinds:
                least = min(least, self.special(configs, best, stages.bound, partial(stages.estimate, kind=kind)))
        return least

    def check_passes(self) -> None:
        """A pinned schedule must suit how often the units run."""
        passes, kind = self.estimator.passes, self.pins.given.get("schedule")
        if kind is None:
            return
        if Kind(kind) in _RECYCLING if passes not in (None, 1) else passes == 1 and kind != Kind.SEVERAL_FORWARD.value:
            return
        often = "once" if passes == 1 else f"{passes} times" if passes else "several times, each of them trained"
        raise PlanError(
            f"the pin schedule = {kind} does not suit graph {self.graph.name!r}, whose units run {often}",
            fix=f"{Kind.SEVERAL_FORWARD.value} is for units of which the last of several passes is trained, and those run under it or {Kind.ONE_F_ONE_B.value}",
        )

    def walk(self, configs: list[Config]) -> float:
        """Estimates schedules in the order of a guess: the bound, and the schedule's bubble with equal stages.

        Ends when no guess is below the best step found, which is returned; what was not looked at is left in `open`.
        """
        order, guesses = count(), list[tuple[float, int, Config, tuple[Kind, int], float]]()
        for config in configs:
            if (bound := self.estimator.bound(config)) < float("inf"):
                start = bound - (config.pp - 1) * self.estimator.shortest(config)
                for kind in self.kinds(config):
                    guess = start + self.estimator.fill(config, *kind)
                    heapq.heappush(guesses, (guess, next(order), config, kind, bound))
        best = float("inf")
        while guesses:
            guess, _, config, kind, bound = heapq.heappop(guesses)
            sharp = (config, *kind, False) in self.estimator.relaxed
            if guess >= best or (best < float("inf") and self.spent()):
                self.open.append((bound, next(order), config, kind))
            elif not sharp:
                sharper = max(bound, self.estimator.schedule_bound(config, *kind))
                if sharper < float("inf"):
                    heapq.heappush(guesses, (max(guess, sharper), next(order), config, kind, sharper))
            else:
                self.open.append((bound, next(order), config, kind))
                if config.zero > 1 and replace(config, zero=0) in self.roomy:
                    continue  # nothing is computed again with less shared: sharing more only adds traffic
                for estimate in self.scheduled(config, *kind):
                    best = min(best, estimate.step)
                    self.found.append(estimate)
        return best

    def spent(self) -> bool:
        """Whether enough was estimated. What does not fit is found out sooner."""
        return len(self.found) + (self.estimated - len(self.found)) // 4 >= self.space.estimates

    def certify(self, best: float) -> float:
        """The least bound of all schedules of all configs.

        That with the least is sharpened, until nothing sharper is known of it, or `effort` is spent.
        """
        heapq.heapify(self.open)
        spent = 0
        while self.open and self.open[0][0] < best:
            bound, number, config, kind = heapq.heappop(self.open)
            sharper, effort = self.sharper(bound, config, kind)
            if sharper is None or spent + effort > self.space.effort:
                self.lowest = Lowest(config, *kind, self.parts(config, kind, bound))
                return bound
            spent += effort
            self.say(f"certifying: no plan below {bound:.4g} s, found {best:.4g} s")
            best = min([best, *(estimate.step for estimate in self.found[-1:])])
            if sharper < float("inf"):
                heapq.heappush(self.open, (sharper, number, config, kind))
        return best

    def sharper(self, bound: float, config: Config, kind: tuple[Kind, int]) -> tuple[float | None, int]:
        """A sharper bound of a config with a schedule, and the effort: its linear program; then, with one lane, its
        estimate, which is exact but for the sum of gradients; with several, its integer program. None where that was
        done.
        """
        if (config, *kind, False) not in self.estimator.relaxed:
            return max(bound, self.estimator.schedule_bound(config, *kind)), 1
        if config.pp == 1:
            if config in self.exact:
                return (self.exact[config], 0) if self.exact[config] > bound else (None, 0)
            self.found += list(self.scheduled(config, *kind))
            return max(bound, self.exact.setdefault(config, float("inf"))), 5
        if self.estimator.counted.whole and (config, *kind, True) not in self.estimator.relaxed:
            return max(bound, self.estimator.schedule_bound(config, *kind, whole=True)), 25
        return None, 0

    def parts(self, config: Config, kind: tuple[Kind, int], bound: float) -> tuple[tuple[str, float], ...]:
        """The bound of a config with a schedule, with one part more counted each time."""
        counted = Counted(**dict.fromkeys((part.name for part in fields(Counted)), False))
        found = [
            (
                "units: their seconds, and what they hold",
                Estimator(self.book, counted=counted).schedule_bound(config, *kind),
            )
        ]
        for part in fields(Counted)[:-1]:
            counted = replace(counted, **{part.name: True})
            found.append((f"+ {part.name}", Estimator(self.book, counted=counted).schedule_bound(config, *kind)))
        return (*found, ("+ whole units", bound))

    def special(
        self,
        configs: list[Config],
        best: float,
        bound_of: Callable[[Config], float],
        estimate: Callable[[Config], Estimate | Shortage | None],
    ) -> float:
        """Pipelines whose order the modulo scheduler finds (interlaced, or of several passes), of configs that could be
        faster, the least bound first, a fifth as many as others at most; the least bound of all.
        """
        bounds = [(bound_of(config), config) for config in configs if config.pp > 1]
        bounds.sort(key=lambda item: item[0])
        for tried, (bound, config) in enumerate(bounds):
            if bound >= best or tried >= self.space.estimates // 5:
                break
            self.say(f"ordering {config.way}, pp={config.pp}, dp={config.dp}, micro-batches of {config.size}")
            self.estimated += 1
            match estimate(config):
                case Estimate() as found:
                    best = min(best, found.step)
                    self.found.append(found)
                case Shortage() as shortage:
                    self.shortages.append(shortage)
        return bounds[0][0] if bounds else float("inf")

    def kinds(self, config: Config) -> list[tuple[Kind, int]]:
        """The schedules of a config that pins allow, those with the least bubble first."""
        if config.pp > 1 and self.estimator.passes != 1:
            return []  # they are ordered by `special`
        found = [item for item in self.named(config) if self.keeps_pins(config.pp * item[1])]
        return sorted(found, key=lambda item: self.estimator.fill(config, *item))

    def named(self, config: Config) -> Iterator[tuple[Kind, int]]:
        """The schedules of a config, and how many stages a lane has."""
        if config.pp == 1:
            yield Kind.ONE_F_ONE_B, 1
            return
        if self.estimator.passes != 1:
            yield from ((kind, 1) for kind in self.recycling())
            return
        for kind in self.space.kinds:
            match kind:
                case Kind.SEVERAL_FORWARD:
                    continue
                case Kind.INTERLEAVED:
                    yield from ((kind, chunks) for chunks in self.space.chunks)
                case Kind.DUAL_PIPE_V:
                    yield kind, 2
                case _:
                    yield kind, 1

    def recycling(self) -> list[Kind]:
        """The schedules of a pipeline whose units run several times. Where each time is trained there is none."""
        return [] if self.estimator.passes is None else [kind for kind in _RECYCLING if kind in self.space.kinds]

    def keeps_pins(self, stages: int) -> bool:
        """Whether the units can be cut into so many stages as pins say."""
        if stages not in self.cuttable:
            self.cuttable[stages] = not self.pins.fixed or self.pins.fixed.fits(len(self.estimator.units), stages)
        return self.cuttable[stages]

    def scheduled(self, config: Config, kind: Kind, chunks: int) -> Iterator[Estimate]:
        self.say(
            f"scheduling {config.way}, pp={config.pp}, dp={config.dp}, micro-batches of {config.size}, {kind.value}"
        )
        self.estimated += 1
        match self.estimator.estimate(config, kind, chunks):
            case Estimate() as estimate:
                if config.pp == 1:
                    plain = all(part.pieces == 1 for stage in estimate.stages for part in stage)
                    left = 0.0 if plain else estimate.breakdown.sync
                    self.exact[config] = (1 - _TOLERANCE) * (estimate.step - left)
                if all(part.keep is Keep.ALL for stage in estimate.stages for part in stage):
                    self.roomy.add(replace(config, zero=0))
                yield estimate
            case Shortage() as shortage:
                self.shortages.append(shortage)

    def configs(self) -> Iterator[Config]:
        devices = self.cluster.devices
        units = sum(item.copies for item in self.model.items if item.modules)
        for way in self.ways():
            if devices % way.devices:
                continue
            for pp in _divisors(devices // way.devices):
                dp = devices // way.devices // pp
                if pp > max(1, min(units, self.space.most_pp or units)) or not self.pins.allows(pp=pp, dp=dp):
                    continue
                for size in self.space.sizes:
                    if self.batch % (dp * size) or not self.pins.allows(size=size):
                        continue
                    for zero in self.space.zeros if dp > 1 else (0,):
                        if self.pins.allows(zero=zero) or (dp == 1 and zero == 0):
                            yield Config(way, pp, dp, size, self.batch // (dp * size), zero)

    def ways(self) -> Iterator[Way]:
        """Every way of the space that the model can take; the vocabulary is split wherever it can be."""
        node = self.cluster.device.per_node
        tps = self.space.tps or tuple(_divisors(min(node, self.cluster.devices)))
        for tp in tps:
            for sequence in self.space.sequence if tp > 1 else (False,):
                way = Way(tp=tp, sequence=sequence, vocabulary=tp > 1)
                smallest = self.space.sizes[0]
                if self.book.fast(way, smallest) is None and tp > 1:
                    way = replace(way, vocabulary=False)
                if self.pins.allows_way(way) and self.book.fast(way, smallest) is not None:
                    yield way
        for cp in self.space.contexts:
            way = Way(cp=cp)
            if cp > 1 and self.pins.allows_way(way) and self.book.fast(way, self.space.sizes[0]) is not None:
                yield way
        for ep in self.space.experts:
            way = Way(ep=ep)
            if ep > 1 and self.pins.allows_way(way) and self.book.fast(way, self.space.sizes[0]) is not None:
                yield way

    # ---- what came out -----------------------------------------------------------------------------------------------

    def result(self, bound: float) -> Found:
        ranked = sorted(self.found, key=lambda estimate: estimate.step)
        best = ranked[0]
        bound = min(bound, best.step)
        seen: set[Config] = {best.config}
        others: list[Choice] = []
        for estimate in ranked[1:]:
            if estimate.config not in seen and len(others) < self.most:
                seen.add(estimate.config)
                others.append(self.choice(estimate, bound))
        refusals = tuple((str(way), reason) for way, reason in self.book.probes.refusals.items())
        probes = sum(costs is not None for costs in self.book.probes.found.values())
        configs = len(list(self.configs()))
        lowest = self.lowest if bound < best.step else None
        return Found(self.choice(best, bound), best, tuple(others), configs, self.estimated, probes, refusals, lowest)

    def choice(self, estimate: Estimate, bound: float) -> Choice:
        config = estimate.config
        return Choice(
            self.graph.name,
            self.cluster.name,
            self.batch,
            config.way,
            config.pp,
            config.dp,
            config.size,
            config.microbatches,
            estimate.kind,
            estimate.chunks,
            config.zero,
            estimate.stages,
            estimate.step,
            max(estimate.memory),
            bound,
            config.lanes,
        )

    def does_not_fit(self) -> PlanError:
        device = self.cluster.device
        if not self.shortages:  # every bound was infinite: look at the configs that share most
            lean = sorted(self.configs(), key=lambda config: (config.size, -config.zero, -config.way.devices))
            for config in lean[:24]:
                self.found += list(self.scheduled(config, Kind.ONE_F_ONE_B, 1))
        if not self.shortages:
            reasons = (
                "; ".join(f"{way}: {reason}" for way, reason in self.book.probes.refusals.items()) or "too few units"
            )
            return PlanError(f"no plan of the space suits graph {self.graph.name!r}: {reasons}", fix="widen the space")
        least = min(self.shortages, key=lambda shortage: shortage.lacking)
        config, memory = least.config, device.memory.value
        need = memory + least.lacking
        enough = -(-self.cluster.devices * int(need) // int(memory))
        return PlanError(
            f"{self.graph.name!r} does not fit: the leanest plan ({config.way}, pp={config.pp}, dp={config.replicas}, ZeRO-{config.zero}, "
            f"micro-batches of {config.size}) lacks {least.lacking / 1e9:.2f} GB on its fullest device",
            where=f"{self.cluster.devices} x {device.kind} of {memory / 1e9:.0f} GB",
            fix=f"about {enough} such devices, or devices of {need / 1e9:.0f} GB; or fewer pins, a smaller batch, "
            "an optimizer with less state, shorter samples",
        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
