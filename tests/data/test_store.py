"""Tests of prepared data: records and prompts stay correct if their files are damaged or lost."""

import dataclasses
import json
import pathlib
import re
import resource
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import tokenizers

from exgrpo_jax.data import prompt, questions, records, store, tokenizer
from exgrpo_jax.data.tokenizer import SentencePieceTokenizer
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import activity
from tests.helpers.paths import REAL_DATA

RECORDS = [
  dict(kind='math', solution='', source='sums', columns='{}', answer=f'{n}')
  | dict(messages=[{'role': 'user', 'content': f'{n}+0'}])
  for n in range(20)
]


def prepared(folder, make=lambda _: {'train': RECORDS}):
  return store.prepared(str(folder), 'sums', 'key', make)


def left(folder):
  return list(pathlib.Path(folder, 'questions').glob('*'))


def test_rows_are_read_in_any_order_from_several_batches(tmp_path, monkeypatch):
  monkeypatch.setattr(store, '_BATCH', 8)
  found = prepared(
    tmp_path, lambda facts: facts.update(layouts=['a']) or {'x': RECORDS, 'y': iter([])}
  )
  assert (found.sizes, found.layouts) == ({'x': 20, 'y': 0}, ['a'])
  read = found.reader('x')
  for rows in (range(20), [19, 0, 7, 8, 7], []):
    assert read(list(rows)) == [RECORDS[row] for row in rows]
  shutil.rmtree(tmp_path)  # a run continues after the cache is cleared
  assert read([3]) == [RECORDS[3]]


@pytest.mark.full
def test_errors_and_kills_leave_no_data_that_looks_prepared(tmp_path):
  script = f"""
import os
from tests.data import test_store
def killed(facts):
  def rows():
    yield from test_store.RECORDS
    os._exit(9)
  return {{'train': rows()}}
test_store.prepared({str(tmp_path)!r}, killed)
"""
  assert subprocess.run([sys.executable, '-c', script], check=False).returncode == 9
  assert len(left(tmp_path)) == 1  # under another name

  def failing(facts):
    del facts
    raise InputError('a bad row')

  with pytest.raises(InputError, match='a bad row'):
    prepared(tmp_path, failing)
  assert prepared(tmp_path).sizes == {'train': 20}


