"""Worker processes that run user code under time and memory limits and can be killed."""
