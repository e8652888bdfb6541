"""Rollouts: from planned questions to graded responses and a training batch."""
