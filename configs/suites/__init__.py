"""Suites of benchmarks, one file each. `evaluate --suite=NAME` finds them."""
