"""The defaults of all settings, for every other config to start from: the paper's values.

They stand beside their meaning in the `Config` of each component; docs/configuration.md lists them.
"""

from exgrpo_jax import config
from exgrpo_jax.experiment.settings import RunConfig


def get_config():
  return config.defaults(RunConfig)
