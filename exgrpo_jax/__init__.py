"""ExGRPO (arXiv:2510.02245) in JAX: learning to reason from experience."""
