"""Phrases that make our texts hard to read are in none of them.

Docstrings begin with a verb by a rule of ruff (D401).
"""

import functools
import re

import pytest

from tests.helpers.paths import REPOSITORY

PHRASES = {
  'again': r'\banew\b',
  'anyone, you': r'\bwhoever\b',
  'next to, except': r'\bbeside\b',
  'the thing itself': r'\b(that|those) of\b',
  'a new sentence': r'\bof which\b',
  'fix': r'\bmend(s|ed|ing)?\b',
  'because': r', for (it|the|they|its|there) ',
  'a verb': r'^ *"""(What|Whether|How) ',
}
FOLDERS = ('exgrpo_jax', 'configs', 'studies', 'benchmarks', 'docs')


@functools.cache
def texts():
  """(file, line number, line) of everything that is written by hand."""
  found = []
  paths = [path for folder in FOLDERS for path in sorted((REPOSITORY / folder).rglob('*'))]
  for path in [*paths, *REPOSITORY.glob('*.md')]:
    if path.suffix in {'.py', '.md', '.js', '.html'} and not {'vendor', 'tests'} & {*path.parts}:
      for number, line in enumerate(path.read_text().splitlines(), 1):
        found.append((str(path.relative_to(REPOSITORY)), number, line))
  return found


@pytest.mark.parametrize(('instead', 'phrase'), PHRASES.items())
def test_a_phrase_that_is_hard_to_read_is_nowhere_else(instead, phrase):
  found = [
    f'{name}:{number}: {line.strip()}' for name, number, line in texts() if re.search(phrase, line)
  ]
  assert not found, f'say: {instead}'
