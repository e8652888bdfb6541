"""ExGRPO (arXiv:2510.02245) in JAX: learning to reason from experience."""

import signal
import sys

from exgrpo_jax.runtime import heap

__version__ = '0.1.0'

# Of a command, python -m exgrpo_jax.…, whose imports take seconds and start threads. A process that
# imports the package keeps its own signal handler, under nohup too, and its own heap.
if sys.argv[:1] == ['-m']:
  heap.keep_pages()
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback, as SIGTERM
