"""User errors: each ends with status 2 and one line that says what to do.

Nothing here compiles or trains, because errors are found first. The tests of each check cover what
its message says about the value.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.helpers import cases, forked, tiny
from tests.helpers.paths import CHECKPOINTS, REPOSITORY, TINY_CONFIG

pytestmark = pytest.mark.full

SMOKE = '--config=smoke'
GOOD = [{'question': f'{n}+0', 'answer': f'{n}\n#### {n}'} for n in range(tiny.POOL)]

# ---- Command lines and their error messages; {run} is a workdir, {model} a model ----

COMMAND_LINES = cases.lines('commands', 'command_lines.txt')

# ---- Config files ----

FILES = {
  'syntax': ('def get_config(:\n', r':1: SyntaxError: .*\. A config is a Python file whose get_co'),
  'raises': ('\nx = nope\n', r":2: NameError: name 'nope' is not defined\. A config is"),
  'exits': ('import sys\nsys.exit(0)\n', r':2: SystemExit: 0\. A config is'),
  'no_get_config': ('x = 1\n', r': the file has no get_config\(\)\. A config is'),
  'returns_none': ('def get_config(): pass\n', r': get_config\(\) returns NoneType\. A config is'),
}

# ---- Settings that only data, a mesh or a tokenizer shows to be wrong, and their messages ----

SETTINGS = [case.values for case in cases.settings('commands', 'settings.jsonl')]
DATA = {
  'good': GOOD,
  'cut': [*GOOD, '{"question": '],
  'other': [{'question': '1', 'key': '2'}],
  'wrong': [{'question': '0+0', 'response': '7'}],
}

# ---- Damaged Hugging Face folders ----


def without(name):
  return lambda folder: (folder / name).unlink()


def cut(name):
  return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:100])


MODELS = {
  'no_folder': (
    shutil.rmtree,
    r'model\.path=\S+ is not a folder\. Use the folder of a Hugging Face',
  ),
  'damaged_config': (cut('config.json'), r'not valid JSON .*\. Download the checkpoint'),
  'no_tokenizer': (without('tokenizer.json'), r'must be a tokenizer\.json, a Senten'),
  'no_weights': (without('model.safetensors'), r'contains neither model\.safetensors n'),
  'damaged_weights': (cut('model.safetensors'), r'not a complete safe.*Download it'),
}


# ---- All of them ----


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  folder = tmp_path_factory.mktemp('refusals')
  for name, rows in DATA.items():
    lines = (row if isinstance(row, str) else json.dumps(row) + '\n' for row in rows)
    (folder / f'{name}.jsonl').write_text(''.join(lines))
  return folder


def with_settings(place, name, settings):
  """A train command; the settings are in a file because parsing each override takes time."""
  good = str(place / 'good.jsonl')
  data = {'train': good, 'evaluation': (good,), 'cache_dir': str(place / 'cache')}
  settings = {f'data.{key}': value for key, value in data.items()} | {
    key: value.format(place=place) if isinstance(value, str) else value
    for key, value in settings.items()
  }
  settings['warm_start.data'] = settings['data.train']
  path = place / f'{name}.py'
  path.write_text(
    'from exgrpo_jax import config\nfrom tests.helpers import tiny\n\n'
    f'def get_config():\n  return config.overridden(tiny.get_config(), {settings!r})\n'
  )
  return ['train', f'--config={path}', f'--workdir={place}/run']


def from_checkpoint(place, name, change):
  folder = place / name
  shutil.copytree(CHECKPOINTS / 'qwen2_tied', folder)
  change(folder)
  of_model = {'model.path': str(folder), 'prompt.template': 'chat', 'warm_start.num_updates': 0}
  return with_settings(place, f'{name}_model', {**of_model, 'rollout.max_prompt': 64})


@pytest.fixture(scope='module')
def early(place):
  """(command, outcome, expected message) of the errors that need no device."""
  cases = [
    (shlex.split(text.format(run=place / 'untouched', model=CHECKPOINTS / 'qwen2_tied')), line)
    for text, line in COMMAND_LINES
  ]
  for name, (text, line) in FILES.items():
    (place / f'{name}.py').write_text(text)
    cases.append((['train', f'--config={place}/{name}.py', f'--workdir={place}/untouched'], line))
  return outcomes(cases)


@pytest.fixture(scope='module')
def late(place):
  """The same for errors in data, model, tokenizer and devices."""
  cases = [
    (with_settings(place, f'settings_{number}', settings), line)
    for number, (settings, line) in enumerate(SETTINGS)
  ]
  cases += [(from_checkpoint(place, name, change), line) for name, (change, line) in MODELS.items()]
  return outcomes(cases)


def outcomes(cases):
  ended = forked.run(command for command, _ in cases)
  return [
    (shlex.join(command), outcome, line)
    for (command, line), outcome in zip(cases, ended, strict=True)
  ]


def assert_refused(status, err, line):
  assert status == 2, err
  assert err.startswith('error: ') and err.count('\n') == 1, err
  assert re.search(line, err), (line, err)


def test_each_ends_with_status_2_and_one_line_that_says_what_to_do(early, late):
  problems = []
  for command, outcome, line in early + late:
    try:
      assert_refused(outcome.status, outcome.err, line)
    except AssertionError as error:
      problems.append(f'{command}: {error}')
  assert problems == []


def test_command_lines_and_configs_are_refused_before_any_device_or_folder_is_touched(early, place):
  assert not any(outcome.used_device for _, outcome, _ in early)
  assert not (place / 'untouched').exists()


@pytest.mark.usefixtures('late')
def test_no_refusal_claims_the_workdir_or_writes_results(place):
  written = {path.name for path in (place / 'run').iterdir()}
  assert written <= {'console.log', 'tokenizer.model', 'run.lock'}


# ---- Runs ----


@pytest.mark.parametrize('command', ['evaluate', 'export'])
def test_folders_without_a_run_and_missing_steps_are_refused(command, recorded, tmp_path):
  flags = [f'--out={tmp_path}/policy']
  if command == 'evaluate':
    data = [f'{name}={recorded.values.data[name]}' for name in ('train', 'evaluation', 'cache_dir')]
    flags = [f'--config={TINY_CONFIG}', *(f'--config.data.{value}' for value in data)]
  (tmp_path / 'config.json').write_text('{"seed": ')
  lines = {
    f'--checkpoint={tmp_path}/nowhere': r"nowhere: this is not a run's workdir, .* no config\.json",
    f'--checkpoint={tmp_path}': r'config\.json: cannot read the run.s config .*\. Resto',
  }
  commands = [[command, flag, *flags] for flag in lines]
  (tmp_path / 'begun').mkdir()
  shutil.copy(recorded.workdir / 'config.json', tmp_path / 'begun')
  lines['begun'] = r'/begun: the run has no checkpoint yet, .*\. Wait for its first .*, or choo'
  commands.append([command, f'--checkpoint={tmp_path}/begun', *flags])
  lines['step'] = r'checkpoints has no checkpoint for step 99\. Saved steps: 4, 8, .*32\.'
  commands.append([command, f'--checkpoint={recorded.workdir}', '--step=99', *flags])
  if command == 'evaluate':
    lines['model'] = r'config\.model\.width is 64, but the run was trained with 32\. Leave out --c'
    flags.append('--config.model.width=64')
    commands.append([command, f'--checkpoint={recorded.workdir}', *flags])
  for outcome, line in zip(forked.run(commands), lines.values(), strict=True):
    assert_refused(outcome.status, outcome.err, line)


# ---- In a process of its own ----


def test_a_process_ends_like_its_fork():
  process = subprocess.run(
    [sys.executable, '-m', 'exgrpo_jax', 'check', SMOKE, '--workdir=w', '--config.seed=x'],
    cwd=REPOSITORY,
    text=True,
    capture_output=True,
  )
  assert_refused(process.returncode, process.stderr, r"config\.seed='x': .* must be of type int")
  assert process.stdout == ''


@pytest.mark.parametrize('dtype', ['float32', 'auto'])
def test_a_valid_command_line_passes_the_check(dtype, place):
  command = ['check', SMOKE, f'--workdir={place}/new', f'--config.model.dtype={dtype}']
  (outcome,) = forked.run([command])
  assert (outcome.status, outcome.err) == (0, '')
  assert outcome.out.startswith('the flags and the config are valid; ')
  assert not (place / 'new').exists() and not outcome.used_device
