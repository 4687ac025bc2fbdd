"""Compiled collectives that run: their flat code, and the machines that interpret it."""

from sennit.collective.runtime.code import Code
from sennit.collective.runtime.failure import Cause, RuntimeFailure
from sennit.collective.runtime.shm_abi import Reduction
from sennit.collective.runtime.shm_endpoint import Buffer
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.collective.runtime.shm_segment import Capacity

__all__ = ["Buffer", "Capacity", "Cause", "Code", "Reduction", "RuntimeFailure", "ShmGroup"]
