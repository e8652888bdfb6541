"""Reading Hugging Face checkpoints into our parameters, and writing them back."""
