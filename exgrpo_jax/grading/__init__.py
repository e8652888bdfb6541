"""Grading: a verifier for mathematical answers, run in worker processes under hard limits.

worker.py and everything it imports must not import jax, because a worker must start instantly.
"""
