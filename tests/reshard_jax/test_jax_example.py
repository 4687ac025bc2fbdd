"""The example runs as a newcomer runs it, and prints what its page shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from sennit.reshard.exchange_jax import register

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_example_runs_and_the_page_shows_its_output() -> None:
    script = ROOT / "examples" / "reshard_jax.py"
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=120)
    page = (ROOT / "docs" / "reshard-jax.md").read_text(encoding="utf-8")
    lines = result.stdout.splitlines()
    assert any(line.startswith("  all_to_all over x, y.0, y.1") for line in lines)
    if register():
        for line in lines:
            assert line in page
