"""Multi-turn environments: the protocol, the worker processes, and built-in environments."""
