"""Load questions from files, the Hub, TFDS or built-in tasks, and tokenize their prompts."""
