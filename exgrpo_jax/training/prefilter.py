r"""`exgrpo data prefilter`: keep only the questions that a policy sometimes solves.

exgrpo data prefilter --config=one_gpu --samples=8 --out=filtered
exgrpo train --config=one_gpu --workdir=/tmp/run \
    --config.data.train=filtered/questions.jsonl --config.experience.path=filtered/successes.parquet

Each question in config.data.train is answered a few times, by the policy that training starts from
or by a run's policy. The responses are sampled and graded as in training. Questions that the
policy always or never solves are dropped, because it currently cannot learn from them. If the
successes are in a run's replay buffer, the run knows from the first step how hard each question is.
The command writes these files to the --out folder:
  questions.jsonl     the remaining questions in verl's columns, plus `solution`, `pass_rate` and
                      `columns` (the original columns as JSON)
  successes.parquet   the correct responses to these questions, for config.experience.path
  pass_rates.jsonl    the fraction of correct responses to each question
"""

import collections
import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from ml_collections import ConfigDict

from exgrpo_jax.data.prompt import last_user_message
from exgrpo_jax.datatypes import Question, QuestionSet, Response, Verdict
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.experiment import policies, warm_start
from exgrpo_jax.experiment.experiment import Experiment, load_questions, open_experiment
from exgrpo_jax.experiment.generation import stages_of
from exgrpo_jax.experiment.policies import Source
from exgrpo_jax.grading import pool
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import activity, console, hosts, machine
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.runtime.workdir import check_folder, make_folder
from exgrpo_jax.training.checks import check_rewards

_QUESTIONS_PER_CALL = 1024  # of generate
_SUCCESSES = pa.schema(
  [
    ('question', pa.string()),
    ('tokens', pa.list_(pa.int32())),
    ('logp', pa.list_(pa.float32())),
    ('correctness', pa.float64()),
  ]
)


class Attempt(NamedTuple):
  """A question and the policy's responses to it."""

  question: Question
  responses: Sequence[Response]
  verdicts: Sequence[Verdict]

  @property
  def pass_rate(self) -> float:
    """Return the fraction of correct responses."""
    return sum(verdict.correct for verdict in self.verdicts) / len(self.verdicts)


def filter_questions(
  values: ConfigDict, source: Source | None, out: str, samples: int, above: float, below: float
) -> None:
  """Sample responses to all training questions, and write the kept questions to the folder `out`.

  Each question gets `samples` responses from the policy of the run `source` or, if `source` is
  None, from the policy that training starts from. A question is kept if its pass rate is strictly
  between `above` and `below`. Raises InputError if no question remains, or if a run with
  this config could not start.
  """
  check_folder('--out', out)
  make_folder('--out', out)
  experiment = open_experiment(values, source.path if source else out)
  if name := experiment.config.environment.name:
    raise InputError(
      f'config.environment.name={name!r}: only single-turn questions can be filtered. Set '
      "config.environment.name=''."
    )
  data = load_questions(experiment, experiment.config.data.train)
  check_rewards(experiment.config, data)
  with jax.set_mesh(experiment.meshes.training), console.opened(), machine.explained():
    if source:
      decode_params = policies.restore(source, experiment).decode_params
    else:
      params = warm_start.initial_params(experiment, data)
      decode_params = model.into_decode_layout(experiment.model, params, experiment.meshes)
    attempts = tuple(_attempts(experiment, data, decode_params, samples))
  selection = [attempt for attempt in attempts if above < attempt.pass_rate < below]
  counts = collections.Counter(np.round([attempt.pass_rate for attempt in attempts], 3).tolist())
  spread = ', '.join(f'{rate:.3g}: {count:,}' for rate, count in sorted(counts.items()))
  if not selection:
    raise InputError(
      f'--above={above} and --below={below}: no question in {data.spec} has a pass rate within '
      f'these bounds ({counted(len(attempts), "question")} tried). Choose different bounds. '
      f'Questions by pass rate: {spread}.'
    )
  write(out, attempts, selection)
  print(f'{data.spec}: kept {len(selection):,} of {counted(len(attempts), "question")}')
  print(f'questions by pass rate: {spread}')
  print(f'wrote questions.jsonl, successes.parquet and pass_rates.jsonl to {out}')


def _attempts(
  experiment: Experiment, data: QuestionSet, decode_params: model.Params, samples: int
) -> Iterator[Attempt]:
  """Yield each question with its graded responses.

  Each response is seeded by config.seed, the question and the sample number.
  """
  config = experiment.config
  overrides = {'group_size': samples, 'partial': False, 'dynamic_sampling': 1.0}
  rollout_config = dataclasses.replace(config.rollout, **overrides)
  rollout = stages_of(experiment, data, Purpose.PREFILTER, rollout=rollout_config)
  with pool.Grader(config.grading, config.verifier) as grader:
    for start in range(0, len(data.questions), _QUESTIONS_PER_CALL):
      rows = range(start, min(start + _QUESTIONS_PER_CALL, len(data.questions)))
      plan = stages.plan_apart(data, rows, step=0)
      with activity.doing(f'questions {rows.start:,} to {rows.stop:,} of {len(data.questions):,}'):
        responses, _ = stages.generate(rollout, decode_params, plan, grader.submit)
        verdicts = stages.collect_verdicts(rollout, plan, responses, grader).verdicts
      yield from map(Attempt, plan.questions, responses, verdicts)


def write(out: str, attempts: Sequence[Attempt], selection: Sequence[Attempt]) -> None:
  """Write questions.jsonl, successes.parquet and pass_rates.jsonl. Only the first host writes."""
  rates = [
    {
      'row': attempt.question.row,
      'source': attempt.question.source,
      'pass_rate': attempt.pass_rate,
      'samples': len(attempt.verdicts),
    }
    for attempt in attempts
  ]
  metrics.write_rows(os.path.join(out, 'pass_rates.jsonl'), rates)
  metrics.write_rows(os.path.join(out, 'questions.jsonl'), [_row(attempt) for attempt in selection])
  successes = [  # in the format that seeding.py reads; a question that is always solved needs none
    {
      'question': last_user_message(attempt.question.messages),
      'tokens': response.tokens,
      'logp': response.logp,
      'correctness': attempt.pass_rate,
    }
    for attempt in selection
    for response, verdict in zip(attempt.responses, attempt.verdicts)
    if verdict.correct and attempt.pass_rate < 1
  ]
  if hosts.is_first():
    table = pa.Table.from_pylist(successes, _SUCCESSES)
    pq.write_table(table, os.path.join(out, 'successes.parquet'))


def _row(attempt: Attempt) -> dict[str, Any]:
  question = attempt.question
  return {
    'data_source': question.source,
    'prompt': [message._asdict() for message in question.messages],
    'reward_model': {'style': question.kind, 'ground_truth': question.answer},
    'solution': question.solution,
    'pass_rate': attempt.pass_rate,
    'columns': json.dumps(question.columns),
  }
