"""Hugging Face checkpoints: reading them as our parameters, and writing them."""
