"""Operators of a program put together to the kernels that torch has for them."""

from sennit.kernels.attention import fuse_attention

__all__ = ["fuse_attention"]
