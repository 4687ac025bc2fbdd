"""Hypothesis profiles: `ci` (the default) tries the same few examples every time, `fuzz` looks for new ones for long.

A test states how many examples it is worth in its own `@settings`, which would win over the profile; so under `fuzz`
each test's own number is multiplied, and its examples are random and kept in `.hypothesis` when they fail.

The captured GPT, which the tests of capture, plan and run share, is made once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

if TYPE_CHECKING:
    from torch import Tensor

    from sennit.ir.graph import Graph

FUZZ_FACTOR = 50

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Certificates and profiles of tests do not go to the user's cache; processes started by tests share one folder,
    and so do tests that run side by side.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "sennit-cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SENNIT_CACHE_DIR", str(folder))
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--hypothesis-profile") != "fuzz":
        return
    for item in items:
        test = getattr(item, "function", None)
        # hypothesis has no public way to change the settings of a decorated test
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if getattr(test, "is_hypothesis_test", False):
            own = own or settings()
            test._hypothesis_internal_use_settings = settings(  # type: ignore[union-attr]
                own,
                max_examples=own.max_examples * FUZZ_FACTOR,
                derandomize=False,
                database=DirectoryBasedExampleDatabase(config.rootpath / ".hypothesis" / "examples"),
            )


@dataclass(frozen=True)
class SmallGPT:
    """A captured GPT in float64, what it is fed, and what the unsplit model computes in eager torch."""

    graph: Graph
    state: dict[str, Tensor]
    reference: dict[str, Tensor]

    def differences(self, outputs: dict[str, Tensor]) -> dict[str, float]:
        assert set(outputs) == set(self.reference)
        return {path: float((outputs[path] - whole).abs().max()) for path, whole in self.reference.items()}


@contextmanager
def one_core() -> Iterator[None]:
    """Kernels that sum in parallel give other bits with another number of threads: compare bits on one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_small_gpt(*, tied: bool) -> SmallGPT:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from sennit.capture import capture
    from sennit.demo.gpt import GPT, GPTConfig, random_batch

    config = GPTConfig(vocabulary=48, context=12, width=32, heads=4, layers=2, tie_embeddings=tied)
    torch.manual_seed(0)
    model = GPT(config).double()
    tokens, targets = random_batch(config, 8)
    graph = capture(model, (tokens, targets), name="GPT")
    with sdpa_kernel(SDPBackend.MATH), one_core():  # the form of attention that is captured
        loss = model(tokens, targets)
        loss.backward()
    parameters = dict(model.named_parameters())
    state = {path: parameter.detach() for path, parameter in parameters.items()}
    state |= {"tokens": tokens, "targets": targets, "tangent": torch.ones((), dtype=torch.float64)}
    gradients = {path: parameter.grad for path, parameter in parameters.items() if parameter.grad is not None}
    return SmallGPT(graph, state, {"loss": loss.detach(), **gradients})


@pytest.fixture
def single_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="session")
def small_gpt() -> SmallGPT:
    return make_small_gpt(tied=True)


@pytest.fixture(scope="session")
def untied_gpt() -> SmallGPT:
    return make_small_gpt(tied=False)
