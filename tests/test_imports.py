"""Torch and JAX stay where they belong: what plans and simulates imports fast, and on machines that lack them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import sennit

SOURCE = Path(__file__).resolve().parent.parent / "src" / "sennit"
LIGHT_FOLDERS = ("ir", "cluster", "cost", "sim")
TORCH_FOLDERS = ("capture", "run", "demo")


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)


def imported_roots(file: Path) -> Iterator[tuple[str, int]]:
    """The top-level package and the line of every import in a file, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield node.module.split(".")[0], node.lineno


def light_modules() -> list[str]:
    """Every module of the light folders, by name, except those that exist to speak to a framework."""
    files = sorted(file for folder in LIGHT_FOLDERS for file in (SOURCE / folder).rglob("*.py"))
    kept = [file for file in files if not file.stem.endswith(("_torch", "_jax"))]
    parts = [file.relative_to(SOURCE.parent).with_suffix("").parts for file in kept]
    return [".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts]


def test_import_sennit_loads_neither_torch_nor_numpy() -> None:
    listing = run_python("-X", "importtime", "-c", "import sennit").stderr
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in listing.splitlines() if "|" in line}
    assert "sennit" in loaded
    assert not loaded & {"torch", "jax", "numpy", "rich", "tyro"}


def test_the_light_folders_import_without_torch_or_jax() -> None:
    modules = light_modules()
    assert "sennit.ir.mesh" in modules
    script = "import sys\n" + "\n".join(
        f"import {name}\nassert not {{'torch', 'jax'}} & set(sys.modules), '{name} loads a framework'"
        for name in modules
    )
    run_python("-c", script)


def test_torch_and_jax_are_imported_only_in_their_files() -> None:
    for file in sorted(SOURCE.rglob("*.py")):
        folder = file.relative_to(SOURCE).parts[0]
        for package, line in imported_roots(file):
            if package == "torch":
                assert folder in TORCH_FOLDERS or file.stem.endswith("_torch"), f"{file}:{line} imports torch"
            if package in ("jax", "jaxlib"):
                assert file.stem.endswith("_jax") or file == SOURCE / "jax.py", f"{file}:{line} imports JAX"


def test_the_public_names_are_there_and_lazy() -> None:
    assert dir(sennit) == sorted(sennit.__all__)
    assert set(sennit._HOME) | {"__version__"} == set(sennit.__all__)
    assert sennit.Mesh.parse("dp=2").names == ("dp",)
    assert "Mesh" in vars(sennit)  # found once, then an ordinary attribute


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(sennit, "parallelise")


def test_every_public_name_is_found_where_its_table_says() -> None:
    for name, module in sennit._HOME.items():
        assert getattr(sennit, name) is getattr(sys.modules[module], name)


def test_the_version_is_that_of_the_distribution() -> None:
    declared = (SOURCE.parent.parent / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{sennit.__version__}"' in declared
