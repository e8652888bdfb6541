r"""How often a policy is right: pass@1, avg@k and pass@k per data source.

python -m exgrpo_jax.evaluate --config=arithmetic --checkpoint=/tmp/arithmetic \
    --data=arithmetic:test --samples=4 --temperature=1

Every evaluation by hand gets files of its own, and a line in evaluations.jsonl beside them that
holds its scores and says how it was made; those that the run itself wrote stay as they are.
"""

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from exgrpo_jax import cli
from exgrpo_jax.data import spec_names
from exgrpo_jax.data.questions import step_checker
from exgrpo_jax.datatypes import Question, QuestionSet, Response, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Experiment, load_questions, open_experiment, parse_config
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics, step_metrics
from exgrpo_jax.rollout import scheduler
from exgrpo_jax.rollout.token_sampling import Distribution
from exgrpo_jax.runtime import activity, console, hosts, randomness
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.runtime.workdir import check_workdir, read_config


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  cli.define_checkpoint()
  cli.define_out("The folder for the records of all questions; by default the run's evaluation/.")
  flags.DEFINE_list('data', None, 'Data specs; config.data.validation and .evaluation by default.')
  flags.DEFINE_integer('samples', None, 'Responses to each question.', lower_bound=1)
  flags.DEFINE_float('temperature', None, 'Of sampling; 0 is greedy.', lower_bound=0.0)


def main(args: cli.Args) -> None:
  """Evaluates a checkpoint of a run."""
  if not args.config or not args.checkpoint:
    raise InputError(
      '--config and --checkpoint are both needed: what train was given as --config and --workdir.'
    )
  values = args.config
  config = parse_config(values)
  read_config(args.checkpoint)
  check_workdir(values, args.checkpoint, ('model', 'tokenizer', 'prompt'))
  with values.unlocked():
    values.evaluation.samples = args.samples or values.evaluation.samples
    if args.temperature is not None:
      values.evaluation.temperature = args.temperature
  specs = args.data or config.data.evaluated
  if not specs:
    raise InputError('--data is needed: the config names nothing to evaluate on.')
  spec_names.check_distinct(specs, '--data')
  experiment = open_experiment(values, args.checkpoint)
  out = args.out or os.path.join(args.checkpoint, 'evaluation')
  with jax.set_mesh(experiment.mesh), console.opened():
    like = model.shapes(experiment.model, experiment.mesh)
    params, step = checkpoint.restore_params(args.checkpoint, args.step, like)
    for spec in specs:
      data = load_questions(experiment, spec)
      with activity.doing(f'evaluation on {spec}'):
        scores, records = score_policy(experiment, params, data, step)
      path = _write_by_hand(out, args.checkpoint, step, spec, scores, records)
      print(f'{spec} at step {step}, temperature {experiment.config.evaluation.temperature}')
      print(f'{table(scores)}\nresponses: {path}')


def score_all(
  experiment: Experiment, params: model.Params, evaluations: Sequence[QuestionSet], step: int
) -> dict[str, float]:
  """The scores on all of a run's evaluations, which it prints; see `score_policy`.

  Where there is a validation set, 'validation/score' is the mean over its sources, without those of
  config.export.best_without, of the share of right responses: the best policy has the highest.
  """
  config, scores, validation = experiment.config, {}, []
  for data in evaluations:
    with activity.doing(spec_names.spec_name(data.spec)):
      of_data, records = score_policy(experiment, params, data, step)
    metrics.write_rows(_records_path(f'{experiment.workdir}/evaluation', step, data.spec), records)
    scores |= of_data
    if data.spec in config.data.validation:
      validation += [
        rows for name, rows in by_source(records).items() if name not in config.export.best_without
      ]
  if scores:
    print(f'evaluation after step {step}\n{table(scores)}', flush=True)
  if validation:
    means = [np.mean([record['correct'] for record in rows]) for rows in validation]
    scores['validation/score'] = float(np.mean(means))
  return scores


