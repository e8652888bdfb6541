"""Traces from elsewhere: the columns that are read, and what a file may not hold."""

import json

import numpy as np
import pytest

from exgrpo_jax.data import traces
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError

CHAT = [
  {'role': 'system', 'content': 'Think.'},
  {'role': 'user', 'content': 'first'},
  {'role': 'assistant', 'content': 'one'},
  {'role': 'user', 'content': ' second\n'},
]


def test_text_and_chat_messages_are_read_from_both_formats(jsonl, parquet):
  rows = [
    {'question': ' second ', 'response': ' 2\n', 'correctness': 0.25},
    {'prompt': CHAT, 'target': [{'role': 'assistant', 'content': ' 2\n'}], 'answer': 'unread'},
  ]
  for path in (jsonl(*rows), parquet(rows[0]), parquet(rows[1])):
    for trace in traces.read(path):
      assert (trace.question, trace.response) == ('second', ' 2\n')
      assert trace.tokens is trace.logp is trace.row is None
  assert [t.correctness for t in traces.read(jsonl(*rows))] == [0.25, None]
  assert [t.place for t in traces.read(jsonl(*rows))] == [f'{jsonl(*rows)}:{n}' for n in (1, 2)]


def test_tokens_and_their_log_probabilities_are_read_from_both_formats(jsonl, parquet):
  row = {'question': 'q', 'tokens': [5, 1], 'logp': [-0.5, 0]}
  for path in (jsonl(row), parquet(row | {'logp': [-0.5, 0.0]})):
    (trace,) = traces.read(path)
    assert trace.response is None and trace.tokens.tolist() == [5, 1]
    assert trace.logp.tolist() == [-0.5, 0] and trace.logp.dtype == np.float32
    traces.check_columns(path)


def test_a_question_is_found_by_its_last_user_message():
  assert traces.asked([Message(**turn) for turn in CHAT]) == 'second'


GOOD = {'question': 'q', 'response': 'r'}


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    pytest.param({'response': 'r'}, r"no 'question' or 'prompt' \(has: 'response'\)", id='quest'),
    pytest.param({'question': 'q'}, r"no 'response' or 'target' or 'tokens'", id='no_response'),
    pytest.param(GOOD | {'response': ' '}, r'response is . .; it must be non-empty', id='empty'),
    pytest.param(GOOD | {'response': 5}, r'response is 5; it must be non-empty text', id='number'),
    pytest.param(GOOD | {'response': '\ud83d'}, r'response is not valid Unicode', id='unicode'),
    pytest.param(
      {'prompt': CHAT[:1], 'response': 'r'}, r"the last with the role 'user' has some", id='user'
    ),
    pytest.param(
      {'question': 'q', 'target': CHAT[:2]}, r"with the role 'assistant' has some", id='assistant'
    ),
    pytest.param(
      GOOD | {'tokens': []}, r'tokens is \[\]; it must be a list of num', id='no_tokens'
    ),
    pytest.param(GOOD | {'tokens': [1.5]}, r'tokens must be whole numbers', id='fractions'),
    pytest.param(GOOD | {'tokens': ['a']}, r"tokens is \['a'\]; it must be a list", id='texts'),
    pytest.param(GOOD | {'tokens': [[1], [1, 2]]}, r'it must be a list of numbers', id='nested'),
    pytest.param(GOOD | {'logp': [0.1]}, r'logp must be at most 0 everywhere, not 0\.1', id='logp'),
    pytest.param(GOOD | {'logp': [-1, float('nan')]}, r'everywhere, not nan', id='nan'),
    pytest.param(GOOD | {'correctness': 1}, r'correctness is 1; it must lie in \(0, 1\)', id='one'),
    pytest.param(GOOD | {'correctness': '.5'}, r"correctness is '\.5'; it must lie in", id='text'),
    pytest.param('[]', r'\[\] is not an object; every row must be one', id='no_object'),
    pytest.param('{', r'not valid JSON \(', id='json'),
  ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_place(jsonl, row, message):
  path = jsonl(json.dumps(GOOD), row)
  with pytest.raises(InputError, match=rf'train\.jsonl:2: .*{message}'):
    list(traces.read(path))


def test_a_file_that_cannot_be_used_is_refused(jsonl, parquet, tmp_path):
  (tmp_path / 'cut.parquet').write_bytes(b'PAR1')
  for path, message in (
    (str(tmp_path / 'no.jsonl'), r'no\.jsonl: there is no such file'),
    (str(tmp_path / 'cut.parquet'), 'not a complete parquet file'),
    (jsonl(''), 'the file holds no trace; at least one is needed'),
    (
      jsonl('{"question": "q", "response": "r", "response": "s"}', name='y.jsonl'),
      "1: 'response' is there 2 times",
    ),
    (parquet({'prompt': 'q', 'answer': 'a'}), r"no 'response' or .* \(has: 'prompt', 'answer'\)"),
  ):
    with pytest.raises(InputError, match=message):
      traces.check_columns(path)
