"""Collective algorithms: a language, a compiler, a verifier, a library."""

from sennit.collective.language import Builder, Chunk, Group, trace

__all__ = ["Builder", "Chunk", "Group", "trace"]
