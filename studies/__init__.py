"""The research record: studies with their protocols, their measurements, and figures of runs."""
