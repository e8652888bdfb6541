"""A policy's scores: its responses to questions, graded and summarized."""

import collections
import dataclasses
import datetime
import functools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from exgrpo_jax.data.prompt import THINK
from exgrpo_jax.data.questions import spec_name
from exgrpo_jax.data.tasks.catalogue import step_checker, style_reader
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Question, QuestionSet, Response, Verdict
from exgrpo_jax.errors import check_argument, counted
from exgrpo_jax.evaluation.responses import check_samples
from exgrpo_jax.evaluation.suites import Part
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import Experiment, RunConfig, load_questions, open_experiment
from exgrpo_jax.experiment.generation import make_sampler
from exgrpo_jax.experiment.policies import Policy, Source
from exgrpo_jax.grading import pool, reasoning_gym, verifier
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import alarms, comparison, metrics
from exgrpo_jax.rollout import stages
from exgrpo_jax.rollout.sampler import requests_for
from exgrpo_jax.runtime import activity, console, hosts, hub, machine
from exgrpo_jax.runtime.randomness import Purpose

Record = dict[str, Any]  # a question with its responses and their verdicts


def score(
  policy: Policy, spec: str | os.PathLike, samples: int | None = None
) -> tuple[dict[str, float], list[Record]]:
  """Score a policy on the questions of a data spec; see `score_policy`.

  `spec` is a data spec such as 'chains:test[:100]'. `samples` is the number of responses per
  question; the default is config.evaluation.samples. Raises InputError if the data does not
  exist or `samples` is not positive.
  """
  policies.check(policy)
  requirement = "a data spec, such as 'chains:test[:100]'. Score several in separate calls"
  check_argument('spec', spec, (str, os.PathLike), requirement)
  experiment = policy.experiment
  if samples is not None:
    check_samples(samples)
    experiment = with_samples(experiment, samples)
  with jax.set_mesh(experiment.meshes.training):
    data = load_questions(experiment, os.fspath(spec))
    return score_policy(experiment, policy.decode_params, data, policy.step)


def score_all(
  experiment: Experiment, params: model.Params, evaluations: Sequence[QuestionSet], step: int
) -> dict[str, float]:
  """Perform all evaluations of a run and print the scores; see `score_policy`.

  With a validation set, 'validation/score' is the share of correct responses, averaged over the
  sources not listed in config.export.best_without. The best policy is the one with the highest
  'validation/score'.
  """
  config, scores, validation = experiment.config, {}, []
  if evaluations:
    params = model.decode_layout(experiment.model, params, experiment.meshes)
  for data in evaluations:
    with activity.doing(spec_name(data.spec)):
      data_scores, records = score_policy(experiment, params, data, step)
    metrics.write_rows(records_path(f'{experiment.workdir}/evaluation', step, data.spec), records)
    scores |= data_scores
    if data.spec in config.data.validation:
      validation += [
        rows for name, rows in by_source(records).items() if name not in config.export.best_without
      ]
  if scores:
    print(f'evaluation after step {step}\n{table(scores)}', flush=True)
  if validation:
    means = [np.mean([record['correct'] for record in rows]) for rows in validation]
    scores['validation/score'] = float(np.mean(means))
    print(f'  validation/score {scores["validation/score"]:.4f}', flush=True)
  return scores


