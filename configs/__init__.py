"""Experiments, one config file each. `--config=NAME` finds them in any installation."""
