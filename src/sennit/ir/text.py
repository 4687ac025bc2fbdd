"""A small scanner that every text form of `ir/` is parsed with: one place that knows about tokens and positions.

Values print with `str(value)` and parse with `Type.parse(text)`; both are property-tested to be inverses. Spaces and
comments (from `#` to the end of the line) separate tokens and mean nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from sennit.errors import ParseError

__all__ = ["Scanner", "quote"]

T = TypeVar("T")

_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*")
_INTEGER = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"-?(?:inf\b|nan\b|[0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)")
_VALUE = re.compile(r"%[A-Za-z0-9_.~]+")
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"')


def quote(text: str) -> str:
    """A string literal that `Scanner.string` reads back."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


class Scanner:
    """A cursor over one text. Each method either consumes what it names or raises `ParseError` at this place."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._skip_blank()

    @classmethod
    def whole(cls, text: str, read: Callable[[Scanner], T]) -> T:
        """Read one value and require that nothing follows it."""
        scanner = cls(text)
        value = read(scanner)
        if not scanner.at_end():
            raise scanner.expected("the end of the text")
        return value

    def _skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.position)
        assert match is not None  # the pattern matches the empty string
        self.position = match.end()

    def here(self) -> str:
        """Line and column, and what stands there, for error messages."""
        line = self.text.count("\n", 0, self.position) + 1
        column = self.position - self.text.rfind("\n", 0, self.position)
        rest = self.text[self.position : self.position + 24].split("\n", 1)[0]
        return f"line {line}, column {column}, at {rest!r}" if rest else f"line {line}, column {column}, at the end"

    def expected(self, what: str) -> ParseError:
        return ParseError(f"expected {what}", where=self.here())

    def at_end(self) -> bool:
        return self.position == len(self.text)

    def _take(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self.text, self.position)
        if match is None:
            raise self.expected(what)
        self.position = match.end()
        self._skip_blank()
        return match.group(0)

    def peek(self, literal: str) -> bool:
        return self.text.startswith(literal, self.position)

    def accept(self, literal: str) -> bool:
        """Consume `literal` if it stands here."""
        if not self.peek(literal):
            return False
        self.position += len(literal)
        self._skip_blank()
        return True

    def expect(self, literal: str) -> None:
        if not self.accept(literal):
            raise self.expected(repr(literal))

    def accept_word(self, word: str) -> bool:
        """Consume `word` if it stands here as a whole word."""
        match = _WORD.match(self.text, self.position)
        return match is not None and match.group(0) == word and self.accept(word)

    def word(self, what: str = "a name") -> str:
        return self._take(_WORD, what)

    def integer(self) -> int:
        return int(self._take(_INTEGER, "an integer"))

    def number(self) -> int | float:
        """An integer where the text is one, else a float."""
        text = self._take(_FLOAT, "a number")
        return int(text) if _INTEGER.fullmatch(text) else float(text)

    def value_name(self) -> str:
        """A `%name`; returns it without the sign."""
        return self._take(_VALUE, "a %name")[1:]

    def string(self) -> str:
        literal = self._take(_STRING, "a quoted string")
        return re.sub(r"\\(.)", lambda m: "\n" if m.group(1) == "n" else m.group(1), literal[1:-1])

    def bracketed(self, opening: str, closing: str, item: Callable[[], T]) -> list[T]:
        """`opening (item ("," item)*)? closing`."""
        self.expect(opening)
        items: list[T] = []
        if self.accept(closing):
            return items
        items.append(item())
        while self.accept(","):
            items.append(item())
        self.expect(closing)
        return items
