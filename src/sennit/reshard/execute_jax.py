"""Resharding of JAX arrays: `Resharder` plans, lowers, and keeps what it made.

    placement of the array, sharding asked for -> layouts (`layout_jax`) -> phases (`fused_jax`) -> shard_map (`lower_jax`)
                                                                          -> exchange (`exchange_jax`), on CPU devices

The result is a jitted function of one array, kept under (placement, sharding, shape, dtype). It is the identity on
values, linear, and its transpose is the resharding of the cotangent back, which is made the same way. JAX is told so
(`linear_call`), because what it derives by itself (a sum over replicas where we gather) moves more. There is no
batching rule: under `vmap` reshard the whole array, with one more entry in the spec.

Where `choose` finds no way, the function is XLA's own resharding.

Source and target usually lie on one mesh, and the shard_map is over that mesh. Two meshes over the same devices in the
same order are also served where they refine to the same primes: both then are partitions of one refined mesh, over
which the shard_map is. Arrays go in and out without a copy.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from sennit.errors import LayoutError
from sennit.ir.layout import Layout
from sennit.ir.layout_jax import from_partition_spec, to_partition_spec
from sennit.ir.mesh import Mesh
from sennit.reshard.exchange_jax import may_exchange, register
from sennit.reshard.fused_jax import choose
from sennit.reshard.lower_jax import lower
from sennit.reshard.phases_jax import DEFAULT_COST, Phase, TouchCost
from sennit.reshard.redistribution import Step

try:
    import jax
    from jax.custom_derivatives import linear_call
    from jax.sharding import NamedSharding
except ImportError as missing:
    raise ImportError('sennit.reshard.execute_jax needs JAX: pip install "sennit[jax]"') from missing

__all__ = ["Resharder", "steps_between"]

Function = Callable[[Any], Any]


class Resharder:
    """Functions that reshard, made when first needed; the `capacity` used last are kept.

    With `direct`, CPU devices take what they need out of each other's memory where that costs less than collectives, by
    `cost`.
    """

    def __init__(self, capacity: int = 256, *, direct: bool = True, cost: TouchCost = DEFAULT_COST) -> None:
        if capacity < 2:
            raise LayoutError(
                f"a resharder with room for {capacity} functions",
                fix="give it room for 2 at least: a resharding and its derivative",
            )
        self._capacity = capacity
        self._direct, self._cost = direct, cost
        self._functions: OrderedDict[Hashable, Function] = OrderedDict()

    def __len__(self) -> int:
        return len(self._functions)

    def __call__(self, x: Any, sharding: NamedSharding, *, source: NamedSharding | None = None) -> Any:
        """`x` under `sharding`. `source` is where `x` lies, needed where JAX does not know it while it traces."""
        return self.function(x, sharding, source=source)(x)

    def function(self, x: Any, sharding: NamedSharding, *, source: NamedSharding | None = None) -> Function:
        """The jitted function that reshards arrays like `x` (an array, or a `jax.ShapeDtypeStruct` with a sharding)."""
        placed = _placement(x, sharding, source)
        return self._function(placed, sharding, tuple(x.shape), x.dtype)

    def _function(self, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Function:
        key = (source, target, shape, dtype)
        found = self._functions.get(key)
        if found is None:
            found = self._functions[key] = self._make(source, target, shape, dtype)
            if len(self._functions) > self._capacity:
                self._functions.popitem(last=False)
        else:
            self._functions.move_to_end(key)
        return found

    def _make(self, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: Any) -> Function:
        self._direct = self._direct and register()
        forward, mesh = _forward(source, target, shape, dtype, self._direct, self._cost)
        if 0 in shape:
            # what jit makes of an array without elements has pieces of the wrong shape (jax 0.10)
            return lambda x: jax.device_put(x, target)

        def back(_: None, cotangent: Any) -> Any:
            return self._function(target, source, shape, dtype)(cotangent)

        jitted: Function = jax.jit(
            lambda x: linear_call(lambda _, value: forward(value), back, None, x), out_shardings=target
        )
        return jitted if mesh is None else _under(mesh, jitted)


def steps_between(
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    dtype: Any,
    *,
    direct: bool = True,
    cost: TouchCost = DEFAULT_COST,
) -> tuple[Step, ...] | None:
    """What a resharding does, on the refined mesh of the source; None where it is XLA's own."""
    layouts = _layouts(source, target, shape)
    way = None if layouts is None else _way(layouts, source, jax.numpy.dtype(dtype), direct and register(), cost)
    return way if way is None else tuple(step for phase in way for step in phase.steps)


def _way(
    layouts: tuple[Layout, Layout], sharding: NamedSharding, dtype: Any, direct: bool, cost: TouchCost
) -> tuple[Phase, ...] | None:
    """The phases; one exchange where it can be had and costs less."""
    exchanges = direct and may_exchange(sharding.mesh.devices.ravel().tolist(), dtype)
    return choose(*layouts, dtype.itemsize, cost, exchanges=exchanges)


