"""Trials as a Slurm array job; scripts replace sbatch and squeue."""

import csv
import json
import re
import subprocess

import pytest

from exgrpo_jax.configs import smoke
from exgrpo_jax.errors import InputError
from exgrpo_jax.sweeps import slurm, sweep, trials
from tests.helpers import fake_trainer, forked
from tests.helpers.devices import caching, devices_of
from tests.helpers.paths import REPOSITORY

pytestmark = pytest.mark.full

# Keeps the script and puts a line 'index STATE' in the queue for each index of the array.
SBATCH = """#!/bin/sh
echo "$@" >> $SPOOL/arguments
[ -e $SPOOL/refuses ] && { echo 'sbatch: error: invalid partition' >&2; exit 1; }
job=$((7 + $(ls $SPOOL | grep -c '\\.sh$')))
for word in "$@"; do
  case $word in --array=*) array=${word#--array=};; esac
  script=$word
done
cp "$script" $SPOOL/$job.sh
for index in $(echo ${array%\\%*} | tr , ' '); do echo $index PENDING; done > $SPOOL/$job
echo $job
"""
SQUEUE = """#!/bin/sh
[ -e $SPOOL/down ] && { echo 'Unable to contact slurm controller' >&2; exit 1; }
for word in "$@"; do case $word in --jobs=*) job=${word#--jobs=};; esac; done
[ -e $SPOOL/$job ] || { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }
cat $SPOOL/$job
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
  """The folder of the queue; the scripts are on PATH."""
  spool, programs = tmp_path / 'spool', tmp_path / 'bin'
  spool.mkdir()
  programs.mkdir()
  for name, text in {'sbatch': SBATCH, 'squeue': SQUEUE}.items():
    (programs / name).write_text(text)
    (programs / name).chmod(0o755)
  monkeypatch.setenv('SPOOL', str(spool))
  monkeypatch.setenv('PATH', f'{programs}:/usr/bin:/bin')
  monkeypatch.setenv('PYTHONPATH', str(REPOSITORY))
  return spool


def run_job(cluster, job, indices, **environment):
  """Run these tasks of an array job and remove them from the queue."""
  queue = cluster / str(job)
  for index in indices:
    assert f'{index} PENDING' in queue.read_text()
    task = {
      'SLURM_ARRAY_TASK_ID': str(index),
      'PATH': '/usr/bin:/bin',
      'PYTHONPATH': str(REPOSITORY),
    }
    subprocess.run(['bash', cluster / f'{job}.sh'], env=task | environment)
    queue.write_text(queue.read_text().replace(f'{index} PENDING\n', ''))


@pytest.fixture
def submit(write_sweep, tmp_path, monkeypatch):
  """A function that submits four trials of the fake trainer with the given options."""
  monkeypatch.setattr(sweep, 'TRAINER', fake_trainer.command())
  path, workdir = write_sweep("trials.grid({'seed': range(4)})"), str(tmp_path / 'two words')
  config = str(REPOSITORY / 'configs' / 'smoke.py')

  def submit(options='', at_once=None):
    planned = sweep.plan_trials(trials.load(path), path, smoke.get_config(), config, {}, workdir)
    return slurm.submit(planned, workdir, slurm.check_options(options), at_once)

  return submit


def test_each_index_is_a_trial_and_only_trials_that_need_it_are_submitted_again(
  submit, cluster, tmp_path, capsys
):
  runs = tmp_path / 'two words'
  assert submit('--partition=gpu --comment="a b"', 2) == {f'seed={n}' for n in range(4)}
  assert 'submitted 4 trials as job 7;' in (out := capsys.readouterr().out)
  assert '0 of 4 trials finished, 4 in the queue\nto watch: squeue --jobs=7\n' in out
  arguments = (cluster / 'arguments').read_text()
  assert '--partition=gpu --comment=a b --parsable --array=0,1,2,3%2 ' in arguments

  run_job(cluster, 7, [2])
  assert [path.parent.name for path in runs.glob('*/starts')] == ['seed=2']
  assert json.loads((runs / 'seed=2' / 'config.json').read_text())['seed'] == 2
  assert 'step 4\n' in (runs / 'seed=2' / 'log.txt').read_text()
  run_job(cluster, 7, [1], FAKE_FAILS='seed=1')
  (cluster / '7').write_text('0 PENDING\n3 RUNNING\n1 FAILED\n2 COMPLETED\n')
  submit()  # only 1 has ended without finishing
  assert 'submitted 1 trial as job 8;' in (out := capsys.readouterr().out)
  assert '1 of 4 trials finished, 3 in the queue\nto watch: squeue --jobs=7,8\n' in out
  assert (cluster / '8').read_text() == '1 PENDING\n'
  submit()
  assert 'submitted' not in capsys.readouterr().out, 'all are finished or in the queue'

  (cluster / '7').unlink()  # Slurm has forgotten the job; 0 and 3 never ran
  submit()
  assert (cluster / '9').read_text() == '0 PENDING\n3 PENDING\n'
  run_job(cluster, 8, [1])
  run_job(cluster, 9, [0, 3])
  assert submit() == set()
  assert capsys.readouterr().out.splitlines(True)[-1] == '4 of 4 trials finished, 0 in the queue\n'
  starts = {path.parent.name: path.read_text().count('\n') for path in runs.glob('*/starts')}
  assert starts == {'seed=0': 1, 'seed=1': 2, 'seed=2': 1, 'seed=3': 1}


@pytest.mark.parametrize(
  ('breakage', 'message'),
  [
    ('refuses', r'sbatch rejected the job \(sbatch: error: invalid partition\)\. Change --sbatch'),
    ('down', r'squeue failed \(Unable to contact .*\), so the trials of job 7 may still be'),
    ('no sbatch', r'sbatch was not found on this machine\. Run the command on a login node'),
  ],
)
def test_slurm_errors_are_reported_and_nothing_is_recorded(
  breakage, message, submit, cluster, tmp_path, monkeypatch
):
  jobs = tmp_path / 'two words' / 'slurm.json'
  if breakage == 'down':
    submit()
  elif breakage == 'no sbatch':
    monkeypatch.setenv('PATH', '/nowhere')
  before = jobs.read_text() if jobs.exists() else ''
  (cluster / breakage).touch()
  with pytest.raises(InputError, match=message):
    submit()
  assert (jobs.read_text() if jobs.exists() else '') == before


def test_trials_with_epochs_train_as_an_array_job_and_the_next_call_writes_the_table(
  compiled, data, write_sweep, cluster, tmp_path
):
  """Really, with the command; 12 questions, 6 at a time: 0.5 and 0.75 epochs are 1 and 2 steps."""
  config = tmp_path / 'tiny.py'  # TINY_CONFIG's runs write no report.html
  config.write_text(
    'from tests.helpers import tiny\n\ndef get_config():\n'
    f'  config = tiny.values({data.train!r}, {data.evaluation!r})\n'
    f'  config.data.cache_dir, config.warm_start.num_updates = {data.cache!r}, 0\n  return config\n'
  )
  path = write_sweep("trials.grid({'num_epochs': [.5, .75]})")
  command = ['sweep', '--launcher=slurm', f'--sweep={path}', f'--config={config}']
  command += [f'--workdir={tmp_path}/runs', '--sbatch=--time=1:00:00']
  first = forked.run_one(command)
  assert first.status == 0 and 'submitted 2 trials as job 7;' in first.out, first
  assert 'No trial has finished yet' in first.out and not first.used_device
  run_job(cluster, 7, [0, 1], **caching(compiled), **devices_of(1), HOME=str(tmp_path))
  second = forked.run_one(command)
  assert second.status == 0 and '2 of 2 trials finished, 0 in the queue' in second.out, second
  assert f'table: {tmp_path}/runs/sweep.md' in second.out
  log = (tmp_path / 'runs' / 'num_epochs=0.75' / 'log.txt').read_text()
  assert re.search(r'^  steps +2, config\.num_epochs=0\.75$', log, re.MULTILINE)
  with open(tmp_path / 'runs' / 'sweep.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert [(row['num_epochs'], row['state'], row['steps']) for row in rows] == [
    ('0.5', 'finished', '1'),
    ('0.75', 'finished', '2'),
  ]
  scores = [name for name in rows[0] if re.fullmatch(r'final/.*(pass|avg)@\d+(_low|_high)?', name)]
  assert len(scores) >= 3 and all(float(row[name]) <= 1 for row in rows for name in scores)
