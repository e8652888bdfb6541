"""Rows become questions, or are refused with the place and the field."""

import csv
import dataclasses
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.data import columns, questions, records
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier

FIELDS = columns.Fields('', '', '', '')
GOOD = {'question': 'q', 'answer': 'a'}
VERL = {
  'data_source': 'math',
  'prompt': [{'role': 'system', 'content': 'Think.'}, {'role': 'user', 'content': 'What is 1+1?'}],
  'reward_model': {'ground_truth': '2', 'style': 'rule'},
  'extra_info': {'index': 0},
}


# ---- jsonl ----


def test_gsm8k_fields_are_the_default(config, jsonl):
  lines = [
    {'question': f'What is {i}+1?', 'answer': f'{i}+1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}'}
    for i in range(4)
  ]
  dataset = questions.load(config, jsonl(*lines))
  assert [question.row for question in dataset] == list(range(4))
  assert dataset[3] == questions.Question(
    row=3,
    messages=(Message('user', 'What is 3+1?'),),
    answer='4',
    kind='math',
    solution='3+1 = 4.\n#### 4',
    source='train',
    columns=lines[3],
  )


@pytest.mark.parametrize(
  ('answer', 'truth', 'solution'),
  [
    pytest.param('72', '72', '', id='bare'),
    pytest.param('two\n#### 1,234', '1,234', 'two\n#### 1,234', id='commas_are_kept'),
    pytest.param('#### 1\n#### 2\n', '2', '#### 1\n#### 2\n', id='last_one_counts'),
    pytest.param('48/2 = $<<48/2=24>>24\n#### 24', '24', '48/2 = $24\n#### 24', id='calculator'),
    pytest.param('$\\frac{1}{2}$', '$\\frac{1}{2}$', '', id='latex'),
  ],
)
def test_gsm8k_answers(config, jsonl, answer, truth, solution):
  question = questions.load(config, jsonl({'question': 'q', 'answer': answer}))[0]
  assert (question.answer, question.solution) == (truth, solution)


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    (
      {'question': 'q', 'solution': 'a'},
      r"train\.jsonl:2: no field 'answer' \(has: 'question', 'solution'\).*data\.answer_field",
    ),
    ({'text': 'q', 'answer': 'a'}, r"no field 'question' \(has: 'text', .*data\.question_field"),
    (
      {'question': 'q', 'answer': None},
      r"1 row has no answer .*\('answer' has no answer: 1\), the first at train\.jsonl:2; "
      r".* config\.data\.unverifiable='drop'",
    ),
    ('{"question": "q", "answer": NaN}', r"'answer' is NaN: 1\), .* at train\.jsonl:2"),
    ({'question': 'q', 'answer': ' NaN'}, r"the answer is 'nan': 1\), .*:2; give"),
    ('{"question": NaN, "answer": 1}', "train.jsonl:2: field 'question' is nan"),
    ({'question': 'q', 'answer': {'a': 1}}, r"field 'answer' is {'a': '1'}; it must"),
    ({'question': 'q', 'answer': ['a', None]}, r"jsonl:2: field 'answer\[1\]' is null; it must"),
    ({'question': 'q', 'answer': [['a']]}, r"jsonl:2: field 'answer\[0\]' is \['a'\]; it must"),
    ('{"question": "q", "answer": [1, NaN]}', r"field 'answer\[1\]' is nan; it must"),
    (
      {'question': 'q', 'answer': []},
      r"\('answer' has no answer: 1\), the first at train\.jsonl:2",
    ),
    (
      {'question': [{'role': 'system', 'content': 'Be brief.'}], 'answer': 'a'},
      r"train\.jsonl:2: 'question' has no message of the role 'user'",
    ),
    (
      {'question': [{'role': r, 'content': 'x'} for r in ('system', 'assistant')], 'answer': 'a'},
      r"train\.jsonl:2: 'question' has no message of the role 'user'",
    ),
    (
      {'question': [{'role': 'assistant', 'content': 'It is 2.'}], 'answer': 'a'},
      r"train\.jsonl:2: 'question' has no message of the role 'user'",
    ),
    ({'question': 'q', 'answer': True}, "field 'answer' is True; it must"),
    ({'question': ' ', 'answer': 'a'}, "field 'question' is ' '; it must"),
    ({'question': 'q', 'answer': 'so\n#### \n'}, r"'answer' has no answer: 1\), .*train\.jsonl:2"),
    ('{"question": "\\ud800", "answer": "a"}', "field 'question' is not valid Unicode"),
  ],
)
def test_error_names_the_invalid_line(config, jsonl, line, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, jsonl(GOOD, line))


