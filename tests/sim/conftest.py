from __future__ import annotations

from collections.abc import Callable

import pytest

from sennit.ir.program import Program

TENSOR_PARALLEL = """
program "tensor parallel" {{
  mesh m0 = tp={p}
  lane all on 0-{last} {{
    input %x : f32[{n},{n}] of %x on m0 "x"
    param %w : f32[{n}{{tp}},{n}] of %w on m0 "up.weight"
    forward %xs : f32[{n},{n}{{tp}}] of %x on m0 = sennit.slice(%x)
    forward %y : f32[{n},{n}]{{sum:tp}} of %y on m0 = aten.mm.default(%xs, %w) for %mm "up"
    all_reduce %z : f32[{n},{n}] of %y on m0 = %y over tp
    free %xs
    free %y
    result "y" %z
  }}
}}
"""


@pytest.fixture(scope="session")
def tensor_parallel() -> Callable[[int, int], Program]:
    """`tensor_parallel(p, n)`: one product over p devices and the all-reduce of its result, n x n."""
    return lambda p, n: Program.parse(TENSOR_PARALLEL.format(p=p, last=p - 1, n=n))


PIPELINE = """
program "pipeline" {{
  mesh m0 = x=1;mb={m}
  mesh m1 = x=1;mb={m}@1
  lane first on 0 {{
    input %x : f32[{b},{n}] of %x on m0 "x"
    param %w : f32[{n},{n}] of %w on m0 "first.weight"
{first}
  }}
  lane second on 1 {{
    param %w : f32[{n},{n}] of %v on m1 "second.weight"
{second}
  }}
}}
"""


@pytest.fixture(scope="session")
def pipeline() -> Callable[[int, int], Program]:
    """`pipeline(m, n)`: two stages of one product each, m micro-batches of n rows, forward only."""

    def make(m: int, n: int) -> Program:
        b = m * n
        first, second = [], []
        for i in range(m):
            piece = f"f32[{b}{{mb}},{n}]"
            first += [
                f"    forward %x{i} : {piece} of %x on m0 at mb={i} = sennit.slice(%x)",
                f'    forward %h{i} : {piece} of %h on m0 at mb={i} = aten.mm.default(%x{i}, %w) for %h "first"',
                f"    send %h{i} to second",
                f"    free %x{i}",
                f"    free %h{i}",
            ]
            second += [
                f"    receive %h{i} : {piece} of %h on m1 at mb={i} from first",
                f'    forward %y{i} : {piece} of %y on m1 at mb={i} = aten.mm.default(%h{i}, %w) for %y "second"',
                f"    free %h{i}",
            ]
        return Program.parse(PIPELINE.format(m=m, b=b, n=n, first="\n".join(first), second="\n".join(second)))

    return make
