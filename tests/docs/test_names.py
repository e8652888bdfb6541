"""Files, functions, settings and metrics that the documents name in code letters exist.

Read are names such as `rollout/stages.py`, `train.collect`, `Run.policy`, `objective.token_loss`,
`collect()`, `replay.ratio=0`, `mesh.*`, `replay/ratio_mean` and `metrics.jsonl`.
"""

import collections
import os
import pathlib
import re

import pytest

from exgrpo_jax import config
from exgrpo_jax.__main__ import COMMANDS
from exgrpo_jax.configs import base
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.runtime import workdir
from studies import protocol
from tests.docs import documents
from tests.docs.documents import PACKAGE, STUDIES, names
from tests.helpers.paths import REPOSITORY

_FILE = re.compile(r'[\w./-]+\.(?:py|md|sh|toml|cfg|yml|cff)')
_DATA_FILE = re.compile(r'(?:[\w/-]+/)?([\w.-]+\.(?:csv|html|jsonl?|png|svg|txt|log|model|lock))')
_DOTTED = re.compile(r'[A-Za-z_]\w*(?:\.\w+)+')
_SETTING = re.compile(r'([a-z]\w*(?:\.\w+)*\.(?:\w+|\*))(?:=.*)?')
_CALL = re.compile(r'(\w+)\(\)')
_METRIC = re.compile(r'([a-z]\w*)/([\w@]*)…?')
_MODULE_AND_NAME = re.compile(r'(exgrpo_jax[\w.]*):(\w+)')
# Libraries whose names the documents may mention.
_FOREIGN = ('absl', 'flax', 'jax', 'jnp', 'ml_collections', 'nnx', 'np', 'optax', 'orbax', 'pytest')
_FOREIGN += ('reward_model',)  # a column of verl's
# Examples of the user's own, and data.
_EXAMPLES = ('package.module', 'x.jsonl', 'cases.jsonl', '.parquet', 'owner/name')
_OWN_CONFIG = 'my_config.py'  # docs/running.md shows how to write it


@pytest.fixture(scope='module')
def keys():
  configuration = documents.load('configuration')
  return configuration.keys(configuration.RunConfig)


def is_missing(text, keys):
  """Whether code letters name something of this repository that is not there."""
  text = text.removeprefix('--').removeprefix('config.') if '.' in text else text
  if any(example in text for example in _EXAMPLES) or '://' in text or ' ' in text:
    return False  # commands have a test of their own
  if _FILE.fullmatch(text):
    return not (_has_file(text) or f"'{text}'" in documents.source())
  if match := _DATA_FILE.fullmatch(text):
    return match[1] not in documents.source()
  if match := _MODULE_AND_NAME.fullmatch(text):
    return not _has_attribute(f'{match[1]}.{match[2]}')
  if _DOTTED.fullmatch(text) and _has_attribute(text):
    return False
  if match := _SETTING.fullmatch(text):
    name = match[1].removesuffix('.*')
    return name not in keys and name.split('.')[0] not in _FOREIGN
  if _DOTTED.fullmatch(text):
    return text.split('.')[0] not in _FOREIGN
  if match := _CALL.fullmatch(text):
    return match[1] not in documents.identifiers()
  if match := _METRIC.fullmatch(text):
    return not _has_path(text) and not set(filter(None, match.groups())) <= documents.identifiers()
  return False


def _has_file(text):
  """A path from the repository's top, the package or docs/, or a file's name alone."""
  if any((folder / text).is_file() for folder in (REPOSITORY, PACKAGE, documents.DOCS, STUDIES)):
    return True
  folders = (PACKAGE, STUDIES, *(REPOSITORY / name for name in ('configs', 'tpu_scripts', 'tests')))
  return '/' not in text and any(next(folder.rglob(text), None) for folder in folders)


def _has_path(text):
  return (REPOSITORY / text).exists() or (PACKAGE / text).exists()


def _has_attribute(text):
  """Whether the package has `module.name`, `Class.name` or `module.Class.name`."""
  parts = text.split('.')
  if parts[0] == 'exgrpo_jax':
    parts = parts[1:]
    if len(parts) > 1 and (PACKAGE / parts[0] / f'{parts[1]}.py').exists():
      parts = parts[1:]
    if len(parts) == 1:
      return parts[0] in documents.modules()
  first, *rest = parts
  for path in documents.modules().get(first, ()):
    if not rest or _is_bound(path, rest):
      return True
    is_inside = path.stem == '__init__' and rest[0] in documents.modules()
    if is_inside and _has_attribute('.'.join(rest)):
      return True
  everywhere = (path for paths in documents.modules().values() for path in paths)
  return bool(rest) and any(_is_bound(path, parts) for path in everywhere if first in names(path))


def _is_bound(path, parts):
  first, *rest = parts
  bound = names(path)
  return first in bound and (not rest or rest[0] in bound[first])


