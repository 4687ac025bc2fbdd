"""Rules that users write for their own operators.

    @sennit.rule("mylib::scale", "... d, d -> ... d")
    @torch.library.custom_op("mylib::scale", mutates_args=())
    def scale(x: Tensor, weight: Tensor) -> Tensor: ...

`annotation.py` has the grammar. The tensors of the annotation are those of the operator's schema, in order, lists
flattened. The rule is certified by execution before it is used, like every other: an annotation that is wrong is an
error with the difference, never a wrong result. An annotation takes the place of a rule of the table, so a user can
also correct or restrict one.

Registered rules live as long as the process: torch keeps registered operators in the same way, and a rule belongs to
its operator. This is the one table of sennit that changes after import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from sennit.capture.rules.annotation import Annotation, parse_annotation
from sennit.capture.rules.rule import Letters, Types
from sennit.errors import PlanError
from sennit.ir.graph import Op

__all__ = ["registered_rules", "rule", "user_rule"]

T = TypeVar("T")

_REGISTERED: dict[str, tuple[Annotation, tuple[tuple[int, ...], ...]]] = {}  # "mylib.op" -> annotation, linear sets


def rule(name: str, annotation: str, *, linear: Sequence[Sequence[int]] = ()) -> Callable[[T], T]:
    """Register the rule of an operator, by its name in torch (`mylib::op`).

    `linear` lists sets of tensors that it reads, by position, in which it is linear: where all of a set are pending
    sums, it may run on the parts. To be used as a decorator of the operator's definition, or as a plain call.
    """
    namespace, separator, operator = name.partition("::")
    if not separator or not operator:
        raise PlanError(f"{name!r} is no operator's name", fix="use the name in torch: 'mylib::op'")
    parsed = parse_annotation(annotation)
    _REGISTERED[f"{namespace}.{operator}"] = (parsed, tuple(tuple(group) for group in linear))

    def decorate(definition: T) -> T:
        _check_schema(namespace, operator, parsed)
        return definition

    if hasattr(getattr(torch.ops, namespace), operator):
        _check_schema(namespace, operator, parsed)
    return decorate


def registered_rules() -> tuple[str, ...]:
    """What is registered, as text: part of the key of every certificate."""
    return tuple(sorted(f"{name}: {parsed.text} {linear}" for name, (parsed, linear) in _REGISTERED.items()))


def user_rule(op: Op, types: Types) -> Letters | None:
    """The rule that a user registered for an operator, for the shapes that it has here."""
    found = _REGISTERED.get(op.kind.rsplit(".", 1)[0])
    if found is None:
        return None
    annotation, linear = found
    try:
        letters = annotation.letters(
            [types[name].shape for name in op.reads], [value.type.shape for value in op.results]
        )
    except ValueError as error:
        raise PlanError(
            f"the rule {annotation.text!r} does not fit {op.kind}: {error}",
            where=op.describe(),
            fix="correct the annotation in sennit.rule",
        ) from error
    return replace(letters, linear=linear)


def _check_schema(namespace: str, operator: str, parsed: Annotation) -> None:
    """The number of tensors, where the schema fixes it; lists and optional tensors are known only at a call."""
    packet = getattr(getattr(torch.ops, namespace), operator)
    overload = getattr(packet, packet.overloads()[0])
    schema = overload._schema
    kinds = [str(argument.type) for argument in schema.arguments]
    if any("List[Tensor]" in kind or "Optional[Tensor]" in kind for kind in kinds):
        return
    tensors = [argument.name for argument, kind in zip(schema.arguments, kinds, strict=True) if kind == "Tensor"]
    if len(tensors) != len(parsed.reads):
        raise PlanError(
            f"the rule {parsed.text!r} names {len(parsed.reads)} tensors that are read, and {namespace}::{operator} reads "
            f"{len(tensors)}: {', '.join(tensors) or 'none'}",
            where=f"schema {schema}",
            fix="annotate each tensor argument, in order, separated by commas",
        )
