"""Tests of prompt files: the right prompts, whatever has happened to the file."""

import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from exgrpo_jax.data import prompt, prompt_file, questions, tokenizer
from exgrpo_jax.data.tokenizer import SentencePieceTokenizer

PLAIN = prompt.Config(template='plain', system='')
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
  """Twenty questions, which are read and tokenised in three batches."""
  monkeypatch.setattr(questions, '_BATCH', 8)
  monkeypatch.setattr(prompt_file, '_BATCH', 8)
  return questions.load(config, jsonl(*LINES))


@pytest.fixture
def no_encoding(monkeypatch):
  """A function: from then on nothing is tokenised, so prompts must come from a file."""

  def forbid():
    monkeypatch.delattr(SentencePieceTokenizer, 'encode_all')
    monkeypatch.delattr(SentencePieceTokenizer, 'encode')

  return forbid


def expected(opened, prompts=PLAIN):
  """Each prompt by itself."""
  messages = [(questions.Message('user', line['question']),) for line in LINES]
  return [opened.encode(opened.render(message, prompts)) for message in messages]


def as_lists(prompts):
  return [prompt.tolist() for prompt in prompts]


def files(data):
  folder = pathlib.Path(data.source.folder, 'prompts')
  return sorted(folder.iterdir()) if folder.is_dir() else []


def test_a_prompt_has_the_tokens_that_it_has_by_itself(data, opened):
  prompts = prompt_file.tokenized(data, opened, PLAIN)
  assert as_lists(prompts) == expected(opened)
  assert prompts.lengths.tolist() == [len(prompt) for prompt in expected(opened)]
  assert {prompt.dtype for prompt in prompts} == {np.dtype(np.int32)}
  assert as_lists(prompts[17:]) == expected(opened)[17:]
  assert as_lists(prompts.select(np.array([3, 9]))) == [expected(opened)[row] for row in (3, 9)]
  with pytest.raises(ValueError, match='read-only'):
    prompts[0][0] = 0


def test_a_second_start_reads_no_question_and_tokenises_nothing(data, opened, no_encoding):
  first = prompt_file.tokenized(data, opened, PLAIN)
  right = expected(opened)
  no_encoding()
  no_source = dataclasses.replace(data.source, read=None)
  second = prompt_file.tokenized(questions.Dataset(data.spec, no_source, data.rows), opened, PLAIN)
  assert as_lists(second) == right
  assert second.checksum == first.checksum


def test_a_file_is_made_for_everything_that_shapes_a_prompt(
  data, opened, config, tmp_path, monkeypatch
):
  count = 0

  def makes_a_file(data, opened, prompts=PLAIN):
    nonlocal count
    count += 1
    prompt_file.tokenized(data, opened, prompts)
    prompt_file.tokenized(data, opened, prompts)
    assert len(files(data)) == count

  makes_a_file(data, opened)
  makes_a_file(data, opened, prompt.Config('paper', ''))
  makes_a_file(data, opened, prompt.Config('paper', 'Be brief.'))
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
    makes_a_file(data, tokenizer.load(tmp_path), prompt.Config('chat', ''))
  monkeypatch.setattr(prompt_file, '_code', lambda: 'another version')
  makes_a_file(data, opened)


def test_the_checksum_tells_questions_apart_that_have_the_same_prompts(config, jsonl, opened):
  def checksum(answer, question='q'):
    data = questions.load(config, jsonl({'question': question, 'answer': answer}))
    return prompt_file.tokenized(data, opened, PLAIN).checksum

  assert len({checksum('1'), checksum('2'), checksum('1', 'r')}) == 3


@pytest.mark.parametrize(
  'damage',
  [
    pytest.param(lambda content: content[:0], id='empty'),
    pytest.param(lambda content: content[:-100], id='cut_off'),
    pytest.param(lambda content: bytes([content[0] ^ 1]) + content[1:], id='one_bit'),
    pytest.param(lambda content: bytes(len(content)), id='zeros_after_a_power_failure'),
  ],
)
def test_a_damaged_file_is_replaced(data, opened, damage, capsys, no_encoding):
  prompt_file.tokenized(data, opened, PLAIN)
  (path,) = files(data)
  path.write_bytes(damage(path.read_bytes()))
  assert as_lists(prompt_file.tokenized(data, opened, PLAIN)) == expected(opened)
  assert f'{path}: the file is damaged; the prompts of ' in capsys.readouterr().err
  right = expected(opened)
  no_encoding()
  assert as_lists(prompt_file.tokenized(data, opened, PLAIN)) == right
  assert not capsys.readouterr().err


def test_a_kill_while_it_is_written_leaves_no_file_of_that_name(config, data, model, opened):
  script = f"""
import os, pathlib
from exgrpo_jax.data import prompt, prompt_file, questions, tokenizer
whole = pathlib.Path.write_bytes
def killed_half_way(path, content):
  whole(path, content[:len(content) // 2])
  os._exit(9)
pathlib.Path.write_bytes = killed_half_way
data = questions.load(questions.{config!r}, {data.spec!r})
prompt_file.tokenized(data, tokenizer.load({str(model)!r}), prompt.{PLAIN!r})
"""
  assert subprocess.run([sys.executable, '-c', script], check=False).returncode == 9
  (left,) = files(data)
  assert as_lists(prompt_file.tokenized(data, opened, PLAIN)) == expected(opened)
  (complete,) = set(files(data)) - {left}
  assert complete.stem == left.stem and not complete.suffix


def test_where_it_cannot_be_written_prompts_are_kept_in_memory(data, opened, capsys):
  folder = pathlib.Path(data.source.folder, 'prompts')
  folder.touch()  # in place of the folder, for root may write anywhere
  prompts = prompt_file.tokenized(data, opened, PLAIN)
  assert as_lists(prompts) == expected(opened)
  assert re.search(
    r'the tokenised prompts of .*train\.jsonl cannot be kept in .*/prompts \(File exists\), so '
    r'every start tokenises them again; .* config\.data\.cache_dir',
    capsys.readouterr().err,
  )
  with pytest.raises(ValueError, match='read-only'):
    prompts[0][0] = 0


def test_a_run_goes_on_when_the_cache_is_cleared(config, data, opened):
  prompts = prompt_file.tokenized(data, opened, PLAIN)
  shutil.rmtree(config.cache_dir)
  assert as_lists(prompts) == expected(opened)
  assert [question.answer for question in data] == [line['answer'] for line in LINES]
