"""Training questions from a public dataset's files."""

import json
import re
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.commands import prepare
from exgrpo_jax.configs import base
from exgrpo_jax.data import questions
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.experiment import parse_config


def verl_row(number, **changes):
  """As in Elliott/Openr1-Math-46k-8192."""
  return {
    'data_source': 'openr1',
    'prompt': [
      {'role': 'system', 'content': 'Think.'},
      {'role': 'user', 'content': f'{number}+0?'},
    ],
    'target': [{'role': 'assistant', 'content': f'<think>\nlong</think>{number}'}],
    'ability': 'math',
    'reward_model': {'ground_truth': str(number), 'style': 'rule'},
    'extra_info': {'index': number, 'split': 'train'},
  } | changes


def problem_row(number, **changes):
  """As in open-r1/OpenR1-Math-220k."""
  answer = str(number + 1)
  row = {'problem': f'{number}+1?', 'solution': f'It is {answer}.', 'answer': answer}
  return row | {'source': 'olympiads'} | changes


@pytest.fixture
def folder(tmp_path):
  """As `hf download` leaves it: shards in a folder data/, and its own notes in .cache/."""
  shards = tmp_path / 'openr1' / 'data'
  shards.mkdir(parents=True)
  (tmp_path / 'openr1' / 'README.md').write_text('# OpenR1')
  (tmp_path / 'openr1' / '.cache').mkdir()
  (tmp_path / 'openr1' / '.cache' / 'old.parquet').write_text('no parquet')
  bad = [{'ground_truth': '', 'style': 'rule'}, None]
  write(shards / 'train-00000-of-00002.parquet', [verl_row(0), verl_row(1, reward_model=bad[0])])
  write(
    shards / 'train-00001-of-00002.parquet',
    [verl_row(2), verl_row(3, reward_model=bad[1]), verl_row(4, prompt=[]), verl_row(2)],
  )
  return tmp_path / 'openr1'


def write(path, rows):
  pq.write_table(pa.Table.from_pylist(rows), path)
  return path


@pytest.fixture
def run(tmp_path, capsys):
  """A function that runs the command and returns (rows written, output)."""

  def run(*places, keep_target=False):
    out = tmp_path / 'openr1.parquet'
    data = [str(place) for place in places]
    prepare.main(types.SimpleNamespace(data=data, out=str(out), keep_target=keep_target))
    return pq.read_table(out).to_pylist(), capsys.readouterr().out

  return run


def load(path, **settings):
  """The questions of a prepared file, as training reads them."""
  config = base.get_config()
  config.data.update(dict(cache_dir=str(path.parent / 'cache'), **settings))
  return list(questions.load(parse_config(config).data, str(path)))


def test_a_folder_of_shards_becomes_one_file_without_the_solutions(run, folder, tmp_path):
  rows, printed = run(folder)
  assert [row['reward_model']['ground_truth'] for row in rows] == ['0', '2', '2']
  columns = {'data_source', 'prompt', 'ability', 'reward_model', 'extra_info'}
  assert [set(row) for row in rows] == [columns] * 3
  for line in (
    r'columns left out: target$',
    r'train-00000-of-00002\.parquet: 2 rows, verl.s columns$',
    r'train-00001-of-00002\.parquet: 4 rows, verl.s columns$',
    r'^left out: 2 rows with no ground truth$',
    r'^left out: 1 row with no prompt$',
    r'openr1\.parquet: 3 questions, 2 of them distinct$',
  ):
    assert re.search(line, printed, re.MULTILINE), (line, printed)
  read = load(tmp_path / 'openr1.parquet', default_kind='math')
  assert [question.answer for question in read] == ['0', '2', '2']
  assert read[1].messages == (Message('system', 'Think.'), Message('user', '2+0?'))


def test_solutions_are_kept_on_request(run, folder, tmp_path):
  rows, printed = run(folder, keep_target=True)
  assert rows[1]['target'] == '<think>\nlong</think>2' and 'columns left out' not in printed
  read = load(tmp_path / 'openr1.parquet', default_kind='math', solution_field='target')
  assert read[1].solution == '<think>\nlong</think>2'


@pytest.mark.parametrize('ending', ['parquet', 'jsonl'])
def test_problems_and_answers_become_prompts_without_a_system_message(ending, run, tmp_path):
  unusable = dict(answer='proof'), dict(answer=None), dict(problem=' ')
  found = [problem_row(number, **changes) for number, changes in enumerate(({}, *unusable))]
  found.append(problem_row(4, answer='0.50'))
  place = tmp_path / f'default.{ending}'
  if ending == 'parquet':
    write(place, found)
  else:
    place.write_text('\n\n'.join(map(json.dumps, found)))
  rows, printed = run(place)
  assert [row['extra_info']['index'] for row in rows] == [0, 1]
  assert 'left out: 1 row with proof instead of a ground truth' in printed
  assert 'columns left out: solution, source' in printed
  read = load(tmp_path / 'openr1.parquet')
  assert [question.answer for question in read] == ['1', '0.50']
  assert read[0].messages == (Message('user', '0+1?'),)


