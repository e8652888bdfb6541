"""Benchmark suites, one file each. `evaluate --suite=NAME` finds them."""
