"""How torch comes to know the backend: by a call, by an entry point, under torchrun; and what registering costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "backend_ddp.py"
SOLO = (
    "import torch, torch.distributed as dist\n"
    "dist.init_process_group('sennit', store=dist.HashStore(), rank=0, world_size=1)\n"
    "x = torch.ones(2); dist.all_reduce(x); print(x.tolist(), dist.get_backend())\n"
    "dist.destroy_process_group()\n"
)


def python(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    folders = [str(path)] * (path is not None) + [str(ROOT / "src")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, timeout=250
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that makes the entry point of pyproject.toml visible, as an install would."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."torch.backends"]\nsennit = "sennit.backend:register"' in declared
    folder = tmp_path / "sennit_entry-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: sennit-entry\nVersion: 0\n", encoding="utf-8")
    (folder / "entry_points.txt").write_text("[torch.backends]\nsennit = sennit.backend:register\n", encoding="utf-8")
    return tmp_path


def test_torch_finds_the_backend_by_itself_and_loads_nothing_for_it(installed: Path) -> None:
    look = "import sys, torch; print(sorted(n for n in sys.modules if n.startswith('sennit')))\n"
    result = python("-c", look + SOLO, path=installed)
    assert result.returncode == 0, result.stderr
    loaded, answer = result.stdout.splitlines()
    assert loaded == "['sennit', 'sennit.backend']"
    assert answer == "[1.0, 1.0] sennit"


def test_registering_twice_changes_nothing() -> None:
    import torch.distributed as dist

    import sennit.backend

    sennit.backend.register()
    first = dist.Backend._plugins["SENNIT"]
    sennit.backend.register()
    assert dist.Backend._plugins["SENNIT"] is first


def test_the_example_runs_under_torchrun() -> None:
    result = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE))
    assert result.returncode == 0, result.stderr[-2000:]
    losses = [float(line.split()[3].rstrip(",")) for line in result.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
