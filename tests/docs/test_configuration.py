"""The page of all settings is what the code says."""

import dataclasses

import pytest

from exgrpo_jax.config import PAPER, setting
from tests.docs import documents


@dataclasses.dataclass(frozen=True)
class Inner:
  """Where things lie; a second sentence.

  A second paragraph.
  """

  path: str = setting('', None, "the *.model of `a_b`, ended by '</think>'; '' | none")
  kinds: tuple[str, ...] = setting(('a',), None, 'all of them')


@dataclasses.dataclass(frozen=True)
class Outer:
  inner: Inner
  ratio: float = setting(0.5, '[0, 1)', 'a share', PAPER)
  clip: str = setting('never', ('always', 'never'), 'when')


@pytest.fixture(scope='module')
def configuration():
  return documents.load('configuration')


def test_the_page_checked_in_is_the_one_that_is_made(configuration):
  made = configuration.page(configuration.Config)
  assert made == configuration.PAGE.read_text(encoding='utf-8'), (
    'docs/configuration.md is out of date; run: python docs/configuration.py'
  )


def test_a_setting_is_a_row_with_type_range_default_origin_and_meaning(configuration):
  page = configuration.page(Outer)
  rows = page.splitlines()
  assert '| `ratio` | float | `[0, 1)` | `0.5` (paper) | a share |' in rows
  assert "| `clip` | str | `'always'`, `'never'` | `'never'` | when |" in rows
  assert "| `inner.kinds` | tuple of str |  | `('a',)` | all of them |" in rows
  # What Markdown would read is escaped outside of code.
  assert r"the \*.model of `a_b`, ended by '&lt;/think>'; '' \| none" in page
  # A section begins with the first paragraph of its docstring, where there is one.
  assert '## inner\n\nWhere things lie; a second sentence. Code: [' in page
  assert 'A second paragraph' not in page and 'Outer(' not in page


def test_keys_are_the_settings_and_their_sections(configuration):
  assert configuration.keys(Outer) == {'ratio', 'clip', 'inner', 'inner.path', 'inner.kinds'}
