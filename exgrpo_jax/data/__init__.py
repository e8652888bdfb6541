"""Loading questions from files, TFDS and embedded tasks, and turning their messages into tokens."""
