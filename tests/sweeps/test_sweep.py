"""A sweep's trials: checked before the first starts, run, resumed and compared."""

import ast
import copy
import csv
import importlib
import itertools
import json
import os
import re
import shlex
import signal
import sys
import threading
import time

import pytest

from exgrpo_jax import config
from exgrpo_jax.configs import base, smoke
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime.workdir import check_workdir
from exgrpo_jax.sweeps import launcher, sweep, trials
from tests.helpers import fake_trainer, forked
from tests.helpers.forked import is_running
from tests.helpers.paths import REPOSITORY

pytestmark = pytest.mark.full

SWEEPS = config_files.shipped_names('exgrpo_jax.configs.sweeps')
SMOKE = str(REPOSITORY / 'configs' / 'smoke.py')
MEASURES = ('pass@1', 'pass@1_high', 'pass@1_low', 'truncated')
TWO_BY_TWO = "trials.grid({'replay.ratio': [0., .25], 'seed': range(2)})"


@pytest.fixture(autouse=True)
def train_nothing(monkeypatch):
  """Let fake_trainer.py run the trials."""
  monkeypatch.setattr(sweep, 'TRAINER', fake_trainer.command())
  monkeypatch.setenv('PYTHONPATH', str(REPOSITORY))


@pytest.fixture
def plan(write_sweep, tmp_path):
  """A function that plans an expression's trials of smoke.py, with 2 steps, in tmp_path/runs."""

  def plan_expression(expression, given=None):
    given = {'num_steps': 2} | (given or {})
    values = config.overridden(smoke.get_config(), given)
    path, workdir = write_sweep(expression), str(tmp_path / 'runs')
    return sweep.plan_trials(trials.load(path), path, values, SMOKE, given, workdir)

  return plan_expression


def run(planned, tmp_path, parallel=2):
  """Run the sweep and return its exit status."""
  workdir = str(tmp_path / 'runs')
  return sweep.run(planned, workdir, parallel, ['sweep'], lambda: sweep.report(planned, workdir))


def starts(tmp_path):
  """How often each trial was started."""
  paths = (tmp_path / 'runs').glob('*/starts')
  return {path.parent.name: len(path.read_text().splitlines()) for path in paths}


# ---- The sweep files ----


@pytest.mark.parametrize('name', SWEEPS)
def test_every_trial_of_a_sweep_file_makes_valid_settings(name, tmp_path):
  path = str(REPOSITORY / 'configs' / 'sweeps' / f'{name}.py')
  planned = sweep.plan_trials(
    trials.load(path), path, base.get_config(), 'configs/base.py', {}, str(tmp_path / 'runs')
  )
  seeds = {len(members) for members in sweep.by_setting(planned).values()}
  assert seeds == {3} and len(sweep.by_setting(planned)) >= 2
  assert f'--sweep={name} ' in importlib.import_module(f'exgrpo_jax.configs.sweeps.{name}').__doc__


def test_every_ablation_of_the_paper_has_a_file():
  """The paper's value is among the values tried."""
  tried = {}
  for name in SWEEPS:
    found = importlib.import_module(f'exgrpo_jax.configs.sweeps.{name}').get_sweep().values()
    keys = set().union(*found) - {'seed'}
    if len(keys) == 1:
      (key,) = keys
      tried[key] = {trial[key] for trial in found}
  for key, value, number in (
    ('replay.ratio', 0.5, 4),
    ('replay.question_selection', 'gaussian', 5),
    ('replay.trajectory_selection', 'lowest_entropy', 6),
    ('replay.bucket_by', 'correctness', 3),
    ('replay.start_pass_rate', 0.35, 3),
    ('objective.shaping', 'policy_shaping', 2),
    ('objective.beta', 0.1, 3),
  ):
    assert value in tried[key] and len(tried[key]) >= number, key
  difficulty = importlib.import_module('exgrpo_jax.configs.sweeps.difficulty').get_sweep().values()
  assert {trial['replay.difficulty'] for trial in difficulty} == {'easy', 'medium', 'hard', 'all'}
  assert {trial['replay.ratio'] for trial in difficulty} == {0}


# ---- Errors found before anything starts ----


