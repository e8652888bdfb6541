"""Tests of question sets: what hosts compare. Limits are tested in test_experiment.py."""

import dataclasses

import pytest

from exgrpo_jax.data import prompt, question_set, tokenizer
from exgrpo_jax.runtime import hosts

PLAIN = prompt.Config(template='plain', system='')
LINES = [{'question': f'{"1+" * n}1', 'answer': f'{n + 1}'} for n in range(6)]


@pytest.fixture
def compared(config, jsonl, tmp_path, monkeypatch):
  """A function: what hosts compare of a file's questions, prepared in a cache of that name."""
  tokenizer.train(['1+1\n'] * 9, 300, tmp_path / 'tokenizer.model')
  opened, seen = tokenizer.load(tmp_path / 'tokenizer.model'), []
  monkeypatch.setattr(hosts, 'check_same', lambda *args: seen.append(args[2]()))

  def load(lines, cache, limit):
    own = dataclasses.replace(config, cache_dir=str(tmp_path / cache), overlong='drop')
    question_set.load(own, jsonl(*lines), opened, PLAIN, limit)
    return seen.pop()

  return load


def test_hosts_compare_the_questions_that_they_have_read(compared):
  same = compared(LINES, 'first', 9)
  assert compared(LINES, 'first', 9) == same  # from the file of prompts
  assert compared(LINES, 'second', 9) == same
  assert compared([{**LINES[0], 'answer': '7'}, *LINES[1:]], 'second', 9) != same
  assert compared(LINES[::-1], 'second', 9) != same
  assert compared(LINES, 'second', 5) != same
