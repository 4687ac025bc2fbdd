"""What ranks do in the tests of `plan="auto"`: functions of a module that processes can import."""

from __future__ import annotations

from collections.abc import Mapping

from parallelize_work import batches, gpt

import sennit
from sennit.plan.search import Choice
from sennit.testing.training_torch import Record, adamw, train_parallel


def searched(rank: int, cluster: str | None, pins: Mapping[str, Mapping[str, object]]) -> tuple[Record, str]:
    """Three steps under the plan that every rank finds for itself; its name."""
    model = sennit.parallelize(gpt(), batches()[0][0], plan="auto", cluster=cluster, pins=pins)
    return train_parallel(model, batches(), adamw(model)), model.plan.name


def read(rank: int, text: str) -> Record:
    """Three steps under a choice that was written to a file."""
    model = sennit.parallelize(gpt(), batches()[0][0], plan=Choice.parse(text))
    return train_parallel(model, batches(), adamw(model))
