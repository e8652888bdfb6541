"""The study command: protocols older than their results, resumed runs, and paired differences.

Runs are of fake_trainer.py, which after two steps score
replay.ratio + seed / 10 + objective.kl_coefficient * seed + .02.
"""

import csv
import dataclasses
import functools
import json
import os
import pathlib
import re
import signal
import time
import types

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import scores
from exgrpo_jax.sweeps import sweep
from studies import commands, protocol, runs, study
from studies.protocols import reuse_rates
from tests.helpers import fake_trainer, forked
from tests.helpers.paths import REPOSITORY

FIELDS = {
  'config': "'smoke'",
  'arms': "{'exgrpo': {'replay.ratio': .5, 'objective.kl_coefficient': .1}, "
  "'grpo': {'replay.ratio': 0.}}",
  'settings': "{'sums': {'num_steps': 2, 'data.evaluation': ('sums.jsonl',)}}",
  'seeds': 'range(2)',
  'baseline': "'grpo'",
  'measure': "'eval/sums/pass@1'",
  'smallest_difference': '.2',
}
RUNS = ['sums,exgrpo,seed=0', 'sums,exgrpo,seed=1', 'sums,grpo,seed=0', 'sums,grpo,seed=1']


def replace_trainer(patch):
  patch.setattr(sweep, 'TRAINER', fake_trainer.command())
  patch.setenv('PYTHONPATH', str(REPOSITORY))


@pytest.fixture(autouse=True)
def train_nothing(monkeypatch):
  """Make all runs use fake_trainer.py."""
  replace_trainer(monkeypatch)


def written_study(folder, words='Is more better?', **changed):
  """Write a study file into `folder`, with some fields replaced; return its path."""
  fields = ', '.join(f'{name}={text}' for name, text in (FIELDS | changed).items())
  path = folder / 'which.py'
  path.write_text(
    f'"""{words}"""\nfrom studies.protocol import Study\n'
    f'def get_study():\n  return Study({fields})\n'
  )
  return str(path)


@pytest.fixture
def write_study(tmp_path):
  """Return a function that writes a study file and returns its path."""
  return functools.partial(written_study, tmp_path)


def started(folder, path, launcher='local'):
  """Run the command on a study file, in folder/runs; return its exit status."""
  args = types.SimpleNamespace(workdir=str(folder / 'runs'), parallel=2, launcher=launcher)
  try:
    commands.run(args, path)
  except SystemExit as ended:
    return ended.code


@pytest.fixture
def start(tmp_path):
  """Return a function that runs the command in tmp_path/runs and returns its exit status."""
  return functools.partial(started, tmp_path)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """Return the folder of a study file and its runs, whose commands were printed first."""
  folder = tmp_path_factory.mktemp('finished')
  path = written_study(folder)
  with pytest.MonkeyPatch.context() as patch:
    replace_trainer(patch)
    assert started(folder, path, launcher='commands') is None
    assert started(folder, path) == 0
  return folder


def starts(tmp_path):
  """Count how often each run was started."""
  folder = tmp_path / 'runs'
  return {path.parent.name: path.read_text().count('\n') for path in folder.glob('*/starts')}


def tables(text):
  """Return the rows of every Markdown table, as lists of cells."""
  lines = [line for line in text.splitlines() if line.startswith('| ') and '---' not in line]
  return [[cell.strip() for cell in line.strip('|').split('|')] for line in lines]


# ---- Results ----


def test_the_results_are_those_by_hand(finished):
  """Two seeds have means but no interval, so there is no verdict."""
  text = (finished / 'runs' / 'results.md').read_text()
  assert text.startswith('# Study which\n\nIs more better?\n\nProtocol written 20')
  assert '4 of 4 runs finished. Commits: c0ffee, c0ffee+ (+: with uncommitted changes).' in text
  assert 'Missing' not in text
  exgrpo, grpo, difference = ['0.6200', '-'], ['0.0700', '-'], ['+0.5500', '-']  # .52 and .72
  means = ['mean', '95% interval', 'interquartile mean', '95% interval']
  assert tables(text) == [
    ['arm', 'seeds', 'step', *means],
    ['exgrpo', '2', '2', *exgrpo, *exgrpo],
    ['grpo', '2', '2', *grpo, *grpo],
    ['arm', 'pairs', *means, 't interval, corrected', 'against 0.2'],
    ['exgrpo', '2', *difference, *difference, '-', 'cannot be told'],
    ['arm', 'seed 0', 'seed 1'],
    ['exgrpo', '0.5200', '0.7200'],
    ['grpo', '0.0200', '0.1200'],
  ]
  (curve,) = [
    row
    for row in csv.DictReader((finished / 'runs' / 'curves.csv').open())
    if row['arm'] == 'exgrpo' and row['step'] == '2.0'
  ]
  assert float(curve['mean']) == pytest.approx(0.62) and curve['low_95'] == 'nan'
  assert (curve['fresh_questions'], curve['generated_tokens']) == ('14.0', '200.0')
  (gained,) = csv.DictReader((finished / 'runs' / 'differences.csv').open())
  assert float(gained['mean']) == pytest.approx(0.55) and gained['low'] == 'nan'
  for name in ('curves', 'differences'):
    assert (finished / 'runs' / f'{name}.png').stat().st_size > 1000


