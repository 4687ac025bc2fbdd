"""The plans that people know, each a short function to read and copy: from a graph and a mesh to a `Plan`."""

from sennit.plan.zoo.batch import data_parallel
from sennit.plan.zoo.experts import expert_parallel
from sennit.plan.zoo.pieces import co_shard
from sennit.plan.zoo.sequence import context_parallel
from sennit.plan.zoo.stages import chimera, interlaced, pipeline, recycled
from sennit.plan.zoo.tensor import tensor_parallel
from sennit.plan.zoo.zero import kept_whole, sharded, zero

__all__ = [
    "chimera",
    "co_shard",
    "context_parallel",
    "data_parallel",
    "expert_parallel",
    "interlaced",
    "kept_whole",
    "pipeline",
    "recycled",
    "sharded",
    "tensor_parallel",
    "zero",
]
