"""A step under several fusions, simulated: what people run today, the parts of our search switched off one by one, and
the bounds.

| variant | kernels | buckets |
|---|---|---|
| no overlap | every operator alone | all gradients in one, at the end |
| no fusion | every operator alone | every gradient alone |
| full fusion | fused wherever it is legal | all gradients in one |
| DDP, n MB | every operator alone | closed at n MB in the order of arrival, the first at 1 MB |
| compiled DDP, n MB | as a compiler fuses that leaves products to libraries | the same |
| operators only, tensors only | one half of the search | the other half as without fusion |
| joint, in the step | the search | waits at the end of the step |
| joint, across steps | the search | waits in the next step too |

Every variant is timed by the same clock on the same costs, so that differences are those of the choices.
`Variant.spans` is what a picture shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sennit.fuse.bucket_search import MEGABYTES, Buckets, same_as_ddp
from sennit.fuse.clock import Span, steady_state, traced
from sennit.fuse.kernel_set import Limits
from sennit.fuse.model import Grouping, KernelOrder, StepModel
from sennit.fuse.moves import AS_COMPILED, fused_greedily
from sennit.fuse.search import Found, SearchOptions, search
from sennit.ir.graph import Phase
from sennit.ir.strategy import Bucket, Part, Strategy
from sennit.ir.strategy_check import check_strategy

__all__ = ["Study", "Variant", "group_numbers", "study", "timed_variant"]


@dataclass(frozen=True, slots=True)
class Variant:
    """`exposed` is how long the compute stream waits in a step.

    `spans` are two steps of the steady state; kernels up to number `forward` are of the forward pass.
    """

    name: str
    strategy: Strategy
    seconds: float
    exposed: float
    kernels: int
    settled: bool
    spans: tuple[Span, ...] = ()
    forward: int = 0


@dataclass(frozen=True, slots=True)
class Study:
    """`found` is the report of the joint search; the variants stand in the order of the module's table."""

    variants: tuple[Variant, ...]
    found: Found

    @property
    def best(self) -> Variant:
        return min(self.variants, key=lambda item: item.seconds)

    def fastest(self, prefix: str) -> Variant:
        """Of the variants whose name begins so."""
        return min((item for item in self.variants if item.name.startswith(prefix)), key=lambda item: item.seconds)


Say = Callable[[str], None]


def study(
    model: StepModel,
    options: SearchOptions | None = None,
    *,
    saved: Sequence[Strategy] = (),
    ablation: bool = True,
    say: Say = lambda message: None,
    stop: Callable[[], bool] | None = None,
) -> Study:
    """All variants.

    `saved` strategies are timed beside them, and are seeds of the joint search; without `ablation` the searches with
    something switched off are left out.
    """
    options = options or SearchOptions()
    say("timing what people run today")
    found = list(_today(model))
    numbered = [(strategy, group_numbers(model, strategy)) for strategy in saved]
    found += [timed_variant(model, f"saved: {item.name}", grouping, item.buckets) for item, grouping in numbered]
    switches: list[tuple[str, SearchOptions]] = []
    if ablation:
        less = replace(options, seconds=options.seconds / 6, across_steps=False)
        switches = [
            ("operators only", replace(less, tensors=False)),
            ("tensors only", replace(less, operators=False)),
            ("joint, in the step", less),
        ]
    best = replace(options, seconds=options.seconds / 2 if ablation else options.seconds)
    switches.append(("joint, across steps" if options.across_steps else "joint", best))
    joint: Found | None = None
    for name, chosen in switches:
        seeds = [grouping for _, grouping in numbered] if chosen is best and options.operators else []

        def progress(tried: int, seconds: float, name: str = name) -> None:
            say(f"searching, {name}: {tried} candidates, best {1e3 * seconds:.3f} ms (simulated)")

        joint = search(model, chosen, name=name, start=seeds, progress=progress, stop=stop)
        found.append(timed_variant(model, name, group_numbers(model, joint.strategy), joint.strategy.buckets))
    assert joint is not None
    return Study(tuple(found), joint)


def _today(model: StepModel) -> list[Variant]:
    alone, gradients = Grouping(), [path for path, _, _ in model.gradients]
    whole: Buckets = (Bucket(tuple(map(Part, gradients))),) if gradients else ()
    each = tuple(Bucket((Part(path),)) for path in gradients)
    full = fused_greedily(model, Limits())
    as_compiled = fused_greedily(model, AS_COMPILED)
    found = [
        timed_variant(model, "no overlap", alone, whole),
        timed_variant(model, "no fusion", alone, each),
        timed_variant(model, "full fusion", full, whole),
    ]
    for name, grouping in (("DDP", alone), ("compiled DDP", as_compiled)):
        order = model.order(grouping)
        assert order is not None
        arrivals = model.arrivals(order, model.kernel_seconds(order, grouping))
        found += [
            timed_variant(model, f"{name}, {size} MB", grouping, same_as_ddp(arrivals, size << 20, 1 << 20))
            for size in MEGABYTES
        ]
    return found


def timed_variant(model: StepModel, name: str, grouping: Grouping, buckets: Buckets) -> Variant:
    order = model.order(grouping)
    assert order is not None
    kernels = KernelOrder(model, order, model.kernel_seconds(order, grouping))
    switch = sum(model.phase[min(kernel)] is Phase.FORWARD for kernel in order)
    timing = kernels.timing(buckets, also=(switch,) if 0 < switch < len(order) else ())
    step = steady_state(timing, model.channel.sharing)
    forward = 0
    passed = 0.0
    for number, seconds in enumerate(timing.kernels):
        passed += seconds
        if passed <= kernels.until[switch] * (1 + 1e-12):
            forward = number + 1
    spans = traced(timing, model.channel.sharing)
    strategy = model.strategy(name, grouping, buckets)
    return Variant(name, strategy, step.seconds, step.waited, len(order), step.settled, spans, forward)


def group_numbers(model: StepModel, strategy: Strategy) -> Grouping:
    """The groups of a strategy as the search has them. A strategy that does not fit the graph is refused."""
    check_strategy(strategy, model.graph)
    place = {op.name: number for number, op in enumerate(model.ops)}
    groups = [
        (frozenset(place[name] for name in group.ops), frozenset(place[name] for name in group.again))
        for group in strategy.groups
    ]
    return Grouping(
        frozenset(group for group, again in groups if len(group) > 1 or again),
        frozenset((group, again) for group, again in groups if again),
    )
