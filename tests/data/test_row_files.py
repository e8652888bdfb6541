"""Tests of row files: every format gives the same rows, and errors name the damaged place."""

import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.data import questions, row_files
from exgrpo_jax.errors import InputError
from tests.docs import documents

GOOD = b'{"question": "q", "answer": "a"}\n'


def rows(path):
  return list(row_files.opened(str(path)).rows(()))


def test_csv_and_json_are_read_like_jsonl(config, jsonl, tmp_path):
  lines = [{'question': f'{n}, "{n}"\n+0?', 'answer': f'{n}.50'} for n in range(3)]
  with (tmp_path / 'x.csv').open('w', newline='') as file:
    writer = csv.DictWriter(file, ['question', 'answer'])
    writer.writeheader()
    writer.writerows(lines)
  (tmp_path / 'x.json').write_text(json.dumps(lines))
  first = list(questions.load(config, jsonl(*lines, name='x.jsonl')))
  assert [question.answer for question in first] == ['0.50', '1.50', '2.50']
  assert list(questions.load(config, f'{tmp_path}/x.csv')) == first
  assert list(questions.load(config, f'{tmp_path}/x.json')) == first


def test_numbers_keep_their_spelling_and_a_byte_order_mark_is_skipped(jsonl):
  path = jsonl('\ufeff{"answer": 0.50}', '', '  ', '{"answer": 7e2, "n": 1}')
  assert rows(path) == [
    (f'{path}:1', {'answer': '0.50'}),
    (f'{path}:4', {'answer': '7e2', 'n': '1'}),
  ]
  assert row_files.opened(path).columns() == ['answer', 'n']
  as_numbers = row_files.opened(path, keep_spelling=False).rows({'n'})
  assert [row for _, row in as_numbers] == [{'answer': 0.5}, {'answer': 700}]


def test_the_python_task_in_the_docs_is_read_like_a_file(config, tmp_path):
  (task,) = documents.blocks((documents.DOCS / 'data.md').read_text(), 'python')
  (tmp_path / 'squares.py').write_text(task)
  loaded = questions.load(config, f'{tmp_path}/squares.py:test[1:3]')
  found = [(q.row, q.answer, q.source) for q in loaded]
  assert found == [(0, '1002001', 'squares'), (1, '1004004', 'squares')]
  assert loaded[0].columns == {'question': 'What is 1001 squared?', 'answer': 1002001}
  (tmp_path / 'squares.py').write_text(task.replace('n * n', 'n * n + 1'))
  assert questions.load(config, f'{tmp_path}/squares.py:test')[0].answer == '1000001'


