"""Sweeps: many runs of one config, started as processes, and a table of the results."""
