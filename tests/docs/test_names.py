"""Files, functions, settings and metrics that the documents name in code letters exist.

Read are names such as `rollout/stages.py`, `train.collect`, `Rollout.plan`, `objective.token_loss`,
`collect()`, `replay.ratio=0`, `mesh.*`, `replay/ratio_mean` and `metrics.jsonl`.
"""

import re

import pytest

from exgrpo_jax import config
from exgrpo_jax.runtime import workdir
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


@pytest.fixture(scope='module')
def keys():
  configuration = documents.load('configuration')
  return configuration.keys(configuration.Config)


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
    while len(parts) > 1 and (PACKAGE / parts[0]).is_dir():
      parts = parts[1:] if (PACKAGE / parts[0] / f'{parts[1]}.py').exists() else parts
      break
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


@pytest.mark.parametrize('path', documents.DOCUMENTS, ids=documents.place)
def test_names_in_code_letters_exist(path, keys):
  texts = dict.fromkeys(text for _, text in documents.inline_code(path))
  assert [text for text in texts if is_missing(text, keys)] == []


@pytest.mark.parametrize('path', documents.DOCUMENTS, ids=documents.place)
def test_code_letters_are_closed(path):
  paragraphs = documents.paragraphs(path.read_text())
  assert [paragraph for paragraph in paragraphs if paragraph.count('`') % 2] == []


def test_the_settings_that_a_resumed_run_may_change_are_those_of_the_code():
  text = (documents.DOCS / 'running.md').read_text()
  section = re.search(r'## Elastic resume\n(.*?)\n## ', text, re.DOTALL)[1]
  listed = re.findall(r'`([^`]+)`', section.partition('\n- ')[2])
  free = {f'{name}*' if name.endswith('.') else name for name in workdir.FREE}
  assert set(listed) == free | {'num_steps'}


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
  table = [
    [set(re.findall(r'`([\w.]+)', cell)) for cell in line.strip('|').split(' | ')]
    for line in (documents.DOCS / 'coming_from.md').read_text().split('## ')[1].splitlines()
    if line.startswith('| ')
  ]
  rows = [[set(names.split()) for names in row[:3]] for row in config.ROWS]
  assert [row[:2] for row in table[2:-1]] == [row[:2] for row in rows]
  assert all(row[2] >= ours for row, (_, _, ours) in zip(table[2:-1], rows, strict=True))
  assert set().union(*(ours for _, _, ours in rows)) <= set(keys)
