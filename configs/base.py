"""The defaults of all settings, which are the paper's values. Every other config starts from them.

The `Config` class of each component has them next to their meaning; docs/configuration.md lists
them.
"""

from exgrpo_jax import config
from exgrpo_jax.experiment.settings import RunConfig


def get_config():
  return config.defaults(RunConfig)
