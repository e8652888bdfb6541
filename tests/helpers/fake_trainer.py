"""In place of exgrpo_jax.train for tests of what starts it: same flags, same files, no training.

Step s of a run evaluates to replay.ratio + seed / 10 + s / 100. FAKE_FAILS and FAKE_HANGS
name trials that break down, or wait ten minutes, after their first step.
"""

import json
import os
import pathlib
import time

from absl import app, flags
from ml_collections import config_flags

from exgrpo_jax import cli

CONFIG = config_flags.DEFINE_config_file('config')
WORKDIR = flags.DEFINE_string('workdir', None, '')


def main(_):
  config, workdir = CONFIG.value, pathlib.Path(WORKDIR.value)
  claim = workdir / 'config.json'
  values = json.loads(json.dumps(config.to_dict()))
  assert not claim.exists() or json.loads(claim.read_text()) == values
  claim.write_text(json.dumps(values))
  with open(workdir / 'starts', 'a') as file:
    file.write('started\n')
  for step in range(config.num_steps + 1):
    score = config.replay.ratio + config.seed / 10 + step / 100
    with open(workdir / 'metrics.jsonl', 'w' if step == 0 else 'a') as file:
      file.write(
        json.dumps(
          {
            'step': step,
            'reward': score,
            'eval/sums/pass@1': score,
            'eval/sums/pass@1_low': 0.0,
            'eval/sums/truncated': 0.5,
          }
        )
        + '\n'
      )
    print(f'step {step}', flush=True)
    if workdir.name in os.environ.get('FAKE_FAILS', ''):
      raise ValueError('the disk is full')
    if workdir.name in os.environ.get('FAKE_HANGS', ''):
      (workdir / 'new').write_text(str(os.getpid()))
      os.replace(workdir / 'new', workdir / 'hangs')
      time.sleep(600)
  (workdir / 'curves.png').write_bytes(b'')


if __name__ == '__main__':
  app.run(main, flags_parser=lambda argv: app.parse_flags_with_usage(cli.resolve_config(argv)))
