"""Estimates of memory on a TPU slice or a GPU and, on a slice, of training speed."""
