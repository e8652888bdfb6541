"""Commands in the documents can be run: their modules, flags, configs and keys exist."""

import re

import pytest

from exgrpo_jax.__main__ import COMMANDS
from studies import protocol
from tests.docs import documents
from tests.helpers.paths import REPOSITORY

_COMMAND = re.compile(r'(?:(?<![\w.-])exgrpo|-m exgrpo_jax) ([a-z]\w*)')
_NAMES = {name for group in COMMANDS.values() for name in group}
_FLAG = re.compile(r'(?<![\w-])--(\w+)')
_STUDY = re.compile(r'-m studies (?:run|figures) ([a-z]\w*)')
_CONFIG = re.compile(r'--(config|suite|sweep)=([^\s…]+)(?![^\s…])(?!…)')
_KEY = re.compile(r'(?<![\w.])(?:--)?config\.((?:\w+\.)*\w+)')
_SWEPT = re.compile(r"'((?:\w+\.)*\w+)': ")
_SCRIPT = re.compile(r'(?<![\w/])tpu_scripts/\w+\.sh')


@pytest.fixture(scope='module')
def keys():
  configuration = documents.load('configuration')
  return configuration.keys(configuration.Config)


def wrong(command, keys):
  """What a command names that does not exist."""
  found = [f'exgrpo {name}' for name in _COMMAND.findall(command) if name not in _NAMES]
  if _COMMAND.search(command):
    found += [f'--{name}' for name in _FLAG.findall(command) if name not in documents.flags()]
  found += [f'study {name}' for name in _STUDY.findall(command) if name not in protocol.names()]
  for kind, name in _CONFIG.findall(command):
    folder = {
      'config': 'configs',
      'suite': 'configs/suites',
      'sweep': 'configs/sweeps',
    }[kind]
    file, _, _ = name.partition(':')
    path = file if file.endswith('.py') else f'{folder}/{file}.py'
    if not (REPOSITORY / path).is_file():
      found.append(f'--{kind}={name}')
  # 'config.json' and 'config.py' are files.
  names = (name for name in _KEY.findall(command) if name not in ('json', 'py'))
  found += [f'config.{name}' for name in names if name not in keys]
  found += [name for name in _SCRIPT.findall(command) if not (REPOSITORY / name).is_file()]
  return found


@pytest.mark.parametrize('path', documents.DOCUMENTS, ids=documents.place)
def test_what_commands_name_exists(path, keys):
  problems = [
    f'{name} in: {command}'
    for _, command in documents.commands(path)
    for name in wrong(command, keys)
  ]
  assert problems == []


@pytest.mark.parametrize('path', documents.DOCUMENTS, ids=documents.place)
def test_keys_of_sweeps_exist(path, keys):
  swept = [
    key
    for block in documents.blocks(path.read_text(), 'python')
    if 'get_sweep' in block
    for key in _SWEPT.findall(block)
  ]
  assert [key for key in swept if key not in keys] == []


@pytest.mark.parametrize(
  ('command', 'problem'),
  [
    ('exgrpo trian --config=smoke', 'exgrpo trian'),
    ('python -m exgrpo_jax errors', 'exgrpo errors'),
    ('exgrpo train --workdri=/tmp/x', '--workdri'),
    ('exgrpo train --config=configs/smok.py', '--config=configs/smok.py'),
    ('exgrpo sweep --sweep=rato', '--sweep=rato'),
    ('python -m studies run smok --workdir=/tmp/x', 'study smok'),
    ('--config.replay.ratoi=0', 'config.replay.ratoi'),
    ('tpu_scripts/resum.sh --dry_run', 'tpu_scripts/resum.sh'),
  ],
)
def test_what_does_not_exist_is_found(command, problem, keys):
  assert wrong(command, keys) == [problem]


@pytest.mark.parametrize(
  'command',
  [
    'exgrpo train --config=configs/smoke.py --workdir=/tmp/x --config.replay.ratio=0',
    'exgrpo train --config=smoke --workdir=/tmp/x --config.data.train=x.jsonl',
    'python -m benchmarks update rollout.questions=8',
    'config.json and config.replay',
    'tpu_scripts/resume.sh --dry_run',
  ],
)
def test_what_exists_is_not_reported(command, keys):
  assert wrong(command, keys) == []
