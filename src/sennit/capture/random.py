"""Random operators taken apart: what is drawn becomes `sennit.uniform`, the rest is plain arithmetic.

| torch | becomes, with u = uniform(seed, number, shape) |
|---|---|
| dropout(x, p) | mask = u >= p; x * mask * 1/(1-p) |
| dropout's backward(g, mask, scale) | g * mask * scale |
| rand, rand_like | u |
| uniform(x, low, high) | u * (high - low) + low |
| bernoulli(x, p), bernoulli(x) | u < p, u < x, in x's type |
| randint(low, high) | floor(u * (high - low) + low), as integers |
| randn, randn_like, normal(x, mean, std) | sqrt(-2 log(1 - u)) * cos(2 pi u'), times std plus mean; u' has the next number |

`number` counts draws in the order of the model, those included that nothing needs in the end; so it depends on the
model alone. Masks are drawn in float32 whatever the model computes in: eight bits of a bfloat16 would round a
probability, and the same seed drops the same elements in every precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import pi

from sennit.errors import CaptureError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Op, Ref, Value

__all__ = ["RandomParts", "is_random"]


def is_random(kind: str) -> bool:
    """Whether an operator draws random numbers, or is the derivative of one that does."""
    return _name(kind) in (
        "bernoulli",
        "multinomial",
        "native_dropout",
        "native_dropout_backward",
        "normal",
        "normal_functional",
        "poisson",
        "rand",
        "rand_like",
        "randint",
        "randint_like",
        "randn",
        "randn_like",
        "randperm",
        "rrelu_with_noise",
        "rrelu_with_noise_functional",
        "uniform",
    )


def _name(kind: str) -> str:
    return kind.split(".")[1] if kind.startswith("aten.") else kind


@dataclass(slots=True)
class RandomParts:
    """Takes operators apart, one after another, and counts what they draw. `seed` names the seed's value."""

    seed: str
    drawn: int = 0
    _ops: list[Op] = field(default_factory=list)

    def take_apart(self, op: Op, types: Callable[[str], TensorType]) -> tuple[Op, ...]:
        """The operators that stand for `op` and define its results, under its own names."""
        self._ops = []
        x = op.reads[0] if op.reads else ""
        result = op.results[0]
        high: Arg
        match _name(op.kind), op.args:
            case "native_dropout", (_, float() | int() as p, *_):
                self._dropout(op, x, float(p))
            case "native_dropout_backward", (Ref(), Ref(mask), float() | int() as scale):
                kept = self._step(op, "kept", "aten.mul.Tensor", (Ref(x), Ref(mask)), result.type)
                self._last(op, result, "aten.mul.Tensor", (Ref(kept), scale))
            case (("rand" | "rand_like"), _):
                self._last(op, result, "sennit.uniform", self._draw(result.type.shape, result.type.dtype))
            case "uniform", _:
                low, high = (*op.args[1:], *(0.0, 1.0)[len(op.args) - 1 :])[:2]
                self._between(op, result, low, high)
            case "bernoulli", (_,):
                self._bernoulli(op, Ref(x), types(x).dtype)
            case "bernoulli", (_, float() | int() as p):
                self._bernoulli(op, float(p), DType.F32)
            case "randint", (int() as high, tuple()):
                self._integers(op, 0, high)
            case "randint", (int() as low, int() as high, tuple()):
                self._integers(op, low, high)
            case "randint_like", (_, int() as high):
                self._integers(op, 0, high)
            case "randint_like", (_, int() as low, int() as high):
                self._integers(op, low, high)
            case (("randn" | "randn_like"), _):
                self._normal(op, 0.0, 1.0)
            case (("normal" | "normal_functional"), (Ref(), *numbers)) if op.kind.split(".")[-1] in (
                "default",
                "functional",
            ):
                mean, deviation = (*numbers, *(0.0, 1.0)[len(numbers) :])[:2]
                self._normal(op, mean, deviation)
            case _:
                raise CaptureError(
                    f"{op.kind} draws in a way that has no split form",
                    where=op.describe(),
                    fix="draw with torch.rand, bernoulli, randint or randn, or pass what is drawn to the model as an argument",
                )
        return tuple(self._ops)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _draw(self, shape: tuple[int, ...], dtype: DType) -> tuple[Arg, ...]:
        """The arguments of the next draw."""
        number, self.drawn = self.drawn, self.drawn + 1
        return (Ref(self.seed), number, shape, dtype)

    def _step(self, op: Op, suffix: str, kind: str, args: tuple[Arg, ...], type_: TensorType) -> str:
        """One part with a name made from the operator's; returns it."""
        value = Value(f"{op.name}.{suffix}", type_)
        self._ops.append(replace(op, kind=kind, args=args, kwargs=(), results=(value,)))
        return value.name

    def _last(self, op: Op, result: Value, kind: str, args: tuple[Arg, ...], **kwargs: Arg) -> None:
        self._ops.append(replace(op, kind=kind, args=args, kwargs=tuple(kwargs.items()), results=(result,)))

    def _uniform(self, op: Op, dtype: DType, suffix: str = "drawn") -> str:
        shape = op.results[0].type.shape
        return self._step(op, suffix, "sennit.uniform", self._draw(shape, dtype), TensorType(shape, dtype))

    def _dropout(self, op: Op, x: str, p: float) -> None:
        result, mask = op.results
        drawn = self._uniform(op, DType.F32)
        self._last(op, mask, "aten.ge.Scalar", (Ref(drawn), p))
        kept = self._step(op, "kept", "aten.mul.Tensor", (Ref(x), Ref(mask.name)), result.type)
        self._last(op, result, "aten.mul.Tensor", (Ref(kept), 1 / (1 - p) if p < 1 else 0.0))

    def _between(self, op: Op, result: Value, low: Arg, high: Arg) -> None:
        assert isinstance(low, (int, float))
        assert isinstance(high, (int, float))
        drawn = self._uniform(op, result.type.dtype)
        wide = self._step(op, "wide", "aten.mul.Tensor", (Ref(drawn), float(high - low)), result.type)
        self._last(op, result, "aten.add.Tensor", (Ref(wide), float(low)))

    def _bernoulli(self, op: Op, p: Arg, dtype: DType) -> None:
        (result,) = op.results
        drawn = self._uniform(op, dtype)
        kind = "aten.lt.Tensor" if isinstance(p, Ref) else "aten.lt.Scalar"
        hit = self._step(op, "hit", kind, (Ref(drawn), p), TensorType(result.type.shape, DType.BOOL))
        self._last(op, result, "aten._to_copy.default", (Ref(hit),), dtype=result.type.dtype)

    def _integers(self, op: Op, low: int, high: int) -> None:
        (result,) = op.results
        drawn = self._uniform(op, DType.F64)  # 53 bits: a 24-bit draw would never give some of many integers
        wide_type = TensorType(result.type.shape, DType.F64)
        wide = self._step(op, "wide", "aten.mul.Tensor", (Ref(drawn), float(high - low)), wide_type)
        floor = self._step(op, "floor", "aten.floor.default", (Ref(wide),), wide_type)
        whole = self._step(op, "from", "aten.add.Tensor", (Ref(floor), float(low)), wide_type)
        self._last(op, result, "aten._to_copy.default", (Ref(whole),), dtype=result.type.dtype)

    def _normal(self, op: Op, mean: Arg, deviation: Arg) -> None:
        """Box and Muller: 1 - u is in (0, 1], so its logarithm is finite."""
        (result,) = op.results
        type_ = TensorType(result.type.shape, DType.F64 if result.type.dtype is DType.F64 else DType.F32)
        first, second = self._uniform(op, type_.dtype), self._uniform(op, type_.dtype, "angle")
        rest = self._step(op, "rest", "aten.rsub.Scalar", (Ref(first), 1.0), type_)
        log = self._step(op, "log", "aten.log.default", (Ref(rest),), type_)
        square = self._step(op, "square", "aten.mul.Tensor", (Ref(log), -2.0), type_)
        radius = self._step(op, "radius", "aten.sqrt.default", (Ref(square),), type_)
        turn = self._step(op, "turn", "aten.mul.Tensor", (Ref(second), 2 * pi), type_)
        cosine = self._step(op, "cosine", "aten.cos.default", (Ref(turn),), type_)
        normal = self._step(op, "normal", "aten.mul.Tensor", (Ref(radius), Ref(cosine)), type_)
        scaled = self._step(op, "scaled", "aten.mul.Tensor", (Ref(normal), deviation), type_)
        if type_.dtype is result.type.dtype:
            self._last(op, result, "aten.add.Tensor", (Ref(scaled), mean))
        else:
            moved = self._step(op, "moved", "aten.add.Tensor", (Ref(scaled), mean), type_)
            self._last(op, result, "aten._to_copy.default", (Ref(moved),), dtype=result.type.dtype)
