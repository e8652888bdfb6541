"""The protocols, one file for each study. Each docstring says what was fixed before the runs."""
