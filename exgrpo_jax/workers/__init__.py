"""Worker processes that run a user's code under limits on time and memory, and may be killed."""
