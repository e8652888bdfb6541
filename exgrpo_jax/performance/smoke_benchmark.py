"""A whole training run, as a user starts it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from exgrpo_jax.performance.measurement import Measurement


def measure(settings: Sequence[str]) -> list[Measurement]:
  """Trains on the config smoke in a temporary folder, in a process of its own.

  Args:
    settings: of the config, such as 'num_steps=1', in place of its own.

  Raises:
    subprocess.CalledProcessError: the run failed; its output says why.
  """
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as workdir:
    started = time.perf_counter()
    subprocess.run(
      [
        *(sys.executable, '-m', 'exgrpo_jax', 'train', '--config=smoke', f'--workdir={workdir}'),
        *(f'--config.{setting}' for setting in settings),
      ],
      check=True,
    )
    seconds = time.perf_counter() - started
    with open(os.path.join(workdir, 'metrics.jsonl')) as file:
      last = json.loads(file.readlines()[-1])
  return [
    Measurement('smoke run', seconds, 's', 'train --config=smoke, from its start to its end'),
    Measurement('steps', last['step'], 'steps', 'of collecting, learning and remembering'),
    Measurement('last step', last['time/step'], 's', 'once all is compiled'),
    Measurement('speed', last['speed/tokens_per_second'], 'tokens/s', 'response tokens trained on'),
  ]