def test_two_threads_can_prepare_the_same_data_at_once(tmp_path):
  sizes, barrier = [], threading.Barrier(2, timeout=30)

  def rows():
    yield from RECORDS
    barrier.wait()  # neither renames its folder before the other has begun to write

  threads = [
    threading.Thread(
      target=lambda: sizes.append(prepared(tmp_path, lambda _: {'train': rows()}).sizes)
    )
    for _ in range(2)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sizes == [{'train': 20}] * 2 and len(left(tmp_path)) == 1


@pytest.mark.parametrize('name', ['facts.json', 'train.arrow'])
@pytest.mark.parametrize('content', [None, b'', bytes(9)], ids=['removed', 'empty', 'zeros'])
def test_damaged_data_is_prepared_again(tmp_path, name, content, capsys):
  path = prepared(tmp_path).folder / name
  path.unlink()
  if content is not None:
    path.write_bytes(content)
  assert prepared(tmp_path).reader('train')([3]) == [RECORDS[3]]
  assert 'the prepared data is damaged' in capsys.readouterr().err
  prepared(tmp_path, None)
  assert not capsys.readouterr().err


def test_an_unwritable_cache_is_refused(tmp_path):
  (tmp_path / 'taken').touch()  # a file instead of a folder, because root can write anywhere
  with pytest.raises(
    InputError, match=r'sums: .* stored in .*/taken/.*NotADirectoryError.*config\.data\.cache_dir'
  ):
    prepared(tmp_path / 'taken')


def test_a_full_disk_is_refused_and_leaves_nothing(tmp_path):
  long = RECORDS[0] | {'solution': '1+' * 100_000}
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
  try:
    with pytest.raises(InputError, match=r'the questions cannot be stored in .*File too large'):
      prepared(tmp_path, lambda _: {'train': [long]})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  assert not left(tmp_path)


# ---- Records from files ----


ROWS = [{'question': f'{n}+1?', 'answer': f'{n + 1}'} for n in range(5)]
GOOD = {'question': 'q', 'answer': 'a'}


def test_a_file_is_prepared_once_and_again_if_it_or_its_fields_change(config, jsonl):
  path = jsonl(*ROWS)
  questions.load(config, path)
  first = left(config.cache_dir)
  written = first[0].stat().st_mtime_ns
  questions.load(config, path + '[:2]')
  assert left(config.cache_dir) == first and first[0].stat().st_mtime_ns == written
  assert questions.load(config, jsonl(GOOD))[0].answer == 'a'
  assert len(left(config.cache_dir)) == 2
  renamed = jsonl(GOOD, name='renamed.jsonl')
  assert questions.load(config, renamed)[0].source == 'renamed'
  swapped = dataclasses.replace(config, question_field='answer', answer_field='question')
  assert questions.load(swapped, path)[0].answer == 'q'
  assert len(left(config.cache_dir)) == 4


def test_several_files_are_one_data_set(config, jsonl, tmp_path):
  jsonl({'question': 'b', 'answer': '2'}, name='train-1.jsonl')
  jsonl({'question': 'a', 'answer': '1'}, name='train-0.jsonl')
  loaded = questions.load(config, f'{tmp_path}/train-*.jsonl')
  assert [(q.row, q.answer, q.source) for q in loaded] == [(0, '1', 'train'), (1, '2', 'train')]
  with pytest.raises(InputError, match=r'test-\*\.jsonl: no file matches this pattern'):
    questions.load(config, f'{tmp_path}/test-*.jsonl')


@pytest.mark.parametrize('name', ['x.jsonl', 'x.csv', 'x.parquet'])
def test_a_file_without_rows_is_refused(config, parquet, tmp_path, name):
  (tmp_path / name).write_text('\n\n' if name == 'x.jsonl' else '')
  if name == 'x.parquet':
    parquet(name=name)
  with pytest.raises(InputError, match=rf'{name}: the file contains no question'):
    questions.load(config, str(tmp_path / name))


def test_a_file_that_cannot_be_read_is_refused(config, tmp_path):
  (tmp_path / 'x.jsonl').symlink_to('/proc/self/mem')
  with pytest.raises(InputError, match=r'x\.jsonl: the file cannot be read \(Input/output error\)'):
    questions.load(config, f'{tmp_path}/x.jsonl')


def test_a_file_that_changes_while_it_is_read_is_refused(config, jsonl, monkeypatch):
  path, of_file = jsonl(*ROWS), records.of_file

  def changed_after(*args):
    found = of_file(*args)
    jsonl(*ROWS, GOOD)
    return found

  monkeypatch.setattr(records, 'of_file', changed_after)
  with pytest.raises(
    InputError,
    match=r'train\.jsonl: the file changed while it was being read\. Run the command again',
  ):
    questions.load(config, path)
  monkeypatch.undo()
  assert len(questions.load(config, path)) == 6


def test_a_long_preparation_reports_its_progress(config, jsonl, monkeypatch, capsys):
  monkeypatch.setattr(activity, 'LINE_SECONDS', 0.0)
  path = jsonl(*ROWS)
  questions.load(config, path)
  counts = ['0 questions', '1 question', '2 questions', '3 questions', '4 questions']
  expected = [f'{path}: {count} prepared' for count in counts]
  assert capsys.readouterr().out.splitlines() == expected


# ---- Questions with different answers ----


CONFLICTING = [
  {'question': '1+1', 'answer': '2'}, {'question': '2+2', 'answer': '4'},
  {'question': '1+1', 'answer': '3'},
]  # fmt: skip


def test_conflicting_answers_are_refused_with_both_lines_and_values(config, jsonl):
  with pytest.raises(
    InputError,
    match=r'2 rows have no answer that can be checked \(conflicting answers to the same question: '
    r"2\)\. The first is at train\.jsonl:1 \('2'\) and train\.jsonl:3 \('3'\).*='drop'",
  ):
    questions.load(config, jsonl(*CONFLICTING))
  dropping = dataclasses.replace(config, on_unverifiable='drop')
  (left,) = questions.load(dropping, jsonl(*CONFLICTING))
  assert left.answer == '4'


def test_answers_conflict_across_the_files_of_a_data_set(config, jsonl, tmp_path):
  for number, row in enumerate(CONFLICTING):
    jsonl(row, name=f'part-{number}.jsonl')
  with pytest.raises(InputError, match=r"part-0\.jsonl:1 \('2'\) and part-2\.jsonl:1 \('3'\)"):
    questions.load(config, f'{tmp_path}/part-*.jsonl')


def test_equal_answers_in_different_notation_do_not_conflict(config, jsonl):
  answers = ('1/2', '1/2', ' 1/2', '0.5', r'\frac{1}{2}')
  path = jsonl(*({'question': '1/4+1/4', 'answer': answer} for answer in answers))
  assert [question.answer for question in questions.load(config, path)] == list(answers)


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason=f'the real datasets are not in {REAL_DATA}')
@pytest.mark.parametrize(('name', 'rows'), [('gsm8k_test.jsonl', 1319), ('gpqa.parquet', 198)])
def test_published_sets_have_no_conflict(config, name, rows):
  assert len(questions.load(config, str(REAL_DATA / name))) == rows


