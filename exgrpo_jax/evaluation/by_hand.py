"""Evaluations by hand: a policy scored on data, its records in files of their own."""

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from exgrpo_jax.data.suite import Part
from exgrpo_jax.evaluation.scores import records_path, score_policy, table, with_samples
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import (
  Experiment,
  load_questions,
  open_experiment,
)
from exgrpo_jax.experiment.policies import Source
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime import activity, console, hosts, machine

Records = Sequence[Mapping[str, Any]]  # of a data spec, see evaluation.score_policy


def evaluate(
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
        with_samples(experiment, part.samples), policy.decode_params, part.data, policy.step
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


def of_one(source: Source, values: ConfigDict, specs: Sequence[str], out: str) -> list[Records]:
  """One policy's records of each data spec."""
  experiment = open_experiment(values, source.path)
  samples = experiment.config.evaluation.samples
  with jax.set_mesh(experiment.meshes.training), console.opened(), machine.explained():
    print(source.path, flush=True)
    parts = [Part(load_questions(experiment, spec), samples, ()) for spec in specs]
    _, evaluated = evaluate(source, experiment, parts, out)
  return [records for _, records in evaluated]