def rows_with(answer):
  return [{'question': 'How many?', 'answer': answer}]


@pytest.mark.parametrize(
  ('answers', 'truth'),
  [
    (['4', 'four'], '["4", "four"]'),
    (['a "quoted" é'], r'["a \"quoted\" é"]'),
    ([1.5, 2.0], '["1.5", "2.0"]'),
  ],
)
def test_a_list_of_accepted_answers_is_one_text_in_every_format(
  config, jsonl, parquet, tmp_path, answers, truth
):
  (tmp_path / 'x.json').write_text(json.dumps(rows_with(answers)))
  with (tmp_path / 'x.csv').open('w', newline='') as file:
    csv.writer(file).writerows([['question', 'answer'], ['How many?', truth]])
  (tmp_path / 'x.py').write_text(f'def get_task():\n  return {{"a": {rows_with(tuple(answers))}}}')
  model = {'ground_truth': answers, 'style': 'rule'}
  paths = [
    jsonl(*rows_with(answers)),
    parquet(*rows_with(answers)),
    parquet({**VERL, 'reward_model': model}, name='verl.parquet'),
    jsonl({**VERL, 'reward_model': model}, name='verl.jsonl'),
    *(f'{tmp_path}/{name}' for name in ('x.json', 'x.csv', 'x.py:a')),
  ]
  for path in paths:
    (question,) = questions.load(config, path)
    assert (question.answer, question.solution) == (truth, ''), path


def test_the_answers_of_a_list_keep_their_spelling(config, jsonl):
  line = '{"question": "q", "answer": [0.50, 7, "so #### 7"]}'
  (question,) = questions.load(config, jsonl(line))
  assert question.answer == '["0.50", "7", "so #### 7"]'
  assert question.columns['answer'] == [0.5, 7, 'so #### 7']


NUMBERS = ('0.10', '2.50', '33.30')


@pytest.mark.parametrize(
  ('kind', 'answers'),
  [
    (pa.float16(), ['0.1', '2.5', '33.3']),
    (pa.float32(), ['0.1', '2.5', '33.3']),
    (pa.decimal128(9, 2), ['0.10', '2.50', '33.30']),
    (pa.decimal256(60, 12), ['0.100000000000', '2.500000000000', '33.300000000000']),
  ],
  ids=str,
)
def test_numbers_of_parquet_are_answers_as_they_are_written(config, tmp_path, kind, answers):
  is_decimal = pa.types.is_decimal(kind)
  values = [decimal.Decimal(text) if is_decimal else np.float64(text) for text in NUMBERS]
  column = pa.array(values, kind) if is_decimal else pa.array(values).cast(kind)
  models = pa.StructArray.from_arrays([column], ['ground_truth'])
  asked = ['one tenth?', 'five halves?', 'a hundredth of 3330?']
  table = pa.table({'question': asked, 'answer': column, 'of': models})
  pq.write_table(table, tmp_path / 'x.parquet')
  for field in ('answer', 'of.ground_truth'):
    loaded = questions.load(
      dataclasses.replace(config, answer_field=field), f'{tmp_path}/x.parquet'
    )
    assert [question.answer for question in loaded] == answers
  assert loaded[0].columns['answer'] == (answers[0] if is_decimal else 0.1)


def test_a_tiny_decimal_is_written_without_an_exponent(config, tmp_path):
  task = 'import decimal\ndef get_task():\n  return {"a": [{"question": "q", "answer": %s}]}'
  (tmp_path / 'x.py').write_text(task % 'decimal.Decimal("1E-12")')
  assert questions.load(config, f'{tmp_path}/x.py:a')[0].answer == '0.000000000001'


def test_a_row_of_tfds_has_floats_at_their_own_precision():
  layout = columns.recognize(['question', 'answer'], FIELDS, 'x')
  values = {'question': 'q', 'answer': np.float32([0.1, 2.5])}
  record = records.record(layout, FIELDS, values, 'x', 'x')
  assert record['answer'] == '["0.1", "2.5"]'
  assert json.loads(record['columns'])['answer'] == [0.1, 2.5]


