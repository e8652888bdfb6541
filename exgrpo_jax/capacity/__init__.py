"""What fits a TPU slice or a GPU and, on a slice, how fast it trains."""
