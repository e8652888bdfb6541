"""A config's settings, model, tokenizer and data, and the policy that a run starts from."""