def score_policy(
  experiment: Experiment, params: model.Params, data: QuestionSet, step: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
  """The scores of `params` on some questions, and a record of each question.

  What a response must have is said by config.evaluation, not by config.verifier. Sampling depends
  on the seed, the step and the questions, so an evaluation by hand repeats the run's.

  Returns:
    Metrics by name: 'eval/{name}/pass@1' (the first sample), its 95% interval as '…_low' and
    '…_high', with k > 1 samples the same for 'avg@{k}' (the mean of all) and 'pass@{k}' (any),
    'truncated' and, where the task can check it, 'valid_steps': shares of all responses. The name
    is the data spec's (`spec_names.spec_name`); data of several sources have metrics of each
    instead, 'eval/{name}/{source}/…'.
    Records: what was asked, answered and judged, and how it was sampled.
  """
  config, tokenizer = experiment.config, experiment.tokenizer
  wanted, samples = config.evaluation, config.evaluation.samples
  questions = list(data.questions)  # read once, for they are read from the disk on demand
  distribution = Distribution(
    temperature=wanted.temperature,
    top_k=wanted.top_k,
    top_p=wanted.top_p,
    min_p=wanted.min_p,
  )
  responses = scheduler.generate(
    experiment.model,
    model.decode_layout(experiment.model, params, experiment.mesh),
    [prompt for prompt in data.prompts for _ in range(samples)],
    [question.row for question in questions for _ in range(samples)],
    list(range(samples)) * len(questions),
    randomness.key(config.seed, Purpose.EVALUATION, step),
    config.rollout.decode_spec(tokenizer, distribution),
    experiment.mesh,
  )
  texts = [tokenizer.decode(response.tokens) for response in responses]
  verdicts = _grade(experiment, data.spec, questions, texts)
  warning = step_metrics.grading_alarm(step, [verdicts], config.grading.max_failures)
  if warning:
    hosts.warn(f'{data.spec}: {warning}')
  records = _records(experiment, questions, responses, texts, verdicts)
  sampling = dataclasses.asdict(distribution) | {'seed': config.seed, 'step': step}
  records = [record | {'sampling': sampling} for record in records]
  name = spec_names.spec_name(data.spec)
  groups, scores = by_source(records), {}
  for source, rows in groups.items():
    scores |= _summarize(name if len(groups) == 1 else f'{name}/{source}', rows)
  return scores, records


def by_source(records: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
  """Source -> its records, in the order in which sources first occur."""
  groups: dict[str, list[dict[str, Any]]] = {}
  for record in records:
    groups.setdefault(record['source'], []).append(record)
  return groups


def table(scores: Mapping[str, float]) -> str:
  """Evaluation metrics as text: a line for each data set and measure, with its 95% interval."""
  lines = []
  width = max(len(name.removeprefix('eval/').rpartition('/')[0]) for name in scores)
  for name, value in scores.items():
    group, _, measure = name.removeprefix('eval/').rpartition('/')
    if measure.endswith(('_low', '_high')) or measure == 'questions':
      continue
    line = f'  {group:<{width}} {measure:<12} {value:.4f}'
    if f'{name}_low' in scores:
      line += (
        f'  (95%: {scores[name + "_low"]:.4f} to {scores[name + "_high"]:.4f}, '
        f'{scores[f"eval/{group}/questions"]:.0f} questions)'
      )
    lines.append(line)
  return '\n'.join(lines)


def _records_path(out: str, step: int, spec: str, made: str = '') -> str:
  """Where in the folder `out` the records of an evaluation are kept."""
  return os.path.join(out, f'step_{step:06d}_{spec_names.spec_name(spec)}{made}.jsonl')


def _write_by_hand(
  out: str,
  run: str,
  step: int,
  spec: str,
  scores: Mapping[str, float],
  records: Sequence[Mapping[str, Any]],
) -> str:
  """Writes records that overwrite none, and a line in evaluations.jsonl; returns their path."""
  now = datetime.datetime.now().astimezone()
  sampling, samples = records[0]['sampling'], len(records[0]['responses'])
  made = f'_temperature_{sampling["temperature"]:g}_samples_{samples}_{now:%Y%m%dT%H%M%S%f}'
  path = _records_path(out, step, spec, made)
  metrics.write_rows(path, records)
  line = {
    'time': now.isoformat(timespec='seconds'),
    'run': os.path.abspath(run),
    'data': spec,
    'samples': samples,
    **sampling,
    'file': os.path.basename(path),
    'scores': scores,
  }
  if hosts.is_first():
    with open(os.path.join(out, 'evaluations.jsonl'), 'a', encoding='utf-8') as file:
      file.write(json.dumps(line) + '\n')
  return path


def _grade(
  experiment: Experiment, spec: str, questions: Sequence[Question], texts: Sequence[str]
) -> list[Verdict]:
  """Verdicts of the texts, equally many for each question in turn, as config.evaluation says."""
  config = experiment.config
  samples = len(texts) // len(questions)
  asked = [question for question in questions for _ in range(samples)]
  grading = dataclasses.replace(config.grading, reward='')
  required = verifier.Config(
    require_think=config.evaluation.require_think, require_box=config.evaluation.require_box
  )
  with Grader(grading, required) as grader:
    verdicts = grader.grade(
      texts, [question.answer for question in asked], [question.kind for question in asked]
    )
  pool.refuse_all_failed(f'evaluation on {spec}', verdicts)
  return verdicts


def _records(
  experiment: Experiment,
  questions: Sequence[Question],
  responses: Sequence[Response],
  texts: Sequence[str],
  verdicts: Sequence[Verdict],
) -> list[dict[str, Any]]:
  """One record per question, with all its responses, special tokens included."""
  tokenizer, template = experiment.tokenizer, experiment.config.prompt.template
  samples = len(texts) // len(questions)
  records = []
  for index, question in enumerate(questions):
    span = slice(index * samples, (index + 1) * samples)
    record = {
      'row': question.row,
      'source': question.source,
      'question': tokenizer.render(question.messages, template),
      'answer': question.answer,
      'responses': [tokenizer.decode(r.tokens, special=True) for r in responses[span]],
      'correct': [verdict.correct for verdict in verdicts[span]],
      'outcomes': [verdict.outcome for verdict in verdicts[span]],
      'truncated': [response.truncated for response in responses[span]],
      'lengths': [len(response.tokens) for response in responses[span]],
    }
    if check := step_checker(question):
      record['valid_steps'] = [check(text) for text in texts[span]]
    records.append(record)
  return records


def _summarize(group: str, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  correct_QK = np.array([record['correct'] for record in records], float)
  # Rows with the same prompt (AIME's 32 copies) are one cluster: they are no new questions.
  _, cluster_Q = np.unique([record['question'] for record in records], return_inverse=True)
  samples = correct_QK.shape[1]
  measures = {'pass@1': correct_QK[:, :1]}
  if samples > 1:
    measures |= {
      f'avg@{samples}': correct_QK,
      f'pass@{samples}': correct_QK.max(axis=1, keepdims=True),
    }
  scores = {f'eval/{group}/questions': float(len(records))}
  for name, values_QK in measures.items():
    mean, low, high = metrics.interval_95(values_QK, cluster_Q)
    scores |= {
      f'eval/{group}/{name}': mean,
      f'eval/{group}/{name}_low': low,
      f'eval/{group}/{name}_high': high,
    }
  scores[f'eval/{group}/truncated'] = float(np.mean([r['truncated'] for r in records]))
  if 'valid_steps' in records[0]:
    scores[f'eval/{group}/valid_steps'] = float(np.mean([r['valid_steps'] for r in records]))
  return scores


if __name__ == '__main__':
  cli.run(main, define_flags, on_all_hosts=True)
