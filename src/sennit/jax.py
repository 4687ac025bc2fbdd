"""Resharding for JAX in one line.

    y = sennit.jax.reshard(x, sharding)

`sennit.reshard.execute_jax` says how. The functions made are kept in one `Resharder` of this module, bounded like any;
make a `Resharder` of your own for another bound, or to let go of them.
"""

from __future__ import annotations

from sennit.reshard.execute_jax import Resharder, steps_between
from sennit.reshard.phases_jax import TouchCost

try:
    import jax
    from jax.sharding import NamedSharding
except ImportError as missing:
    raise ImportError('sennit.jax needs JAX: pip install "sennit[jax]"') from missing

__all__ = ["Resharder", "TouchCost", "reshard", "steps_between"]

_resharder = Resharder()


def reshard(x: jax.Array, sharding: NamedSharding, *, source: NamedSharding | None = None) -> jax.Array:
    """`x` under `sharding`, over the same devices, within the memory of the larger piece and its staging.

    Inside `jit` and `grad` JAX knows where an array lies only if the axes of its mesh are of the Explicit type;
    otherwise say it with `source`."""
    return _resharder(x, sharding, source=source)  # type: ignore[no-any-return]
