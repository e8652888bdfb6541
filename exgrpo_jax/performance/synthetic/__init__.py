"""A run that nobody made, as large as one likes, for what measures the page of a run."""