each_document = pytest.mark.parametrize('path', documents.DOCUMENTS, ids=documents.place)


@each_document
def test_names_in_code_letters_exist(path, keys):
  texts = dict.fromkeys(documents.inline_code(path))
  assert [text for text in texts if is_missing(text, keys)] == []


@each_document
def test_code_letters_are_closed(path):
  paragraphs = documents.paragraphs(path.read_text())
  assert [paragraph for paragraph in paragraphs if paragraph.count('`') % 2] == []


def test_the_settings_that_a_resumed_run_may_change_are_those_of_the_code():
  text = (documents.DOCS / 'running.md').read_text()
  heading = '## Which settings may change when a run resumes?\n'
  section = text.partition(heading)[2].partition('\n## ')[0]
  listed = re.findall(r'`([^`]+)`', section.partition('\n- ')[2])
  free = {f'{name}*' if name.endswith('.') else name for name in workdir.FREE}
  assert set(listed) == free | {'num_steps', 'num_epochs'}


EXISTING = """
rollout/stages.py configs/base.py replay.py objective.token_loss algorithm.objective
exgrpo_jax.algorithm.objective exgrpo_jax.grading.rewards:think_format train.main
Batch.advantage_B datatypes.Batch.advantage_B config.replay.ratio replay.ratio=0
--config.replay.ratio=0.25 mesh.* replay/ratio_mean time/… metrics.jsonl jax.lax.map token_loss()
"""
MISSPELT = """
rollout/stagse.py replya.py objective.tokn_loss objectvie.token_loss
exgrpo_jax.algorithm.objectvie exgrpo_jax.grading.rewards:thnk_format Batch.advantage_Z
config.replay.ratoi replay.ratoi=0 mseh.* replay/ratio_maen metrcis.jsonl token_los()
"""


def test_only_what_does_not_exist_is_reported(keys):
  assert [text for text in EXISTING.split() if is_missing(text, keys)] == []
  assert [text for text in MISSPELT.split() if not is_missing(text, keys)] == []


def test_the_page_on_trl_and_verl_has_the_counterparts_that_hints_have(keys):
  page = documents.DOCS / 'coming_from.md'
  assert documents.load('configuration').coming_from() == page.read_text(), 'run configuration.py'
  rows = config.counterparts()
  lines = page.read_text().partition('<!-- The end')[0].splitlines()
  assert len(rows) == sum(line.startswith(('| `', '| —')) for line in lines)
  assert {name for row in rows for name in row.ours} <= set(keys)
  assert all(row.ours or row.note for row in rows)
  values = [row.note for row in rows if '=' in (row.trl + row.verl)[0]]
  for setting, value in re.findall(r'([\w.]+)=(\w+)', ' '.join(values)):
    always = {'objective.clip_schedule': 'always'}
    parse_config(config.overridden(base.get_config(), {setting: value, **always}))


@pytest.mark.full
def test_every_option_of_trl_is_in_one_row():
  trl = pytest.importorskip('trl', '1.16')
  named = collections.Counter(name for row in config.counterparts() for name in row.trl)
  assert set(trl.GRPOConfig.__annotations__) - set(named) == set()
  assert [name for name, count in named.items() if count > 1] == []


# ---- Links between the documents, and from them to files, lead somewhere ----


def broken(path, target):
  """Why a link of the document at `path` leads nowhere; '' where it leads somewhere."""
  file, _, anchor = target.partition('#')
  found = pathlib.Path(os.path.normpath(path.parent / file)) if file else path
  if not found.is_relative_to(REPOSITORY) or not found.exists():
    return f'{target}: no such file'
  if anchor and anchor not in documents.anchors(found):
    return f'{target}: no such heading'
  return ''


@pytest.mark.parametrize('path', [*documents.DOCUMENTS, documents.CHANGELOG], ids=documents.place)
def test_relative_links_lead_to_files_and_headings(path):
  targets = [target for target in documents.links(path) if '://' not in target]
  assert list(filter(None, (broken(path, target) for target in targets))) == []


def test_a_link_that_leads_nowhere_is_found():
  page = documents.DOCS / 'index.md'
  assert broken(page, '../README.md') == ''
  assert broken(page, 'measuring.md#how-fast-is-this-machine') == ''
  assert broken(page, '../READMEE.md')
  assert broken(page, 'measuring.md#how-fast-is-this')
  assert broken(page, '../../elsewhere.md')


def test_every_page_is_in_the_navigation():
  text = (REPOSITORY / 'mkdocs.yml').read_text()
  assert [path.name for path in documents.DOCS.glob('*.md') if f': {path.name}\n' not in text] == []


# ---- The hook that makes them links to the repository's host ----


@pytest.fixture(scope='module')
def hook():
  return documents.load('hooks').link_to_repository


