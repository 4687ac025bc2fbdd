"""torch model -> `Graph`, and the rules that say how each operator may be split."""

from sennit.capture.trace import Model, capture

__all__ = ["Model", "capture"]
