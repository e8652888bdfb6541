r"""How often a policy is right: pass@1, avg@k and pass@k per data source.

python -m exgrpo_jax.evaluate --checkpoint=/tmp/chains --samples=4 --temperature=1
python -m exgrpo_jax.evaluate --model=Qwen2.5-1.5B-Instruct --data=gsm8k_test.jsonl
python -m exgrpo_jax.evaluate --compare=Qwen2.5-1.5B-Instruct,/tmp/run --data=gsm8k_test.jsonl
python -m exgrpo_jax.evaluate --suite=paper --model=Qwen2.5-7B-Instruct --name='Base model' \
    --out=/tmp/table

Of two policies, asked the same questions in the same way, --compare gives the difference. A suite
is a table of benchmarks, to which each evaluation adds a row.

Every evaluation by hand gets files of its own, and a line in evaluations.jsonl beside them that
holds its scores and says how it was made; those that the run itself wrote stay as they are.
"""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from exgrpo_jax import cli, config_files, policies, suites
from exgrpo_jax.data import spec_names
from exgrpo_jax.data.suite import Part
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import compare, records_path, score_policy, table, with_samples
from exgrpo_jax.experiment import Experiment, load_questions, open_experiment, parse_config
from exgrpo_jax.policies import Source
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime import activity, console, device_memory, hosts

Records = Sequence[Mapping[str, Any]]  # of a data spec, see evaluation.score_policy


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  cli.define_checkpoint()
  cli.define_model()
  cli.define_out(
    "The folder for the records of all questions; by default the run's evaluation/, and of a model "
    'without a run none are kept.'
  )
  cli.define_paths(
    'compare',
    "Two policies, A,B, each a run's workdir or a Hugging Face folder, in place of --checkpoint "
    'and --model. B is sampled and judged as A is, with the prompts and the tokenizer of its own.',
  )
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
  cli.define_sampling()


def main(args: cli.Args) -> None:
  """Evaluates a checkpoint of a run, or a model, on some data or on a suite; or compares two."""
  if args.compare:
    _compare_two(args)
    return
  source = policies.chosen(args)
  wanted = _open_table(args, source)
  given: Any = args.config
  if wanted and source.kind == 'model' and not given:
    given = policies.base_config()
    given.prompt.template = 'paper'
  values = policies.config_values(source, given)
  if wanted:
    values = suites.with_settings(wanted.suite, values, policies.given_overrides(args))
  values = _as_asked(args, values)
  specs = args.data or (wanted.suite.data if wanted else parse_config(values).data.evaluated)
  _check_specs(specs)
  out = args.out or (source.kind == 'run' and os.path.join(source.path, 'evaluation')) or ''
  experiment = open_experiment(values, source.path)
  with jax.set_mesh(experiment.meshes.training), console.opened(), device_memory.explained():
    loaded = [load_questions(experiment, spec) for spec in specs]
    if wanted:
      parts = suites.plan(wanted, loaded, experiment.config, may_miss=bool(args.data))
    else:
      parts = [Part(data, experiment.config.evaluation.samples, ()) for data in loaded]
    step, evaluated = _evaluate(source, experiment, parts, out)
    if wanted:
      policy = source.describe() | {'step': step}
      print(suites.write_row(wanted, experiment.config, policy, evaluated), end='')


def _open_table(args: cli.Args, source: Source) -> suites.Table | None:
  """The table of --suite, where there is one."""
  if not args.suite:
    if args.name is not None:
      raise InputError(f'--name={args.name} names the row of a table, and there is no --suite.')
    return None
  if args.samples is not None:
    raise InputError(f"--samples={args.samples} is a benchmark's own; the suite says it.")
  (path,) = source.describe().values()
  name = os.path.basename(path.rstrip('/'))
  return suites.open_table(args.suite, args.out, name if args.name is None else args.name)


