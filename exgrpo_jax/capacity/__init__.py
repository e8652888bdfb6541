"""Estimates of memory use on a TPU slice or a GPU, and of training speed on a slice."""
