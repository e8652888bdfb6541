"""ExGRPO (arXiv:2510.02245) in JAX: learning to reason from experience.

What a notebook needs is here, `import exgrpo_jax as ex`; docs/library.md shows it at work.
"""

import importlib
import re
import signal
import sys
from typing import TYPE_CHECKING, Any

from exgrpo_jax.runtime import device_memory, heap

if TYPE_CHECKING:
  from exgrpo_jax.config_files import load_config
  from exgrpo_jax.evaluation import score
  from exgrpo_jax.generate import sample
  from exgrpo_jax.grading.verifier import judge
  from exgrpo_jax.policies import open_policy
  from exgrpo_jax.session import open_run

__version__ = '0.1.0'
__all__ = ['judge', 'load_config', 'open_policy', 'open_run', 'sample', 'score']

# Imported when they are asked for: a grading worker must start without JAX. None has the name of a
# module here, which importing that module would put in its place.
_HOMES = {
  'judge': 'exgrpo_jax.grading.verifier',
  'load_config': 'exgrpo_jax.config_files',
  'open_policy': 'exgrpo_jax.policies',
  'open_run': 'exgrpo_jax.session',
  'sample': 'exgrpo_jax.generate',
  'score': 'exgrpo_jax.evaluation',
}


def __getattr__(name: str) -> Any:
  if name not in _HOMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  return getattr(importlib.import_module(_HOMES[name]), name)


def _is_command() -> bool:
  """Whether this process is `python -m exgrpo_jax.…`, which is importing the package to find it.

  Until the module is found argv[0] is '-m', and what follows it are the module's own arguments, so
  the module's name is the word before them; an option may be joined with it, as in -um.
  """
  module = sys.orig_argv[len(sys.orig_argv) - len(sys.argv) :][:1]
  named = module and re.match(r'(-\w*?m)?exgrpo_jax(\.|$)', module[0])
  return sys.argv[:1] == ['-m'] and bool(named)


# Of a command, whose imports take seconds and start threads. A process that imports the package, as
# python -m of a user's own does, keeps its own signal handler, under nohup too, and its own heap.
if _is_command():
  heap.keep_pages()
  device_memory.take_share()
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback, as SIGTERM
