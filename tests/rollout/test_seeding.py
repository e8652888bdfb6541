"""From trace files to successes in the buffer: reading, matching, tokenizing, grading, capping."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.data.prompt import THINK, last_user_message
from exgrpo_jax.datatypes import Message, QuestionSet
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, programs
from exgrpo_jax.rollout import seeding
from tests.helpers import tiny
from tests.helpers.chance import is_correct


def trace(question, response=None, tokens=None, logp=None, **fields):
  return seeding.Trace(
    place='x.jsonl:1',
    question=question,
    response=response,
    tokens=None if tokens is None else np.array(tokens),
    logp=None if logp is None else np.array(logp, np.float32),
    correctness=fields.pop('correctness', None),
    **fields,
  )


@pytest.fixture
def propose(recorded):
  """Call `seeding.candidates` on traces, by default with the recorded run's questions."""

  def propose(*found, data=None, limit=tiny.RESPONSE, overlong='refuse'):
    tokenizer = recorded.experiment.tokenizer
    return seeding.candidates('x.jsonl', found, data or recorded.data, tokenizer, limit, overlong)

  return propose


class Listed(list):
  """Questions in a list."""

  def read(self, rows):
    return [self[row] for row in rows]


def asking(recorded, *texts, prompt='q\n'):
  """Return a QuestionSet of these texts."""
  question = recorded.data.questions[0]
  return QuestionSet(
    spec='listed',
    questions=Listed(
      dataclasses.replace(question, row=row, messages=(Message('user', text),))
      for row, text in enumerate(texts)
    ),
    prompts=[np.array(recorded.experiment.tokenizer.encode(prompt), np.int32) for _ in texts],
  )


def test_copies_of_a_question_get_the_same_traces_unless_a_row_is_named(recorded, propose):
  data = asking(recorded, 'a', 'b', 'a')
  for row, rows in ((None, [0, 2]), (2, [2]), (1, [0, 2])):
    found, counts = propose(trace('a', 'x', row=row), trace('c', 'x'), data=data)
    assert [candidate.row for candidate in found] == rows
    assert counts == {'traces': 2, 'without a matching question': 1, 'too long': 0, 'repeated': 0}


def test_a_response_ends_with_its_first_end_token(recorded, propose):
  tokenizer = recorded.experiment.tokenizer
  ids, end = tokenizer.encode('2+0'), tokenizer.eos_ids[0]
  found, counts = propose(
    trace('2+0', '2+0'),
    trace('2+0', tokens=[*ids, end], logp=[0] * (len(ids) + 1)),
    trace('2+0', tokens=ids),
    trace('2+0', tokens=[ids[0], end, *ids], logp=[*range(len(ids) + 2)]),
  )
  # An end token is added to a text, but not to tokens.
  assert [c.tokens.tolist() for c in found] == [[*ids, end], ids, [ids[0], end]]
  assert counts['repeated'] == 1 and found[0].tokens.dtype == np.int32
  assert found[2].logp.tolist() == [0, 1]


def test_a_think_tag_in_the_prompt_is_not_repeated(recorded, propose):
  tokenizer = recorded.experiment.tokenizer
  for prompt, text in ((f'q\n{THINK}', 'x</think>'), ('q\n', f'{THINK}x</think>')):
    data = asking(recorded, 'a', prompt=prompt)
    (found,), _ = propose(trace('a', f'{THINK}x</think>'), data=data, limit=99)
    assert tokenizer.decode(found.tokens) == text


@pytest.mark.parametrize(
  ('found', 'message'),
  [
    (trace('2 + 0', '2'), r'1 trace, but none of them matches a question in \S+\. Quest'),
    (trace('2+0', tokens=[1, 5000]), r'ids from 1 to 5000, but the run.s .* ids from 0 to'),
    (trace('2+0', tokens=[-1]), r'x\.jsonl:1: tokens contains ids from -1 to -1'),
    (trace('2+0', '2', logp=[-1.0] * 9), r'logp has 9 numbers, but the response has \d tokens'),
    (trace('2+0', tokens=[5] * 13), r'has 13 tokens, more than config\.rollout\.max_response=12'),
  ],
)
def test_traces_that_cannot_be_replayed_are_refused(propose, found, message):
  with pytest.raises(InputError, match=message):
    propose(found)


def test_overlong_traces_are_dropped_if_configured(propose):
  long = trace('2+0', tokens=[5] * 13)
  found, counts = propose(long, trace('2+0', '2'), overlong='drop')
  assert len(found) == counts['too long'] == 1
  with pytest.raises(InputError, match=r'more than config\.rollout\.max_response=12'):
    propose(long, overlong='drop')


def test_the_newest_successes_of_a_question_and_the_last_correctness_are_kept(
  recorded, propose, monkeypatch
):
  monkeypatch.setattr(programs, 'COMMAND', tiny.WORKER)
  texts = [f'{n}' for n in range(60)]
  right = [text for text in texts if is_correct(text, '3')]
  assert len(right) > tiny.STORED and '1' in right
  found, _ = propose(
    *(trace('3+0', text, correctness=0.25 if n == 1 else None) for n, text in enumerate(texts)),
    trace('6+0', right_of(6), correctness=0.75),
  )
  config, tokenizer = recorded.experiment.config, recorded.experiment.tokenizer
  with pool.Grader(config.grading, config.verifier) as grader:
    kept = seeding.successes('x.jsonl', found, recorded.data, tokenizer, tiny.RESPONSE, grader)
    wrong = [trace('3+0', next(text for text in texts if text not in right))]
    with pytest.raises(
      InputError, match=r'contains 1 response to questions .* none of them is correct \(1 wrong\)'
    ):
      seeding.successes(
        'x.jsonl', propose(*wrong)[0], recorded.data, tokenizer, tiny.RESPONSE, grader
      )
  buffer = seeding.seeded(recorded.rollout, {}, kept, 'zero')
  stored = buffer.entries[3].trajectories
  assert [tokenizer.decode(t.tokens) for t in stored] == right[-tiny.STORED :]
  expected = {3: 0.25, 6: 0.75}  # the correctness of 3 comes from a success that is no longer kept
  assert {row: entry.correctness for row, entry in buffer.entries.items()} == expected
  assert all((t.logp == 0).all() and (t.step, t.reward) == (0, 1) for t in stored)


