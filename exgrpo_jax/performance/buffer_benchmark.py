"""The replay buffer at a share of the paper's scale: drawing, recording, saving, restoring."""

import concurrent.futures
import functools
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Cursor, Plan, Question, Response, Trajectory, Verdict
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.performance.timing import median_seconds

QUESTIONS, TRAJECTORIES, TOKENS = 46_000, 4, 1500  # of the paper; tokens are a mean
STEP_QUESTIONS, ROLLOUTS, STEPS_BETWEEN_SAVES = 128, 8, 50  # of the paper
_PROMPT = np.zeros(200, np.int32)
_JUDGED = (Verdict(1.0, 'correct'), Verdict(0.0, 'wrong')) * (ROLLOUTS // 2)
_REPEATS = 5
_CONFIG = replay.Config(
  ratio=0.5,
  start_pass_rate=0.35,
  sigma=1.0,
  question_selection='gaussian',
  trajectory_selection='lowest_entropy',
  bucket_by='correctness',
  difficulty='all',
  count_replayed=True,
  lower_bound=0.0,
  upper_bound=1.0,
  max_trajectories=8,
  retire='with_replay',
  failed='stay',
)


def measure(scale: float) -> dict[str, float]:
  """Figures by name at `scale` times the paper's number of questions.

  Saving and restoring run in processes of their own, so that neither finds memory that the other
  has freed. Memory is what such a process held at its peak besides the buffer.
  """
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as workdir:
    measured = _in_own_process(_measure_saving, scale, workdir)
    return measured | _in_own_process(_measure_restoring, workdir)


def _in_own_process(run: Callable[..., dict[str, float]], *args: object) -> dict[str, float]:
  with concurrent.futures.ProcessPoolExecutor(
    1,
    multiprocessing.get_context('spawn'),
    logging.set_verbosity,  # orbax logs every detail below it
    (logging.ERROR,),
  ) as pool:
    return pool.submit(run, *args).result()


def _measure_saving(scale: float, workdir: str) -> dict[str, float]:
  _save_and_restore_nothing()
  rng = np.random.default_rng(0)
  buffer = _synthetic_buffer(round(scale * QUESTIONS), rng)
  step = _synthetic_step(len(buffer.entries), 0, rng)
  draw, record = median_seconds(
    _REPEATS,
    lambda: replay.draw_questions(_CONFIG, buffer, STEP_QUESTIONS, ROLLOUTS, rng),
    lambda: replay.record_step(_CONFIG, buffer, *step),
  )
  gigabytes, before = _gigabytes(buffer), _peak_gigabytes()
  with checkpoint.open_manager(workdir, checkpoint.Config(every=1, keep=2)) as manager:
    wait, total = _save(manager, 1, buffer)
    memory = _peak_gigabytes() - before
    for number in range(max(1, round(scale * STEPS_BETWEEN_SAVES))):
      step = _synthetic_step(len(buffer.entries), 1 + number, rng)
      buffer = replay.record_step(_CONFIG, buffer, *step)
    wait_again, total_again = _save(manager, 2, buffer)
  return {
    'questions': len(buffer.entries),
    'buffer, GB': gigabytes,
    'draw, ms': 1e3 * draw,
    'record, ms': 1e3 * record,
    'first save, s': total,
    'first save, s that the loop waits': wait,
    'first save, GB held besides the buffer': memory,
    'second save, s': total_again,
    'second save, s that the loop waits': wait_again,
    'second save, GB written': _gigabytes_written(workdir),
  }


def _measure_restoring(workdir: str) -> dict[str, float]:
  _save_and_restore_nothing()
  before, start = _peak_gigabytes(), time.perf_counter()
  buffer = _restore(workdir, 2)
  seconds = time.perf_counter() - start
  return {
    'restore, s': seconds,
    'restore, GB held besides the buffer': _peak_gigabytes() - before - _gigabytes(buffer),
  }


# ---- A synthetic run ----


def _synthetic_buffer(num_questions: int, rng: np.random.Generator) -> replay.Buffer:
  """TRAJECTORIES of about TOKENS tokens to each question; questions in all buckets."""
  entries = {}
  for row in range(num_questions):
    responses = [_synthetic_response(rng) for _ in range(TRAJECTORIES)]
    entries[row] = replay.Entry(
      correctness=(1 + row % (ROLLOUTS - 1)) / ROLLOUTS,
      prompt_length=len(_PROMPT),
      trajectories=tuple(
        Trajectory(tokens=response.tokens, logp=response.logp, reward=1.0, step=0)
        for response in responses
      ),
    )
  return replay.Buffer(entries=entries, started=True)


def _synthetic_step(
  num_questions: int, number: int, rng: np.random.Generator
) -> tuple[Plan, list[None], list[list[Response]], list[tuple[Verdict, ...]]]:
  """Plan, no replays, responses and verdicts of a step, half of the responses right."""
  rows = rng.choice(num_questions, min(num_questions, STEP_QUESTIONS), replace=False)
  plan = Plan(
    step=number,
    epoch=0,
    replay_started=True,
    questions=tuple(
      Question(row=int(row), messages=(), answer='', kind='math', solution='', source='')
      for row in rows
    ),
    prompts=(_PROMPT,) * len(rows),
    candidates=((),) * len(rows),
  )
  responses = [[_synthetic_response(rng) for _ in range(ROLLOUTS)] for _ in rows]
  return plan, [None] * len(rows), responses, [_JUDGED] * len(rows)


def _synthetic_response(rng: np.random.Generator) -> Response:
  """From half to one and a half times TOKENS random tokens."""
  length = int(rng.integers(TOKENS // 2, TOKENS + TOKENS // 2))
  start = int(rng.integers(0, len(_random_tokens()) - length))
  tokens = _random_tokens()[start : start + length].copy()
  logp = -tokens.astype(np.float32)
  return Response(tokens=tokens, logp=logp, entropy=logp, truncated=False)


@functools.cache
def _random_tokens() -> np.ndarray:
  return np.random.default_rng(0).integers(0, 150_000, 1 << 20).astype(np.int32)


# ---- Saving and restoring it ----


def _state() -> TrainState:
  """A model so small that the buffer is all there is to save."""
  return TrainState(params={'weight': jnp.zeros(1)}, opt_state=())


def _save(manager: ocp.CheckpointManager, step: int, buffer: replay.Buffer) -> tuple[float, float]:
  """Seconds until the training loop goes on, and until the checkpoint is complete."""
  start = time.perf_counter()
  checkpoint.save(manager, Snapshot(step=step, state=_state(), buffer=buffer, cursor=Cursor()))
  wait = time.perf_counter() - start
  manager.wait_until_finished()
  return wait, time.perf_counter() - start


def _restore(workdir: str, step: int) -> replay.Buffer:
  with checkpoint.open_manager(workdir) as manager:
    return checkpoint.restore(manager, step, checkpoint.abstract(_state())).buffer


def _save_and_restore_nothing() -> None:
  """So that what is loaded and compiled once does not count."""
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as workdir:
    with checkpoint.open_manager(workdir, checkpoint.Config(every=1, keep=1)) as manager:
      _save(manager, 1, replay.Buffer())
    _restore(workdir, 1)


def _gigabytes(buffer: replay.Buffer) -> float:
  return 1e-9 * sum(
    trajectory.tokens.nbytes + trajectory.logp.nbytes
    for entry in buffer.entries.values()
    for trajectory in entry.trajectories
  )


def _gigabytes_written(workdir: str) -> float:
  """The size of those files of the second checkpoint that are none of the first's."""
  first, second = (_sizes(os.path.join(workdir, 'checkpoints', step)) for step in ('1', '2'))
  return 1e-9 * sum(size for inode, size in second.items() if inode not in first)


def _sizes(folder: str) -> dict[int, int]:
  """Inode -> bytes of every file under a folder."""
  files = (os.path.join(path, name) for path, _, names in os.walk(folder) for name in names)
  return {stat.st_ino: stat.st_size for stat in map(os.stat, files)}


def _peak_gigabytes() -> float:
  """The most memory that this process has held."""
  unit = 1 if sys.platform == 'darwin' else 1024
  return 1e-9 * unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
