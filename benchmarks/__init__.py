"""Benchmarks of this machine: `python -m benchmarks`, from a clone."""
