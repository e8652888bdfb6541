"""Load questions from files, the Hub, TFDS or embedded tasks, and tokenize their prompts."""
