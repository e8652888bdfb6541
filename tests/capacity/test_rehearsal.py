"""A run compiles few programs, and none that --compile_only has not compiled before."""

import os
import re

import pytest

from tests.helpers import forked
from tests.helpers.paths import TINY_CONFIG

# Of both commands; sampling at two temperatures, and a KL term that needs a reference policy.
CHANGES = {'num_steps': 3, 'evaluation.every': 2, 'evaluation.temperature': 0.6, 'parity.every': 1}
EPISODES = {
  'environment.name': 'tests.helpers.environments:Chance',
  'environment.max_turns': 3,
  'environment.max_turn_tokens': 5,
  'rollout.slots': 6,  # so that episodes wait for one
  'warm_start.num_updates': 0,
}

EXPERTS = {
  'model.num_experts': 4,
  'model.experts_per_token': 2,
  'objective.balance_coefficient': 0.01,
  'rollout.router_replay': True,
}


@pytest.fixture(
  scope='module',
  params=[{}, *(pytest.param(own, marks=pytest.mark.full) for own in (EPISODES, EXPERTS))],
  ids=['turn', 'turns', 'experts'],
)
def said(request, data, tmp_path_factory):
  """What --compile_only prints, and then a run in another workdir that shares its cache."""
  folder = tmp_path_factory.mktemp('rehearsed')
  settings = CHANGES | {
    'compilation_cache': '{workdir}/../compiled',
    'objective.kl_coefficient': 0.01,
    'data.train': data.train,
    'warm_start.data': data.train,
    'data.evaluation': f"('{data.evaluation}',)",
    'data.cache_dir': data.cache,
  }
  settings |= request.param
  command = ['train', f'--config={TINY_CONFIG}']
  command += [f'--config.{name}={value}' for name, value in settings.items()]

  def train(name, *more):
    outcome = forked.run_one([*command, f'--workdir={folder / name}', *more], JAX_PLATFORMS='cpu')
    assert outcome.status == 0, outcome.err
    return outcome.out

  return train('first', '--compile_only'), train('second'), folder


def counts(output, pattern):
  """{function: programs} of what was printed."""
  (listed,) = re.findall(pattern, output)
  pairs = [entry.partition(' ') for entry in listed.split(', ')]
  return {name: int(number or 1) for name, _, number in pairs}


def test_a_run_compiles_few_programs(said):
  names = counts(said[1], r'compiled \d+ programs in \d+ s: (.*); not')
  assert {'decode', 'insert', 'prefill', 'empty'} <= {*names}
  listed = ', '.join(f'{name} {count}' for name, count in names.items())
  assert sum(names.values()) < (24 if 'park' in names else 20), listed


def test_a_run_compiles_nothing_after_compile_only(said):
  rehearsed = counts(said[0], r'not in the compilation cache: (.*)\n')
  # In one turn 24 slots, 6 and 1; of a tiny model's update one shape.
  assert rehearsed['decode'] == (1 if 'park' in rehearsed else 3) and rehearsed['accumulate'] == 1
  assert re.findall('not in the compilation cache: (.*)', said[1]) == ['none']


def test_compile_only_takes_no_step(said):
  folder = said[2] / 'first'
  assert not {'metrics.jsonl', 'checkpoints', 'config.json'} & {*os.listdir(folder)}
  assert (said[2] / 'second' / 'metrics.jsonl').exists()
