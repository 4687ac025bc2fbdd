"""Search for the fastest plan that fits: probe units with the compiler, bound, choose, schedule."""

from sennit.plan.search.choice import Choice, Kind, Part, differences
from sennit.plan.search.found import Found
from sennit.plan.search.realize import mesh_of, planner_of
from sennit.plan.search.search import batch_of, probes_of, search
from sennit.plan.search.space import Space
from sennit.plan.search.ways import Keep, Way

__all__ = [
    "Choice",
    "Found",
    "Keep",
    "Kind",
    "Part",
    "Space",
    "Way",
    "batch_of",
    "differences",
    "mesh_of",
    "planner_of",
    "probes_of",
    "search",
]
