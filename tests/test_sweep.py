"""Many runs: checked before the first starts, run, interrupted, resumed, compared."""

import copy
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from exgrpo_jax import cli, sweep
from exgrpo_jax.configs import base, smoke
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import comparison, metrics, plots
from exgrpo_jax.runtime.workdir import check_workdir
from exgrpo_jax.sweeps import trials
from tests.helpers.paths import REPOSITORY

SWEEPS = cli.shipped_names('exgrpo_jax.configs.sweeps')
SMOKE = str(REPOSITORY / 'configs' / 'smoke.py')
THREE_BY_TWO = "trials.grid({'replay.ratio': [0., .25, .5], 'seed': range(2)})"


@pytest.fixture(autouse=True)
def fake_trainer(monkeypatch):
  """Trials are run by fake_trainer.py."""
  monkeypatch.setattr(sweep, 'TRAINER', 'tests.helpers.fake_trainer')
  monkeypatch.setenv('PYTHONPATH', str(REPOSITORY))


@pytest.fixture
def write_sweep(tmp_path):
  """Writes a sweep file whose get_sweep returns the expression; gives its path."""

  def write(expression):
    path = tmp_path / 'sweep.py'
    path.write_text(
      f'from exgrpo_jax.sweeps import trials\ndef get_sweep():\n  return {expression}\n'
    )
    return str(path)

  return write


@pytest.fixture
def plan(write_sweep, tmp_path):
  """The trials of an expression over smoke.py of 2 steps, in tmp_path/runs."""

  def planned(expression, given=None):
    given = {'num_steps': 2} | (given or {})
    values = sweep.overridden(smoke.get_config(), given)
    return sweep.plan_trials(write_sweep(expression), values, SMOKE, given, str(tmp_path / 'runs'))

  return planned


def run(found, tmp_path, parallel=1):
  """sweep.run of all trials of `found` that are not finished."""
  left = [trial for trial in found if not sweep.is_finished(trial)]
  return sweep.run(found, left, str(tmp_path / 'runs'), parallel)


def starts(tmp_path):
  return {
    path.parent.name: len(path.read_text().splitlines())
    for path in (tmp_path / 'runs').glob('*/starts')
  }


# The sweep files.


@pytest.mark.parametrize('name', SWEEPS)
def test_every_trial_of_a_sweep_file_makes_valid_settings(name, tmp_path):
  path = str(REPOSITORY / 'configs' / 'sweeps' / f'{name}.py')
  found = sweep.plan_trials(path, base.get_config(), 'configs/base.py', {}, str(tmp_path / 'runs'))
  seeds = {len(members) for members in sweep.by_setting(found).values()}
  assert seeds == {3} and len(sweep.by_setting(found)) >= 2
  assert f'--sweep={name} ' in importlib.import_module(f'exgrpo_jax.configs.sweeps.{name}').__doc__


@pytest.mark.parametrize(
  ('key', 'values'),
  [
    ('replay.ratio', {0.0, 0.25, 0.5, 0.75}),
    ('replay.question_selection', {'gaussian', 'uniform'}),
    (
      'replay.trajectory_selection',
      {'lowest_entropy', 'random', 'highest_entropy', 'lowest_perplexity', 'newest'},
    ),
    ('objective.shaping', {True, False}),
    ('objective.beta', None),
    ('replay.start_pass_rate', None),
    ('replay.difficulty', {'easy', 'medium', 'hard', 'all'}),
    ('replay.bucket_by', {'correctness', 'question_length', 'response_length'}),
  ],
)
def test_every_ablation_of_the_paper_has_its_file(key, values):
  sweeps = [
    importlib.import_module(f'exgrpo_jax.configs.sweeps.{name}').get_sweep() for name in SWEEPS
  ]
  (own,) = [
    found for found in sweeps if all(set(trial) == {key, 'seed'} for trial in found.values())
  ]
  tried = {trial[key] for trial in own.values()}
  assert tried == values if values else {0.1, 0.35} & tried and len(tried) > 2


# Grids and lists.


def test_a_grid_is_every_combination_named_by_its_values():
  assert trials.grid({'replay.ratio': [0.0, 0.25], 'seed': range(2)}) == {
    'ratio=0,seed=0': {'replay.ratio': 0.0, 'seed': 0},
    'ratio=0,seed=1': {'replay.ratio': 0.0, 'seed': 1},
    'ratio=0.25,seed=0': {'replay.ratio': 0.25, 'seed': 0},
    'ratio=0.25,seed=1': {'replay.ratio': 0.25, 'seed': 1},
  }


