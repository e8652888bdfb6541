"""The replay buffer at a fraction of the paper's scale: drawing, recording, saving, restoring."""

import functools
import pathlib
import tempfile
import time

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from benchmarks.frame import Bench, Figure, in_own_process, in_turns, peak_bytes
from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Cursor, Plan, Question, Response, Trajectory, Verdict
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.learner.optimizer import TrainState

_QUESTIONS, _TRAJECTORIES, _TOKENS = 46_000, 4, 1500  # the paper's values; _TOKENS is a mean
_STEP_QUESTIONS, _SAMPLES, _STEPS_BETWEEN_SAVES = 128, 8, 50  # the paper's values
_PROMPT = np.zeros(200, np.int32)
_VERDICTS = (Verdict(1.0, 'correct'), Verdict(0.0, 'wrong')) * (_SAMPLES // 2)


def measure(bench: Bench) -> list[Figure]:
  """Measure times, and the memory that saving and restoring need on top of the buffer."""
  args = bench.config.replay, bench.size.scale
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as workdir:
    return [
      *in_own_process(_measure_saving, *args, workdir),
      *in_own_process(_measure_restoring, workdir),
    ]


def _measure_saving(config: replay.ReplayConfig, scale: float, workdir: str) -> list[Figure]:
  _save_and_restore_nothing()
  rng = np.random.default_rng(0)
  buffer = _synthetic_buffer(max(8, round(scale * _QUESTIONS)), rng)
  step = _synthetic_step(len(buffer.entries), 0, rng)
  draw, record = in_turns(
    5,
    lambda: replay.draw_questions(config, buffer, _STEP_QUESTIONS, _SAMPLES, 0, rng),
    lambda: len(replay.record_step(config, buffer, *step).entries),
  )
  before, held = peak_bytes(), _size(buffer)
  with checkpoint.open_manager(workdir, checkpoint.CheckpointConfig(every=1, keep=2)) as manager:
    first, first_wait = _save(manager, 1, buffer)
    memory = peak_bytes() - before
    for number in range(max(1, round(scale * _STEPS_BETWEEN_SAVES))):
      step = _synthetic_step(len(buffer.entries), 1 + number, rng)
      buffer = replay.record_step(config, buffer, *step)
    second, second_wait = _save(manager, 2, buffer)
  return [
    Figure('buffer', 1e-9 * held, 'GB', f'{len(buffer.entries):,} questions'),
    Figure('draw', 1e3 * draw, 'ms'),
    Figure('record', 1e3 * record, 'ms'),
    Figure('first save', first, 's', f'training waits {first_wait:.2g} s'),
    Figure('first save, memory', 1e-9 * memory, 'GB', 'in addition to the buffer'),
    Figure('second save', second, 's', f'training waits {second_wait:.2g} s'),
    Figure('second save, written', 1e-9 * _written(workdir), 'GB', 'not shared with the first'),
  ]


def _measure_restoring(workdir: str) -> list[Figure]:
  _save_and_restore_nothing()
  before, start = peak_bytes(), time.perf_counter()
  buffer = _restore(workdir, 2)
  seconds = time.perf_counter() - start
  memory = peak_bytes() - before - _size(buffer)
  return [
    Figure('restore', seconds, 's'),
    Figure('restore, memory', 1e-9 * memory, 'GB', 'in addition to the buffer'),
  ]


def _synthetic_buffer(count: int, rng: np.random.Generator) -> replay.Buffer:
  """Make a buffer of questions in all buckets, each with _TRAJECTORIES of about _TOKENS tokens."""
  entries = {}
  for row in range(count):
    responses = [_synthetic_response(rng) for _ in range(_TRAJECTORIES)]
    entries[row] = replay.Entry(
      correctness=(1 + row % (_SAMPLES - 1)) / _SAMPLES,
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
  """Make a step's plan, replays (none), responses and verdicts; half the responses are correct."""
  rows = rng.choice(num_questions, min(num_questions, _STEP_QUESTIONS), replace=False)
  plan = Plan(
    step=number,
    cursor=Cursor(),
    replay_started=True,
    questions=tuple(
      Question(row=int(row), messages=(), answer='', kind='math', solution='', source='')
      for row in rows
    ),
    prompts=(_PROMPT,) * len(rows),
    candidates=((),) * len(rows),
    is_drawn=(False,) * len(rows),
  )
  responses = [[_synthetic_response(rng) for _ in range(_SAMPLES)] for _ in rows]
  return plan, [None] * len(rows), responses, [_VERDICTS] * len(rows)


def _synthetic_response(rng: np.random.Generator) -> Response:
  """Draw a response of random tokens, 0.5 to 1.5 times _TOKENS long."""
  length = int(rng.integers(_TOKENS // 2, _TOKENS + _TOKENS // 2))
  start = int(rng.integers(0, len(_random_tokens()) - length))
  tokens = _random_tokens()[start : start + length].copy()
  logp = -tokens.astype(np.float32)
  return Response(tokens=tokens, logp=logp, entropy=logp, truncated=False)


@functools.cache
def _random_tokens() -> np.ndarray:
  return np.random.default_rng(0).integers(0, 150_000, 1 << 20).astype(np.int32)


def _state() -> TrainState:
  """Return the state of a model so small that the buffer dominates a checkpoint."""
  return TrainState(params={'weight': jnp.zeros(1)}, opt_state=())


def _save(manager: ocp.CheckpointManager, step: int, buffer: replay.Buffer) -> tuple[float, float]:
  """Save; return the seconds until the checkpoint is complete and until training continues."""
  start = time.perf_counter()
  checkpoint.save(manager, Snapshot(step=step, state=_state(), buffer=buffer, cursor=Cursor()))
  wait = time.perf_counter() - start
  manager.wait_until_finished()
  return time.perf_counter() - start, wait


def _restore(workdir: str, step: int) -> replay.Buffer:
  with checkpoint.open_manager(workdir) as manager:
    return checkpoint.restore(manager, step, checkpoint.abstract(_state())).buffer


def _save_and_restore_nothing() -> None:
  """Trigger one-time loading and compilation, so that they are not measured."""
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as workdir:
    with checkpoint.open_manager(workdir, checkpoint.CheckpointConfig(every=1, keep=1)) as manager:
      _save(manager, 1, replay.Buffer())
    _restore(workdir, 1)


def _size(buffer: replay.Buffer) -> int:
  return sum(
    trajectory.tokens.nbytes + trajectory.logp.nbytes
    for entry in buffer.entries.values()
    for trajectory in entry.trajectories
  )


def _written(workdir: str) -> int:
  """Count the bytes of the second checkpoint's files that are not links to the first's."""
  first, second = (
    {path.stat().st_ino: path.stat().st_size for path in folder.rglob('*') if path.is_file()}
    for folder in (pathlib.Path(workdir, 'checkpoints', step) for step in ('1', '2'))
  )
  return sum(size for inode, size in second.items() if inode not in first)
