"""The research record: studies by protocol, what they measured, and the figures of runs."""