def test_a_list_has_names_of_its_own():
  assert trials.listed({'whole': {}, 'plain': {'replay.ratio': 0.0}}, {'seed': [3]}) == {
    'whole,seed=3': {'seed': 3},
    'plain,seed=3': {'replay.ratio': 0.0, 'seed': 3},
  }


def test_a_list_without_axes_is_as_it_stands():
  assert trials.listed({'plain': {'replay.ratio': 0.0}}, {}) == {'plain': {'replay.ratio': 0.0}}


# What is refused before anything starts.


@pytest.mark.parametrize(
  ('expression', 'message'),
  [
    (
      "{'a': {'replay.ratoi': 0.}}",
      "trial 'a': config.replay has no 'ratoi'; did you mean 'ratio'?",
    ),
    (
      "{'a': {'seed': 0}, 'b': {'replay.ratio': 1.5}}",
      "trial 'b': config.replay.ratio=1.5 must lie in [0, 1): ",
    ),
    (
      "{'a': {'objective.shaping': 'off'}}",
      "trial 'a': config.objective.shaping='off' must be of type bool",
    ),
    (
      "{'a': {'replay': 0.}}",
      "trial 'a': config.replay is a section; an override sets one value, "
      "such as 'replay.bucket_by'.",
    ),
    ("{'a': {'seed.x': 0}}", "trial 'a': config.seed is one value and has no 'x'."),
    (
      "{'a': {'num_steps': 3}}",
      "trial 'a': --config.num_steps=2 is given, and the trial sets it to 3; only one of them can be.",
    ),
    (
      "{'a': {'seed': 0}, 'b': {}}",
      "trials 'a' and 'b' are the same run; to repeat a setting, vary its 'seed'.",
    ),
    ("{'a': {'seed': 1}, 'A': {'seed': 2}}", "trials 'a' and 'A' differ only in case"),
    ("trials.grid({'seed': [1, 1]})", "two trials are named 'seed=1'"),
    ("trials.grid({'replay.ratio': [.1, .10000001]})", "two trials are named 'ratio=0.1'"),
    ("{'../a': {}}", "a trial cannot be named '../a', because its folder gets the same name"),
    ("{'..': {}}", "a trial cannot be named '..'"),
    ("trials.grid({'data.train': ['x.jsonl[:5]']})", "cannot be named 'train=x.jsonl[:5]'"),
    ("{'a': 1}", "trial 'a' must be {dotted config key: value}, not 1."),
    ('[]', 'get_sweep() must return trial name -> {config key: value}, at least one, not [].'),
    ('1 / 0', 'ZeroDivisionError: division by zero'),
  ],
)
def test_a_trial_that_cannot_be_is_named(expression, message, plan, tmp_path):
  with pytest.raises(InputError, match=re.escape(message)):
    plan(expression)
  assert not (tmp_path / 'runs').exists()


def test_a_missing_sweep_file_and_one_without_get_sweep_are_refused(tmp_path):
  with pytest.raises(InputError, match=r'nowhere\.py: there is no such file; configs/sweeps/ has'):
    trials.load('nowhere.py')
  (tmp_path / 'empty.py').write_text('')
  with pytest.raises(InputError, match=r'empty\.py: it has no get_sweep\(\)'):
    trials.load(str(tmp_path / 'empty.py'))


def test_a_workdir_of_another_sweep_or_of_other_overrides_is_refused(plan, tmp_path):
  assert run(plan("{'a': {'seed': 1}}"), tmp_path) == 0
  with pytest.raises(
    InputError,
    match=r"runs holds a trial 'a' that is not in .*sweep\.py: use "
    'another --workdir for another sweep, or move that folder away',
  ):
    plan("{'b': {'seed': 1}}")
  with pytest.raises(InputError, match='a belongs to another config: config.seed was 1, is 2'):
    plan("{'a': {'seed': 2}}")
  with pytest.raises(InputError, match='a belongs to another config: config.replay.sigma was 1.0'):
    plan("{'a': {'seed': 1}}", {'replay.sigma': 2.0})
  assert len(plan("{'a': {'seed': 1}, 'b': {'seed': 2}}")) == 2  # a sweep may grow


def test_a_workdir_of_a_single_run_is_refused(plan, tmp_path):
  (tmp_path / 'runs').mkdir()
  (tmp_path / 'runs' / 'config.json').write_text('{}')
  with pytest.raises(InputError, match="runs is a single run's; a sweep needs one of its own"):
    plan("{'a': {}}")


