"""Element types by the short names that the text forms use, and the type of one logical tensor.

tensor := dtype "[" (size ("," size)*)? "]"
dtype  := "f64" | "f32" | "bf16" | "f16" | "i64" | "i32" | "i16" | "i8" | "u8" | "bool"
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod

from sennit.errors import ParseError
from sennit.ir.text import Scanner

__all__ = ["DType", "TensorType"]


class DType(Enum):
    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 1 if self is DType.BOOL else int(self.value.lstrip("bfiu")) // 8

    @property
    def torch_name(self) -> str:
        """The name of the same type in torch: `float32`, `bfloat16`, `bool`."""
        letters = self.value.rstrip("0123456789")
        return {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}.get(letters, letters) + self.value[
            len(letters) :
        ]

    @property
    def is_float(self) -> bool:
        return self.value.startswith(("f", "bf"))

    @classmethod
    def read(cls, scanner: Scanner) -> DType:
        word = scanner.word("an element type")
        try:
            return cls(word)
        except ValueError:
            names = ", ".join(d.value for d in cls)
            raise ParseError(
                f"unknown element type {word!r}", where=scanner.here(), fix=f"use one of {names}"
            ) from None


@dataclass(frozen=True, slots=True)
class TensorType:
    """The shape and element type of a logical tensor, as the unsplit model sees it."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.value}[{','.join(map(str, self.shape))}]"

    @classmethod
    def read(cls, scanner: Scanner) -> TensorType:
        dtype = DType.read(scanner)
        return cls(tuple(scanner.bracketed("[", "]", scanner.integer)), dtype)

    @classmethod
    def parse(cls, text: str) -> TensorType:
        return Scanner.whole(text, cls.read)
