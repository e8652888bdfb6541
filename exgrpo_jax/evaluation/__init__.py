"""Evaluation of a policy: scores, suites of benchmarks, and responses to prompts."""
