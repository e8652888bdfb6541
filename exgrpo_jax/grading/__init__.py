"""Grading: a verifier for mathematical answers, run in worker processes under hard limits.

Nothing below pool.py imports jax, because a worker must start in an instant.
"""
