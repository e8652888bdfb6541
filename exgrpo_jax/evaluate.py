r"""How often a policy is right: pass@1, avg@k and pass@k per data source.

python -m exgrpo_jax.evaluate --config=arithmetic --checkpoint=/tmp/arithmetic \
    --data=arithmetic:test --samples=4 --temperature=1
python -m exgrpo_jax.evaluate --suite=paper --model=Qwen2.5-7B-Instruct --name='Base model' \
    --out=/tmp/table

A suite is a table of benchmarks, to which each evaluation adds a row.

Every evaluation by hand gets files of its own, and a line in evaluations.jsonl beside them that
holds its scores and says how it was made; those that the run itself wrote stay as they are.
"""

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from exgrpo_jax import cli, config_files, policies, suites
from exgrpo_jax.data import spec_names
from exgrpo_jax.data.prompt import THINK
from exgrpo_jax.data.questions import step_checker, style_reader
from exgrpo_jax.data.suite import Part
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Question, QuestionSet, Response, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Config, Experiment, load_questions, open_experiment, parse_config
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics, step_metrics
from exgrpo_jax.rollout import scheduler
from exgrpo_jax.rollout.token_sampling import Distribution
from exgrpo_jax.runtime import activity, console, hosts, randomness
from exgrpo_jax.runtime.randomness import Purpose


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  cli.define_checkpoint()
  cli.define_model()
  cli.define_out("The folder for the records of all questions; by default the run's evaluation/.")
  flags.DEFINE_string(
    'suite',
    None,
    'A table of benchmarks, to which a row is added: a file such as path/to/suite.py, or by name '
    f'one of {", ".join(config_files.shipped_names(suites.SUITES))}. Its settings replace those of '
    'the config, but for what the command line changes.',
  )
  flags.DEFINE_string('name', None, "The row's name; by default that of the run or model's folder.")
  flags.DEFINE_list('data', None, 'Data specs; config.data.validation and .evaluation by default.')
  flags.DEFINE_integer('samples', None, 'Responses to each question.', lower_bound=1)
  flags.DEFINE_float('temperature', None, 'Of sampling; 0 is greedy.', lower_bound=0.0)


def main(args: cli.Args) -> None:
  """Evaluates a checkpoint of a run, or a model, on some data or on a suite."""
  values: Any = policies.config_values(args)
  wanted = _open_table(args)
  if wanted:
    values = suites.with_settings(wanted.suite, values, policies.overrides(args))
  with values.unlocked():
    values.evaluation.samples = args.samples or values.evaluation.samples
    if args.temperature is not None:
      values.evaluation.temperature = args.temperature
  config = parse_config(values)
  specs = args.data or (wanted.suite.data if wanted else config.data.evaluated)
  out = args.out or (args.checkpoint and os.path.join(args.checkpoint, 'evaluation'))
  if not specs or not out:
    missing, why = ('data', 'evaluate on') if not specs else ('out', 'write to')
    raise InputError(f'--{missing} is needed: neither config nor run names what to {why}.')
  spec_names.check_distinct(specs, '--data')
  experiment = open_experiment(values, args.checkpoint or out)
  with jax.set_mesh(experiment.meshes.training), console.opened():
    loaded = [load_questions(experiment, spec) for spec in specs]
    if wanted:
      parts = suites.plan(wanted, loaded, config, may_miss=bool(args.data))
    else:
      parts = [Part(data, config.evaluation.samples, ()) for data in loaded]
    params, step = policies.restore(args, experiment)
    policy, evaluated = policies.origin(args), []
    for part in parts:
      spec = part.data.spec
      with activity.doing(f'evaluation on {spec}'):
        scores, records = score_policy(_sampling(experiment, part.samples), params, part.data, step)
      path = _write_by_hand(out, policy, step, spec, scores, records)
      print(f'{spec} at step {step}, temperature {config.evaluation.temperature}')
      print(f'{table(scores)}\nresponses: {path}', flush=True)
      evaluated.append((part, records))
    if wanted:
      print(suites.write_row(wanted, config, policy | {'step': step}, evaluated), end='')


