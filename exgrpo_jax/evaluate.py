"""How often a policy is right: pass@1, avg@k and pass@k per data source.

python -m exgrpo_jax.evaluate --config=configs/arithmetic.py --checkpoint=/tmp/arithmetic \\
    --data=arithmetic:test --samples=4 --temperature=1
"""

import dataclasses
import os

import jax
import numpy as np
from absl import flags

from exgrpo_jax.data import tasks
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import (
  CHECKPOINT,
  CONFIG,
  OUT,
  STEP,
  Experiment,
  load_questions,
  open_experiment,
  run_command,
)
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics, step_metrics
from exgrpo_jax.rollout import scheduler, token_sampling
from exgrpo_jax.runtime import hosts
from exgrpo_jax.runtime.workdir import check_workdir, read_config

_DATA = flags.DEFINE_list('data', None, 'Data specs; config.data.evaluation by default.')
_SAMPLES = flags.DEFINE_integer('samples', None, 'Responses a question.', lower_bound=1)
_TEMPERATURE = flags.DEFINE_float('temperature', None, '0 is greedy.', lower_bound=0.0)


def main() -> None:
  """Evaluates a checkpoint of a run."""
  if not CONFIG.value or not CHECKPOINT.value:
    raise InputError(
      '--config and --checkpoint are both needed: what train was given as --config and --workdir.'
    )
  values = CONFIG.value
  read_config(CHECKPOINT.value)
  check_workdir(values, CHECKPOINT.value, ('model', 'tokenizer', 'prompt'))
  with values.unlocked():
    values.evaluation.samples = _SAMPLES.value or values.evaluation.samples
    if _TEMPERATURE.value is not None:
      values.evaluation.temperature = _TEMPERATURE.value
  experiment = open_experiment(values, CHECKPOINT.value)
  like = model.shapes(experiment.model, experiment.mesh)
  params, step = checkpoint.restore_params(CHECKPOINT.value, STEP.value, like)
  out = OUT.value or os.path.join(CHECKPOINT.value, 'evaluation')
  key = jax.random.fold_in(jax.random.key(experiment.settings.seed), step)
  for spec in _DATA.value or experiment.settings.data.evaluation:
    found = evaluate(experiment, params, spec, step, key, out)
    print(f'{spec} at step {step}, temperature {experiment.settings.evaluation.temperature}')
    print(table(found))


def evaluate(
  experiment: Experiment, params, spec: str, step: int, key: jax.Array, out: str
) -> dict[str, float]:
  """Scores `params` on a data spec and writes one record a question.

  Evaluation judges the answer alone: the last box, with or without a think section.

  Returns metrics by name, for each source of the spec: 'eval/{source}/pass@1' (the
  first sample), its 95% interval as '…_low' and '…_high', with k > 1 samples the same for
  'avg@{k}' (the mean of all) and 'pass@{k}' (any), 'truncated' and, where the task can
  check it, 'valid_steps': shares of all responses.
  """
  settings, words = experiment.settings, experiment.tokenizer
  dataset, prompts = load_questions(experiment, spec)
  wanted, samples = settings.evaluation, settings.evaluation.samples
  how = token_sampling.Config(wanted.temperature, wanted.top_k, wanted.top_p, wanted.min_p)
  responses = scheduler.generate(
    experiment.model,
    model.decode_layout(experiment.model, params, experiment.mesh),
    [prompt for prompt in prompts for _ in range(samples)],
    [question.row for question in dataset for _ in range(samples)],
    list(range(samples)) * len(dataset),
    key,
    settings.rollout.sampling(words, how),
    experiment.mesh,
  )
  texts = [words.decode(response.tokens) for response in responses]
  asked = [question for question in dataset for _ in range(samples)]
  with Grader(
    dataclasses.replace(settings.grading, reward=''),
    dataclasses.replace(settings.verifier, require_think=False),
  ) as grader:
    verdicts = grader.grade(
      texts, [question.answer for question in asked], [question.kind for question in asked]
    )
  if warning := step_metrics.grading_alarm(step, [verdicts], settings.grading.max_failures):
    hosts.warn(f'{spec}: {warning}')
  records = []
  for index, question in enumerate(dataset):
    own = slice(index * samples, (index + 1) * samples)
    records.append(
      {
        'row': question.row,
        'source': question.source,
        'question': words.render(question.messages, settings.prompt.template),
        'answer': question.answer,
        'responses': texts[own],
        'correct': [verdict.correct for verdict in verdicts[own]],
        'outcomes': [verdict.outcome for verdict in verdicts[own]],
        'truncated': [response.truncated for response in responses[own]],
        'lengths': [len(response.tokens) for response in responses[own]],
      }
    )
    if question.source in tasks.STEP_CHECKERS:
      check = tasks.STEP_CHECKERS[question.source]
      records[-1]['valid_steps'] = [
        check(question.messages[-1].content, text) for text in texts[own]
      ]
  name = ''.join(c if c.isalnum() else '_' for c in os.path.basename(spec))
  metrics.write_rows(os.path.join(out, f'step_{step:06d}_{name}.jsonl'), records)
  sources = dict.fromkeys(record['source'] for record in records)
  return {
    key: value
    for source in sources
    for key, value in _summary(source, [r for r in records if r['source'] == source]).items()
  }


def mean_score(found: dict[str, float]) -> float:
  """One number of an evaluation: the mean over sources of avg@k, or of pass@1 where k is 1."""
  averages = [value for name, value in found.items() if 'avg@' in name and name[-1].isdigit()]
  firsts = [value for name, value in found.items() if name.endswith('/pass@1')]
  return float(np.mean(averages or firsts))


def table(found: dict[str, float]) -> str:
  """Evaluation metrics as text: a line for each source and measure, with its 95% interval."""
  lines = []
  for name, value in found.items():
    _, source, measure = name.split('/', 2)
    if measure.endswith(('_low', '_high')) or measure == 'questions':
      continue
    line = f'  {source:<16} {measure:<12} {value:.4f}'
    if f'{name}_low' in found:
      line += (
        f'  (95%: {found[name + "_low"]:.4f} to {found[name + "_high"]:.4f}, '
        f'{found[f"eval/{source}/questions"]:.0f} questions)'
      )
    lines.append(line)
  return '\n'.join(lines)


def _summary(source, records):
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
  found = {f'eval/{source}/questions': float(len(records))}
  for name, values_QK in measures.items():
    mean, low, high = metrics.interval_95(values_QK, cluster_Q)
    found |= {
      f'eval/{source}/{name}': mean,
      f'eval/{source}/{name}_low': low,
      f'eval/{source}/{name}_high': high,
    }
  found[f'eval/{source}/truncated'] = float(np.mean([r['truncated'] for r in records]))
  if 'valid_steps' in records[0]:
    found[f'eval/{source}/valid_steps'] = float(np.mean([r['valid_steps'] for r in records]))
  return found


if __name__ == '__main__':
  run_command(main, on_all_hosts=True)
