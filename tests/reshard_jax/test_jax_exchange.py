"""Exchanges between CPU devices, as part of compiled programs.

A cost of no starts makes them the choice for small arrays too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax_problems import Problem, cpu_devices, problem, problems  # noqa: E402

import sennit.reshard.execute_jax as execute_jax  # noqa: E402
from sennit.jax import Resharder, TouchCost, steps_between  # noqa: E402
from sennit.reshard.exchange_jax import may_exchange, register  # noqa: E402

EAGER = TouchCost(permute=0.0)
MESHES = ((2, 2, 2), (4, 2), (2, 4), (8,), (2, 3), (3, 2), (5,))
CASE = problem("x=2,y=4", (16, 32), "x y", "- yx")

pytestmark = pytest.mark.skipif(not register(), reason="the core is not built: no C compiler at install")


def kinds(case: Problem, dtype: Any = np.float32, **options: Any) -> list[str]:
    found = steps_between(*case.shardings(), case.shape, dtype, **options)
    return [step.kind.value for step in found or ()]


def exchanged(case: Problem = CASE) -> tuple[Any, Any, Any]:
    """The array, and functions there and back."""
    assert kinds(case, cost=EAGER) == ["exchange"]
    source, target = case.shardings()
    resharder = Resharder(cost=EAGER)
    x = jax.device_put(case.values(), source)
    return x, lambda a: resharder(a, target, source=source), lambda a: resharder(a, source, source=target)


@settings(derandomize=True, deadline=None, max_examples=40)
@given(problems(MESHES))
def test_random_problems(case: Problem) -> None:
    assume(kinds(case, cost=EAGER) == ["exchange"])
    x, there, _ = exchanged(case)
    result = there(x)
    expected = jax.device_put(case.values(), case.shardings()[1])
    for ours, theirs in zip(result.addressable_shards, expected.addressable_shards, strict=True):
        assert ours.device == theirs.device
        np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(theirs.data))


@pytest.mark.parametrize("dtype", ["bool", "int8", "float8_e4m3fn", "uint16", "bfloat16", "int32", "complex64"])
def test_dtypes(dtype: str) -> None:
    source, target = CASE.shardings()
    values = CASE.values(jnp.dtype(dtype))
    result = Resharder(cost=EAGER)(jax.device_put(values, source), target)
    np.testing.assert_array_equal(np.asarray(result).view(np.uint8), values.view(np.uint8))


def test_the_same_array_many_times() -> None:
    x, there, back = exchanged()
    for _ in range(100):
        # one at a time: with many programs in its queue and few cores XLA's own collectives wait for each other without
        # end
        x = jax.block_until_ready(back(there(x)))
    np.testing.assert_array_equal(np.asarray(x), CASE.values())


def test_many_at_once_in_one_program() -> None:
    """More than there are threads: nothing here waits for another device but XLA's own collectives, which it orders."""
    x, there, _ = exchanged()
    results = jax.jit(lambda a: [there(a * (number + 1)) for number in range(40)])(x)
    for number, result in enumerate(results):
        np.testing.assert_array_equal(np.asarray(result), CASE.values() * (number + 1))


def test_in_a_loop_with_an_array_that_does_not_change() -> None:
    """XLA would move the question for an address out of the loop, if it were free to."""
    x, there, _ = exchanged()

    def body(total: Any, _: None) -> tuple[Any, None]:
        return total + there(x * 1.0), None

    total = jax.device_put(np.zeros(CASE.shape, np.float32), CASE.shardings()[1])
    result = jax.jit(lambda start: lax.scan(body, start, None, length=20)[0])(total)
    np.testing.assert_array_equal(np.asarray(result), 20 * CASE.values())


def test_in_a_loop_with_one_that_does() -> None:
    x, there, back = exchanged()
    result = jax.jit(lambda a: lax.scan(lambda c, _: (back(there(c)) + 1, None), a, None, length=20)[0])(x)
    np.testing.assert_array_equal(np.asarray(result), CASE.values() + 20)


def test_in_branches_gradients_and_recomputation() -> None:
    x, there, back = exchanged()
    result = jax.jit(lambda a: lax.cond(a[0, 0] > 1e9, lambda b: b, lambda b: back(there(b)), a))(x)
    np.testing.assert_array_equal(np.asarray(result), CASE.values())
    for function in (lambda a: jnp.sin(there(a)).sum(), jax.checkpoint(lambda a: jnp.sin(there(a)).sum())):
        gradient = jax.jit(jax.grad(function))(x)
        np.testing.assert_allclose(np.asarray(gradient), np.cos(CASE.values()), rtol=1e-5, atol=1e-6)


def test_an_array_of_another_layout_in_memory() -> None:
    _, there, _ = exchanged()
    left = np.cos(CASE.values())
    result = jax.jit(lambda a: there(jnp.transpose(a) @ jnp.eye(32, dtype=np.float32)))(left.T.copy())
    np.testing.assert_allclose(np.asarray(result), left, rtol=1e-6)


def test_a_donated_array() -> None:
    source, target = CASE.shardings()
    _, there, _ = exchanged()
    function = jax.jit(lambda a: there(a) * 2, donate_argnums=0, out_shardings=target)
    for _ in range(20):
        x = jax.device_put(CASE.values(), source)
        np.testing.assert_array_equal(np.asarray(function(x)), 2 * CASE.values())


def test_it_needs_no_temporaries() -> None:
    case = problem("x=2,y=4", (512, 1024), "x y", "- yx")
    x, there, _ = exchanged(case)
    analysis = jax.jit(there).lower(x).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 4096  # addresses, and XLA's own words


def test_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    large = problem("x=2,y=4", (2048, 2048), "x y", "- yx")
    assert kinds(large) == ["exchange"]
    assert "exchange" not in kinds(large, direct=False)
    assert "exchange" not in kinds(CASE)  # two starts are more than all that is to be copied
    assert kinds(problem("x=2,y=4", (2048, 2048), "- -", "x y")) == ["slice"]
    assert kinds(problem("x=2,y=4", (2048, 2048), "x -", "- -")) == ["all_gather"]  # one start, and in place at once
    assert "exchange" not in kinds(large, "int4")  # elements that are not whole bytes
    monkeypatch.setattr(execute_jax, "register", lambda: False)
    assert "exchange" not in kinds(large)


def test_an_xla_with_another_interface(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*given: object, **named: object) -> None:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: the API version is incompatible")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    assert not register()
    assert "collectives serve" in caplog.text


def test_only_cpu_devices_of_this_process() -> None:
    class Device:
        platform, process_index = "gpu", 0

    class Far:
        platform, process_index = "cpu", 1

    near = cpu_devices().tolist()
    assert may_exchange(near, np.dtype(np.float32))
    assert not may_exchange([*near, Device()], np.dtype(np.float32))
    assert not may_exchange([*near, Far()], np.dtype(np.float32))
    assert not may_exchange(near * 9, np.dtype(np.float32))


def test_on_another_mesh_over_the_same_devices() -> None:
    source, _ = CASE.shardings()
    mesh = jax.sharding.Mesh(cpu_devices().reshape(4, 2), ("a", "b"))
    target = NamedSharding(mesh, jax.sharding.PartitionSpec(None, ("b", "a")))
    result = Resharder(cost=EAGER)(jax.device_put(CASE.values(), source), target)
    assert result.sharding == target
    np.testing.assert_array_equal(np.asarray(result), CASE.values())