def right_of(question):
  return next(text for n in range(99) if is_correct(text := str(n), str(question)))


# ---- The columns of trace files, and unusable files ----


@pytest.fixture
def parquet(tmp_path):
  """Return a function that writes rows to a Parquet file and returns its path."""

  def write(*rows):
    pq.write_table(pa.Table.from_pylist(list(rows)), tmp_path / 'x.parquet')
    return str(tmp_path / 'x.parquet')

  return write


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
  parts = [{'type': 'text', 'text': text} for text in (' sec', 'ond ')]
  in_parts = {'prompt': [{'role': 'user', 'content': parts}], 'response': ' 2\n'}
  paths = jsonl(*rows), parquet(rows[0]), parquet(rows[1]), jsonl(in_parts, name='parts.jsonl')
  for path in paths:
    for trace in seeding.read(path):
      assert (trace.question, trace.response) == ('second', ' 2\n')
      assert trace.tokens is trace.logp is trace.row is None
  assert [t.correctness for t in seeding.read(jsonl(*rows))] == [0.25, None]
  assert [t.place for t in seeding.read(jsonl(*rows))] == [f'{jsonl(*rows)}:{n}' for n in (1, 2)]


def test_tokens_and_their_log_probabilities_are_read_from_both_formats(jsonl, parquet):
  row = {'question': 'q', 'tokens': [5, 1], 'logp': [-0.5, 0]}
  for path in (jsonl(row), parquet(row | {'logp': [-0.5, 0.0]})):
    (trace,) = seeding.read(path)
    assert trace.response is None and trace.tokens.tolist() == [5, 1]
    assert trace.logp.tolist() == [-0.5, 0] and trace.logp.dtype == np.float32
    seeding.check_columns(path)


def test_a_question_is_matched_by_its_last_user_message():
  assert last_user_message([Message(**turn) for turn in CHAT]) == 'second'


GOOD = {'question': 'q', 'response': 'r'}


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    pytest.param({'response': 'r'}, r"no field 'question' or 'prompt' \(has: 'resp", id='quest'),
    pytest.param({'question': 'q'}, r"no field 'response' or 'target' or", id='no_response'),
    pytest.param(GOOD | {'response': ' '}, r'response=. .: no text found', id='empty'),
    pytest.param(GOOD | {'response': 5}, r'response=5: no text found', id='number'),
    pytest.param(
      GOOD | {'response': '\ud83d'}, r"field 'response' is not valid Unicode", id='unicode'
    ),
    pytest.param(
      {'prompt': CHAT[:1], 'response': 'r'}, r"the last 'user' message contains text", id='user'
    ),
    pytest.param(
      {'question': 'q', 'target': CHAT[:2]},
      r"last 'assistant' message contains text",
      id='assistant',
    ),
    pytest.param(GOOD | {'tokens': []}, r'tokens=\[\]: this is not a list of', id='no_tokens'),
    pytest.param(GOOD | {'tokens': [1.5]}, r'tokens contains non-integer values', id='fractions'),
    pytest.param(GOOD | {'tokens': ['a']}, r"tokens=\['a'\]: this is not a list of", id='texts'),
    pytest.param(GOOD | {'tokens': [[1], [1, 2]]}, r'not a list of numbers', id='nested'),
    pytest.param(GOOD | {'logp': [0.1]}, r'logp contains 0\.1', id='logp'),
    pytest.param(GOOD | {'logp': [-1, float('nan')]}, r'logp contains nan', id='nan'),
    pytest.param(GOOD | {'logp': [-1, -1e39]}, r'logp contains -1e\+39', id='too_low'),
    pytest.param(GOOD | {'correctness': 1}, r'correctness=1: .* must be in \(0, 1\)', id='one'),
    pytest.param(GOOD | {'correctness': '.5'}, r"correctness='\.5': .* must be", id='text'),
    pytest.param('[]', r'\[\] is not an object\. Every row must be an object', id='no_object'),
    pytest.param('{', r'not valid JSON \(', id='json'),
  ],
)
def test_an_unusable_row_is_refused_with_its_line_number(jsonl, row, message):
  path = jsonl(json.dumps(GOOD), row)
  with pytest.raises(InputError, match=rf'train\.jsonl:2: .*{message}'):
    list(seeding.read(path))


def test_an_unusable_file_is_refused(jsonl, parquet, tmp_path):
  (tmp_path / 'cut.parquet').write_bytes(b'PAR1')
  for path, message in (
    (str(tmp_path / 'no.jsonl'), r'no\.jsonl: there is no such file'),
    (str(tmp_path / 'cut.parquet'), 'not a complete parquet file'),
    (jsonl(''), 'the file contains no traces'),
    (
      jsonl('{"question": "q", "response": "r", "response": "s"}', name='y.jsonl'),
      "1: 'response' occurs 2 times",
    ),
    (
      parquet({'prompt': 'q', 'answer': 'a'}),
      r"no field 'response' or .* \(has: 'prompt', 'answer'\)",
    ),
  ):
    with pytest.raises(InputError, match=message):
      seeding.check_columns(path)