def _as_asked(args: cli.Args, values: ConfigDict) -> ConfigDict:
  """The config with what the command line says about sampling."""
  changed: Any = policies.with_sampling(args, values)
  with changed.unlocked():
    changed.evaluation.samples = args.samples or changed.evaluation.samples
  return changed


def _check_specs(specs: Sequence[str]) -> None:
  if not specs:
    raise InputError('--data is needed: neither config nor run names what to evaluate on.')
  spec_names.check_distinct(specs, '--data')


def _evaluate(
  source: Source, experiment: Experiment, parts: Sequence[Part], out: str
) -> tuple[int, list[tuple[Part, Records]]]:
  """Scores a policy on each part and prints that; returns its step, and the records of each.

  Call it on the mesh of training. Records are written into `out`, unless that is ''.
  """
  policy, evaluated = policies.restore(source, experiment), []
  temperature = experiment.config.evaluation.temperature
  for part in parts:
    spec = part.data.spec
    with activity.doing(f'evaluation on {spec}'):
      scores, records = score_policy(
        with_samples(experiment, part.samples), policy.params, part.data, policy.step
      )
    of_run = f' at step {policy.step}' if source.kind == 'run' else ''
    print(f'{spec}{of_run}, temperature {temperature}\n{table(scores)}', flush=True)
    if out:
      path = _write_by_hand(out, source.describe(), policy.step, spec, scores, records)
      print(f'responses: {path}', flush=True)
    evaluated.append((part, records))
  return policy.step, evaluated


def _write_by_hand(
  out: str,
  policy: Mapping[str, str],
  step: int,
  spec: str,
  scores: Mapping[str, float],
  records: Records,
) -> str:
  """Writes records that overwrite none, and a line in evaluations.jsonl; returns their path."""
  now = datetime.datetime.now().astimezone()
  sampling, samples = records[0]['sampling'], len(records[0]['responses'])
  made = f'_temperature_{sampling["temperature"]:g}_samples_{samples}_{now:%Y%m%dT%H%M%S%f}'
  path = records_path(out, step, spec, made)
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


# ---- Two policies ----


def _compare_two(args: cli.Args) -> None:
  """Evaluates two policies on the same questions, and prints by how much the second is better."""
  for name in ('checkpoint', 'model', 'step', 'suite', 'name'):
    if getattr(args, name) is not None:
      raise InputError(f'--compare names both policies, so --{name} cannot be beside it.')
  if len(args.compare) != 2:
    raise InputError(
      f"--compare={','.join(args.compare)} must name two policies, A,B: each a run's workdir or a "
      'Hugging Face folder.'
    )
  first, second = map(policies.at, args.compare)
  of_first: Any = _as_asked(args, policies.config_values(first, args.config))
  of_second: Any = policies.config_values(second, args.config)
  with of_first.unlocked(), of_second.unlocked():
    # A question left out for one of them would have no counterpart.
    of_first.data.overlong = 'refuse'
    for name in ('seed', 'data', 'evaluation'):
      of_second[name] = of_first[name]
    of_second.rollout.max_response = of_first.rollout.max_response
  specs = args.data or parse_config(of_first).data.evaluated
  _check_specs(specs)
  outcomes = [
    _of_one(source, values, specs, args.out or '')
    for source, values in ((first, of_first), (second, of_second))
  ]
  for spec, *records in zip(specs, *outcomes, strict=True):
    print(f'{spec}: {second.path} minus {first.path}\n{compare(*records)}', flush=True)


def _of_one(source: Source, values: ConfigDict, specs: Sequence[str], out: str) -> list[Records]:
  """One policy's records of each data spec."""
  experiment = open_experiment(values, source.path)
  samples = experiment.config.evaluation.samples
  with jax.set_mesh(experiment.meshes.training), console.opened(), device_memory.explained():
    print(source.path, flush=True)
    parts = [Part(load_questions(experiment, spec), samples, ()) for spec in specs]
    _, evaluated = _evaluate(source, experiment, parts, out)
  return [records for _, records in evaluated]


if __name__ == '__main__':
  cli.run(main, define_flags, on_all_hosts=True)