def score_policy(
  experiment: Experiment, decode_params: model.Params, data: QuestionSet, step: int
) -> tuple[dict[str, float], list[Record]]:
  """Score `decode_params` on the questions in `data`; return metrics and one record per question.

  The required response format comes from config.evaluation, not config.verifier. Sampling depends
  only on the seed, the step and the questions, so a manual evaluation reproduces the run's scores.

  Returns:
    Metrics by name. 'eval/{name}/pass@1' is the score of the first sample, and '…_low' and '…_high'
    are the bounds of its 95% interval. With k > 1 samples, there are also 'avg@{k}' (the mean over
    all samples), 'pass@{k}' (the share of questions with at least one correct sample) and, if any
    answer was extracted, 'maj@{k}' (the share of questions whose most frequent answer is correct;
    see `majority`), each with its bounds. 'truncated' is the share of responses that were
    truncated. If the task can check steps, 'valid_steps' is the share of responses whose steps are
    all valid. The name comes from the data spec (`spec_name`). If the data has several sources, the
    metrics are per source instead: 'eval/{name}/{source}/…'.
    Records with the questions, responses, verdicts and sampling settings.
  """
  config, tokenizer = experiment.config, experiment.tokenizer
  settings, samples = config.evaluation, config.evaluation.samples
  questions = list(data.questions)  # read once, because each access reads from the disk
  sampler = make_sampler(experiment, Purpose.EVALUATION, distribution=settings.distribution)
  rows, limit = [question.row for question in questions], config.rollout.max_response
  requests = requests_for(data.prompts, rows, samples, step, limit, questions)
  responses, _ = sampler.generate(decode_params, requests)
  texts = [tokenizer.decode(response.tokens) for response in responses]
  prompts = [tokenizer.decode(prompt, special=True) for prompt in data.prompts]
  thinks = all(prompt.endswith(THINK) for prompt in prompts)
  episode_verdicts = [response.verdict for response in responses if response.verdict]
  verdicts = episode_verdicts or _grade(config, questions, texts, thinks)
  pool.refuse_all_failed(f'evaluation on {data.spec}', verdicts)
  if warning := alarms.grading(step, [verdicts]):
    hosts.warn(f'{data.spec}: {warning}')
  records = _records(tokenizer, questions, prompts, responses, texts, verdicts)
  sampling = dataclasses.asdict(settings.distribution) | {'seed': config.seed, 'step': step}
  records = [record | {'sampling': sampling} for record in records]
  name = spec_name(data.spec)
  groups, scores = by_source(records), {}
  for source, rows in groups.items():
    scores |= _summarize(name if len(groups) == 1 else f'{name}/{source}', rows)
  return scores, records


def with_samples(experiment: Experiment, samples: int) -> Experiment:
  """Return the experiment with `samples` responses per evaluated question."""
  config = experiment.config
  evaluation = dataclasses.replace(config.evaluation, samples=samples)
  return dataclasses.replace(experiment, config=dataclasses.replace(config, evaluation=evaluation))


def by_source(records: Sequence[Record]) -> dict[str, list[Record]]:
  """Group records by source, in order of first appearance."""
  groups: dict[str, list[Record]] = {}
  for record in records:
    groups.setdefault(record['source'], []).append(record)
  return groups


def majority(question: Question, verdicts: Sequence[Verdict]) -> float | None:
  """Return the probability that the most frequent answer is correct; None if there are no answers.

  A tie is broken at random. All correct answers count as the same answer, except in reasoning_gym
  tasks, which may accept different answers. Wrong answers count as the same if their texts match.
  """
  has_one_answer = question.kind != reasoning_gym.KIND
  votes = collections.Counter(
    (verdict.correct, '' if verdict.correct and has_one_answer else verdict.answer.strip())
    for verdict in verdicts
    if verdict.answer is not None
  )
  max_votes = max(votes.values(), default=0)
  winners = [is_correct for (is_correct, _), count in votes.items() if count == max_votes]
  return sum(winners) / len(winners) if winners else None


def table(scores: Mapping[str, float]) -> str:
  """Format evaluation metrics: one line per dataset and measure, with the 95% interval."""
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
        f'{counted(round(scores[f"eval/{group}/questions"]), "question")})'
      )
    lines.append(line)
  return '\n'.join(lines)