# What is run.


def test_a_trial_gets_its_values_through_the_command_line(plan, tmp_path):
  """Every type of value; the trainer reads the same config as was checked here."""
  found = plan(
    "{'a': {'replay.ratio': 0, 'objective.dual_clip': float('inf'), "
    "'optimizer.epsilon': 1.6e-10, 'objective.shaping': False, 'seed': 7, "
    "'data.train': 'arithmetic:train[:64]', "
    "'data.evaluation': ['arithmetic:test[:8]', 'it\\'s \"x\".jsonl']}}"
  )
  assert run(found, tmp_path) == 0
  written = json.loads((tmp_path / 'runs' / 'a' / 'config.json').read_text())
  assert written == json.loads(json.dumps(found[0].values.to_dict()))
  assert written['replay']['ratio'] == 0 and written['seed'] == 7 and written['num_steps'] == 2
  assert written['data']['evaluation'] == ['arithmetic:test[:8]', 'it\'s "x".jsonl']


def test_the_table_is_of_mean_and_deviation_over_the_seeds(plan, tmp_path, capsys):
  # Seeds 0 and 1 differ by .1: mean ratio + .05 + .02, deviation .1 / sqrt(2) = .0707.
  assert run(plan(THREE_BY_TWO), tmp_path) == 0
  table = (
    '| evaluation  | setting    | seeds | final           | best            |\n'
    '| ----------- | ---------- | ----- | --------------- | --------------- |\n'
    '| sums/pass@1 | ratio=0    | 2     | 0.0700 ± 0.0707 | 0.0700 ± 0.0707 |\n'
    '| sums/pass@1 | ratio=0.25 | 2     | 0.3200 ± 0.0707 | 0.3200 ± 0.0707 |\n'
    '| sums/pass@1 | ratio=0.5  | 2     | 0.5700 ± 0.0707 | 0.5700 ± 0.0707 |\n'
  )
  assert table in capsys.readouterr().out
  assert table in (tmp_path / 'runs' / 'sweep.md').read_text()
  assert (tmp_path / 'runs' / 'sweep.png').read_bytes().startswith(b'\x89PNG')


def test_finished_trials_are_not_run_again_and_prolonged_ones_are(plan, tmp_path):
  expression = "trials.grid({'seed': range(2)})"
  assert run(plan(expression), tmp_path) == run(plan(expression), tmp_path) == 0
  assert starts(tmp_path) == {'seed=0': 1, 'seed=1': 1}
  longer = plan("trials.grid({'seed': range(3)})", {'num_steps': 3})
  assert not any(map(sweep.is_finished, longer))


def test_a_failing_trial_is_named_and_the_others_go_on(plan, tmp_path, capsys, monkeypatch):
  monkeypatch.setenv('FAKE_FAILS', 'ratio=0,seed=1')
  assert run(plan(THREE_BY_TWO), tmp_path, parallel=3) == 1
  out = capsys.readouterr().out
  assert out.endswith(
    '1 of 6 trials failed; the same command tries them again:\n'
    '  ratio=0,seed=1: exit status 1: ValueError: the disk is full\n'
  )
  assert '| sums/pass@1 | ratio=0    | 1 of 2 | 0.0200          | 0.0200          |' in out
  assert 'step 0\n' in (tmp_path / 'runs' / 'ratio=0,seed=1' / 'log.txt').read_text()
  monkeypatch.delenv('FAKE_FAILS')
  assert run(plan(THREE_BY_TWO), tmp_path) == 0
  assert starts(tmp_path).pop('ratio=0,seed=1') == 2 and sum(starts(tmp_path).values()) == 7


