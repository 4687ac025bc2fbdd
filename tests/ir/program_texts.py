"""Golden programs that the checker accepts, as text.

The mutants of `test_program_check.py` each break one line of one.
"""

from __future__ import annotations

DATA_PARALLEL = """
program "data parallel" {
  mesh m0 = dp=4
  lane all on 0-3 {
    param %w : f32[4,8] of %w on m0 "h.0.weight"
    input %x : f32[16{dp},4] of %x on m0 "x"
    forward %y : f32[16{dp},8] of %y on m0 = aten.mm.default(%x, %w) for %y "h.0"
    forward %loss.part : f32[]{sum:dp} of %loss on m0 = aten.sum.default(%y) for %loss "head"
    all_reduce %loss : f32[] of %loss on m0 = %loss.part over dp
    backward %dw.part : f32[4,8]{sum:dp} of %dw on m0 = aten.mm.default(%x, %y) for %dw "h.0"
    free %y
    all_reduce %dw : f32[4,8] of %dw on m0 = %dw.part over dp
    free %dw.part
    loss %loss
    gradient "h.0.weight" %dw
  }
}
"""

# two micro-batches, sequence parallel in and out of a tensor-parallel pair of products
TENSOR_PARALLEL = """
program "tensor parallel" {
  mesh m0 = dp=2,tp=2;mb=2
  lane all on 0-3 {
    param %w1 : f32[8,16{tp}] of %w1 on m0 "mlp.up.weight"
    param %w2 : f32[16{tp},8] of %w2 on m0 "mlp.down.weight"
    input %x : f32[8{dp},8] of %x on m0 "x"
    forward %x0 : f32[8{dp,mb},8] of %x on m0 at mb=0 = sennit.slice(%x)
    forward %x1 : f32[8{dp,mb},8] of %x on m0 at mb=1 = sennit.slice(%x)
    forward %s0 : f32[8{dp,mb},8{tp}] of %x on m0 at mb=0 = sennit.slice(%x0)
    all_gather %r0 : f32[8{dp,mb},8] of %x on m0 at mb=0 = %s0 over tp
    forward %h0 : f32[8{dp,mb},16{tp}] of %h on m0 at mb=0 = aten.mm.default(%r0, %w1) for %h "mlp.up"
    forward %p0 : f32[8{dp,mb},8]{sum:tp} of %y on m0 at mb=0 = aten.mm.default(%h0, %w2) for %y "mlp.down"
    reduce_scatter %y0 : f32[8{dp,mb},8{tp}] of %y on m0 at mb=0 = %p0 over tp
    forward %h1 : f32[8{dp,mb},16{tp}] of %h on m0 at mb=1 = aten.mm.default(%x1, %w1) for %h "mlp.up"
    forward %p1 : f32[8{dp,mb},8]{sum:tp} of %y on m0 at mb=1 = aten.mm.default(%h1, %w2) for %y "mlp.down"
    reduce_scatter %q1 : f32[8{dp,mb,tp},8] of %y on m0 at mb=1 = %p1 over tp
    all_to_all %y1 : f32[8{dp,mb},8{tp}] of %y on m0 at mb=1 = %q1 over tp
    forward %y : f32[8{dp},8{tp}] of %y on m0 = sennit.concat(%y0, %y1)
    backward %g0 : f32[16{tp},8]{sum:dp,mb} of %dw2 on m0 at mb=0 = aten.mm.default(%h0, %r0) for %dw2 "mlp.down"
    backward %g1 : f32[16{tp},8]{sum:dp,mb} of %dw2 on m0 at mb=1 = aten.mm.default(%h1, %x1) for %dw2 "mlp.down"
    backward %g : f32[16{tp},8]{sum:dp} of %dw2 on m0 = sennit.accumulate(%g0, %g1)
    all_reduce %dw2 : f32[16{tp},8] of %dw2 on m0 = %g over dp
    forward %b : f32[8]{sum:tp} of %bias on m0 = sennit.partial(%bias)
    all_reduce %b.r : f32[8] of %bias on m0 = %b over tp
    result "y" %y
    gradient "mlp.down.weight" %dw2
  }
}
""".replace("    input %x :", '    param %bias : f32[8] of %bias on m0 "bias"\n    input %x :')

