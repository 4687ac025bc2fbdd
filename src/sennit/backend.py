"""`dist.init_process_group("sennit")`: makes the name known to torch.distributed.

Where sennit is installed, torch calls `register` by itself at the end of `import torch` (entry point group
`torch.backends`; TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns this off). Elsewhere call it once:

    import sennit.backend
    sennit.backend.register()

    calls = sennit.backend.calls()      # collectives of small tensors without torch's part of a call: `plain_calls_torch.py`
    x = sennit.backend.empty(1 << 20)   # a tensor that the other ranks of the host read where it is

Registering loads nothing of sennit but this file; the runtime is loaded when the first group is made.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sennit.collective.runtime.backend_torch import SennitGroup
    from sennit.collective.runtime.plain_calls_torch import PlainCalls

__all__ = ["NAME", "calls", "empty", "register"]

NAME = "sennit"


def register() -> None:
    """Make the backend `sennit` known. A second call changes nothing."""
    backend = import_module("torch.distributed").Backend
    if not hasattr(backend, NAME.upper()):  # where registering puts the name
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def calls(group: Any = None) -> PlainCalls:
    """Collectives of a group of this backend, of the default one if none is given, that are called without
    torch.distributed.
    """
    from sennit.collective.runtime.plain_calls_torch import PlainCalls

    return PlainCalls(group)


def empty(*size: Any, dtype: Any = None, group: Any = None) -> Any:
    """`torch.empty`, in memory of a group of this backend: collectives of that group read it where it is.

    All ranks of a host may read and write there, and so may forked children. It is a tensor like any other, in any
    use, and stays valid when the group is gone. Ordinary memory where the ranks share none.
    """
    from sennit.collective.runtime.plain_calls_torch import empty

    return empty(*size, dtype=dtype, group=group)


def _create(options: Any, backend_options: Any) -> SennitGroup:
    from sennit.collective.runtime.group_torch import HostSettings, create_group
    from sennit.environment import current_environment

    said = current_environment()
    return create_group(options, backend_options, HostSettings(said.interface, said.threads, said.local_ranks))
