"""Sweeps: many runs of one config, their processes, and a table of their results."""