# a stage per lane, and a gradient of a tied weight summed over the stages
ACROSS_LANES = """
program "tied weight" {
  mesh m0 = pp=2,dp=2
  lane first on 0-1 {
    param %w : f32[4] of %w on m0 "embed.weight"
    backward %a : f32[4]{sum:pp,dp} of %dw on m0 = aten.mul.Tensor(%w, 2.0) for %dw "embed"
    all_reduce %b : f32[4]{sum:pp} of %dw on m0 = %a over dp
    all_reduce %c : f32[4] of %dw on m0 = %b over pp
    free %b
    gradient "embed.weight" %c
  }
  lane second on 2-3 {
    param %w : f32[4] of %w on m0 "embed.weight"
    backward %a : f32[4]{sum:pp,dp} of %dw on m0 = aten.mul.Tensor(%w, 3.0) for %dw "head"
    all_reduce %b : f32[4]{sum:pp} of %dw on m0 = %a over dp
    all_reduce %c : f32[4] of %dw on m0 = %b over pp
    gradient "embed.weight" %c
  }
}
"""


def one_forward_one_backward(micro_batches: int) -> str:
    """Two stages of two data-parallel devices. The first stage runs one forward ahead; sends do not block."""
    first = _Stage("m0", micro_batches)
    second = _Stage("m1", micro_batches)
    for mb in range(micro_batches):
        first.forward(mb)
        if mb >= 1:
            first.backward(mb - 1)
        second.middle(mb)
    first.backward(micro_batches - 1)
    return "\n".join(
        [
            'program "1F1B" {',
            f"  mesh m0 = dp=2;mb={micro_batches}@0-1",
            f"  mesh m1 = dp=2;mb={micro_batches}@2-3",
            "  lane stage0 on 0-1 {",
            '    param %w : f32[8,8] of %w0 on m0 "h.0.weight"',
            f'    input %x : f32[{4 * micro_batches}{{dp}},8] of %x on m0 "x"',
            *first.lines,
            *first.gradient("h.0.weight"),
            "  }",
            "  lane stage1 on 2-3 {",
            '    param %w : f32[8,8] of %w1 on m1 "h.1.weight"',
            *second.lines,
            *second.gradient("h.1.weight"),
            "  }",
            "}",
        ]
    )


class _Stage:
    """The lines of one stage: each method adds those of one micro-batch."""

    def __init__(self, mesh: str, micro_batches: int) -> None:
        self.mesh, self.micro_batches = mesh, micro_batches
        self.lines: list[str] = []
        self.rows = 4 * micro_batches

    def piece(self, name: str, tensor: str, mb: int) -> str:
        return f"%{name}{mb} : f32[{self.rows}{{dp,mb}},8] of %{tensor} on {self.mesh} at mb={mb}"

    def add(self, *lines: str) -> None:
        self.lines += [f"    {line}" for line in lines]

    def forward(self, mb: int) -> None:
        self.add(
            f"forward {self.piece('x', 'x', mb)} = sennit.slice(%x)",
            f'forward {self.piece("h", "h", mb)} = aten.mm.default(%x{mb}, %w) for %h "h.0"',
            f"send %h{mb} to stage1",
        )

    def backward(self, mb: int) -> None:
        self.add(f"receive {self.piece('dh', 'dh', mb)} from stage1")
        self.weight_gradient(mb, f"%x{mb}, %dh{mb}", "dw0", "h.0")
        self.add(f"free %x{mb}", f"free %h{mb}", f"free %dh{mb}")

    def middle(self, mb: int) -> None:
        self.add(
            f"receive {self.piece('h', 'h', mb)} from stage0",
            f'forward {self.piece("y", "y", mb)} = aten.mm.default(%h{mb}, %w) for %y "h.1"',
            f'backward {self.piece("dh", "dh", mb)} = aten.mm.default(%y{mb}, %w) for %dh "h.1"',
            f"send %dh{mb} to stage0",
        )
        self.weight_gradient(mb, f"%h{mb}, %y{mb}", "dw1", "h.1")
        self.add(f"free %h{mb}", f"free %dh{mb}")

    def weight_gradient(self, mb: int, args: str, tensor: str, module: str) -> None:
        self.add(
            f"backward %g{mb} : f32[8,8]{{sum:dp,mb}} of %{tensor} on {self.mesh} at mb={mb} = aten.mm.default({args}) "
            f'for %{tensor} "{module}"'
        )
        if mb == 0:
            return
        total = "%g0" if mb == 1 else f"%s{mb - 1}"
        covered = "+".join(str(at) for at in range(mb + 1))
        layout, at = ("{sum:dp,mb}", f" at mb={covered}") if mb + 1 < self.micro_batches else ("{sum:dp}", "")
        self.add(
            f"backward %s{mb} : f32[8,8]{layout} of %{tensor} on {self.mesh}{at} = sennit.accumulate({total}, %g{mb})"
        )

    def gradient(self, path: str) -> list[str]:
        tensor = "dw0" if self.mesh == "m0" else "dw1"
        return [
            f"    all_reduce %dw : f32[8,8] of %{tensor} on {self.mesh} = %s{self.micro_batches - 1} over dp",
            f'    gradient "{path}" %dw',
        ]


PIPELINE = one_forward_one_backward(4)
