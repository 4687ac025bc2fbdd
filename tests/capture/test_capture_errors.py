"""What cannot be captured gets an error with the module, the user's line and the remedy."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sennit.capture import capture
from sennit.errors import CaptureError, SennitError


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class Branches(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sum()
        if y > 0:  # here
            y = y * 2
        return y


class Reads(Part):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).sum()
        return y * y.item()  # here


class Selects(Part):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x[x[:, 0] > 0])  # here
        return y.sum()


class Leaves(Part):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.sum() * float(x.detach().numpy().max())  # here


class Complex(Part):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.fft.fft(self.layer(x))  # here
        return y.abs().sum()


class EightBits(Part):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.to(torch.float8_e4m3fn).float().sum()  # here


class Shuffles(Part):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return (y * torch.randperm(4)).sum()  # here


class Drops(Part):
    def forward(self, x: Tensor, layerdrop: float = 0.5) -> Tensor:
        y: Tensor = self.layer(x)
        if torch.rand([]) < layerdrop:  # here
            y = x
        return y.sum()


class Fails(Part):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.T)  # here
        return y.sum()


class WritesArgument(Part):
    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        y: Tensor = self.layer(x)
        return y.sum()


class WritesParameter(Part):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
        y: Tensor = self.layer(x)
        return y.sum()


class Returns(Part):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(loss=self.layer(x).sum())


class Outer(nn.Module):
    """The part that fails is inside, and the message says where."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList([part])

    def forward(self, x: Tensor) -> Any:
        return self.parts[0](x)


def marked_line(part: type[nn.Module]) -> str | None:
    with open(__file__, encoding="utf-8") as file:
        lines = file.read().splitlines()
    start = lines.index(f"class {part.__name__}(Part):")
    return next(
        (f"test_capture_errors.py:{n}" for n in range(start, start + 7) if lines[n - 1].endswith("# here")), None
    )


@pytest.mark.parametrize(
    ("part", "what", "fix"),
    [
        (Branches, "branches on the value of a tensor", "torch.where"),
        (Reads, "reads the value of a tensor into Python", "torch.where"),
        (Selects, "makes a tensor whose size depends on values", "multiply by the mask"),
        (Leaves, "leaves torch", "with torch operators"),
        (Complex, "element type torch.complex128 has no name here", "use one of f64, f32"),
        (EightBits, "element type torch.float8_e4m3fn has no name here", "use one of f64, f32"),
        (Shuffles, "aten.randperm.default draws in a way that has no split form", "pass what is drawn"),
        (Drops, "branches on the value of a tensor", "encoder_layerdrop = decoder_layerdrop = 0"),
        (Fails, "fails while it is traced: RuntimeError", "call the model on the sample"),
        (WritesArgument, "writes to its argument 'x' in place", "x.clone()"),
        (WritesParameter, "writes to its parameter 'parts.0.layer.weight' in forward", "make it a buffer"),
        (Returns, "returns an object of type types.SimpleNamespace that is no tensor", "config.use_cache = False"),
    ],
)
def test_the_cause_the_place_and_the_remedy(
    part: type[nn.Module], what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Outer(part()).double(), (torch.randn(3, 4, dtype=torch.float64),))
    error = caught.value
    assert what in error.what
    assert error.fix is not None
    assert fix in error.fix
    if (line := marked_line(part)) is not None:
        assert error.where is not None
        assert re.search(r"module 'parts\.0(\.layer)?'", error.where)
        assert line in error.where
    assert capsys.readouterr().err == ""  # torch would write the graph


def test_a_branch_that_is_certain_is_no_branch() -> None:
    graph = capture(Drops(), (torch.randn(3, 4), 0.0))
    assert graph.select(kind="aten.addmm.default")
    always = capture(Drops(), (torch.randn(3, 4), 1.0), training=False)
    assert not any(op.kind == "aten.addmm.default" for op in always.ops)


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(SennitError, match=r"the arguments do not fit forward\(x: .*missing a required argument: 'x'"):
        capture(Branches(), ())
