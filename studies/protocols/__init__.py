"""The protocols: a file for each study, whose docstring says what was fixed before its runs."""
