"""A run: its state, the loop of the paper, what it starts from."""
