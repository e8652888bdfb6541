"""How fast, and what fits: measured on this machine, or compiled and computed for a TPU slice."""
