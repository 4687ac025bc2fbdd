"""Transform, place, order, preserve dependencies; the plan zoo."""

from sennit.plan.co_shard import Cut, co_shard
from sennit.plan.lower import lower
from sennit.plan.pattern import Pattern, Task, Work, one_forward_one_backward
from sennit.plan.plan import Plan, data_inputs, order, place, transform
from sennit.plan.propagate import Decisions, Moment, propagate
from sennit.plan.recompute import recompute
from sennit.plan.zoo import context_parallel, data_parallel, expert_parallel, pipeline, tensor_parallel

__all__ = [
    "Cut",
    "Decisions",
    "Moment",
    "Pattern",
    "Plan",
    "Task",
    "Work",
    "co_shard",
    "context_parallel",
    "data_inputs",
    "data_parallel",
    "expert_parallel",
    "lower",
    "one_forward_one_backward",
    "order",
    "pipeline",
    "place",
    "propagate",
    "recompute",
    "tensor_parallel",
    "transform",
]
