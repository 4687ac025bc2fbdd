"""What ranks know of the machine: the maker of its cores, and what its shared cache keeps."""

from __future__ import annotations

import pytest

from sennit.collective.runtime.shm_facts import kept_bytes, processor_maker, shared_cache

MIB = 1 << 20


@pytest.mark.parametrize(("maker", "kept"), [("AuthenticAMD", 24 * MIB), ("GenuineIntel", 0), ("", 0), (None, 0)])
def test_only_a_near_cache_keeps(maker: str | None, kept: int) -> None:
    assert kept_bytes(32 * MIB, maker) == kept


def test_this_machine() -> None:
    assert shared_cache() > 0
    maker = processor_maker()
    assert maker is None or maker == maker.strip() != ""
