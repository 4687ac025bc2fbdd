"""Reshard a JAX array on eight CPU devices, with what it does and what memory it takes beside XLA's own.

python examples/reshard_jax.py
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns where it replicates the whole array

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import sennit.jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_platforms", "cpu")

mesh = jax.make_mesh((2, 4), ("x", "y"))
source = NamedSharding(mesh, PartitionSpec("x", None, "y"))  # rows over x, columns over y
target = NamedSharding(mesh, PartitionSpec(None, ("x", "y")))  # the middle dim over both
values = np.arange(64 * 256 * 64, dtype=np.float32).reshape(64, 256, 64)
x = jax.device_put(values, source)

y = sennit.jax.reshard(x, target)
assert y.sharding == target
assert np.array_equal(np.asarray(y), values)


# in a training step: the gradient comes back under the source's sharding
def loss(a: jax.Array) -> jax.Array:
    return (sennit.jax.reshard(a, target, source=source) ** 2).sum()


gradient = jax.jit(jax.grad(loss))(x)
assert np.array_equal(np.asarray(gradient), 2 * values)

print(f"{source.spec} -> {target.spec}")
piece = x.addressable_shards[0].data.nbytes
for direct, name in ((True, "sennit"), (False, "sennit, by collectives")):
    for step in sennit.jax.steps_between(source, target, x.shape, x.dtype, direct=direct) or ():
        print(f"  {step.kind.value} over {', '.join(step.axes)}: {step.source} -> {step.result}")
    program = sennit.jax.Resharder(direct=direct).function(x, target).lower(x).compile()
    print(f"  {name}: temporaries of {program.memory_analysis().temp_size_in_bytes / piece:.2f} pieces")

theirs = jax.jit(lambda a: a, out_shardings=target).lower(x).compile()
print(f"  XLA's own: temporaries of {theirs.memory_analysis().temp_size_in_bytes / piece:.2f} pieces")
