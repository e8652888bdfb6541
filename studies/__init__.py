"""The research record: studies by protocol, their measurements, and figures of runs."""
