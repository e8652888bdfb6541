r"""Measure how often a policy is correct: pass@1, avg@k, pass@k and maj@k per data source.

exgrpo evaluate --checkpoint=/tmp/chains --samples=4 --temperature=1
exgrpo evaluate --model=Qwen2.5-1.5B-Instruct --data=gsm8k_test.jsonl
exgrpo evaluate --compare=Qwen2.5-1.5B-Instruct,/tmp/run --data=gsm8k_test.jsonl
exgrpo evaluate --suite=paper --model=Qwen2.5-7B-Instruct --name='Base model' \
    --out=/tmp/table

--compare evaluates two policies on the same questions with the same settings, and prints the
difference. A suite is a table of benchmarks; each evaluation adds a row to it.

Each evaluation writes new files, and adds a line with its scores and settings to evaluations.jsonl
next to them. Files from evaluations during training are left unchanged.
"""

import os
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from exgrpo_jax.commands import command_line
from exgrpo_jax.data import questions
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import suites
from exgrpo_jax.evaluation.scores import compare, evaluate, evaluate_policy, prepare_policy
from exgrpo_jax.evaluation.suites import Part
from exgrpo_jax.experiment import config_files, policies
from exgrpo_jax.experiment.experiment import load_questions, open_experiment, parse_config
from exgrpo_jax.experiment.policies import Source
from exgrpo_jax.runtime import console, machine
from exgrpo_jax.runtime.workdir import check_folder


def define_flags() -> None:
  """Define the flags of this command."""
  command_line.define_config()
  command_line.define_checkpoint()
  command_line.define_model()
  command_line.define_path(
    'out',
    'The folder for per-question records. The default with --checkpoint is evaluation/ in '
    'its workdir. With --model or --compare, no records are kept by default.',
  )
  command_line.define_path(
    'compare',
    "Two policies to compare, written as A,B, instead of --checkpoint and --model. Each is a run's "
    'workdir or a Hugging Face model. B is sampled and graded like A, but with its own prompts '
    """and tokenizer. Quote a path that contains a comma: '"sweep/a,seed=1","sweep/b,seed=1"'.""",
    several=True,
  )
  flags.DEFINE_string(
    'suite',
    None,
    'A table of benchmarks to add a row to: a file such as path/to/suite.py, or one of these '
    f'names: {", ".join(config_files.shipped_names(suites.SUITES))}. Its settings override the '
    'config, but not the settings given on the command line.',
  )
  flags.DEFINE_string(
    'name', None, "The row's name; by default the name of the run's or model's folder."
  )
  command_line.define_specs(
    'data',
    'The data specs to evaluate on; by default config.data.validation and config.data.evaluation.',
  )
  flags.DEFINE_integer('samples', None, 'The number of responses per question.', lower_bound=1)
  command_line.define_sampling()


def main(args: command_line.Args) -> None:
  """Evaluate a policy on data or a suite, or compare two policies."""
  if args.out:
    check_folder('--out', args.out)
  if args.compare:
    _compare_two(args)
    return
  source = command_line.chosen_policy(args)
  table = _open_table(args, source)
  user_config: Any = args.config
  if table and source.kind == 'model' and not user_config:
    user_config = policies.base_config()
    user_config.prompt.template = 'paper'
  values = policies.config_values(source, user_config, args.max_response)
  if table:
    values = suites.with_settings(table.suite, values, command_line.given_overrides(args))
  values = command_line.with_sampling(args, values)
  specs = args.data or (table.suite.data if table else parse_config(values).data.evaluated)
  _check_specs(specs)
  out = args.out or ''
  if not out and source.kind == 'run':
    check_folder('--out', out := os.path.join(source.path, 'evaluation'))
  experiment = open_experiment(values, source.path)
  with jax.set_mesh(experiment.meshes.training), console.opened(), machine.explained():
    question_sets = [load_questions(experiment, spec) for spec in specs]
    if table:
      parts = suites.plan(table, question_sets, experiment.config, may_miss=bool(args.data))
    else:
      parts = [Part(data, experiment.config.evaluation.samples, ()) for data in question_sets]
    step, results = evaluate(source, experiment, parts, out)
    if table:
      policy = source.describe() | {'step': step}
      print(suites.write_row(table, experiment.config, policy, results), end='')


def _open_table(args: command_line.Args, source: Source) -> suites.Table | None:
  """Open the table for --suite, or return None if the flag is not given."""
  if not args.suite:
    if args.name is not None:
      raise InputError(
        f'--name={args.name}: this flag names a table row, so it requires --suite. Add --suite, '
        'or remove --name.'
      )
    return None
  if args.samples is not None:
    raise InputError(
      f'--samples={args.samples}: the suite sets the number of samples for each benchmark. Remove '
      '--samples.'
    )
  (path,) = source.describe().values()
  name = os.path.basename(path.rstrip('/'))
  return suites.open_table(args.suite, args.out, name if args.name is None else args.name)


def _check_specs(specs: Sequence[str]) -> None:
  if not specs:
    raise InputError(
      '--data is required, because neither the config nor the run specifies data to evaluate on.'
    )
  questions.check_distinct(specs, '--data')


def _compare_two(args: command_line.Args) -> None:
  """Evaluate two policies on the same questions, and print the difference, second minus first."""
  for name in ('checkpoint', 'model', 'step', 'suite', 'name'):
    if getattr(args, name) is not None:
      raise InputError(
        f'--{name}={getattr(args, name)}: --compare already names both policies. Remove --{name}.'
      )
  if len(args.compare) != 2:
    raise InputError(
      f'--compare={",".join(args.compare)}: the value must be two policies, written as A,B. Each '
      "must be a run's workdir or a Hugging Face model. Quote a path that contains a comma: "
      """--compare='"sweep/a,seed=1","sweep/b,seed=1"'."""
    )
  first, second = map(policies.at, args.compare)
  settings = _settings_of_two(args, first, second)
  specs = args.data or parse_config(settings[0]).data.evaluated
  _check_specs(specs)
  # Both are prepared first, to find errors in the second before the first is evaluated.
  setups = [
    (source, *prepare_policy(source, values, specs))
    for source, values in zip((first, second), settings)
  ]
  outcomes = [evaluate_policy(*setup, args.out or '') for setup in setups]
  for spec, *records in zip(specs, *outcomes, strict=True):
    print(f'{spec}: {second.path} minus {first.path}\n{compare(*records)}', flush=True)


def _settings_of_two(
  args: command_line.Args, first: Source, second: Source
) -> tuple[ConfigDict, ConfigDict]:
  """Return configs with which the second policy is sampled and graded like the first."""
  user_config, max_response = args.config, args.max_response
  first_values: Any = command_line.with_sampling(
    args, policies.config_values(first, user_config, max_response)
  )
  second_values: Any = policies.config_values(
    second, user_config, first_values.rollout.max_response
  )
  with first_values.unlocked(), second_values.unlocked():
    # If one policy left out a question, the other's responses would have no counterpart.
    first_values.data.on_overlong = 'refuse'
    # By default, config.seed determines the base of LoRA adapters.
    second_values.warm_start.seed = parse_config(second_values).warm_start_seed
    for name in ('seed', 'data', 'evaluation', 'grading', 'verifier', 'environment'):
      second_values[name] = first_values[name]
    second_values.rollout.max_response = first_values.rollout.max_response
  return first_values, second_values


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags, on_all_hosts=True)
