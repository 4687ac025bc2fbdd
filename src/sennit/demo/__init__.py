"""The main job with no configuration: `sennit demo`."""

from sennit.demo.comparison import DemoOptions, run_demo

__all__ = ["DemoOptions", "run_demo"]
