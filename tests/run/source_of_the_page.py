"""The model of docs/generated-source.md, and the source that the page shows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sennit.capture import capture
from sennit.ir.mesh import Mesh
from sennit.plan import lower, propagate, tensor_parallel
from sennit.run import emit_lane
from sennit.run.built import notes_of


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        error = self.down(torch.relu(self.up(x))) - wanted
        return (error * error).sum() / error.numel()


def source() -> str:
    graph = capture(MLP(), (torch.randn(16, 8), torch.randn(16, 8)))
    plan = tensor_parallel(graph, Mesh.parse("dp=2,tp=2;mb=2"), column="up", row="down")
    program = lower(propagate(plan))
    return emit_lane(program, program.lanes[0], notes_of(plan))


if __name__ == "__main__":  # to refresh the page
    import re
    from pathlib import Path

    page = Path(__file__).parents[2] / "docs" / "generated-source.md"
    text = page.read_text(encoding="utf-8")
    fence = re.compile(r"```{code-block} python\n\"\"\"stage0.*?```", re.DOTALL)
    page.write_text(fence.sub(lambda _: f"```{{code-block}} python\n{source()}```", text), encoding="utf-8")
