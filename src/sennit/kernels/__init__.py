"""A lowered program as it is called: operators that are one kernel, reductions that are one collective."""

from sennit.kernels.attention import fuse_attention
from sennit.kernels.joined_program import in_buckets

__all__ = ["fuse_attention", "in_buckets"]
