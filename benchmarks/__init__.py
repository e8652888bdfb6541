"""Benchmarks of this machine. Run `python -m benchmarks` in a clone."""
