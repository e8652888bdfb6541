"""The commands that start trainings, with fake_trainer.py in place of those.

python -m tests.helpers.with_fake_trainer sweep --sweep=ratio --config=smoke --workdir=/tmp/ratio
"""

import importlib
import sys

from exgrpo_jax.sweeps import sweep
from tests.helpers import fake_trainer

if __name__ == '__main__':
  sweep.TRAINER = fake_trainer.command()
  package = 'studies' if sys.argv[1] == 'run' else 'exgrpo_jax'
  importlib.import_module(f'{package}.__main__').main()