def test_last_policies_are_evaluated_once_with_many_samples(
  write_study, start, tmp_path, monkeypatch
):
  evaluated = []

  def evaluate(source, values, specs, out):  # `prepare_policy` passes them through
    evaluated.append(os.path.basename(source.path))
    samples, score = values.evaluation.samples, len(evaluated) / 10
    measured = {f'eval/sums_to_2/avg@{samples}': score, f'eval/sums_to_2/pass@{samples}': 1.0}
    line = {'data': specs[0], 'samples': samples, 'step': 2, 'scores': measured}
    pathlib.Path(out).mkdir()
    pathlib.Path(out, 'evaluations.jsonl').write_text(json.dumps(line) + '\n')

  monkeypatch.setattr(scores, 'prepare_policy', lambda _, values, specs: (values, specs))
  monkeypatch.setattr(scores, 'evaluate_policy', evaluate)
  path = write_study(last_data="'sums.jsonl[:2]'", last_samples='16')
  assert start(path) == start(path) == 0
  assert evaluated == RUNS
  text = (tmp_path / 'runs' / 'results.md').read_text()
  assert '`eval/sums_to_2/avg@16` of the last policy:' in text
  assert '`eval/sums_to_2/pass@16` of the last policy:' in text
  seeds = [row for row in tables(text) if row[0] == 'grpo' and len(row) == 3]
  assert seeds == [  # pass@1, avg@16 and pass@16
    ['grpo', '0.0200', '0.1200'],
    ['grpo', '0.3000', '0.4000'],
    ['grpo', '1.0000', '1.0000'],
  ]


def test_runs_share_a_warm_start_where_they_would_train_the_same(write_study, tmp_path):
  """Runs with the same seed share, except an arm with a longer warm start or its own path."""
  arms = (
    "{'exgrpo': {'replay.ratio': .5}, 'grpo': {'replay.ratio': 0.}, "
    "'long': {'warm_start.num_updates': 9}, 'own': {'warm_start.path': 'kept'}}"
  )
  _, planned = study.plan(protocol.load(write_study(arms=arms)), str(tmp_path / 'runs'))
  path = {(c.arm, c.seed): trial.values.warm_start.path for c, trial in planned.items()}
  assert path['exgrpo', 0] == path['grpo', 0] and path['exgrpo', 1] == path['grpo', 1]
  assert len({path[arm, seed] for arm in ('exgrpo', 'long') for seed in (0, 1)}) == 4
  assert path['own', 0] == path['own', 1] == 'kept'


def test_the_measure_may_differ_by_setting(write_study):
  settings = "{'two': {'num_steps': 2}, 'one': {'num_steps': 1}}"
  measure = "{'two': 'eval/sums/pass@1', 'one': 'eval/sums/truncated'}"
  chosen = protocol.load(write_study(settings=settings, measure=measure))
  assert chosen.study.measure_of('two') == 'eval/sums/pass@1'
  assert chosen.study.measure_of('one') == 'eval/sums/truncated'


