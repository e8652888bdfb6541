"""From a config to frozen settings, a model, a tokenizer and data."""