def compare(first: Sequence[Record], second: Sequence[Record]) -> str:
  """Format the score difference (second policy minus first) per source, with an interval.

  `first` and `second` are records of the same questions, with the same number of responses to each.
  Differences are paired by question, so variation in difficulty does not widen the interval.
  """
  lines, pairs = [], by_source([a | {'other': b} for a, b in zip(first, second, strict=True)])
  width = max(map(len, pairs))
  for source, records in pairs.items():
    keys = [(index, comparison.question_key(record)) for index, record in enumerate(records)]
    shares = (
      {key: float(np.mean(record['correct'])) for key, record in zip(keys, policy_records)}
      for policy_records in (records, [record['other'] for record in records])
    )
    difference_Q, _, (mean, low, high) = comparison.compare(*shares, of_questions=True)
    samples = len(records[0]['correct'])
    measure = 'pass@1' if samples == 1 else f'avg@{samples}'
    lines.append(
      f'  {source:<{width}} {measure:<12} {mean:+.4f}  (95%: {low:+.4f} to {high:+.4f}, paired; of '
      f'{counted(len(records), "question")} {np.sum(difference_Q > 0)} better, '
      f'{np.sum(difference_Q < 0)} worse)'
    )
  return '\n'.join(lines)


def records_path(out: str, step: int, spec: str, suffix: str = '') -> str:
  """Return the path of an evaluation's records in the folder `out`."""
  return os.path.join(out, f'step_{step:06d}_{spec_name(spec)}{suffix}.jsonl')


def _grade(
  config: RunConfig, questions: Sequence[Question], texts: Sequence[str], thinks: bool
) -> list[Verdict]:
  """Grade the texts as config.evaluation specifies.

  `texts` contains the same number of responses for each question, in question order. `thinks` is
  True if all prompts end in <think>; otherwise, responses need not contain </think>.
  """
  samples = len(texts) // len(questions)
  response_questions = [question for question in questions for _ in range(samples)]
  require = tuple(part for part in config.evaluation.require if part != 'think' or thinks)
  with Grader(config.grading.correctness_alone, verifier.VerifierConfig(require)) as grader:
    return grader.grade(
      texts,
      [question.answer for question in response_questions],
      [question.kind for question in response_questions],
      [functools.partial(stages.question_facts, question) for question in response_questions],
    )


def _records(
  tokenizer: Tokenizer,
  questions: Sequence[Question],
  prompts: Sequence[str],
  responses: Sequence[Response],
  texts: Sequence[str],
  verdicts: Sequence[Verdict],
) -> list[Record]:
  """Return one record per question, with all of its responses, including special tokens."""
  samples = len(texts) // len(questions)
  records = []
  for index, (question, prompt) in enumerate(zip(questions, prompts)):
    span = slice(index * samples, (index + 1) * samples)
    entropies = [float(np.mean(response.entropy[response.own])) for response in responses[span]]
    record = {
      'row': question.row,
      'source': question.source,
      'question': prompt,
      'answer': question.answer,
      'responses': [tokenizer.decode(r.tokens, special=True) for r in responses[span]],
      'correct': [verdict.correct for verdict in verdicts[span]],
      'outcomes': [verdict.outcome for verdict in verdicts[span]],
      # The answers that the verifier compared; null if a response has no answer or grading failed.
      'extracted': [verdict.answer for verdict in verdicts[span]],
      'majority': majority(question, verdicts[span]),
      'truncated': [response.truncated for response in responses[span]],
      'lengths': [response.num_own for response in responses[span]],
      # Means over tokens, in nats, at the sampling temperature; null if the policy has diverged,
      # because JSON has no NaN.
      'entropies': [round(value, 5) if math.isfinite(value) else None for value in entropies],
    }
    if check := step_checker(question):
      record['valid_steps'] = [check(text) for text in texts[span]]
    if style := style_reader(question):
      record['styles'] = [style(text) for text in texts[span]]
    records.append(record)
  return records


