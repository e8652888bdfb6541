"""A config made into frozen settings, a model, a tokenizer and data."""
