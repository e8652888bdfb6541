"""The page of all settings is what the code says."""

import dataclasses

import pytest

from exgrpo_jax.config import setting
from exgrpo_jax.configs import base
from tests.docs import documents


@dataclasses.dataclass(frozen=True)
class Inner:
  """Where things lie; a second sentence.

  A second paragraph.
  """

  path: str = setting(None, "the *.model of `a_b`, ended by '</think>'; '' | none")
  kinds: tuple[str, ...] = setting(None, 'all of them')


@dataclasses.dataclass(frozen=True)
class Outer:
  ratio: float = setting('[0, 1)', 'a share')
  clip: str = setting(('always', 'never'), 'when')
  inner: Inner


@pytest.fixture(scope='module')
def configuration():
  return documents.load('configuration')


def test_the_page_checked_in_is_the_one_that_is_made(configuration):
  made = configuration.page(configuration.Config, base.get_config().to_dict())
  assert made == configuration.PAGE.read_text(encoding='utf-8'), (
    'docs/configuration.md is out of date; run: python docs/configuration.py'
  )


def test_a_setting_is_a_row_with_type_range_default_and_meaning(configuration):
  values = {'ratio': 0.5, 'clip': 'never', 'inner': {'path': '', 'kinds': ('a',)}}
  rows = configuration.page(Outer, values).splitlines()
  assert '| `ratio` | float | `[0, 1)` | `0.5` | a share |' in rows
  assert "| `clip` | str | `'always'`, `'never'` | `'never'` | when |" in rows
  assert "| `inner.kinds` | tuple of str |  | `('a',)` | all of them |" in rows


def test_what_markdown_would_read_is_escaped_outside_of_code(configuration):
  page = configuration.page(Outer, {'ratio': 0, 'clip': '', 'inner': {'path': '', 'kinds': ()}})
  assert r"the \*.model of `a_b`, ended by '&lt;/think>'; '' \| none" in page


def test_a_section_begins_with_the_first_paragraph_of_its_docstring(configuration):
  page = configuration.page(Outer, {'ratio': 0, 'clip': '', 'inner': {'path': '', 'kinds': ()}})
  assert '## inner\n\nWhere things lie; a second sentence. Code: [' in page
  assert 'A second paragraph' not in page
  assert 'Outer(ratio' not in page  # what dataclass writes where there is no docstring


def test_keys_are_the_settings_and_their_sections(configuration):
  assert configuration.keys(Outer) == {'ratio', 'clip', 'inner', 'inner.path', 'inner.kinds'}


def test_every_value_of_the_base_config_is_on_the_page(configuration):
  def dotted(values, prefix=''):
    for name, value in values.items():
      if isinstance(value, dict):
        yield from dotted(value, f'{prefix}{name}.')
      else:
        yield prefix + name

  page = configuration.PAGE.read_text(encoding='utf-8')
  missing = [key for key in dotted(base.get_config().to_dict()) if f'| `{key}` |' not in page]
  assert missing == []
