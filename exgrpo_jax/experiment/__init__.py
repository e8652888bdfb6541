"""Turning a config into frozen settings, a model, a tokenizer and data."""
