"""The commands that start trainings, with fake_trainer.py in place of those.

python -m tests.helpers.with_fake_trainer sweep --sweep=ratio --config=smoke --workdir=/tmp/ratio
"""

import sys

from exgrpo_jax import cli, study, sweep

if __name__ == '__main__':
  sweep.TRAINER = 'tests.helpers.fake_trainer'
  study.TRAIN_SERVER = ''
  command = {'study': study, 'sweep': sweep}[sys.argv.pop(1)]
  cli.run(command.main, command.define_flags)
