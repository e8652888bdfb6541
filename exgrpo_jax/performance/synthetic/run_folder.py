"""The workdir of an invented run, of the paper's size by default, with all that its page shows."""

import importlib
import pathlib
from typing import Any

import numpy as np
from etils import epath

from exgrpo_jax.algorithm.replay import Buffer, Entry
from exgrpo_jax.datatypes import Trajectory
from exgrpo_jax.learner import buffer_files, checkpoint
from exgrpo_jax.performance.synthetic import history, metric_rows, prose, tables
from exgrpo_jax.performance.synthetic.history import Size, Visits
from exgrpo_jax.performance.synthetic.prose import Text
from exgrpo_jax.performance.synthetic.tables import Data
from exgrpo_jax.reporting import messages, records
from exgrpo_jax.runtime import environment
from exgrpo_jax.runtime import workdir as workdirs

_BASE = 'exgrpo_jax.configs.base'
_WARN_EVERY = 100  # steps
_MOST_STORED = 8  # successes of a question
_CHARACTERS_OF_TOKEN = 3.2


def write(workdir: pathlib.Path, size: Size) -> None:
  """Writes the run into an empty folder; the same one each time."""
  rng = np.random.default_rng(0)
  text = prose.make(workdir / 'tokenizer', rng)
  data = tables.make_data(size, text, rng)
  visits = history.simulate(size, rng)
  _write_config(workdir, size)
  environment.record_start(str(workdir), 1)
  tables.write(workdir, size, visits, data, text, rng)
  metrics = list(metric_rows.make(size, rng))
  records.write(workdir / records.FILE, metrics)
  _write_console(workdir, size, metrics)
  _write_evaluations(workdir, size, text, data, rng)
  _write_buffer(workdir, size, visits, text, rng)


def _write_config(workdir: pathlib.Path, size: Size) -> None:
  config = importlib.import_module(_BASE).get_config()
  config.num_steps = size.steps
  config.rollout.questions, config.rollout.samples = size.questions, size.samples
  config.data.evaluation = tuple(f'{name}.jsonl' for name in metric_rows.BENCHMARKS)
  workdirs.claim_workdir(config, str(workdir))


def _write_console(workdir: pathlib.Path, size: Size, metrics: list[dict[str, Any]]) -> None:
  with (workdir / 'console.log').open('w') as file:
    for record in metrics[1:]:
      step = record['step']
      if step % _WARN_EVERY == 1:
        file.write(f'WARNING: step {step}: of 1024 gradings 12 timed out, an invented warning.\n')
      line = messages.progress_line(step, size.steps, record, 150.0 * (size.steps - step))
      file.write(f'{line}\n')


def _write_evaluations(
  workdir: pathlib.Path, size: Size, text: Text, data: Data, rng: np.random.Generator
) -> None:
  """Files of each evaluation, whose responses have some thousands of characters."""
  (workdir / 'evaluation').mkdir()
  for step in filter(lambda step: metric_rows.is_evaluated(size, step), range(size.steps + 1)):
    for offset, name in enumerate(metric_rows.BENCHMARKS):
      rows = np.arange(size.evaluated) + offset * size.evaluated
      lengths = tables.lengths(size, size.evaluated, rng)
      texts = text.cut(rng.random(len(rows)), (_CHARACTERS_OF_TOKEN * lengths).astype(int))
      correct = rng.random(len(rows)) < metric_rows.pass_rate(step / size.steps)
      given = np.where(correct, data.answers[rows], rng.permutation(data.answers)[: len(rows)])
      rows_of_file = (
        {
          'row': row,
          'source': name,
          'question': data.questions[place],
          'answer': data.answers[place],
          'responses': [f'{response}</s>'],
          'correct': [is_right],
          'outcomes': ['correct' if is_right else 'wrong'],
          'extracted': [answer],
          'truncated': [length == size.longest],
          'lengths': [length],
          'entropies': [0.3],
          'sampling': {'temperature': 0.6, 'top_k': 0, 'top_p': 1.0, 'seed': 0, 'step': step},
        }
        for row, (place, response, is_right, answer, length) in enumerate(
          zip(rows.tolist(), texts, correct.tolist(), given.tolist(), lengths.tolist())
        )
      )
      records.write(workdir / 'evaluation' / f'step_{step:06d}_{name}.jsonl', rows_of_file)


def _write_buffer(
  workdir: pathlib.Path, size: Size, visits: Visits, text: Text, rng: np.random.Generator
) -> None:
  """A checkpoint that holds the buffer alone, of questions that were replayed most often."""
  times = np.zeros(size.rows, int)
  np.maximum.at(times, visits.question, visits.times)
  seen = np.unique(visits.question)
  rows = seen[np.argsort(-times[seen], kind='stable')][: size.stored].tolist()

  def trajectory() -> Trajectory:
    length = tables.lengths(size, 1, rng)
    tokens = text.cut_tokens(rng.random(1), length)
    tokens[-1] = text.eos
    logp, _ = tables.token_values(len(tokens), rng)
    step = int(rng.integers(1, size.steps + 1))
    return Trajectory(tokens=tokens, logp=logp, reward=1.0, step=step, times_replayed=step % 4)

  entries = {
    row: Entry(
      correctness=0.5,
      prompt_length=100,
      trajectories=tuple(trajectory() for _ in range(1 + row % _MOST_STORED)),
    )
    for row in rows
  }
  folder = checkpoint.buffer_folder(str(workdir), size.steps)
  folder.mkdir(parents=True)
  buffer_files.write(epath.Path(folder), size.steps, Buffer(entries=entries, started=True), None)
