"""Benchmark suites, with one file each. `evaluate --suite=NAME` finds them."""
