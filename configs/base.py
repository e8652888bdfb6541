"""The defaults of all settings, which are the paper's values. All other configs start from these.

Each component's config class, such as `RolloutConfig`, defines and explains its settings.
docs/configuration.md lists all settings.
"""

from exgrpo_jax import config
from exgrpo_jax.experiment.settings import RunConfig


def get_config():
  return config.defaults(RunConfig)
