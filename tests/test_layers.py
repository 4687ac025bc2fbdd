"""The layers hold in this tree, and the linter does see it where they do not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINT = Path(sys.executable).parent / "lint-imports"


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    """Lint the package under `tree`; the path puts it before an installed one."""
    return subprocess.run(
        [str(LINT), "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree / "src")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return tmp_path


def test_the_layers_hold() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("ir/mesh.py", "import sennit.cli"),
        ("errors.py", "import sennit.ir.mesh"),
        ("ir/mesh.py", "from sennit.environment import current_environment"),
        ("doctor.py", "from sennit.ir.mesh import Mesh"),
        ("cli.py", "import torch"),
    ],
)
def test_a_lower_layer_that_imports_a_higher_one_is_found(copy: Path, module: str, statement: str) -> None:
    file = copy / "src" / "sennit" / module
    file.write_text(file.read_text(encoding="utf-8") + f"\n{statement}\n", encoding="utf-8")
    result = lint_imports(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "BROKEN" in result.stdout


def test_a_folder_that_the_layers_forget_is_found(copy: Path) -> None:
    (copy / "src" / "sennit" / "newcomer.py").write_text("", encoding="utf-8")
    result = lint_imports(copy)
    assert result.returncode == 1
    assert "newcomer" in result.stdout


def test_every_folder_is_a_package() -> None:
    """The linter does not look into a folder without `__init__.py`."""
    for folder in {file.parent for file in (ROOT / "src" / "sennit").rglob("*.py")}:
        assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py"
