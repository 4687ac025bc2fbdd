"""Runs an example inside ranks that are there already, and returns what it printed."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(rank: int, name: str, *arguments: object) -> str:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        spec.loader.exec_module(module)
        module.main(*arguments)
    return said.getvalue()


def run_hf_example(rank: int, folder: str) -> str:
    from sennit.testing.families_torch import transformers_module

    transformers_module()  # where torchvision was built for another torch, a plain import of a model fails
    return run_example(rank, "plan_finetune_hf", None, folder)
