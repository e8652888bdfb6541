"""ExGRPO (arXiv:2510.02245) in JAX: learning to reason from experience."""

__version__ = '0.1.0'