@pytest.mark.parametrize(
  ('expression', 'message'),
  [
    pytest.param("{'a': {'replay.ratoi': 0.}}", "trial 'a': config.replay has no", id='unknown'),
    pytest.param(
      "{'a': {'seed': 0}, 'b': {'replay.ratio': 1.5}}",
      "trial 'b': config.replay.ratio=1.5: the value must be in [0, 1)",
      id='out_of_range',
    ),
    pytest.param(
      "{'a': {'num_steps': 3}}",
      "trial 'a': --config.num_steps=2: the trial sets this key to 3",
      id='given_on_the_command_line_too',
    ),
    pytest.param(
      "{'a': {'num_epochs': 3}}",
      "trial 'a': config.num_steps=2: config.num_epochs=3 determines the length",
      id='two_lengths',
    ),
    pytest.param(
      "{'a': {'seed': 0}, 'b': {}}", "trials 'a' and 'b' are the same run", id='the_same_run_twice'
    ),
  ],
)
def test_an_impossible_trial_is_refused_by_name(expression, message, plan, tmp_path):
  with pytest.raises(InputError, match=re.escape(message)):
    plan(expression)
  assert not (tmp_path / 'runs').exists()


def test_a_workdir_of_another_sweep_of_other_overrides_or_of_a_single_run_is_refused(
  plan, tmp_path
):
  assert run(plan("{'a': {'seed': 1}}"), tmp_path) == 0
  for expression, given, message in (
    ("{'b': {'seed': 1}}", {}, r"contains a trial 'a' that is not in .*sweep\.py"),
    ("{'a': {'seed': 2}}", {}, r'a belongs to a run with .*: config\.seed was 1 and is now 2'),
    ("{'a': {'seed': 1}}", {'replay.sigma': 2.0}, r'different config: config\.replay\.sigma was 1'),
  ):
    with pytest.raises(InputError, match=message):
      plan(expression, given)
  assert len(plan("{'a': {'seed': 1}, 'b': {'seed': 2}}")) == 2  # a sweep may grow
  (tmp_path / 'runs' / 'config.json').write_text('{}')
  with pytest.raises(InputError, match="runs: this is a single run's workdir"):
    plan("{'a': {'seed': 1}}")


# ---- Running trials ----


def test_a_trial_gets_its_values_through_the_command_line(plan, tmp_path):
  """Values of every type: the trainer reads the same config that was checked here."""
  planned = plan(
    "{'a': {'replay.ratio': 0, 'objective.dual_clip': float('inf'), "
    "'optimizer.epsilon': 1.6e-10, 'replay.count_replayed': False, 'seed': 7, "
    "'data.train': 'arithmetic:train[:64]', "
    "'data.evaluation': ['arithmetic:test[:8]', 'it\\'s \"x\".jsonl']}}"
  )
  assert run(planned, tmp_path) == 0
  written = json.loads((tmp_path / 'runs' / 'a' / 'config.json').read_text())
  assert written == json.loads(json.dumps(planned[0].values.to_dict()))
  assert written['replay']['ratio'] == 0 and written['seed'] == 7 and written['num_steps'] == 2
  assert written['data']['evaluation'] == ['arithmetic:test[:8]', 'it\'s "x".jsonl']


def test_a_failing_trial_is_named_and_the_next_sweep_retries_only_this_trial(
  plan, tmp_path, capsys, monkeypatch
):
  monkeypatch.setenv('FAKE_FAILS', 'ratio=0,seed=1')
  assert run(plan(TWO_BY_TWO), tmp_path) == 1
  out = capsys.readouterr().out
  assert '1 of 4 trials failed' in out.splitlines()[-2]
  assert out.endswith('  ratio=0,seed=1: exit status 1: ValueError: the disk is full\n')
  assert (
    '| sums/pass@1    | ratio=0    | 1 of 2 | 2    | 0.0200          | 0.0200          |' in out
  )
  assert 'step 0\n' in (tmp_path / 'runs' / 'ratio=0,seed=1' / 'log.txt').read_text()
  monkeypatch.delenv('FAKE_FAILS')
  assert run(plan(TWO_BY_TWO), tmp_path) == 0
  assert starts(tmp_path).pop('ratio=0,seed=1') == 2 and sum(starts(tmp_path).values()) == 5
  # Seeds 0 and 1 differ by .1: mean ratio + .05 + .02, deviation .1 / sqrt(2) = .0707. Truncated
  # rises from 0 to .2. Lower is better, so its best is 0.
  table = (
    '| evaluation     | setting    | seeds | step | final           | best            |\n'
    '| -------------- | ---------- | ----- | ---- | --------------- | --------------- |\n'
    '| sums/pass@1    | ratio=0    | 2     | 2    | 0.0700 ± 0.0707 | 0.0700 ± 0.0707 |\n'
    '| sums/pass@1    | ratio=0.25 | 2     | 2    | 0.3200 ± 0.0707 | 0.3200 ± 0.0707 |\n'
    '| sums/truncated | ratio=0    | 2     | 2    | 0.2000 ± 0.0000 | 0.0000 ± 0.0000 |\n'
    '| sums/truncated | ratio=0.25 | 2     | 2    | 0.2000 ± 0.0000 | 0.0000 ± 0.0000 |\n'
  )
  assert table in capsys.readouterr().out
  assert table in (tmp_path / 'runs' / 'sweep.md').read_text()
  check_csv(tmp_path / 'runs')
  assert (tmp_path / 'runs' / 'sweep.png').read_bytes().startswith(b'\x89PNG')
  assert run(plan(TWO_BY_TWO), tmp_path) == 0 and sum(starts(tmp_path).values()) == 5
  assert not any(map(sweep.is_finished, plan(TWO_BY_TWO, {'num_steps': 3}))), 'prolonged'


