"""Hypothesis profiles: `ci` (the default) tries the same few examples every time, `fuzz` looks for new ones for long.

A test states how many examples it is worth in its own `@settings`, which would win over the profile; so under `fuzz`
each test's own number is multiplied, and its examples are random and kept in `.hypothesis` when they fail.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.database import DirectoryBasedExampleDatabase

FUZZ_FACTOR = 50

settings.register_profile("ci", derandomize=True, deadline=None, database=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("ci")


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