@pytest.mark.parametrize(
  ('markdown', 'expected'),
  [
    ('[a](../f.py)', '[a](https://host/r/blob/main/f.py)'),
    ('[a](../sub/f.md#b-c)', '[a](https://host/r/blob/main/sub/f.md#b-c)'),
    ('[a](../sub/)', '[a](https://host/r/tree/main/sub)'),
    ('[a](page.md#x) and [b](https://x.org)', '[a](page.md#x) and [b](https://x.org)'),
  ],
  ids=['file', 'anchor', 'folder', 'inside or elsewhere'],
)
def test_links_out_of_the_pages_go_to_the_host(hook, tmp_path, markdown, expected):
  for name in ('f.py', 'sub/f.md', 'docs/page.md'):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
  docs = tmp_path / 'docs'
  assert hook(markdown, docs, docs, 'https://host/r/') == (expected, [])


def test_the_hook_tells_of_files_that_do_not_exist(hook, tmp_path):
  docs = tmp_path / 'docs'
  docs.mkdir()
  text = '[a](../gone.py) [b](../../outside.py)'
  assert hook(text, docs, docs, 'https://host/r') == (text, ['../gone.py', '../../outside.py'])


# ---- Commands in the documents can be run: their modules, flags, configs and keys exist ----


_COMMAND = re.compile(r'(?:(?<![\w.-])exgrpo|-m exgrpo_jax) ([a-z]\w*)')
_NAMES = {name for group in COMMANDS.values() for name in group}
_FLAG = re.compile(r'(?<![\w-])--(\w+)')
_STUDY = re.compile(r'-m studies (?:run|figures) ([a-z]\w*)')
_CONFIG = re.compile(r'--(config|suite|sweep)=([^\s…]+)(?![^\s…])(?!…)')
_KEY = re.compile(r'(?<![\w.])(?:--)?config\.((?:\w+\.)*\w+)')
_SWEPT = re.compile(r"'((?:\w+\.)*\w+)': ")
_SCRIPT = re.compile(r'(?<![\w/])tpu_scripts/\w+\.sh')


def wrong(command, keys):
  """What a command names that does not exist."""
  found = [f'exgrpo {name}' for name in _COMMAND.findall(command) if name not in _NAMES]
  if _COMMAND.search(command):
    command = re.sub('--sbatch="[^"]*"', '--sbatch', command)  # its options are sbatch's
    found += [f'--{name}' for name in _FLAG.findall(command) if name not in documents.flags()]
  found += [f'study {name}' for name in _STUDY.findall(command) if name not in protocol.names()]
  for kind, name in _CONFIG.findall(command):
    folder = {'config': 'configs', 'suite': 'configs/suites', 'sweep': 'configs/sweeps'}[kind]
    file, _, _ = name.partition(':')
    path = file if file.endswith('.py') else f'{folder}/{file}.py'
    if path != _OWN_CONFIG and not (REPOSITORY / path).is_file():
      found.append(f'--{kind}={name}')
  # 'config.json' and 'config.py' are files.
  names = (name for name in _KEY.findall(command) if name not in ('json', 'py'))
  found += [f'config.{name}' for name in names if name not in keys]
  found += [name for name in _SCRIPT.findall(command) if not (REPOSITORY / name).is_file()]
  return found


@each_document
def test_what_commands_name_exists(path, keys):
  problems = {command: wrong(command, keys) for command in documents.commands(path)}
  assert {command: names for command, names in problems.items() if names} == {}


@each_document
def test_keys_of_sweeps_exist(path, keys):
  blocks = documents.blocks(path.read_text(), 'python')
  sweeps = [block for block in blocks if 'get_sweep' in block]
  assert {key for block in sweeps for key in _SWEPT.findall(block)} <= {*keys}


@pytest.mark.parametrize(
  ('command', 'problems'),
  [
    ('exgrpo trian --config=smoke', ['exgrpo trian']),
    ('python -m exgrpo_jax errors', ['exgrpo errors']),
    ('exgrpo train --workdri=/tmp/x', ['--workdri']),
    ('exgrpo train --config=configs/smok.py', ['--config=configs/smok.py']),
    ('exgrpo sweep --sweep=rato', ['--sweep=rato']),
    ('python -m studies run smok --workdir=/tmp/x', ['study smok']),
    ('--config.replay.ratoi=0', ['config.replay.ratoi']),
    ('tpu_scripts/resum.sh --dry_run', ['tpu_scripts/resum.sh']),
    ('exgrpo train --config=configs/smoke.py --workdir=/tmp/x --config.replay.ratio=0', []),
    ('exgrpo train --config=smoke --workdir=/tmp/x --config.data.train=x.jsonl', []),
    ('python -m benchmarks update rollout.questions=8', []),
    ('config.json and config.replay', []),
    ('tpu_scripts/resume.sh --dry_run', []),
  ],
)
def test_only_what_does_not_exist_is_found(command, problems, keys):
  assert wrong(command, keys) == problems