def test_error_names_a_solution_of_the_wrong_type(config, jsonl):
  config = dataclasses.replace(config, solution_field='proof')
  with pytest.raises(InputError, match=r"train\.jsonl:1: field 'proof' is \['x'\]"):
    questions.load(config, jsonl({**GOOD, 'proof': ['x']}))


def test_not_a_number_is_text_where_answers_are_compared_as_text(config, jsonl):
  as_text = dataclasses.replace(config, default_kind='text', unverifiable='drop')
  path = jsonl(
    {'question': '0/0 in JavaScript?', 'answer': 'NaN'}, '{"question": "q", "answer": NaN}'
  )
  assert [question.answer for question in questions.load(as_text, path)] == ['NaN']


def test_an_integer_of_5000_digits_is_an_answer_and_a_column_as_text(config, jsonl):
  digits = '7' * 5000
  (question,) = questions.load(
    config, jsonl(f'{{"question": "q", "answer": {digits}, "n": {digits}}}')
  )
  assert question.answer == question.columns['n'] == digits
  assert verifier.judge(rf'So \boxed{{{digits}}}', digits) == 'correct'
  assert verifier.judge(rf'So \boxed{{{digits}1}}', digits) == 'wrong'


# ---- verl's columns ----


def test_verl_columns(config, parquet):
  dataset = questions.load(config, parquet(VERL, {**VERL, 'data_source': 'aime'}))
  assert dataset[1] == questions.Question(
    row=1,
    messages=(Message('system', 'Think.'), Message('user', 'What is 1+1?')),
    answer='2',
    kind='math',
    solution='',
    source='aime',
    columns={**VERL, 'data_source': 'aime'},
  )


@pytest.mark.parametrize(
  ('source', 'style', 'default', 'kind'),
  [
    ('gpqa', 'rule', '', 'choice'),
    ('arc_c', None, '', 'choice'),
    ('math', 'rule', 'text', 'math'),
    ('math', 'text', '', 'text'),
    ('mine', 'rule', 'choice', 'choice'),
    ('mine', 'math', '', 'math'),
  ],
)
def test_source_or_style_determines_how_answers_are_compared(
  config, parquet, source, style, default, kind
):
  row = {**VERL, 'data_source': source, 'reward_model': {'ground_truth': '2', 'style': style}}
  (question,) = questions.load(dataclasses.replace(config, default_kind=default), parquet(row))
  assert question.kind == kind


def test_a_parquet_column_of_solutions(config, parquet):
  config = dataclasses.replace(config, solution_field='target')
  dataset = questions.load(config, parquet({**VERL, 'target': 'so 2'}, {**VERL, 'target': None}))
  assert [question.solution for question in dataset] == ['so 2', '']
  assert questions.load(config, parquet(VERL))[0].solution == ''


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      {'reward_model': {'ground_truth': None, 'style': 'rule'}},
      r"'reward_model.ground_truth' has no answer: 1\), the first at x\.parquet: row 1",
    ),
    ({'reward_model': None}, 'row 1: reward_model is None'),
    ({'prompt': []}, r'row 1: prompt is \[\]; it must be text or a list'),
    ({'prompt': [{'role': 'tool', 'content': 'x'}]}, 'row 1: prompt is .*tool'),
    ({'prompt': [{'role': 'user', 'content': None}]}, "row 1: field 'content' is null"),
    ({'data_source': None}, "row 1: field 'data_source' is null"),
    (
      {'data_source': 'mine'},
      r"row 1: data_source 'mine' is not a known one \(aime, .*config\.data\.default_kind",
    ),
    (
      {'reward_model': {'ground_truth': '2', 'style': 'model'}},
      "row 1: reward_model.style is 'model'; it must be 'rule'.*'math', 'choice', 'text'",
    ),
  ],
)
def test_error_names_the_invalid_parquet_row(config, parquet, change, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, parquet(VERL, {**VERL, **change}))


def test_a_text_reward_model_is_refused(config, parquet):
  with pytest.raises(InputError, match="row 0: reward_model is '2'; it must be a struct"):
    questions.load(config, parquet({**VERL, 'reward_model': '2'}))


def test_not_a_number_is_no_answer_in_a_parquet_column_of_numbers(config, parquet):
  path = parquet({'question': '1+1', 'answer': 2.5}, {'question': 'q', 'answer': float('nan')})
  with pytest.raises(InputError, match=r"\('answer' is NaN: 1\), the first at x\.parquet: row 1"):
    questions.load(config, path)