@pytest.mark.parametrize(
  ('name', 'content', 'message'),
  [
    ('x.jsonl', GOOD + b'\n{"question": "q", "answ', r'x\.jsonl:3: not valid JSON'),
    ('x.jsonl', GOOD + b'["q", "a"]', r"x\.jsonl:2: \['q', 'a'\] is not an object"),
    ('x.jsonl', GOOD + b'{"a": "caf\xe9"}', r'x\.jsonl:2: not valid JSON .*UTF-8'),
    ('x.jsonl', GOOD + b'{"a": "3", "a": "2"}', r"x\.jsonl:2: 'a' occurs 2 times"),
    ('x.json', b'{"question": "q"}', r'x\.json: the file contains .* isn.t an array\. .*\.jsonl'),
    ('x.json', b'["a"]', r"x\.json: row 0: 'a' is not an object"),
    (
      'x.csv',
      b'question,answer\n1+1,2\n2+2\n',
      r'x\.csv: row 1: the row has 1 value, .* names 2 c',
    ),
    ('x.csv', b'question,answer\n1+1,2,3\n', r'x\.csv: row 0: the row has 3 values, .* names 2 c'),
    ('x.csv', b'question,answer\n"1"+1,2\n', r'x\.csv: row 0: not valid CSV'),
    ('x.csv', b'question,answer,answer\n1+1,2,3\n', r"x\.csv:1: 'answer' occurs 2 times"),
    ('x.csv', b'question,answer\n1+1,2\nq,caf\xe9\n', r'x\.csv:3: the text is not valid UTF.*0xe9'),
    (
      'x.csv',
      b'question;answer\n1+1;2\n',
      r"x\.csv:1: 'question;answer' .* no comma, so the file seems",
    ),
    ('x.csv', b'"question"\t"answer"\n"1,5"\t"2"\n', r'x\.csv:1: .* no comma, so the file seems'),
    ('x.parquet', b'PAR1', r'x\.parquet: not a complete parquet file'),
    ('x.py', b'def get_task():\n  return {"a": [1]}', r'x\.py:a: row 0: 1 is not an object'),
    ('x.py', b'def get_task():\n  return {"b": []}', r"the task has no split 'a' \(has: b\)\."),
    ('x.py', b'def get_task():\n  return {"a": None}', r'x\.py: TypeError: .* not iterable\. '),
    (
      'x.py',
      b'def get_task():\n  return {"a": (1 / 0 for _ in [0])}',
      r'x\.py:2: ZeroDivisionError: .* whose get_task\(\) returns',
    ),
    ('x.py', b'\nraise OSError("no")', r'x\.py:2: OSError: no\. .* whose get_task\(\) returns'),
    ('x.py', b'', r'x\.py: the file has no get_task\(\)'),
  ],
)
def test_a_damaged_file_is_refused_with_the_place(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(InputError, match=message):
    rows(f'{tmp_path}/{name}' + ':a' * name.endswith('.py'))


@pytest.mark.parametrize('name', ['x.jsonl', 'x.parquet', 'x.py:train'])
def test_a_missing_file_is_refused(tmp_path, name):
  with pytest.raises(InputError, match=r'/x\.\w+: there is no such file'):
    rows(f'{tmp_path}/{name}')


FLOATS = [0.1, 2.5, 33.3, None]


@pytest.mark.parametrize('kind', [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_parquet_floats_keep_their_shortest_spelling(tmp_path, kind):
  floats = pa.array([value and np.float64(value) for value in FLOATS]).cast(kind)
  counts = pa.array([1, 2, 3, 4])
  nested = pa.StructArray.from_arrays([floats, counts], ['x', 'n'])
  lists = pa.ListArray.from_arrays([0, 2, 2, 3, 4], floats)
  maps = pa.MapArray.from_arrays([0, 1, 2, 3, 4], ['a', 'b', 'c', 'd'], floats)
  table = pa.table({'x': floats, 'of': nested, 'some': lists, 'by': maps})
  pq.write_table(table, tmp_path / 'x.parquet')
  assert [row for _, row in rows(tmp_path / 'x.parquet')] == [
    {'x': 0.1, 'of': {'x': 0.1, 'n': 1}, 'some': [0.1, 2.5], 'by': [('a', 0.1)]},
    {'x': 2.5, 'of': {'x': 2.5, 'n': 2}, 'some': [], 'by': [('b', 2.5)]},
    {'x': 33.3, 'of': {'x': 33.3, 'n': 3}, 'some': [33.3], 'by': [('c', 33.3)]},
    {'x': None, 'of': {'x': None, 'n': 4}, 'some': [None], 'by': [('d', None)]},
  ]


@pytest.mark.parametrize('kind', [pa.string(), pa.binary()], ids=str)
def test_error_names_the_parquet_row_with_invalid_utf8(config, tmp_path, kind):
  answers = pa.array([b'2', b'caf\xe9'], pa.binary()).view(kind)
  pq.write_table(pa.table({'question': ['1+1', 'q'], 'answer': answers}), tmp_path / 'x.parquet')
  with pytest.raises(
    InputError, match=r"x\.parquet: row 1: .*'utf-8' codec .*Save the file as UTF-8"
  ):
    questions.load(config, str(tmp_path / 'x.parquet'))


@pytest.mark.parametrize('kind', [pa.timestamp('s'), pa.duration('s')], ids=str)
def test_error_names_the_parquet_row_with_an_invalid_date(tmp_path, kind):
  table = pa.table({'question': ['1+1', 'q'], 'at': pa.array([0, 10**15], kind)})
  pq.write_table(table, tmp_path / 'x.parquet')
  with pytest.raises(InputError, match=r"x\.parquet: row 1: .* in field 'at' is out of range"):
    rows(tmp_path / 'x.parquet')


def test_duplicate_parquet_columns_are_refused(tmp_path):
  arrays = [pa.array([text]) for text in ('1+1', '2', '3')]
  pq.write_table(pa.table(arrays, ['question', 'answer', 'answer']), tmp_path / 'x.parquet')
  with pytest.raises(InputError, match=r"x\.parquet: 'answer' occurs 2 times"):
    rows(tmp_path / 'x.parquet')