def test_every_evaluation_of_every_run_is_a_row_with_what_it_cost(finished):
  rows = list(csv.DictReader((finished / 'runs' / 'results.csv').open()))
  assert [(r['arm'], r['seed'], r['step']) for r in rows] == [
    (arm, seed, step) for arm in ('exgrpo', 'grpo') for seed in '01' for step in '012'
  ]
  first, row = rows[3], rows[5]
  # Two steps of 8 questions, one of them replayed, 100 tokens, and 5 - 2 seconds.
  command, warm_start = first['command'].rsplit(' --config.warm_start.path=', 1)
  assert os.path.dirname(warm_start) == str(finished / 'runs' / 'warm_starts')
  assert command.endswith(
    '--config=smoke --workdir=' + str(finished / 'runs' / 'sums,exgrpo,seed=1') + ' '
    "--config.num_steps=2 '--config.data.evaluation=('\"'\"'sums.jsonl'\"'\"',)' "
    '--config.replay.ratio=0.5 --config.objective.kl_coefficient=0.1 --config.seed=1'
  )
  assert {name: row[name] for name in list(row)[:8]} == {
    'setting': 'sums',
    'arm': 'exgrpo',
    'seed': '1',
    'finished': 'True',
    'step': '2',
    'fresh_questions': '14',
    'generated_tokens': '200',
    'training_seconds': '6.0',
  }
  assert float(row['eval/sums/pass@1']) == pytest.approx(0.72)
  assert first['commit'] == 'c0ffee+' and row['commit'] == row['command'] == ''
  assert rows[3]['fresh_questions'] == rows[3]['generated_tokens'] == '0'  # before training


def test_a_failed_run_is_named_and_its_pair_left_out(write_study, start, tmp_path, monkeypatch):
  monkeypatch.setenv('FAKE_FAILS', 'sums,grpo,seed=1')
  assert start(write_study()) == 1
  text = (tmp_path / 'runs' / 'results.md').read_text()
  assert '3 of 4 runs finished' in text
  assert 'Missing because they have not finished: `grpo,seed=1`.' in text
  assert ['grpo', '1 of 2', '2', '0.0200', '-', '0.0200', '-'] in tables(text)
  assert ['exgrpo', '1', '+0.5000', '-', '+0.5000', '-', '-', 'cannot be told'] in tables(text)
  assert ['grpo', '0.0200', '-'] in tables(text)


# ---- The protocol ----


def test_a_finished_study_is_reported_again_without_a_run(finished):
  table = finished / 'runs' / 'results.md'
  before = table.read_text()
  table.unlink()
  assert started(finished, str(finished / 'which.py')) == 0
  assert table.read_text() == before
  assert starts(finished) == dict.fromkeys(RUNS, 1)


def test_a_protocol_of_an_earlier_version_lacks_what_has_been_added_since(finished):
  path = finished / 'runs' / 'protocol.json'
  written = path.read_text()
  entry = json.loads(written)
  for name in ('tokens', 'takes_off', 'tuned', 'align_every'):
    del entry['study'][name]
  path.write_text(json.dumps(entry))
  assert started(finished, str(finished / 'which.py')) == 0
  path.write_text(written)


def test_a_protocol_or_config_that_has_changed_is_refused(write_study, start, tmp_path):
  """Even if only commands were printed, because they may be running somewhere."""
  config = tmp_path / 'mine.py'
  text = 'from exgrpo_jax.configs import smoke\n\ndef get_config():\n  return smoke.get_config()\n'
  config.write_text(text)
  own = {'config': repr(str(config))}
  assert start(write_study(**own), launcher='commands') is None
  saved = json.loads((tmp_path / 'runs' / 'protocol.json').read_text())
  assert saved['text'] == (tmp_path / 'which.py').read_text()
  less = "{'exgrpo': {'replay.ratio': .4, 'objective.kl_coefficient': .1}, 'grpo': {}}"
  for changed, message in (
    ({'smallest_difference': '.1'}, 'smallest_difference was 0.2, is 0.1'),
    ({'seeds': 'range(3)'}, 'seeds was [0, 1], is [0, 1, 2]'),
    ({'arms': less}, 'arms.exgrpo.replay.ratio was 0.5, is 0.4'),
    ({'words': 'Is less better?'}, 'its file, at \'- """Is more better?"""\''),
  ):
    with pytest.raises(InputError, match=re.escape(message)):
      start(write_study(**own | changed))
  assert start(write_study(**own), launcher='commands') is None, 'as it was, it is not refused'
  config.write_text(text.replace('return ', 'c = ') + '  c.rollout.group_size = 6\n  return c\n')
  with pytest.raises(InputError, match=r'values\.rollout\.group_size was 4, is 6'):
    start(write_study(**own))
  assert starts(tmp_path) == {}


def test_results_older_than_the_protocol_are_refused(finished):
  written = finished / 'runs' / 'protocol.json'
  kept = written.rename(finished / 'kept.json')
  with pytest.raises(
    InputError, match=r"contains the run 'sums,exgrpo,seed=0' but no protocol\.json"
  ):
    started(finished, str(finished / 'which.py'))
  kept.rename(written)