def check_csv(runs):
  """For TWO_BY_TWO: step 2 is the last and the best, except that step 0 is best for truncated."""
  with open(runs / 'sweep.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  scores = [f'{end}/sums/{name}' for end in ('best', 'final') for name in MEASURES]
  first = ['trial', 'seed', 'replay.ratio', 'state', 'steps', 'seconds']
  assert list(rows[0]) == [*first, *scores, 'workdir']
  for row, (ratio, seed) in zip(rows, itertools.product((0.0, 0.25), range(2)), strict=True):
    assert (row['trial'], row['seed']) == (f'ratio={ratio:g},seed={seed}', f'{seed}')
    assert row['workdir'] == f'{runs}/{row["trial"]}'
    assert (row['state'], row['steps'], row['seconds']) == ('finished', '2', '10.0')
    assert float(row['replay.ratio']) == ratio
    score = pytest.approx(ratio + seed / 10 + 0.02)
    assert [float(row[name]) for name in scores] == [score, 1, 0, 0, score, 1, 0, 0.2]


def test_the_csv_has_the_state_of_every_trial_and_scores_of_the_finished_ones(
  plan, tmp_path, monkeypatch
):
  planned = plan("{'a': {'seed': 1}, 'b': {'replay.ratio': .25}, 'c': {'seed': 2}, 'd': {}}")
  monkeypatch.setenv('FAKE_FAILS', 'b')
  assert run(planned[:2], tmp_path) == 1
  sweep.report(planned, str(tmp_path / 'runs'), active={'c'})
  with open(tmp_path / 'runs' / 'sweep.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  names = ('trial', 'state', 'seed', 'replay.ratio', 'steps', 'final/sums/pass@1_high')
  assert [tuple(row[name] for name in names) for row in rows] == [
    ('a', 'finished', '1', '0.5', '2', '1.0'),
    ('b', 'unfinished', '0', '0.25', '0', ''),
    ('c', 'queued or running', '2', '0.5', '', ''),
    ('d', 'not started', '0', '0.5', '', ''),
  ]


def test_with_epochs_a_trial_is_finished_after_the_steps_that_its_run_recorded(plan, tmp_path):
  (trial,) = plan("{'a': {}}")
  assert run([trial], tmp_path) == 0  # 2 steps
  path = tmp_path / 'runs' / 'a' / 'config.json'
  written = json.loads(path.read_text())
  for recorded, steps, epochs, expected in (
    (0.5, 2, 0.5, True), (0.5, 3, 0.5, False), (0.5, 2, 0.75, False), (0.0, 2, 0.5, False),
  ):  # fmt: skip
    path.write_text(json.dumps({**written, 'num_epochs': recorded, 'num_steps': steps}))
    changed = config.overridden(trial.values, {'num_epochs': epochs})
    assert sweep.is_finished(trial._replace(values=changed)) == expected, (recorded, steps, epochs)


def test_a_trial_that_ends_before_its_last_step_has_failed(plan, tmp_path, capsys):
  (trial,) = plan("{'a': {}}")
  longer = trial._replace(values=config.overridden(trial.values, {'num_steps': 3}))
  assert run([longer], tmp_path) == 1
  assert 'a: exited with status 0 before its last step' in capsys.readouterr().out


def test_a_real_run_is_recognised_as_finished(recorded, values):
  trial = sweep.Trial('a', str(recorded.workdir), copy.deepcopy(values), arguments=[])
  assert sweep.is_finished(trial)
  trial.values.num_steps += 1
  assert not sweep.is_finished(trial)


def test_a_trial_without_its_report_or_last_checkpoint_is_not_finished(plan, tmp_path):
  """The trial has records of all steps."""
  (trial,) = plan("{'a': {}}")
  run([trial], tmp_path)
  workdir = tmp_path / 'runs' / 'a'
  (workdir / 'checkpoints' / '1').mkdir(parents=True)
  assert not sweep.is_finished(trial)
  (workdir / 'checkpoints' / '2').mkdir()
  assert sweep.is_finished(trial)
  (workdir / 'report.html').unlink()
  assert not sweep.is_finished(trial)


def test_trials_that_differ_only_in_their_seed_are_one_setting(plan):
  planned = plan("{'x': {'seed': 3}, 'y': {'replay.ratio': .25}, 'z': {'seed': 4}}")
  assert {
    label: [trial.name for trial in members] for label, members in sweep.by_setting(planned).items()
  } == {'x': ['x', 'z'], 'y': ['y']}
  assert list(sweep.by_setting(plan("trials.grid({'seed': range(2)})"))) == ['as configured']


# ---- The command line ----


def test_the_commands_for_a_queue_are_quoted_and_nothing_is_run(write_sweep, tmp_path):
  workdir = tmp_path / 'two words'
  flags = [f'--workdir={workdir}', f'--sweep={write_sweep(TWO_BY_TWO)}']
  flags += ['--config=configs/smoke.py', '--config.data.evaluation=("a.jsonl",)']
  outcome = forked.run_one(['sweep', '--launcher=commands', *flags])
  assert outcome.status == 0, outcome.err
  first, *rest = outcome.out.splitlines()
  assert len(rest) == 3 and not workdir.exists()
  assert shlex.split(first) == [
    *('python', '-m', 'exgrpo_jax', 'train', f'--config={os.path.abspath("configs/smoke.py")}'),
    *(f'--workdir={workdir}/ratio=0,seed=0', "--config.data.evaluation=('a.jsonl',)"),
    *('--config.replay.ratio=0.0', '--config.seed=0'),
  ]
  assert '4 of 4 trials still to run' in outcome.err


def test_printing_to_a_closed_pipe_ends_without_a_traceback(write_sweep, tmp_path):
  """As in `| head -1`."""
  flags = (f'--workdir={tmp_path}/runs', f'--sweep={write_sweep(TWO_BY_TWO)}', '--config=smoke')
  outcome = forked.run_one(['sweep', '--launcher=commands', *flags], has_reader=False)
  assert 'Traceback' not in outcome.err and 'BrokenPipe' not in outcome.err
  assert outcome.status == 128 + signal.SIGPIPE


def test_after_a_failure_an_interrupt_and_a_kill_the_same_command_completes_the_table(
  write_sweep, tmp_path
):
  """A killed sweep leaves a trial running. Until it ends, another sweep is refused."""
  command = [
    *('tests.helpers.with_fake_trainer', 'sweep', '--parallel=2'),
    f'--sweep={write_sweep(TWO_BY_TWO)}',
    *(f'--config={SMOKE}', '--config.num_steps=2', f'--workdir={tmp_path}/runs'),
  ]
  environment = {'FAKE_FAILS': 'ratio=0,seed=1', 'FAKE_HANGS': 'ratio=0.25,seed=0'}
  pid_file = tmp_path / 'runs' / 'ratio=0.25,seed=0' / 'hangs'
  after_failure = tmp_path / 'runs' / 'ratio=0.25,seed=1'  # starts once one trial has failed

  def run_until_it_hangs(signal_number):
    """Signal a sweep, and return (its outcome, process id of the hanging trial)."""
    with forked.start(command, **environment) as running:
      while not (pid_file.exists() and after_failure.exists()):
        assert running.is_running(), running.wait()
        time.sleep(0.05)
      pid = int(pid_file.read_text())
      running.send_signal(signal_number)
      outcome = running.wait()
    pid_file.unlink()
    return outcome, pid

  ended, pid = run_until_it_hangs(signal.SIGTERM)  # a shell's background jobs ignore SIGINT
  assert ended.status == 130, ended
  assert 'ratio=0,seed=1: exit status 1: ValueError: the disk is full' in ended.out
  again = r'Run the same command again to resume:\n.*exgrpo\S* sweep --parallel=2 --sweep='
  assert re.search(again, ended.out)
  with pytest.raises(ProcessLookupError):
    os.kill(pid, 0)

  ended, pid = run_until_it_hangs(signal.SIGKILL)
  assert ended.status == -signal.SIGKILL
  refused = forked.run_one(command)
  assert refused.status == 2 and 'or a trial left over from a killed sweep' in refused.err
  os.kill(pid, signal.SIGKILL)

  deadline = time.monotonic() + 60  # the other remaining trial may take a while to end
  while (completed := forked.run_one(command)).status == 2 and time.monotonic() < deadline:
    time.sleep(0.1)
  assert completed.status == 0, completed
  assert '| ratio=0    | 2     | 2    | 0.0700 ± 0.0707 |' in completed.out
  assert '| ratio=0.25 | 2     | 2    | 0.3200 ± 0.0707 |' in completed.out
  assert starts(tmp_path)['ratio=0,seed=0'] == 1


def test_a_trial_that_the_real_trainer_refuses_has_the_reason_in_its_log(
  plan, tmp_path, monkeypatch
):
  monkeypatch.setattr(sweep, 'TRAINER', ('exgrpo_jax', 'train'))
  (trial,) = plan("{'a': {}}", {'data.train': 'nowhere.jsonl'})
  assert run([trial], tmp_path) == 1
  log = (tmp_path / 'runs' / 'a' / 'log.txt').read_text()
  assert 'error: nowhere.jsonl: there is no such file' in log
  assert metrics.read(tmp_path / 'runs' / 'a') == []
  check_workdir(trial.values, str(tmp_path / 'runs' / 'a'))


# ---- The trials of a sweep: grids, lists, and sweep files ----


def test_a_grid_is_every_combination_named_by_its_values():
  assert trials.grid({'replay.ratio': [0.0, 0.25], 'seed': range(2)}) == {
    'ratio=0,seed=0': {'replay.ratio': 0.0, 'seed': 0},
    'ratio=0,seed=1': {'replay.ratio': 0.0, 'seed': 1},
    'ratio=0.25,seed=0': {'replay.ratio': 0.25, 'seed': 0},
    'ratio=0.25,seed=1': {'replay.ratio': 0.25, 'seed': 1},
  }


@pytest.mark.parametrize(
  ('expression', 'name', 'flag'),
  [
    ("trials.grid({'seed': np.arange(1)})", 'seed=0', '--config.seed=0'),
    ("trials.grid({'replay.ratio': np.float32([0.5])})", 'ratio=0.5', '--config.replay.ratio=0.5'),
    ("{'a': {'seed': np.int64(3)}}", 'a', '--config.seed=3'),
  ],
)
def test_a_sweep_may_contain_numpy_numbers(expression, name, flag, plan):
  (trial,) = plan(expression)
  assert trial.name == name and trial.arguments[-1] == flag


def test_listed_settings_are_combined_with_axes_and_keep_their_names():
  settings = {'full': {}, 'plain': {'replay.ratio': 0.0}}
  assert trials.listed(settings, {'seed': [3]}) == {
    'full,seed=3': {'seed': 3},
    'plain,seed=3': {'replay.ratio': 0.0, 'seed': 3},
  }
  assert trials.listed(settings, {}) == settings


@pytest.mark.parametrize(
  ('expression', 'message'),
  [
    ("{'a': {'seed': 1}, 'A': {'seed': 2}}", "trials 'a' and 'A' differ only in case"),
    ("trials.grid({'seed': [1, 1]})", "two trials are named 'seed=1'"),
    ("trials.grid({'replay.ratio': [.1, .10000001]})", "two trials are named 'ratio=0.1'"),
    ("{'../a': {}}", "a trial cannot be named '../a'"),
    ("{'..': {}}", "a trial cannot be named '..'"),
    ("trials.grid({'data.train': ['x.jsonl[:5]']})", "cannot be named 'train=x.jsonl[:5]'"),
    ("{'a': 1}", "trial 'a' must be a dict, {dotted config key: value}, not 1."),
    ('[]', 'must return a non-empty dict'),
    ('1 / 0', ': ZeroDivisionError: division by zero'),
    ('exit(3)', ': SystemExit: 3'),
  ],
)
def test_a_sweep_file_that_defines_no_valid_trials_is_refused(expression, message, write_sweep):
  with pytest.raises(InputError, match=re.escape(message)):
    trials.load(write_sweep(expression))


# ---- Commands in parallel: how many run, how a failure is reported, how they are interrupted ----


def shell_job(tmp_path, name, script):
  return launcher.Job(name=name, command=['sh', '-c', script], log=str(tmp_path / name / 'log.txt'))


@pytest.mark.parametrize(
  ('script', 'reason'),
  [
    ('echo step 3; echo; kill -9 $$', 'SIGKILL: step 3'),
    ('echo ValueError: x; echo; echo a note after it; exit 3', 'exit status 3: ValueError: x'),
    ('echo jax.errors.JaxError: x; echo ----; false', 'exit status 1: jax.errors.JaxError: x'),
    ('exit 1', 'exit status 1: its log is empty'),
  ],
)
def test_a_failure_is_reported_with_the_error_line_of_its_log(script, reason, tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'a' / 'log.txt').write_text('error: of an earlier start\n')
  jobs = [shell_job(tmp_path, 'a', script), shell_job(tmp_path, 'b', 'true')]
  assert launcher.run(jobs, 1) == launcher.Outcome(failed={'a': reason}, unfinished=[])


@pytest.mark.parametrize('parallel', [1, 2])
def test_jobs_run_in_parallel_up_to_the_given_number(parallel, tmp_path):
  """Each job creates a file, waits, and reports whether the other job's file exists."""
  script = 'cd {}; touch {}; for i in 1 2 3 4 5 6 7 8 9; do sleep .1; done; test -e {}; echo $?>{}'
  jobs = [
    shell_job(tmp_path, 'a', script.format(tmp_path, 'x', 'y', 'a_met_b')),
    shell_job(tmp_path, 'b', script.format(tmp_path, 'y', 'nothing', 'rc')),
  ]
  assert launcher.run(jobs, parallel) == launcher.Outcome(failed={}, unfinished=[])
  assert (tmp_path / 'a_met_b').read_text() == ('1\n' if parallel == 1 else '0\n')


@pytest.mark.skipif(
  not hasattr(os, 'sched_getaffinity') or len(os.sched_getaffinity(0)) < 2, reason='one core'
)
def test_parallel_jobs_run_on_separate_cores(tmp_path):
  meets = 'for i in $(seq 100); do sleep 0.1; test -e {other} && break; done'
  ask = f'sleep 0.3; {sys.executable} -c "import os; print(os.sched_getaffinity(0))"'
  jobs = []
  for name, other in ('ab', 'ba'):
    meet = meets.format(other=tmp_path / f'{other}.txt')
    jobs.append(shell_job(tmp_path, name, f'{ask} > {tmp_path}/{name}.txt; {meet}'))
  launcher.run(jobs, 2)
  one, two = (ast.literal_eval((tmp_path / f'{name}.txt').read_text()) for name in 'ab')
  assert one and two and not one & two


@pytest.mark.skipif(not hasattr(os, 'sched_getaffinity'), reason='all jobs have all cores')
@pytest.mark.parametrize('count', [0, 1])
def test_fewer_jobs_than_parallel_get_all_cores(count, tmp_path):
  show = f'{sys.executable} -c "import os; print(os.sched_getaffinity(0))" > {tmp_path}/cores'
  jobs = [shell_job(tmp_path, 'a', f'sleep 0.3; {show}')] * count
  assert launcher.run(jobs, 2) == launcher.Outcome(failed={}, unfinished=[])
  for path in tmp_path.glob('cores'):
    assert ast.literal_eval(path.read_text()) == os.sched_getaffinity(0)


def test_a_second_signal_kills_a_job_that_does_not_exit(tmp_path):
  """The signal also kills its child processes; waiting jobs are not started."""
  sleeps = f'sleep 30 & echo $! > {tmp_path}/child; touch {tmp_path}/x; wait; wait; wait'
  stubborn = shell_job(tmp_path, 'a', f'trap : TERM; {sleeps}')

  def interrupt_twice():
    while not (tmp_path / 'x').exists():
      time.sleep(0.02)
    for _ in range(2):
      os.kill(os.getpid(), signal.SIGTERM)  # a background job of a shell ignores SIGINT
      time.sleep(0.5)

  handler = signal.getsignal(signal.SIGTERM)
  sender = threading.Thread(target=interrupt_twice)
  sender.start()
  outcome = launcher.run([stubborn, shell_job(tmp_path, 'b', 'true')], 1)
  assert outcome == launcher.Outcome(failed={}, unfinished=['a', 'b'])
  sender.join()
  child = int((tmp_path / 'child').read_text())
  assert not is_running(child)
  assert signal.getsignal(signal.SIGTERM) is handler
