"""What tests and benchmarks of distributed programs need and a single machine lacks: other hosts."""

from sennit.testing.testbed import Host, Network, network, why_no_network

__all__ = ["Host", "Network", "network", "why_no_network"]