@pytest.mark.parametrize(
  ('changed', 'message'),
  [
    ({'words': ''}, 'no docstring'),
    ({'seeds': '[1]'}, r'seeds=\[1\] must be two or more'),
    ({'seeds': '[1, 1]'}, r'seeds=\[1, 1\] must be two or more distinct'),
    ({'baseline': "'ppo'"}, r"baseline='ppo' must be one of two or more arms: exgrpo, grpo"),
    ({'arms': "{'a,b': {}, 'grpo': {}}"}, r"arms has the name 'a,b'"),
    ({'arms': "['grpo']"}, r'arms must map name ->'),
    ({'settings': '{}'}, r'settings is empty'),
    ({'settings': "{'x': {'seed': 1}}"}, r"'seed' is set more than once by setting 'x', arm"),
    ({'settings': "{'x': {'replay.ratio': 1}}"}, r"'replay.ratio' is set more than once by"),
    ({'measure': "'reward'"}, r"measure='reward' must be the name of an evaluation"),
    ({'measure': "{'other': 'eval/sums/pass@1'}"}, r'must have one value for each setting: sums'),
    (
      {'measure': "'eval/sum/pass@1'"},
      r"measure='eval/sum/pass@1' is not a measure of .*: eval/sums/",
    ),
    ({'smallest_difference': '0'}, r'smallest_difference=0 must be a finite number above 0'),
    ({'tokens': '-1'}, r'tokens=-1 must be a whole number of at least 0'),
    (
      {'tokens': "{'other': 8}"},
      r"tokens=\{'other': 8\} must have one value for each setting: sums",
    ),
    ({'align_every': '1.5'}, r'align_every=1\.5 must be a whole number of at least 0'),
    (
      {'second_baseline': "'grpo'"},
      r"second_baseline='grpo' must be an arm other than the baseline: exgrpo\. ",
    ),
    ({'last_samples': '0'}, r'last_samples=0 must be a whole number of at least 1'),
    ({'last_data': "('sums',)"}, r"last_data=\('sums',\) must be a data spec, or '' for none"),
    (
      {'last_data': "{'other': 'sums'}"},
      r"last_data=\{'other': 'sums'\} must have one value for each setting: sums",
    ),
    ({'takes_off': '-.1'}, r'takes_off=-0\.1 must be a finite number'),
    ({'tuned': '1'}, 'tuned must map setting -> arm -> overrides, not 1'),
    ({'tuned': "{'other': {}}"}, r"tuned names the unknown setting 'other'. Use one of: sums"),
    (
      {'tuned': "{'sums': {'ppo': {}}}"},
      r"tuned\['sums'\] names the unknown arm 'ppo'. Use one of: ex",
    ),
    ({'tuned': "{'sums': {'grpo': 1}}"}, r"tuned\['sums'\] must map name ->"),
    (
      {'tuned': "{'sums': {'exgrpo': {'replay.ratio': 1}}}"},
      r"'replay.ratio' is set more than once by",
    ),
    ({'config': "'smok'"}, r'study which: --config=smok: there is no config with this name'),
    ({'arms': "{'a': {'replay.ratoi': 1}, 'grpo': {}}"}, r"config\.replay has no 'ratoi'"),
    ({'arms': "{'a': {}, 'grpo': {}}"}, r'are the same run'),
  ],
)
def test_a_study_that_cannot_be_run_is_refused(changed, message, write_study, start, tmp_path):
  with pytest.raises(InputError, match=message):
    start(write_study(**changed))
  assert not (tmp_path / 'runs').exists()


def test_what_was_tuned_for_an_arm_in_a_setting_holds_there_alone():
  rate = 'optimizer.learning_rate'
  two = protocol.Study(
    config='smoke',
    arms={'exgrpo': {}, 'grpo': {'replay.ratio': 0.0}},
    settings={'easy': {'num_steps': 2}, 'hard': {'num_steps': 4}},
    seeds=range(2),
    baseline='grpo',
    measure='eval/sums/pass@1',
    smallest_difference=0.1,
    tuned={'hard': {'grpo': {rate: 1e-3}}},
  )
  found = {cell[:2]: overrides for cell, (_, overrides) in protocol.cells(two).items()}
  assert found['hard', 'grpo'] == {'num_steps': 4, 'replay.ratio': 0.0, rate: 1e-3, 'seed': 1}
  assert [cell for cell, overrides in found.items() if rate in overrides] == [('hard', 'grpo')]


