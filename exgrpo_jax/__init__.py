"""ExGRPO (arXiv:2510.02245) in JAX: learning to reason from experience.

In a notebook, `import exgrpo_jax as ex` is enough; see docs/library.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from exgrpo_jax.errors import InputError
  from exgrpo_jax.evaluation.responses import sample
  from exgrpo_jax.evaluation.scores import score
  from exgrpo_jax.experiment.config_files import load_config
  from exgrpo_jax.experiment.policies import open_policy
  from exgrpo_jax.grading.verifier import judge
  from exgrpo_jax.training.session import open_run

__version__ = '0.1.0'
__all__ = ['InputError', 'judge', 'load_config', 'open_policy', 'open_run', 'sample', 'score']

# Imported on first use, because grading workers must start without JAX. No function may share its
# name with a module in this folder, because importing that module would replace the function.
_HOMES = {
  'InputError': 'exgrpo_jax.errors',
  'judge': 'exgrpo_jax.grading.verifier',
  'load_config': 'exgrpo_jax.experiment.config_files',
  'open_policy': 'exgrpo_jax.experiment.policies',
  'open_run': 'exgrpo_jax.training.session',
  'sample': 'exgrpo_jax.evaluation.responses',
  'score': 'exgrpo_jax.evaluation.scores',
}


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_HOMES[name]), name)
