"""Convert Hugging Face checkpoints to our parameters and back."""
