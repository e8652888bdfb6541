"""Fixtures of the data tests."""

import pytest

from exgrpo_jax.data import questions


@pytest.fixture
def config(tmp_path):
  """Default field names, and a cache of the test's own."""
  return questions.Config(
    train='',
    validation=(),
    evaluation=(),
    question_field='',
    answer_field='',
    solution_field='',
    default_kind='',
    unverifiable='refuse',
    overlong='refuse',
    cache_dir=str(tmp_path / 'cache'),
  )
