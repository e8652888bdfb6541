"""Training runs: their state, the paper's loop, and how they start."""
