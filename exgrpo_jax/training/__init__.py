"""A training run: its state, the paper's loop, and its start."""
