"""The trials of a sweep, and processes that run them side by side."""
