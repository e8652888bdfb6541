"""A stand-in for exgrpo_jax.train in tests of what starts it: its flags and files, no training.

Step s of a run evaluates to replay.ratio + seed / 10 + s / 100, with a tenth of s truncated; added
is objective.kl_coefficient times the seed. A training step replays a question, generates 100 tokens
and takes 5 seconds, 2 of them for its evaluation.
The trials named in FAKE_FAILS fail after step 0, those in FAKE_HANGS then hang for ten minutes.
Its first argument has the values of smoke.py, which would import JAX: that takes seconds.
"""

import json
import math
import os
import pathlib
import re
import sys
import time

from absl import app, flags
from ml_collections import ConfigDict, config_flags


def command():
  """Return the value for sweep.TRAINER that runs this module."""
  from exgrpo_jax.configs import smoke

  return 'tests.helpers.fake_trainer', repr(smoke.get_config().to_dict())


def main(_):
  config, workdir = flags.FLAGS.config, pathlib.Path(flags.FLAGS.workdir)
  config_file = workdir / 'config.json'
  values = json.loads(json.dumps(config.to_dict()))
  assert not config_file.exists() or json.loads(config_file.read_text()) == values
  config_file.write_text(json.dumps(values))
  commit = {'hash': 'c0ffee', 'has_uncommitted_changes': config.seed > 0}
  (workdir / 'environment.json').write_text(json.dumps([{'commit': commit}]))
  with open(workdir / 'starts', 'a') as file:
    file.write('started\n')
  for step in range(config.num_steps + 1):
    score = config.replay.ratio + config.seed * (0.1 + config.objective.kl_coefficient) + step / 100
    record = {'step': step, 'reward': score, 'eval/sums/pass@1': score, 'eval/sums/pass@1_low': 0.0}
    record |= {'eval/sums/pass@1_high': 1.0, 'eval/sums/truncated': step / 10}
    if step:
      record |= {'replay/rows': 1, 'length/total': 100, 'time/step': 5.0, 'time/evaluate': 2.0}
    with open(workdir / 'metrics.jsonl', 'w' if step == 0 else 'a') as file:
      file.write(json.dumps(record) + '\n')
    print(f'step {step}', flush=True)
    if workdir.name in os.environ.get('FAKE_FAILS', ''):
      raise ValueError('the disk is full')
    if workdir.name in os.environ.get('FAKE_HANGS', ''):
      (workdir / 'new').write_text(str(os.getpid()))
      os.replace(workdir / 'new', workdir / 'hangs')
      time.sleep(600)
  (workdir / 'report.html').write_bytes(b'')


if __name__ == '__main__':
  values = eval(sys.argv.pop(1), {'inf': math.inf})
  assert re.fullmatch(r'--config=(.*/configs/smoke\.py|smoke)', sys.argv.pop(1))
  config_flags.DEFINE_config_dict('config', ConfigDict(values))
  flags.DEFINE_string('workdir', None, '')
  flags.DEFINE_integer('num_processes', None, '')
  app.run(main)
