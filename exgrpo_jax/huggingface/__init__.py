"""Read Hugging Face checkpoints into our parameters, and write them."""