# ---- Prompts ----


PLAIN = prompt.PromptConfig(template='plain', system='')
LINES = [{'question': f'{n}+{n * n} \u2581 = ?' * (n % 3 + 1), 'answer': f'{n}'} for n in range(20)]


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  """The path of a tokenizer."""
  path = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.model'
  tokenizer.train([line['question'] for line in LINES], 300, path)
  return path


@pytest.fixture
def opened(model):
  return tokenizer.load(model)


@pytest.fixture
def data(config, jsonl, monkeypatch):
  """Twenty questions, which are read and tokenized in three batches."""
  monkeypatch.setattr(store, '_BATCH', 8)
  return questions.load(config, jsonl(*LINES))


@pytest.fixture
def no_encoding(monkeypatch):
  """A function that disables tokenization, so that prompts must come from a file."""

  def forbid():
    monkeypatch.delattr(SentencePieceTokenizer, 'encode_all')
    monkeypatch.delattr(SentencePieceTokenizer, 'encode')

  return forbid


def expected(opened):
  """Tokenize each prompt separately."""
  messages = [(Message('user', line['question']),) for line in LINES]
  return [opened.encode(opened.render(message, PLAIN)) for message in messages]


def as_lists(prompts):
  return [prompt.tolist() for prompt in prompts]


def files(data):
  return sorted(pathlib.Path(data.store.folder, 'prompts').glob('*'))


def test_batched_prompts_equal_prompts_tokenized_one_by_one(data, opened):
  prompts = store.tokenized(data, opened, PLAIN)
  assert as_lists(prompts) == expected(opened)
  assert prompts.lengths.tolist() == [len(prompt) for prompt in expected(opened)]
  assert {prompt.dtype for prompt in prompts} == {np.dtype(np.int32)}
  assert as_lists(prompts[17:]) == expected(opened)[17:]
  assert as_lists(prompts.select(np.array([3, 9]))) == [expected(opened)[row] for row in (3, 9)]
  with pytest.raises(ValueError, match='read-only'):
    prompts[0][0] = 0


def test_a_second_start_reads_no_question_and_tokenizes_nothing(
  data, opened, no_encoding, monkeypatch
):
  first = store.tokenized(data, opened, PLAIN)
  right = expected(opened)
  no_encoding()
  monkeypatch.delattr(store.Dataset, 'read')
  second = store.tokenized(data, opened, PLAIN)
  assert as_lists(second) == right
  assert second.checksum == first.checksum


