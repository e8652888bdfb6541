"""A complete training run, started as a user would start it."""

import subprocess
import sys
import tempfile
import time

from benchmarks.frame import SIZES, Bench, Figure
from exgrpo_jax.reporting import metrics

TINY = (
  *('warm_start.num_updates=2', 'evaluation.every=2', 'rollout.questions=2'),
  *('rollout.slots=8', 'data.train=arithmetic:train[:64]', 'data.evaluation=()'),
)


def measure(bench: Bench) -> list[Figure]:
  """Train with the config smoke in a separate process."""
  settings = ('num_steps=2', *TINY) if bench.size.model == SIZES['tiny'].model else ()
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as workdir:
    start = time.perf_counter()
    train(workdir, settings)
    seconds = time.perf_counter() - start
    last = metrics.read(workdir)[-1]
  return [
    Figure('smoke run', seconds, 's', f'{last["step"]:.0f} steps, from start to end'),
    Figure('last step', last['time/step'], 's', 'with everything compiled'),
    Figure('speed', last['perf/tokens_per_second'], 'tokens/s', 'response tokens trained on'),
  ]


def train(workdir: str, settings: tuple[str, ...]) -> None:
  """Train with the config smoke and `settings`. Raises CalledProcessError if the run fails."""
  command = ['-m', 'exgrpo_jax', 'train', '--config=smoke', f'--workdir={workdir}']
  flags = [f'--config.{setting}' for setting in settings]
  subprocess.run([sys.executable, *command, *flags], check=True, stdout=subprocess.DEVNULL)
