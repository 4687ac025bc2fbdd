"""The MODEL argument: what it names, and what is said of text that names nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from sennit.capture import capture
from sennit.cli_model import ModelSource, load_model, parse_model
from sennit.demo.models import catalogue
from sennit.errors import CaptureError
from sennit.ir.graph import Role


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("gpt", ModelSource("gpt")),
        ("gpt2:layers=2,dtype=bf16", ModelSource("gpt2", None, (("layers", 2),), "bf16")),
        ("mine.py:make", ModelSource("mine.py", "make")),
        ("a.b:make:dtype=f64", ModelSource("a.b", "make", (), "f64")),
    ],
)
def test_text(text: str, source: ModelSource) -> None:
    assert parse_model(text) == source


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "names no model"),
        ("gpt:layers=two", "no option of a model"),
        ("gpt:colour=2", "no option of a model"),
        ("mine:make:batch=2", "gives sizes to a function"),
        ("nobody", "there is no model 'nobody'"),
        ("family.nobody", "there is no family"),
        ("family.gpt2:tokens=7", "family.gpt2 has a length of its own"),
        ("nobody_at_all:make", "there is no module"),
        ("nobody.py:make", "there is no file"),
        ("sennit.demo.gpt:nothing", "has no 'nothing'"),
        ("sennit.demo.models:catalogue", "returned dict"),
    ],
)
def test_faults_are_named(text: str, match: str) -> None:
    with pytest.raises(CaptureError, match=match):
        load_model(text)


def test_a_model_without_memory_is_captured_at_its_size() -> None:
    model, sample = load_model("gpt:layers=2,batch=2,tokens=16,dtype=bf16", memory=False)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    graph = capture(model, sample.args, sample.kwargs)
    assert {str(item.value.type.dtype.value) for item in graph.inputs if item.path.endswith("weight")} == {"bf16"}


def test_a_function_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine_for_test.py"
    file.write_text("import torch\ndef make():\n    return torch.nn.Linear(3, 1), (torch.ones(2, 3),)\n")
    model, sample = load_model(f"{file}:make:dtype=f64")
    assert isinstance(model, nn.Linear)
    assert sample.args[0].dtype is torch.float64
    assert not sample.kwargs


@pytest.mark.parametrize("name", [name for name, entry in catalogue().items() if entry.library == "torch"])
def test_models_of_the_catalogue_return_a_loss(name: str) -> None:
    model, sample = load_model(f"{name}:batch=2,layers=1", memory=False)
    loss = model(*sample.args, **sample.kwargs)
    assert loss.shape == ()


@pytest.mark.filterwarnings("default")  # those of the library
@pytest.mark.parametrize("batch", [3, 8])
def test_a_family_has_the_batch_that_is_asked_for(batch: int) -> None:
    pytest.importorskip("transformers")
    model, sample = load_model(f"family.t5:batch={batch}", memory=False)
    assert {len(value) for value in sample.kwargs.values() if isinstance(value, torch.Tensor)} == {batch}
    graph = capture(model, sample.args, sample.kwargs)
    assert {item.value.type.shape[0] for item in graph.inputs if item.role is Role.INPUT} == {batch}


def test_a_function_of_a_module_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lies_here_for_test.py").write_text(
        "import torch\ndef make():\n    return torch.nn.Linear(3, 1), (torch.ones(2, 3),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [item for item in sys.path if item])
    model, _ = load_model("lies_here_for_test:make")
    assert isinstance(model, nn.Linear)
