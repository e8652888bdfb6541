"""How fast this machine is: `python -m benchmarks`, from a clone."""
