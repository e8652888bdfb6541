"""The messages of a run to its user: at its start, after each step and at its end."""

import importlib.util
import math
import os
import shlex
import shutil
import sys
import types

import jax
import pytest

from exgrpo_jax.reporting import messages, metrics
from tests.helpers import tiny


def test_the_banner_names_the_method_the_model_the_data_and_the_workdir(recorded):
  parameters = sum(x.size for x in jax.tree.leaves(recorded.steps[1].params))
  tokens = recorded.experiment.tokenizer.vocab_size
  text = messages.banner(recorded.rollout, recorded.evaluations, 16, 8, '32', '/tmp/run')
  for words in (
    'ExGRPO, replay.ratio=0.5',
    '1 cpu, 1 host',
    'data=1, fsdp=1, expert=1, tensor=1 in decoding',
    f'{parameters:,} parameters, float32: 1 layer of width 32, a vocabulary of {tokens}',
    f'{tiny.POOL} questions from {recorded.data.spec}',
    f'{tiny.QUESTIONS} questions, {tiny.ROLLOUTS} responses each',
    f'4 questions from {recorded.evaluations[0].spec}',
    'every 16 steps',
    '32 (8 already done)',
    '/tmp/run',
  ):
    assert words in text, words


def test_the_progress_line():
  full = {
    'reward': 0.5,
    'pass_rate/fresh': 0.25,
    'entropy': 1.5,
    'length/mean': 812.4,
    'buffer/questions': 1034,
    'buffer/retired': 20,
    'perf/tokens_per_second': 12345.6,
  }
  line = messages.progress_line(7, 700, full, 3725)
  assert line == (
    'step   7/700 | reward  0.500 | pass 0.250 | entropy  1.500 | length   812 | buffer  1034 '
    '| retired    20 |  12,346 tok/s |  1:02:05 left'
  )
  partial = messages.progress_line(70, 700, {'reward': -1}, None)
  assert partial == (
    'step  70/700 | reward -1.000 | pass     - | entropy      - | length     - | buffer     - '
    '| retired     - |       - tok/s |        - left'
  )


@pytest.mark.parametrize(
  ('width', 'rest'),
  [
    (110, 'entropy      - | length     - |       - tok/s |        - left'),
    (100, 'entropy      - | length     - |        - left'),
    (80, 'length     - |        - left'),
  ],
)
def test_a_narrow_terminal_gets_the_most_important_columns(width, rest, monkeypatch):
  monkeypatch.setenv('COLUMNS', str(width))
  monkeypatch.setattr(sys, 'stdout', types.SimpleNamespace(isatty=lambda: True))
  line = messages.progress_line(70, 700, {'memory/device_peak': 9.0}, None)
  assert line == f'step  70/700 | reward      - | pass     - | {rest}' and len(line) <= width


def evaluated(step, **scores):
  """A record with a score of each source, and an interval of 0.1 around it."""
  record = {'step': step}
  for name, score in scores.items():
    for end, shift in (('', 0), ('_low', -0.1), ('_high', 0.1)):
      record[f'eval/{name.replace("__", "/").replace("_at_", "@")}{end}'] = score + shift
  return record


def test_the_closing_message_compares_the_first_and_last_evaluations():
  records = [
    evaluated(0, sums__pass_at_1=0.2, sums__avg_at_4=0.3, sums__pass_at_4=0.6),
    {'step': 1, 'reward': 0.5},
    evaluated(3, sums__pass_at_1=0.4, sums__avg_at_4=0.5, new__pass_at_1=0.8),
  ]
  text = messages.farewell(records, '/tmp/run', ['exgrpo'])
  start = text.index('evaluation, first and last, with 95% intervals:')
  first, second = (line.split('  ') for line in text[start:].splitlines()[1:3])
  ends = ['0.300 (0.200 to 0.400) after step 0', '->', '0.500 (0.400 to 0.600) after step 3']
  assert first == ['', 'avg@4 on sums', *ends]
  assert second == ['', 'pass@1 on new', '0.800 (0.700 to 0.900) after step 3']
  without = messages.farewell(records[1:2], '/tmp/run', ['exgrpo'])
  assert 'intervals' not in without


