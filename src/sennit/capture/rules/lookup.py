"""Where an operator's rule comes from: what a user registered, our own table, torch's DTensor, discovery; the first
that answers.

`rule_of(op, types)` asks the first three, which cost microseconds to a millisecond. `RuleBook` remembers the answers
for one graph: a deep model has few different operators, told apart by kind, types and arguments, so a look-up is one
dictionary access per operator. `sources` are asked last: `discover.discovered_rule` executes an operator to find its
rule, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sennit.capture.rules.letters import whole
from sennit.capture.rules.rule import Rule, Types
from sennit.capture.rules.table import own_rule
from sennit.capture.rules.user import user_rule
from sennit.capture.rules_dtensor import dtensor_rule
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Arg, Op, Ref

__all__ = ["RuleBook", "Source", "rule_of", "signature"]

Source = Callable[[Op, Types], Rule | None]
Signature = tuple[object, ...]


def rule_of(op: Op, types: Types, sources: Sequence[Source] = ()) -> Rule:
    """The rule of an operator. One that nobody knows is replicated, always right."""
    for source in (user_rule, own_rule, dtensor_rule, *sources):
        rule = source(op, types)
        if rule is not None:
            return rule
    reads = [types[name].shape for name in op.reads]
    return whole(reads, [value.type.shape for value in op.results])


def signature(op: Op, types: Types) -> Signature:
    """What a rule depends on: the kind, the types, and the arguments that are not names."""
    reads: tuple[TensorType, ...] = tuple(types[name] for name in op.reads)
    kwargs = tuple((key, _blank(arg)) for key, arg in op.kwargs)
    return op.kind, _blank(op.args), kwargs, reads, tuple(value.type for value in op.results)


def _blank(arg: Arg) -> object:
    match arg:
        case Ref():
            return Ref
        case tuple():
            return tuple(map(_blank, arg))
        case _:
            return type(arg), arg  # 1, 1.0 and True are equal, and mean different things


class RuleBook:
    """The rules of one graph's operators, looked up once per signature."""

    def __init__(self, types: Types, sources: Sequence[Source] = ()) -> None:
        self.types, self.sources = types, tuple(sources)
        self._rules: dict[int, Rule] = {}
        self._numbers: dict[Signature, int] = {}
        self._of_op: dict[str, int] = {}

    def signature(self, op: Op) -> int:
        """A number that operators with one signature share: quick to compare and to hash."""
        name = op.results[0].name
        if name not in self._of_op:
            self._of_op[name] = self._numbers.setdefault(signature(op, self.types), len(self._numbers))
        return self._of_op[name]

    def rule(self, op: Op) -> Rule:
        key = self.signature(op)
        if key not in self._rules:
            self._rules[key] = rule_of(op, self.types, self.sources)
        return self._rules[key]
