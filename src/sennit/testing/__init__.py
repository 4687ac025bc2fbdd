"""What tests and benchmarks share: other hosts on one machine, model families from real libraries, and eager torch to
compare with.
"""

from sennit.testing.testbed import Host, Network, network, why_no_network

__all__ = ["Host", "Network", "network", "why_no_network"]
