"""Checkpoints of Hugging Face, read into our parameters and written back."""
