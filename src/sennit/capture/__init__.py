"""torch model -> `Graph`, and the rules that say how each operator may be split."""

from sennit.capture.experts import experts_as_batch, experts_by_capacity
from sennit.capture.signature import Signature
from sennit.capture.trace import Captured, Model, capture, capture_call

__all__ = ["Captured", "Model", "Signature", "capture", "capture_call", "experts_as_batch", "experts_by_capacity"]
