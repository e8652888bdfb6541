"""Sweeps and studies: trials, protocols, the processes that run them."""