def test_a_list_of_accepted_answers_is_one_truth(run, tmp_path):
  found = [verl_row(0, reward_model={'ground_truth': ['4', 'four']})]
  write(tmp_path / 'problems.parquet', [problem_row(1, answer=['5']), problem_row(2, answer=[])])
  rows, printed = run(write(tmp_path / 'verl.parquet', found), tmp_path / 'problems.parquet')
  assert [row['reward_model']['ground_truth'] for row in rows] == ['["4", "four"]', '["5"]']
  assert 'left out: 1 row with no ground truth' in printed


def test_truths_that_cannot_be_checked_are_left_out_and_counted(run, tmp_path):
  truths = {0: '1', 1: '1/2', 2: float('nan'), 3: '7' * 5000}
  found = [verl_row(n, reward_model={'ground_truth': truth}) for n, truth in truths.items()]
  found += [verl_row(0, reward_model={'ground_truth': '0'})]  # asked again
  found += [verl_row(1, reward_model={'ground_truth': '0.5'}, extra_info={'index': '9' * 5000})]
  path = tmp_path / 'x.jsonl'
  path.write_text('\n'.join(map(json.dumps, found)))
  rows, printed = run(path)
  assert [row['reward_model']['ground_truth'] for row in rows] == ['1/2', '7' * 5000, '0.5']
  assert 'left out: 1 row with no ground truth' in printed
  assert re.search(
    r'left out: 2 rows with conflicting answers to the same question, such as \S+x\.jsonl:1 '
    r"\('1'\) and \S+x\.jsonl:5 \('0'\)",
    printed,
  )


@pytest.mark.parametrize(
  ('name', 'rows', 'message'),
  [
    ('x.parquet', [{'question': '1'}], r"x\.parquet: no question column .* verl's columns"),
    ('x.parquet', [verl_row(0, prompt='1+1')], r"row 0: prompt is '1\+1'\. It must be a list of"),
    ('x.parquet', [problem_row(0, problem=5)], r'row 0: problem is 5\. It must be text'),
    ('x.parquet', [problem_row(0, answer=True)], r"row 0: field 'answer' is True\. It must be"),
    (
      'x.jsonl',
      '{"prompt": [{"role": "user", "content": "1"}], "reward_model": {"ground_truth": [null]}}',
      r"jsonl:1: field 'reward_model\.ground_truth\[0\]' is null\. It must be",
    ),
    (
      'x.parquet',
      [verl_row(0, reward_model={'ground_truth': b'5'})],
      r"row 0: reward_model is {'ground_truth': b'5'}\. It must",
    ),
    ('x.jsonl', r'{"problem": "\ud83d", "answer": "1"}', "jsonl:1: field 'content' is not valid"),
    ('x.jsonl', json.dumps(verl_row(0, ability='\ud83d')), "jsonl:1: field 'ability' is not valid"),
    ('x.parquet', [problem_row(0, answer='')], r'no rows are left, so \S+ was not written'),
    ('x.parquet', 'PAR1', r'x\.parquet: not a complete parquet file \('),
    ('x.jsonl', '{"problem": ', r'x\.jsonl:1: not valid JSON'),
    ('x.csv', 'a,b', r'x\.csv must be a folder, or a file that ends in \.jsonl or \.parquet'),
    ('empty/x.txt', '', r'empty: no file in this folder ends in \.jsonl or \.parquet'),
  ],
)
def test_unreadable_data_is_refused_and_nothing_is_written(name, rows, message, run, tmp_path):
  path = tmp_path / name
  path.parent.mkdir(exist_ok=True)
  if isinstance(rows, str):
    path.write_text(rows)
  else:
    write(path, rows)
  with pytest.raises(InputError, match=message):
    run(path.parent if name.startswith('empty') else path)
  assert not list(tmp_path.glob('openr1*'))


def test_nothing_is_overwritten(run, folder, tmp_path):
  (tmp_path / 'openr1.parquet').write_text('mine')
  with pytest.raises(InputError, match=r'--out=.*openr1\.parquet: .* already exists\. Choose'):
    run(folder)
  assert (tmp_path / 'openr1.parquet').read_text() == 'mine'
