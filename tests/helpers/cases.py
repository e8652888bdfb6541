"""Tables of cases that lie in files beside the tests: tests/ROOM/cases/."""

import json

import pytest

from tests.helpers.paths import REPOSITORY

# For every clone; real data is larger but optional.
RESPONSES = REPOSITORY / 'tests' / 'grading' / 'cases' / 'responses.jsonl'


def rows(room, name):
  """The objects of a file of JSON lines."""
  return [json.loads(line) for line in _path(room, name).read_text().splitlines()]


def lines(room, name):
  """(left, right) of each line 'left  →  right'; '# ' begins a comment."""
  text = _path(room, name).read_text().splitlines()
  return [tuple(line.split('  →  ')) for line in text if not line.startswith('# ')]


def settings(room, name):
  """(settings, what the refusal says) of each object of a file; lists are tuples."""
  return [
    pytest.param(
      {k: tuple(v) if isinstance(v, list) else v for k, v in row['settings'].items()},
      row['message'],
      id=', '.join(f'{k}={v}' for k, v in row['settings'].items()),
    )
    for row in rows(room, name)
  ]


def responses():
  """Responses to judge: the fields of `exgrpo verify --file`, and 'about', what a case tests."""
  return rows('grading', 'responses.jsonl')


def _path(room, name):
  return REPOSITORY / 'tests' / room / 'cases' / name
