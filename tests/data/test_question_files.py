"""Files are prepared once, as one data set, and again where anything has changed."""

import dataclasses
import pathlib

import pytest

from exgrpo_jax.data import question_files, questions
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import activity

LINES = [{'question': f'{n}+1?', 'answer': f'{n + 1}'} for n in range(5)]
GOOD = {'question': 'q', 'answer': 'a'}


def folders(config):
  return sorted(pathlib.Path(config.cache_dir, 'questions').iterdir())


def test_a_file_is_prepared_once_and_again_if_it_or_its_fields_change(config, jsonl):
  path = jsonl(*LINES)
  questions.load(config, path)
  first = folders(config)
  written = first[0].stat().st_mtime_ns
  questions.load(config, path + '[:2]')
  assert folders(config) == first and first[0].stat().st_mtime_ns == written
  assert questions.load(config, jsonl(GOOD))[0].answer == 'a'
  assert len(folders(config)) == 2
  renamed = jsonl(GOOD, name='renamed.jsonl')
  assert questions.load(config, renamed)[0].source == 'renamed'
  swapped = dataclasses.replace(config, question_field='answer', answer_field='question')
  assert questions.load(swapped, path)[0].answer == 'q'
  assert len(folders(config)) == 4


def test_several_files_are_one_data_set(config, jsonl, tmp_path):
  jsonl({'question': 'b', 'answer': '2'}, name='train-1.jsonl')
  jsonl({'question': 'a', 'answer': '1'}, name='train-0.jsonl')
  loaded = questions.load(config, f'{tmp_path}/train-*.jsonl')
  assert [(q.row, q.answer, q.source) for q in loaded] == [(0, '1', 'train'), (1, '2', 'train')]
  with pytest.raises(InputError, match=r'test-\*\.jsonl: there is no file of that pattern'):
    questions.load(config, f'{tmp_path}/test-*.jsonl')


@pytest.mark.parametrize('name', ['x.jsonl', 'x.csv', 'x.parquet'])
def test_a_file_without_rows_is_refused(config, parquet, tmp_path, name):
  (tmp_path / name).write_text('\n\n' if name == 'x.jsonl' else '')
  if name == 'x.parquet':
    parquet(name=name)
  with pytest.raises(InputError, match=rf'{name}: the file holds no question'):
    questions.load(config, str(tmp_path / name))


def test_a_file_that_cannot_be_read_is_refused(config, tmp_path):
  (tmp_path / 'x.jsonl').symlink_to('/proc/self/mem')
  with pytest.raises(InputError, match=r'x\.jsonl: the file cannot be read \(Input/output error\)'):
    questions.load(config, f'{tmp_path}/x.jsonl')


def test_a_file_that_changes_while_it_is_read_is_refused(config, jsonl, monkeypatch):
  path, of_file = jsonl(*LINES), question_files.records.of_file

  def changed_after(*args):
    found = of_file(*args)
    jsonl(*LINES, GOOD)
    return found

  monkeypatch.setattr(question_files.records, 'of_file', changed_after)
  with pytest.raises(InputError, match=r'train\.jsonl: the file changed while it was read; start'):
    questions.load(config, path)
  monkeypatch.undo()
  assert len(questions.load(config, path)) == 6


def test_a_long_preparation_says_how_far_it_is(config, jsonl, monkeypatch, capsys):
  monkeypatch.setattr(activity, 'LINE_SECONDS', 0.0)
  path = jsonl(*LINES)
  questions.load(config, path)
  counts = ['0 questions', '1 question', '2 questions', '3 questions', '4 questions']
  expected = [f'{path}: {count} prepared' for count in counts]
  assert capsys.readouterr().out.splitlines() == expected
