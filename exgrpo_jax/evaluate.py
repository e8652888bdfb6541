r"""How often a policy is right: pass@1, avg@k and pass@k per data source.

python -m exgrpo_jax.evaluate --config=arithmetic --checkpoint=/tmp/arithmetic \
    --data=arithmetic:test --samples=4 --temperature=1
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from exgrpo_jax import cli
from exgrpo_jax.data import tasks
from exgrpo_jax.datatypes import QuestionSet, Response, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import Experiment, load_questions, open_experiment
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics, step_metrics
from exgrpo_jax.rollout import scheduler
from exgrpo_jax.rollout.token_sampling import Distribution
from exgrpo_jax.runtime import hosts, randomness
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.runtime.workdir import check_workdir, read_config


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  cli.define_checkpoint()
  cli.define_out("The folder for the records of all questions; by default the run's evaluation/.")
  flags.DEFINE_list('data', None, 'Data specs; config.data.evaluation by default.')
  flags.DEFINE_integer('samples', None, 'Responses to each question.', lower_bound=1)
  flags.DEFINE_float('temperature', None, 'Of sampling; 0 is greedy.', lower_bound=0.0)


def main(args: cli.Args) -> None:
  """Evaluates a checkpoint of a run."""
  if not args.config or not args.checkpoint:
    raise InputError(
      '--config and --checkpoint are both needed: what train was given as --config and --workdir.'
    )
  values = args.config
  read_config(args.checkpoint)
  check_workdir(values, args.checkpoint, ('model', 'tokenizer', 'prompt'))
  with values.unlocked():
    values.evaluation.samples = args.samples or values.evaluation.samples
    if args.temperature is not None:
      values.evaluation.temperature = args.temperature
  experiment = open_experiment(values, args.checkpoint)
  config = experiment.config
  out = args.out or os.path.join(args.checkpoint, 'evaluation')
  with jax.set_mesh(experiment.mesh):
    like = model.shapes(experiment.model, experiment.mesh)
    params, step = checkpoint.restore_params(args.checkpoint, args.step, like)
    for spec in args.data or config.data.evaluation:
      data = load_questions(experiment, spec)
      scores = score_policy(experiment, params, data, step, out)
      print(f'{spec} at step {step}, temperature {config.evaluation.temperature}')
      print(table(scores))


def score_policy(
  experiment: Experiment,
  params: model.Params,
  data: QuestionSet,
  step: int,
  out: str,
) -> dict[str, float]:
  """Scores `params` on some questions and writes a record of each into the folder `out`.

  Evaluation judges the answer alone: the last box, with or without a think section. Sampling
  depends on the seed, the step and the questions, so an evaluation by hand repeats the run's.

  Returns:
    Metrics by name, for each source of the data: 'eval/{source}/pass@1' (the first sample), its
    95% interval as '…_low' and '…_high', with k > 1 samples the same for 'avg@{k}' (the mean of
    all) and 'pass@{k}' (any), 'truncated' and, where the task can check it, 'valid_steps':
    shares of all responses.
  """
  config, tokenizer = experiment.config, experiment.tokenizer
  wanted, samples = config.evaluation, config.evaluation.samples
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
    [question.row for question in data.questions for _ in range(samples)],
    list(range(samples)) * len(data.questions),
    randomness.key(config.seed, Purpose.EVALUATION, step),
    config.rollout.decode_spec(tokenizer, distribution),
    experiment.mesh,
  )
  texts = [tokenizer.decode(response.tokens) for response in responses]
  verdicts = _grade(experiment, data, texts)
  warning = step_metrics.grading_alarm(step, [verdicts], config.grading.max_failures)
  if warning:
    hosts.warn(f'{data.spec}: {warning}')
  records = _records(experiment, data, responses, texts, verdicts)
  name = ''.join(c if c.isalnum() else '_' for c in os.path.basename(data.spec))
  metrics.write_rows(os.path.join(out, f'step_{step:06d}_{name}.jsonl'), records)
  sources = dict.fromkeys(record['source'] for record in records)
  return {
    name: value
    for source in sources
    for name, value in _summarize(source, [r for r in records if r['source'] == source]).items()
  }


def mean_score(scores: Mapping[str, float]) -> float:
  """One number for an evaluation: the mean over sources of avg@k, or of pass@1 where k is 1."""
  averages = [value for name, value in scores.items() if 'avg@' in name and name[-1].isdigit()]
  firsts = [value for name, value in scores.items() if name.endswith('/pass@1')]
  return float(np.mean(averages or firsts))


def table(scores: Mapping[str, float]) -> str:
  """Evaluation metrics as text: a line for each source and measure, with its 95% interval."""
  lines = []
  for name, value in scores.items():
    _, source, measure = name.split('/', 2)
    if measure.endswith(('_low', '_high')) or measure == 'questions':
      continue
    line = f'  {source:<16} {measure:<12} {value:.4f}'
    if f'{name}_low' in scores:
      line += (
        f'  (95%: {scores[name + "_low"]:.4f} to {scores[name + "_high"]:.4f}, '
        f'{scores[f"eval/{source}/questions"]:.0f} questions)'
      )
    lines.append(line)
  return '\n'.join(lines)


def _grade(experiment: Experiment, data: QuestionSet, texts: Sequence[str]) -> list[Verdict]:
  """Verdicts of the texts, equally many for each question in turn, by the answer alone."""
  config = experiment.config
  samples = len(texts) // len(data.questions)
  asked = [question for question in data.questions for _ in range(samples)]
  grading = dataclasses.replace(config.grading, reward='')
  verifier = dataclasses.replace(config.verifier, require_think=False)
  with Grader(grading, verifier) as grader:
    return grader.grade(
      texts, [question.answer for question in asked], [question.kind for question in asked]
    )


def _records(
  experiment: Experiment,
  data: QuestionSet,
  responses: Sequence[Response],
  texts: Sequence[str],
  verdicts: Sequence[Verdict],
) -> list[dict[str, Any]]:
  """One record per question, with all its responses."""
  template = experiment.config.prompt.template
  samples = len(texts) // len(data.questions)
  records = []
  for index, question in enumerate(data.questions):
    span = slice(index * samples, (index + 1) * samples)
    record = {
      'row': question.row,
      'source': question.source,
      'question': experiment.tokenizer.render(question.messages, template),
      'answer': question.answer,
      'responses': list(texts[span]),
      'correct': [verdict.correct for verdict in verdicts[span]],
      'outcomes': [verdict.outcome for verdict in verdicts[span]],
      'truncated': [response.truncated for response in responses[span]],
      'lengths': [len(response.tokens) for response in responses[span]],
    }
    if question.source in tasks.STEP_CHECKERS:
      check = tasks.STEP_CHECKERS[question.source]
      asked = question.messages[-1].content
      record['valid_steps'] = [check(asked, text) for text in texts[span]]
    records.append(record)
  return records


def _summarize(source: str, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
  scores = {f'eval/{source}/questions': float(len(records))}
  for name, values_QK in measures.items():
    mean, low, high = metrics.interval_95(values_QK, cluster_Q)
    scores |= {
      f'eval/{source}/{name}': mean,
      f'eval/{source}/{name}_low': low,
      f'eval/{source}/{name}_high': high,
    }
  scores[f'eval/{source}/truncated'] = float(np.mean([r['truncated'] for r in records]))
  if 'valid_steps' in records[0]:
    scores[f'eval/{source}/valid_steps'] = float(np.mean([r['valid_steps'] for r in records]))
  return scores


if __name__ == '__main__':
  cli.run(main, define_flags, on_all_hosts=True)