def test_where_all_fail_there_is_no_table(plan, tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(sweep, 'TRAINER', 'no_such_trainer')
  assert run(plan("{'a': {}}"), tmp_path) == 1
  out = capsys.readouterr().out
  assert 'no trial has finished: nothing to compare' in out
  assert 'a: exit status 1: ' in out and 'No module named no_such_trainer' in out


def test_an_end_before_the_last_step_is_a_failure(plan, tmp_path, capsys):
  found = plan("{'a': {}}")
  longer = [found[0]._replace(values=sweep.overridden(found[0].values, {'num_steps': 3}))]
  assert run(longer, tmp_path) == 1
  assert 'a: it exited with status 0, but before its last step' in capsys.readouterr().out


def test_a_real_run_is_known_to_be_finished_by_what_it_leaves(recorded, values):
  trial = sweep.Trial(
    name='a', workdir=str(recorded.workdir), values=copy.deepcopy(values), arguments=[]
  )
  assert sweep.is_finished(trial)
  trial.values.num_steps += 1
  assert not sweep.is_finished(trial)


def test_records_of_all_steps_are_no_finish_without_the_curves_or_the_last_checkpoint(
  plan, tmp_path
):
  (trial,) = plan("{'a': {}}")
  run([trial], tmp_path)
  workdir = tmp_path / 'runs' / 'a'
  (workdir / 'checkpoints' / '1').mkdir(parents=True)
  assert not sweep.is_finished(trial)
  (workdir / 'checkpoints' / '2').mkdir()
  assert sweep.is_finished(trial)
  (workdir / 'curves.png').unlink()
  assert not sweep.is_finished(trial)


# The comparison.


def test_a_setting_is_all_that_differs_in_seed_alone(plan):
  found = plan("{'x': {'seed': 3}, 'y': {'replay.ratio': .25}, 'z': {'seed': 4}}")
  assert {
    label: [trial.name for trial in members] for label, members in sweep.by_setting(found).items()
  } == {'x': ['x', 'z'], 'y': ['y']}
  assert list(sweep.by_setting(plan("trials.grid({'seed': range(2)})"))) == ['as configured']


def test_best_is_each_runs_highest_and_final_its_last():
  runs = [
    [
      {'step': 0, 'eval/a/pass@1': 0.5},
      {'step': 1, 'reward': 1.0},
      {'step': 2, 'eval/a/pass@1': 0.25},
      {'step': 3, 'reward': 1.0},
    ],
    [
      {'step': 0, 'eval/a/pass@1': 0.25, 'eval/a/pass@1_high': 0.9},
      {'step': 2, 'eval/a/pass@1': 0.75, 'eval/a/questions': 8.0},
    ],
  ]
  # Final .25 and .75: mean .5, deviation .5 / sqrt(2). Best .5 and .75.
  line = comparison.table({'x': runs}, {'x': 3, 'y': 1}).splitlines()[2:]
  assert [[cell.strip() for cell in row.split('|')[1:-1]] for row in line] == [
    ['a/pass@1', 'x', '2 of 3', '0.5000 ± 0.3536', '0.6250 ± 0.1768'],
    ['a/pass@1', 'y', '0 of 1', '-', '-'],
  ]


def test_the_picture_has_a_line_a_setting_with_a_band_over_its_seeds(tmp_path, monkeypatch):
  figures = []
  monkeypatch.setattr(plots.Figure, 'savefig', lambda figure, *_, **__: figures.append(figure))
  first = [{'step': 0, 'reward': 0.0}, {'step': 1, 'reward': 1.0}, {'step': 2, 'reward': 5.0}]
  second = [{'step': 0, 'reward': 2.0}, {'step': 1, 'reward': 1.0}]  # has no step 2
  comparison.picture({'a': [first, second], 'b': [second]}, tmp_path / 'x.png')
  (ax,) = figures[0].axes
  a, b = ax.lines
  assert a.get_xydata().tolist() == [[0, 1], [1, 1]] and a.get_label() == 'a'
  assert b.get_xydata().tolist() == [[0, 2], [1, 1]] and a.get_color() != b.get_color()
  heights = ax.collections[0].get_paths()[0].vertices[:, 1]
  assert heights.max() == pytest.approx(1 + 2**0.5) and heights.min() == pytest.approx(1 - 2**0.5)


def test_no_metric_to_draw_is_refused(tmp_path):
  with pytest.raises(InputError, match='nothing to draw: no run has any of reward'):
    comparison.picture({'a': [[{'step': 0}]]}, tmp_path / 'x.png')


# The command line.

COMMAND = [
  sys.executable,
  '-c',
  'from exgrpo_jax import cli, sweep; '
  'sweep.TRAINER = "tests.helpers.fake_trainer"; cli.run(sweep.main, sweep.define_flags)',
]


def test_the_commands_for_a_queue_are_quoted_and_nothing_is_run(write_sweep, tmp_path):
  workdir = tmp_path / 'two words'
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'exgrpo_jax.sweep',
      '--launcher=commands',
      f'--workdir={workdir}',
      f'--sweep={write_sweep(THREE_BY_TWO)}',
      '--config=configs/smoke.py',
      '--config.data.evaluation=("a.jsonl",)',
    ],
    cwd=REPOSITORY,
    text=True,
    capture_output=True,
  )
  assert done.returncode == 0, done.stderr
  first, *rest = done.stdout.splitlines()
  assert len(rest) == 5 and not workdir.exists()
  assert shlex.split(first) == [
    'python',
    '-m',
    'exgrpo_jax.train',
    '--config=configs/smoke.py',
    f'--workdir={workdir}/ratio=0,seed=0',
    "--config.data.evaluation=('a.jsonl',)",
    '--config.replay.ratio=0.0',
    '--config.seed=0',
  ]
  assert '6 of 6 trials are left to run' in done.stderr


