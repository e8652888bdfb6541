"""Questions from files, the Hub, TFDS and embedded tasks, and their prompts as tokens."""
