"""Certificates: every rule that a program relies on is executed once, and remembered on disk.

`Certifier.require(op, types, rule, strategy, size)` tries the way in which a strategy splits an operator (`trial.py`),
unless it holds a certificate for it. A difference above 1e-9 is an error that names the operator, the split and the
difference: then the rule, a user's annotation or another source's, is wrong, and the program would have computed
something else.

A certificate is the hash of what was tried: the small operator with its arguments and types, the rule and the way.
Certificates of one torch release and one version of the rules are lines of one file. A file is written beside its place
and moved there, with what other processes wrote meanwhile; a line that is no hash is dropped, so a damaged file costs a
repetition and nothing else. Operators from outside torch are certified in every process: their definition may have
changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

import torch

import sennit.capture.rules
from sennit.capture.rules.rule import Rule, Strategy, Types
from sennit.capture.rules.trial import Way, largest_difference, small, way_of
from sennit.errors import PlanError
from sennit.ir.graph import Op

__all__ = ["TOLERANCE", "Certifier"]

TOLERANCE = (
    1e-9  # of the largest value, in float64: sums in another order differ by 1e-15 or so, wrong splits by much more
)


class Certifier:
    """Tries what it holds no certificate for.

    `folder` is where certificates are kept between processes; None keeps none.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.file = folder / "rules" / f"{_version()}.txt" if folder is not None else None
        self.stored = _read(self.file)
        self.held = set(self.stored)
        self.tried = 0
        self._seen: set[tuple[object, ...]] = set()

    def require(self, op: Op, types: Types, rule: Rule, strategy: Strategy, size: int) -> None:
        """Raise unless the operator, split so over an axis of `size`, computes what it does whole."""
        if strategy.is_replicated or op.kind.startswith("sennit."):
            return  # our own operators are defined on pieces: `ir/local_forms_numpy.py` is their meaning
        way = way_of(rule, strategy)
        key = _key(op, types, rule, way, size)
        if key in self.held:
            return
        difference = self._try(op, types, rule, way, size)
        if not difference <= TOLERANCE:
            raise PlanError(
                f"the rule of {op.kind} is wrong: {way}, its pieces differ from the whole by {difference:.3g} of the largest value",
                where=f"{op.describe()}, rule {rule}",
                fix="correct the annotation in sennit.rule"
                if _is_foreign(op)
                else "split it otherwise, and report this rule",
            )
        self.tried += 1
        self.held.add(key)
        if not _is_foreign(op):
            self.stored.add(key)

    def _try(self, op: Op, types: Types, rule: Rule, way: Way, size: int) -> float:
        try:
            return largest_difference(op, types, rule, way, size)
        except Exception as error:  # torch raises many kinds; each one means that the pieces do not fit the operator
            raise PlanError(
                f"the rule of {op.kind} cannot be tried: {way}, {type(error).__name__}: {error}",
                where=f"{op.describe()}, rule {rule}",
                fix="correct the annotation in sennit.rule, or parallelize(..., certify=False) where it does not run on the CPU"
                if _is_foreign(op)
                else "split it otherwise, and report this rule",
            ) from error

    def save(self) -> None:
        """Write the certificates, together with those that others wrote since."""
        if self.file is None or self.stored <= _read(self.file):
            return
        self.stored |= _read(self.file)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=self.file.name)
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.writelines(f"{key}\n" for key in sorted(self.stored))
        os.replace(name, self.file)


def _is_foreign(op: Op) -> bool:
    return not op.kind.startswith("aten.")


def _key(op: Op, types: Types, rule: Rule, way: Way, size: int) -> str:
    reduced, reads = small(op, types, rule)
    what = (
        op.kind,
        reduced.args,
        reduced.kwargs,
        tuple(reads.values()),
        tuple(v.type for v in reduced.results),
        rule,
        way,
        size,
    )
    return hashlib.sha256(repr(what).encode()).hexdigest()


def _read(file: Path | None) -> set[str]:
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines() if file is not None else []
    except OSError:
        return set()  # none yet, or not readable: everything is tried again
    return {line for line in lines if re.fullmatch(r"[0-9a-f]{64}", line)}


def _version() -> str:
    """The release of torch, and a hash of the rules and of what tries them."""
    digest = hashlib.sha256()
    folder = Path(sennit.capture.rules.__file__).parent
    definitions = folder.parent.parent / "ir"
    for file in (*sorted(folder.glob("*.py")), definitions / "local_forms_numpy.py", definitions / "layout_numpy.py"):
        digest.update(file.read_bytes())
    return f"torch-{torch.__version__}-{digest.hexdigest()[:16]}"