def test_the_closing_message_lists_all_output_files(recorded):
  workdir = str(recorded.workdir)
  text = messages.farewell(metrics.read(workdir), workdir, ['exgrpo'])
  named = {word for word in text.split() if word.startswith(workdir)}
  files = {'report.html', 'metrics.jsonl', 'samples', 'evaluation'}
  assert {os.path.basename(path) for path in named} == files  # no console.log and no other path


def test_the_next_commands_can_be_pasted_into_a_shell(tmp_path, monkeypatch):
  """They are short because evaluate reads the run's config, and they work from any folder."""
  program, workdir = ['/venv/bin/python', '-m', 'exgrpo_jax'], tmp_path / 'my run'
  monkeypatch.chdir(tmp_path)
  checkpoint, out = f'--checkpoint={workdir}', workdir / 'export' / 'last'

  def commands(**known):
    text = messages.farewell([], workdir.name, program, **known)
    return [shlex.split(line) for line in text[text.index('next:') :].splitlines()[1:]]

  monkeypatch.setattr(shutil, 'which', lambda name: f'/bin/{name}')
  assert commands() == [
    ['tensorboard', f'--logdir={workdir}/tensorboard'],
    [*program, 'evaluate', checkpoint, '--samples=4'],
    [*program, 'export', checkpoint, f'--out={out}'],
  ]
  monkeypatch.setattr(shutil, 'which', lambda _: None)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda _: None)
  assert commands(can_evaluate=False) == [[*program, 'export', checkpoint, f'--out={out}']]
  assert 'next' not in messages.farewell([], '', program, can_evaluate=False, can_export=False)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  viewer = [sys.executable, '-m', 'tensorboard.main', f'--logdir={workdir}/tensorboard']
  assert commands(can_evaluate=False, can_export=False) == [viewer]
  assert 'policies' not in messages.farewell([], workdir.name, program)
  out.mkdir(parents=True)  # config.export.last has written it
  assert f'  policies  {workdir.name}/export\n' in messages.farewell([], workdir.name, program)
  assert [words[3:4] for words in commands()] == [
    ['--logdir=' + f'{workdir}/tensorboard'],
    ['evaluate'],
  ]


def test_a_run_that_is_longer_than_requested_is_finished():
  text = messages.finished('/tmp/run', 4, 'config.num_steps=2')
  assert text.startswith(
    '/tmp/run: the run is already finished. It has taken 4 steps, and config.num_steps=2.'
  )
  assert 'taken 1 step, and' in messages.finished('/tmp/run', 1, 'config.num_steps=0')


def test_the_summary_table():
  # 20 steps: a tenth is 2. Rewards are 0, 1, ..., 19; the evaluation in the middle is best, but
  # the most responses were truncated there.
  records = [{'step': step, 'reward': float(step), 'length/mean': 400.0} for step in range(20)]
  for step, value in (0, 0.25), (10, 0.75), (19, 0.5):
    records[step]['eval/gsm8k/pass@1'] = value
    records[step]['eval/gsm8k/truncated'] = value
  records[3]['entropy'] = math.nan
  records[4]['pass_rate/replay'] = math.nan
  assert messages.summary_table(records).splitlines() == [
    '                      first    last    best  at step',
    'reward                0.500  18.500  19.000       19',
    'pass_rate/replay        nan     nan       -        -',
    'entropy                 nan     nan       -        -',
    'length/mean             400     400       -        -',
    'eval/gsm8k/pass@1     0.250   0.500   0.750       10',
    'eval/gsm8k/truncated  0.250   0.500   0.250        0',
  ]
  assert messages.summary_table([]).split() == ['first', 'last', 'best', 'at', 'step']