def _open_table(args: cli.Args) -> suites.Table | None:
  """The table of --suite, where there is one."""
  if not args.suite:
    if args.name is not None:
      raise InputError(f'--name={args.name} names the row of a table, and there is no --suite.')
    return None
  if args.samples is not None:
    raise InputError(f"--samples={args.samples} is a benchmark's own; the suite says it.")
  (path,) = policies.origin(args).values()
  name = os.path.basename(path.rstrip('/'))
  return suites.open_table(args.suite, args.out, name if args.name is None else args.name)


def _sampling(experiment: Experiment, samples: int) -> Experiment:
  """The experiment, with so many responses to each question of an evaluation."""
  config = experiment.config
  changed = dataclasses.replace(config.evaluation, samples=samples)
  return dataclasses.replace(experiment, config=dataclasses.replace(config, evaluation=changed))


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
    print(f'  validation/score {scores["validation/score"]:.4f}', flush=True)
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
    model.decode_layout(experiment.model, params, experiment.meshes),
    [prompt for prompt in data.prompts for _ in range(samples)],
    [question.row for question in questions for _ in range(samples)],
    list(range(samples)) * len(questions),
    randomness.key(config.seed, Purpose.EVALUATION, step),
    config.rollout.decode_spec(tokenizer, distribution),
    experiment.meshes.decoding,
  )
  texts = [tokenizer.decode(response.tokens) for response in responses]
  prompts = [tokenizer.render(q.messages, config.prompt.template) for q in questions]
  thinks = all(prompt.endswith(THINK) for prompt in prompts)
  verdicts = _grade(config, data.spec, questions, texts, thinks)
  warning = step_metrics.grading_alarm(step, [verdicts], config.grading.max_failures)
  if warning:
    hosts.warn(f'{data.spec}: {warning}')
  records = _records(tokenizer, questions, prompts, responses, texts, verdicts)
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
  policy: Mapping[str, str],
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
    **policy,
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
  config: Config, spec: str, questions: Sequence[Question], texts: Sequence[str], thinks: bool
) -> list[Verdict]:
  """Verdicts of the texts, equally many for each question in turn, as config.evaluation says.

  Unless all prompts end in <think> (`thinks`), no response needs </think>.
  """
  samples = len(texts) // len(questions)
  asked = [question for question in questions for _ in range(samples)]
  grading = dataclasses.replace(config.grading, reward='')
  wanted = config.evaluation
  required = verifier.Config(wanted.require_think and thinks, wanted.require_box)
  with Grader(grading, required) as grader:
    verdicts = grader.grade(
      texts, [question.answer for question in asked], [question.kind for question in asked]
    )
  pool.refuse_all_failed(f'evaluation on {spec}', verdicts)
  return verdicts


def _records(
  tokenizer: Tokenizer,
  questions: Sequence[Question],
  prompts: Sequence[str],
  responses: Sequence[Response],
  texts: Sequence[str],
  verdicts: Sequence[Verdict],
) -> list[dict[str, Any]]:
  """One record per question, with all its responses, special tokens included."""
  samples = len(texts) // len(questions)
  records = []
  for index, (question, prompt) in enumerate(zip(questions, prompts)):
    span = slice(index * samples, (index + 1) * samples)
    record = {
      'row': question.row,
      'source': question.source,
      'question': prompt,
      'answer': question.answer,
      'responses': [tokenizer.decode(r.tokens, special=True) for r in responses[span]],
      'correct': [verdict.correct for verdict in verdicts[span]],
      'outcomes': [verdict.outcome for verdict in verdicts[span]],
      # What the verifier compared; null where there was nothing, or grading failed.
      'extracted': [verdict.answer for verdict in verdicts[span]],
      'truncated': [response.truncated for response in responses[span]],
      'lengths': [len(response.tokens) for response in responses[span]],
      # Means over tokens, in nats, at the temperature of sampling.
      'entropies': [_mean_entropy(response) for response in responses[span]],
    }
    if check := step_checker(question):
      record['valid_steps'] = [check(text) for text in texts[span]]
    if style := style_reader(question):
      record['styles'] = [style(text) for text in texts[span]]
    records.append(record)
  return records


def _mean_entropy(response: Response) -> float | None:
  """Over its tokens, in nats; None of a policy that has diverged, for JSON has no NaN."""
  value = float(np.mean(response.entropy))
  return round(value, 5) if math.isfinite(value) else None


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
