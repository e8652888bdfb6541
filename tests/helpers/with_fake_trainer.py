"""The commands that start trainings, with fake_trainer.py in place of those.

python -m tests.helpers.with_fake_trainer sweep --sweep=ratio --config=smoke --workdir=/tmp/ratio
"""

import sys

from exgrpo_jax.commands import study
from exgrpo_jax.commands import sweep as sweep_command
from exgrpo_jax.studies import sweep

if __name__ == '__main__':
  sweep.TRAINER = ('tests.helpers.fake_trainer',)
  study.TRAIN_SERVER = ''
  {'study': study, 'sweep': sweep_command}[sys.argv.pop(1)].run()
