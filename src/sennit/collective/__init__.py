"""Collective algorithms: a language, a compiler, a verifier, a library."""

from sennit.collective.compile import CompileOptions, compile_algorithm
from sennit.collective.language import Builder, Chunk, Group, trace

__all__ = ["Builder", "Chunk", "CompileOptions", "Group", "compile_algorithm", "trace"]