ADDED = [f'reuse_rates:{rate}' for rate in reuse_rates.ADDED]
NAMES = [*protocol.names(), 'collapse:4e-4', 'lake:6', 'reuse:usual', 'reuse:guess', *ADDED]
NAMES += ['reuse_parts:rates', 'reuse_parts:2.5e-5']


@pytest.mark.parametrize('name', NAMES)
def test_every_study_of_the_folder_can_be_run(name, tmp_path):
  chosen = protocol.load(name)
  seeds = chosen.study.seeds[:1]  # the other seeds differ in nothing else, and take as long to plan
  fewer = chosen._replace(study=dataclasses.replace(chosen.study, seeds=seeds))
  _, planned = study.plan(fewer, str(tmp_path / 'runs'))
  assert len(planned) == len(chosen.study.arms) * len(chosen.study.settings) * len(seeds)
  assert f'python -m studies run {name} ' in chosen.words


# `smoke` is only a check. The CSV of `reuse_rates` contains the runs of the rates added later.
UNMEASURED = ('smoke', *ADDED)


@pytest.mark.parametrize('name', [name for name in NAMES if name not in UNMEASURED])
def test_what_was_measured_is_what_the_protocol_asks_for(name):
  chosen = protocol.load(name)
  found = study.read(chosen.name)
  assert all(run.is_finished for run in found)
  places = {(run.setting, run.arm, run.seed) for run in found}
  assert places == {tuple(cell) for cell in protocol.cells(chosen.study)}
  for setting in chosen.study.settings:
    for arm in chosen.study.arms:
      assert runs.finished(found, setting, arm, chosen.study.measure_of(setting))


def test_a_study_that_compares_gradients_is_trained_by_the_command_of_this_folder(write_study):
  path = write_study(align_every='7')
  _, planned = study.plan(protocol.load(path), 'w')
  plain = study.plan(protocol.load(write_study()), 'w')[1]
  for cell, trial in planned.items():
    flags = plain[cell].arguments[1 + len(sweep.TRAINER) :]
    assert trial.arguments == ['-m', 'studies', 'train', *flags, '--align_every=7']


def test_commands_are_refused_in_one_line():
  cases = {
    (
      'run',
      'smok',
      '--workdir=w',
    ): 'smok: there is no such study. Pass a file that ends in',
    ('run', 'smoke'): '--workdir is required, e.g. --workdir=/tmp/smoke_study',
    ('run', 'smoke', 'why', '--workdir=w'): "'smoke why': run one study at a time",
    ('run', '--workdir=w'): 'must be followed by at least one STUDY',
    ('figures', 'smoke', '--out=w'): 'smoke: studies/measured/smoke.csv does not exist',
    ('train', '--align_every=0'): '--align_every=0: the value must be a positive integer',
    ('study',): "'study' is not a command. Use one of: run, figures, train.",
  }
  for words, outcome in zip(cases, forked.run(['studies.__main__', *words] for words in cases)):
    assert outcome.status == 2 and cases[words] in outcome.err, outcome.err
    assert outcome.err.count('\n') == 1
  (listed,) = forked.run([['studies.__main__']])
  assert listed.status == 0 and 'replay_pays_again' in listed.out and '  figures ' in listed.out


def test_after_a_kill_the_same_command_completes_the_study(write_study, tmp_path):
  command = [
    'tests.helpers.with_fake_trainer',
    'run',
    write_study(),
    f'--workdir={tmp_path}/runs',
  ]
  hanging = tmp_path / 'runs' / 'sums,exgrpo,seed=1' / 'hangs'
  with forked.start(command, FAKE_HANGS='sums,exgrpo,seed=1') as running:
    while not hanging.exists():
      assert running.is_running(), running.wait()
      time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    running.wait()
  os.kill(int(hanging.read_text()), signal.SIGKILL)
  assert not (tmp_path / 'runs' / 'results.md').exists()

  completed = forked.run_one(command)
  assert completed.status == 0, completed
  assert starts(tmp_path) == dict.fromkeys(RUNS, 1) | {'sums,exgrpo,seed=1': 2}
  assert ['exgrpo', '2', *['+0.5500', '-'] * 2, '-', 'cannot be told'] in tables(completed.out)
