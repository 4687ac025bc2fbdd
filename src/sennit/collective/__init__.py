"""Collective algorithms: a language, a compiler, a verifier, a library."""

from sennit.collective.compile import CompileOptions, compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.language import Builder, Chunk, Group, trace

__all__ = ["Builder", "Chunk", "CompileOptions", "Group", "compile_algorithm", "compile_one_sided", "trace"]