def test_what_cannot_be_is_one_line_and_exit_status_2(write_sweep, tmp_path):
  done = subprocess.run(
    [
      *COMMAND,
      f'--sweep={write_sweep(THREE_BY_TWO)}',
      '--config=configs/smoke.py',
      f'--workdir={tmp_path}/runs',
      '--parallel=0',
    ],
    cwd=REPOSITORY,
    text=True,
    capture_output=True,
  )
  assert (done.returncode, done.stdout) == (2, '')
  assert done.stderr.splitlines()[-1] == 'error: --parallel=0 must be at least 1.'


def test_interrupted_with_a_failure_and_started_again_the_table_is_right(write_sweep, tmp_path):
  """And a sweep that was killed leaves its trial running, which no second one may join."""
  command = [
    *COMMAND,
    f'--sweep={write_sweep(THREE_BY_TWO)}',
    f'--config={SMOKE}',
    '--config.num_steps=2',
    f'--workdir={tmp_path}/runs',
    '--parallel=2',
  ]
  broken = os.environ | {'FAKE_FAILS': 'ratio=0,seed=1', 'FAKE_HANGS': 'ratio=0.25,seed=0'}
  mark = tmp_path / 'runs' / 'ratio=0.25,seed=0' / 'hangs'
  next_one = tmp_path / 'runs' / 'ratio=0.25,seed=1'  # begun once the one that fails has failed

  def interrupted(number):
    process = subprocess.Popen(
      command,
      env=broken,
      cwd=REPOSITORY,
      text=True,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )
    while not (mark.exists() and next_one.exists()):
      assert process.poll() is None, process.communicate()[0]
      time.sleep(0.05)
    trial = int(mark.read_text())
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    mark.unlink()
    return process.returncode, out, trial

  status, out, trial = interrupted(signal.SIGTERM)  # in the background of a shell SIGINT is ignored
  assert status == 130, out
  assert 'ratio=0,seed=1: exit status 1: ValueError: the disk is full' in out
  assert 'the same command resumes them:\npython -m exgrpo_jax.sweep --sweep=' in out
  with pytest.raises(ProcessLookupError):
    os.kill(trial, 0)

  status, _, trial = interrupted(signal.SIGKILL)
  assert status == -signal.SIGKILL
  refused = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
  assert refused.returncode == 2 and 'or trials that a killed sweep left running' in refused.stderr
  os.kill(trial, signal.SIGKILL)

  done = subprocess.run(command, cwd=REPOSITORY, text=True, capture_output=True)
  assert done.returncode == 0, done.stdout + done.stderr
  finals = {
    row[1].strip(): row[3].strip()
    for line in done.stdout.splitlines()
    if (row := line.split('|')[1:-1]) and 'pass@1' in line
  }
  assert finals == {
    'ratio=0': '0.0700 ± 0.0707',
    'ratio=0.25': '0.3200 ± 0.0707',
    'ratio=0.5': '0.5700 ± 0.0707',
  }
  assert starts(tmp_path)['ratio=0,seed=0'] == 1


def test_a_real_trainer_that_refuses_its_data_is_named_with_what_it_said(
  write_sweep, tmp_path, monkeypatch
):
  monkeypatch.setattr(sweep, 'TRAINER', 'exgrpo_jax.train')
  values = sweep.overridden(smoke.get_config(), {'data.train': 'nowhere.jsonl'})
  found = sweep.plan_trials(
    write_sweep("{'a': {}}"), values, SMOKE, {'data.train': 'nowhere.jsonl'}, str(tmp_path / 'runs')
  )
  assert run(found, tmp_path) == 1
  assert (
    'error: nowhere.jsonl: there is no such file'
    in (tmp_path / 'runs' / 'a' / 'log.txt').read_text()
  )
  assert metrics.read(tmp_path / 'runs' / 'a') == []
  check_workdir(values, str(tmp_path / 'runs' / 'a'))
