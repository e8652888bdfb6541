r"""Which questions a policy solves sometimes: `python -m exgrpo_jax.data prefilter`.

python -m exgrpo_jax.data prefilter --config=one_gpu --samples=8 --out=filtered
python -m exgrpo_jax.train --config=one_gpu --workdir=/tmp/run \
    --config.data.train=filtered/questions.jsonl --config.experience.path=filtered/successes.parquet

The policy that training would start from, or a run's, answers each question of config.data.train a
few times, sampled and graded as in training. Questions that it always or never solves teach nothing
for now, and are left out. With the successes in the replay buffer, a run knows from its first step
on how hard each question is. In --out are
  questions.jsonl     the questions that remain, in verl's columns, with `solution`, `pass_rate` and
                      `columns`, the columns that they had, as JSON
  successes.parquet   the right responses to them, for config.experience.path
  pass_rates.jsonl    of every question the share of responses that was right
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
from absl import flags

from exgrpo_jax import cli, policies, warm_start
from exgrpo_jax.check import check_rewards
from exgrpo_jax.data import traces
from exgrpo_jax.datatypes import Question, Response, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Experiment, load_questions, make_rollout, open_experiment
from exgrpo_jax.grading import pool
from exgrpo_jax.policies import Source
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout.stages import Rollout, plan_apart
from exgrpo_jax.runtime import activity, console, device_memory, hosts
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.runtime.workdir import make_folder

_TOGETHER = 1024  # questions that are asked together
_SUCCESSES = pa.schema(
  [
    ('question', pa.string()),
    ('tokens', pa.list_(pa.int32())),
    ('logp', pa.list_(pa.float32())),
    ('correctness', pa.float64()),
  ]
)


class Tried(NamedTuple):
  """A question, and what the policy made of it."""

  question: Question
  responses: Sequence[Response]
  verdicts: Sequence[Verdict]

  @property
  def pass_rate(self) -> float:
    """The share of right responses."""
    return sum(verdict.correct for verdict in self.verdicts) / len(self.verdicts)


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  cli.define_checkpoint()
  cli.define_out('The folder to write.')
  flags.DEFINE_integer('samples', 8, 'Responses to each question.', lower_bound=2)
  flags.DEFINE_float(
    'above', 0.0, 'A question remains where its pass rate is above this.', 0.0, 1.0
  )
  flags.DEFINE_float('below', 1.0, 'And below this.', 0.0, 1.0)


def main(args: cli.Args) -> None:
  """Tries all training questions, and writes those that remain."""
  if not args.out or not (args.config or args.checkpoint):
    raise InputError(
      '--out is needed, and --config or --checkpoint: the folder to write, and what is trained.'
    )
  source = Source('run', args.checkpoint, args.step) if args.checkpoint else None
  values = policies.config_values(source, args.config) if source else args.config
  make_folder('--out', args.out)
  experiment = open_experiment(values, args.checkpoint or args.out)
  data = load_questions(experiment, experiment.config.data.train)
  check_rewards(experiment.config, data)
  rollout = make_rollout(experiment, data)
  with jax.set_mesh(experiment.meshes.training), console.opened(), device_memory.explained():
    if source:
      params = policies.restore(source, experiment).params
    else:
      params = warm_start.initial_params(experiment, data)
    tried = tuple(_tried(experiment, rollout, params, args.samples))
  kept = [one for one in tried if args.above < one.pass_rate < args.below]
  if not kept:
    raise InputError(
      f'--above={args.above} and --below={args.below} leave none of the {len(tried)} questions of '
      f'{data.spec}, whose pass rates are {_spread(tried)}.'
    )
  write(args.out, tried, kept)
  print(f'{data.spec}: {len(kept):,} of {len(tried):,} questions remain; solved {_spread(tried)}')
  print(f'in {args.out}: questions.jsonl, successes.parquet, pass_rates.jsonl')


def _tried(
  experiment: Experiment, rollout: Rollout, params: model.Params, samples: int
) -> Iterator[Tried]:
  """All questions in their order; what is drawn depends on seed, question and sample alone."""
  config, data = experiment.config, rollout.data
  rollout = dataclasses.replace(
    rollout, config=dataclasses.replace(config.rollout, samples=samples, carry=False)
  )
  decode_params = model.decode_layout(experiment.model, params, experiment.meshes)
  with pool.Grader(config.grading, config.verifier) as grader:
    for start in range(0, len(data.questions), _TOGETHER):
      rows = range(start, min(start + _TOGETHER, len(data.questions)))
      plan = plan_apart(data, rows, step=0)
      with activity.doing(f'questions {rows.start:,} to {rows.stop:,} of {len(data.questions):,}'):
        responses, _ = rollout.generate(decode_params, plan, Purpose.PREFILTER, grader.submit)
        verdicts = rollout.grade(plan, responses, grader)
      yield from map(Tried, plan.questions, responses, verdicts)


def write(out: str, tried: Sequence[Tried], kept: Sequence[Tried]) -> None:
  """The three files; of several hosts only the first writes."""
  rates = [
    {
      'row': one.question.row,
      'source': one.question.source,
      'pass_rate': one.pass_rate,
      'samples': len(one.verdicts),
    }
    for one in tried
  ]
  metrics.write_rows(os.path.join(out, 'pass_rates.jsonl'), rates)
  metrics.write_rows(os.path.join(out, 'questions.jsonl'), [_row(one) for one in kept])
  successes = [row for one in kept for row in _successes(one)]
  if hosts.is_first():
    table = pa.Table.from_pylist(successes, _SUCCESSES)
    pq.write_table(table, os.path.join(out, 'successes.parquet'))


def _row(one: Tried) -> dict[str, Any]:
  """A question in the columns of a prefiltered set, apart from those of its own; see columns.py."""
  question = one.question
  return {
    'data_source': question.source,
    'prompt': [message._asdict() for message in question.messages],
    'reward_model': {'style': question.kind, 'ground_truth': question.answer},
    'solution': question.solution,
    'pass_rate': one.pass_rate,
    'columns': json.dumps(question.columns),
  }


def _successes(one: Tried) -> Iterator[dict[str, Any]]:
  """Its right responses, as traces.py reads them; none where all or no responses are right."""
  if not 0 < one.pass_rate < 1:
    return
  for response, verdict in zip(one.responses, one.verdicts):
    if verdict.correct:
      yield {
        'question': traces.asked(one.question.messages),
        'tokens': response.tokens,
        'logp': response.logp,
        'correctness': one.pass_rate,
      }


def _spread(tried: Sequence[Tried]) -> str:
  """How many questions have which pass rate."""
  counts = collections.Counter(np.round([one.pass_rate for one in tried], 3).tolist())
  return ', '.join(f'{rate:.3g}: {count:,}' for rate, count in sorted(counts.items()))