def _forward(
    source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: Any, direct: bool, cost: TouchCost
) -> tuple[Function, jax.sharding.Mesh | None]:
    """The resharding, and the mesh that it must run under where that is not the one of the array."""
    layouts = _layouts(source, target, shape)
    phases = None if layouts is None else _way(layouts, source, dtype, direct, cost)
    if layouts is None or phases is None:
        return (lambda x: x), None  # under the jit of `Resharder`, whose out_shardings make XLA reshard
    mesh: Any = source.mesh
    if mesh == target.mesh:
        in_spec, out_spec = source.spec, target.spec
    else:
        refined = layouts[0].mesh
        devices = source.mesh.devices.reshape([axis.size for axis in refined.axes])
        mesh = jax.sharding.Mesh(devices, refined.names)
        in_spec, out_spec = to_partition_spec(layouts[0]), to_partition_spec(layouts[1])
    mapped = jax.shard_map(
        lambda piece: lower(phases, mesh.axis_names, piece),
        mesh=mesh,
        in_specs=in_spec,
        out_specs=out_spec,
        check_vma=False,  # what replicates is known from the layouts, and JAX cannot derive it from a permute
    )
    return mapped, None if mesh is source.mesh else mesh


def _under(mesh: jax.sharding.Mesh, function: Function) -> Function:
    """JAX refuses a shard_map over another mesh than the one in context; while tracing the context cannot be changed."""

    def call(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            return function(x)
        with jax.set_mesh(mesh):
            return function(x)

    return call


def _placement(x: Any, sharding: NamedSharding, source: NamedSharding | None) -> NamedSharding:
    placed = source
    if placed is None and isinstance(x, jax.core.Tracer):
        known = jax.typeof(x).sharding
        # known while tracing only where the axes are of the Explicit type, and then without the devices
        if known.mesh == sharding.mesh.abstract_mesh and _is_explicit(known):
            placed = NamedSharding(sharding.mesh, known.spec)
    elif placed is None:
        placed = getattr(x, "sharding", None)
    if not isinstance(placed, NamedSharding):
        raise LayoutError(
            "where the array lies is not known"
            if placed is None
            else f"the array lies under {placed}, which names no mesh",
            where=f"reshard of an array of shape {list(x.shape)} to {sharding.spec}",
            fix="inside jit and grad pass source=x.sharding of the array outside (or use axes of the Explicit type); "
            "an array that is on no mesh yet: place it with jax.device_put",
        )
    return placed


def _is_explicit(sharding: NamedSharding) -> bool:
    return any(kind is jax.sharding.AxisType.Explicit for kind in sharding.mesh.axis_types)


def _layouts(source: NamedSharding, target: NamedSharding, shape: tuple[int, ...]) -> tuple[Layout, Layout] | None:
    """Both layouts on the refined mesh of the source; None where the meshes refine to different primes."""
    where = f"an array of shape {list(shape)} from {source.spec} to {target.spec}"
    if source.memory_kind != target.memory_kind:
        raise LayoutError(
            f"from memory {source.memory_kind} to memory {target.memory_kind}",
            where=where,
            fix="change the kind of memory with jax.device_put, before or after",
        )
    _check_devices(source, target, where)
    have, want = (_layout(sharding, shape, where) for sharding in (source, target))
    if [axis.size for axis in have.mesh.axes] != [axis.size for axis in want.mesh.axes]:
        return None
    names = dict(zip(want.mesh.names, have.mesh.names, strict=True))
    return have, Layout.make(have.mesh, shape, {names[axis]: entry for axis, entry in want.entries})


def _check_devices(source: NamedSharding, target: NamedSharding, where: str) -> None:
    if source.mesh == target.mesh:
        return
    meshes = f"from mesh {source.mesh} to mesh {target.mesh}"
    have, want = (sharding.mesh.devices.ravel().tolist() for sharding in (source, target))
    if have != want:
        raise LayoutError(
            f"{meshes}: devices {[device.id for device in have]} and {[device.id for device in want]}",
            where=where,
            fix="use a mesh over the array's devices, in the same order; to other devices move it with jax.device_put",
        )
    if _is_explicit(source) or _is_explicit(target):
        raise LayoutError(
            f"{meshes}: axes of the Explicit type stay on one mesh",
            where=where,
            fix="state both placements on one mesh, or use axes of the Auto type",
        )


def _layout(sharding: NamedSharding, shape: tuple[int, ...], where: str) -> Layout:
    """The layout on the refined mesh, without axes of size 1 (which split nothing)."""
    mesh = Mesh.make(dict(sharding.mesh.shape))
    layout = from_partition_spec(mesh, shape, sharding.spec)
    if layout.pending:
        raise LayoutError(
            f"axes {[name for name, _ in layout.pending]} hold unreduced sums, and a resharding on JAX moves values alone",
            where=where,
            fix="reduce first: jax.reshard to a spec without `unreduced`",
        )
    refined = layout.refined()
    small = Mesh(tuple(axis for axis in refined.mesh.axes if axis.size > 1), refined.mesh.devices)
    return Layout.make(small, shape, {name: entry for name, entry in refined.entries if name in small})
