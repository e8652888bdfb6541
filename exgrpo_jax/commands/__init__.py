"""The commands. Each is a thin file that defines flags and calls into the package."""