def _summarize(group: str, records: Sequence[Record]) -> dict[str, float]:
  correct_QK = np.array([record['correct'] for record in records], float)
  cluster_Q = [comparison.question_key(record) for record in records]
  samples = correct_QK.shape[1]
  measures = {'pass@1': correct_QK[:, :1]}
  if samples > 1:
    measures |= {
      f'avg@{samples}': correct_QK,
      f'pass@{samples}': correct_QK.max(axis=1, keepdims=True),
    }
    majority_Q = [record['majority'] for record in records]
    if any(share is not None for share in majority_Q):
      measures[f'maj@{samples}'] = np.array([[share or 0.0] for share in majority_Q])
  scores = {f'eval/{group}/questions': float(len(records))}
  for name, values_QK in measures.items():
    mean, low, high = comparison.interval_95(values_QK, cluster_Q)
    scores |= {
      f'eval/{group}/{name}': mean,
      f'eval/{group}/{name}_low': low,
      f'eval/{group}/{name}_high': high,
    }
  scores[f'eval/{group}/truncated'] = float(np.mean([r['truncated'] for r in records]))
  if 'valid_steps' in records[0]:
    scores[f'eval/{group}/valid_steps'] = float(np.mean([r['valid_steps'] for r in records]))
  return scores


# ---- Manual evaluations ----

Records = Sequence[Mapping[str, Any]]  # one per question, see `score_policy`


def evaluate(
  source: Source, experiment: Experiment, parts: Sequence[Part], out: str
) -> tuple[int, list[tuple[Part, Records]]]:
  """Score a policy on each part and print the scores; return the policy's step and all records.

  Call this with the training mesh set. Records are written to `out`, unless `out` is ''.
  """
  policy, results = policies.restore(source, experiment), []
  for part in parts:
    spec = part.data.spec
    with activity.doing(f'evaluation on {spec}'):
      scores, records = score_policy(
        with_samples(experiment, part.samples), policy.decode_params, part.data, policy.step
      )
    step_text = f' at step {policy.step}' if source.kind == 'run' else ''
    sampling = experiment.config.evaluation.distribution
    print(f'{spec}{step_text}, {sampling}\n{table(scores)}', flush=True)
    if out:
      path = _write_manual(out, source.describe(), policy.step, spec, scores, records)
      print(f'responses: {path}', flush=True)
    results.append((part, records))
  return policy.step, results


def _write_manual(
  out: str,
  policy: Mapping[str, str],
  step: int,
  spec: str,
  scores: Mapping[str, float],
  records: Records,
) -> str:
  """Write records to a new file and add a line to evaluations.jsonl; return the file's path."""
  now = datetime.datetime.now().astimezone()
  sampling, samples = records[0]['sampling'], len(records[0]['responses'])
  suffix = f'_temperature_{sampling["temperature"]:g}_samples_{samples}_{now:%Y%m%dT%H%M%S%f}'
  path = records_path(out, step, spec, suffix)
  metrics.write_rows(path, records)
  line = {
    'time': now.isoformat(timespec='seconds'),
    **policy,
    'data': spec,
    'samples': samples,
    **sampling,
    'file': os.path.basename(path),
    'scores': scores,
  }
  if hosts.is_first():
    metrics.append_evaluation(out, line)
  return path


def prepare_policy(
  source: Source, values: ConfigDict, specs: Sequence[str]
) -> tuple[Experiment, list[Part]]:
  """Open a policy's experiment, and load the questions of each data spec."""
  experiment = open_experiment(values, source.path)
  samples = experiment.config.evaluation.samples
  with jax.set_mesh(experiment.meshes.training), console.opened(), machine.explained():
    return experiment, [Part(load_questions(experiment, spec), samples, ()) for spec in specs]


def evaluate_policy(
  source: Source, experiment: Experiment, parts: Sequence[Part], out: str
) -> list[Records]:
  """Evaluate a policy that `prepare_policy` has opened, and return the records of each part."""
  meshes = experiment.meshes
  # Another policy may have been opened since, with its own commits.
  with jax.set_mesh(meshes.training), console.opened(), machine.explained(), hub.as_in(source.path):
    print(source.path, flush=True)
    _, results = evaluate(source, experiment, parts, out)
  return [records for _, records in results]
