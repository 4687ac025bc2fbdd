"""What tests and benchmarks share: model families from real libraries, and eager torch brought to compare with."""
