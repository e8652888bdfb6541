"""From files, TFDS names and embedded tasks to questions, and from messages to tokens."""
