"""What a sweep is made of: its trials, and a launcher that runs them in parallel."""