def test_everything_that_shapes_a_prompt_leads_to_another_file(
  data, opened, config, tmp_path, monkeypatch
):
  count = 0

  def makes_a_file(data, opened, prompts=PLAIN):
    nonlocal count
    count += 1
    store.tokenized(data, opened, prompts)
    store.tokenized(data, opened, prompts)
    assert len(files(data)) == count

  makes_a_file(data, opened)
  makes_a_file(data, opened, prompt.PromptConfig('paper', ''))
  makes_a_file(data, opened, prompt.PromptConfig('paper', 'Be brief.'))
  makes_a_file(questions.load(config, data.spec + '[:12]'), opened)
  makes_a_file(questions.load(config, data.spec + '[4:16]'), opened)
  texts = [line['question'] for line in LINES]
  tokenizer.train([*texts, 'other'], 300, tmp_path / 'other.model')
  makes_a_file(data, tokenizer.load(tmp_path / 'other.model'))
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
  bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(special_tokens=['</s>']))
  bpe.save(str(tmp_path / 'tokenizer.json'))
  makes_a_file(data, tokenizer.load(tmp_path))
  beside = tmp_path / 'tokenizer_config.json'
  for template in ('A {{ messages[0].content }}', 'B {{ messages[0].content }}'):
    beside.write_text(json.dumps({'eos_token': '</s>', 'chat_template': template}))
    makes_a_file(data, tokenizer.load(tmp_path), prompt.PromptConfig('chat', ''))
  beside.write_text(json.dumps({'eos_token': '</s>', 'chat_template': 'C {{ mode }}'}))
  for keywords in ('', '{"mode": 1}', '{"mode": 2}'):
    makes_a_file(data, tokenizer.load(tmp_path), prompt.PromptConfig('chat', '', keywords))
  monkeypatch.setattr(store, '_code', lambda: 'another version')
  makes_a_file(data, opened)


@pytest.mark.parametrize(
  'damage',
  [
    lambda content: content[:0],
    lambda content: content[:-100],
    lambda content: bytes([content[0] ^ 1]) + content[1:],
    lambda content: bytes(len(content)),
  ],
  ids=['empty', 'cut_off', 'one_bit', 'zeros_after_a_power_failure'],
)
def test_a_damaged_file_is_replaced(data, opened, damage, capsys, no_encoding):
  store.tokenized(data, opened, PLAIN)
  (path,) = files(data)
  path.write_bytes(damage(path.read_bytes()))
  assert as_lists(store.tokenized(data, opened, PLAIN)) == expected(opened)
  assert f'{path}: the file is damaged. Tokenizing the prompts of ' in capsys.readouterr().err
  right = expected(opened)
  no_encoding()
  assert as_lists(store.tokenized(data, opened, PLAIN)) == right
  assert not capsys.readouterr().err


def test_prompts_stay_in_memory_if_they_cannot_be_saved(data, opened, capsys):
  folder = pathlib.Path(data.store.folder, 'prompts')
  folder.touch()  # a file instead of a folder, because root can write anywhere
  prompts = store.tokenized(data, opened, PLAIN)
  assert as_lists(prompts) == expected(opened)
  assert re.search(
    r'the tokenized prompts of .*train\.jsonl cannot be saved in .*/prompts \(File exists\), so '
    r'they will be tokenized again each time a run starts\. .* config\.data\.cache_dir',
    capsys.readouterr().err,
  )
  with pytest.raises(ValueError, match='read-only'):
    prompts[0][0] = 0


def test_a_run_continues_after_the_cache_is_cleared(config, data, opened):
  prompts = store.tokenized(data, opened, PLAIN)
  shutil.rmtree(config.cache_dir)
  assert as_lists(prompts) == expected(opened)
  assert [question.answer for question in data] == [line['answer'] for line in LINES]
