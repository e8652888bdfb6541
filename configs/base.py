"""The defaults of all settings, which are the paper's values. All other configs start from these.

Each component's `Config` class defines its settings and explains them. docs/configuration.md lists
them all.
"""

from exgrpo_jax import config
from exgrpo_jax.experiment.settings import RunConfig


def get_config():
  return config.defaults(RunConfig)
