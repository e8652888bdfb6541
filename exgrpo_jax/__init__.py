"""ExGRPO (arXiv:2510.02245) in JAX: learning to reason from experience."""

import signal
import sys

__version__ = '0.1.0'

# Of a command, python -m exgrpo_jax.…, whose imports take seconds: Ctrl-C ends it as SIGTERM does,
# without a traceback. A process that imports the package keeps its own handler, and nohup's stays.
if sys.argv[:1] == ['-m'] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
  signal.signal(signal.SIGINT, signal.SIG_DFL)
