"""sennit: plan, reshard, fuse and communicate for distributed deep learning, verified before it runs.

The names below are the public face. Each is imported from its module when it is first used (PEP 562), so that
`import sennit` costs a few milliseconds and loads neither torch nor numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sennit.capture.rules import rule
    from sennit.cluster import Cluster
    from sennit.errors import SennitError
    from sennit.fuse.data_parallel_torch import DataParallel
    from sennit.ir.graph import Graph
    from sennit.ir.layout import Layout
    from sennit.ir.mesh import Mesh
    from sennit.ir.program import Program
    from sennit.ir.timeline import Timeline
    from sennit.reshard.calibrate_torch import calibrate_redistribution
    from sennit.reshard.checkpoint_torch import load_checkpoint
    from sennit.reshard.dtensor_torch import redistribute
    from sennit.reshard.serve_torch import serve_dtensor
    from sennit.reshard.shared import SharedMemory
    from sennit.reshard.weights_torch import absent_weight, stream_weights
    from sennit.run.module import ParallelModule
    from sennit.run.parallelize import Sample, parallelize
    from sennit.run.scaler import GradScaler
    from sennit.run.training_state import TrainingState
    from sennit.sim import simulate

__all__ = [
    "Cluster",
    "DataParallel",
    "GradScaler",
    "Graph",
    "Layout",
    "Mesh",
    "ParallelModule",
    "Program",
    "Sample",
    "SennitError",
    "Timeline",
    "TrainingState",
    "__version__",
    "absent_weight",
    "calibrate_redistribution",
    "load_checkpoint",
    "parallelize",
    "redistribute",
    "rule",
    "serve_dtensor",
    "simulate",
    "stream_weights",
]

__version__ = "0.1.0"

_HOME = {
    "Cluster": "sennit.cluster",
    "GradScaler": "sennit.run.scaler",
    "DataParallel": "sennit.fuse.data_parallel_torch",
    "Graph": "sennit.ir.graph",
    "Layout": "sennit.ir.layout",
    "Mesh": "sennit.ir.mesh",
    "ParallelModule": "sennit.run.module",
    "Program": "sennit.ir.program",
    "Sample": "sennit.run.parallelize",
    "SennitError": "sennit.errors",
    "Timeline": "sennit.ir.timeline",
    "TrainingState": "sennit.run.training_state",
    "absent_weight": "sennit.reshard.weights_torch",
    "calibrate_redistribution": "sennit.reshard.calibrate_torch",
    "load_checkpoint": "sennit.reshard.checkpoint_torch",
    "parallelize": "sennit.run.parallelize",
    "redistribute": "sennit.reshard.dtensor_torch",
    "rule": "sennit.capture.rules",
    "serve_dtensor": "sennit.reshard.serve_torch",
    "simulate": "sennit.sim",
    "stream_weights": "sennit.reshard.weights_torch",
}

# What runs on `current_executor`. It takes the shared memory of one host from a folder above its own: this is where the
# two meet.
_ON_CURRENT_EXECUTOR = (
    "calibrate_redistribution",
    "load_checkpoint",
    "redistribute",
    "serve_dtensor",
    "stream_weights",
)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'sennit' has no attribute {name!r}")
    if name in _ON_CURRENT_EXECUTOR:
        import_module("sennit.reshard.execute_torch").EXECUTORS.shared = _share_memory
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # the next use finds it without this function
    return value


def _share_memory(rank: int, ranks: int, staging: int) -> SharedMemory:
    memory: SharedMemory = import_module("sennit.collective.runtime.shm_posts").HostMemory(rank, ranks, staging)
    return memory


def __dir__() -> list[str]:
    return sorted(__all__)
