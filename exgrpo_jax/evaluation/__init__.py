"""Evaluation of a policy: scores, benchmark suites, and responses to prompts."""
