"""Experiments, one file each. `--config=NAME` finds them wherever the package is installed."""
