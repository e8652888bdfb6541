"""Rollout: from a plan of questions to graded responses and a batch."""
