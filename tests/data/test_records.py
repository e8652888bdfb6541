"""Tests of records: the file formats, and the ways in which their content can be invalid."""

import dataclasses
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.data import questions
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier

LINES = [
  {'question': f'What is {i}+1?', 'answer': f'{i}+1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}'}
  for i in range(20)
]


VERL = {
  'data_source': 'math',
  'prompt': [{'role': 'system', 'content': 'Think.'}, {'role': 'user', 'content': 'What is 1+1?'}],
  'reward_model': {'ground_truth': '2', 'style': 'rule'},
  'extra_info': {'index': 0},
}


@pytest.fixture
def parquet(tmp_path):
  def write(*rows):
    path = tmp_path / 'bench.parquet'
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)

  return write


# ---- jsonl ----


def test_gsm8k_fields_are_the_default(config, jsonl):
  path = jsonl(*LINES)
  dataset = questions.load(config, path)
  assert len(dataset) == 20
  assert dataset[3] == questions.Question(
    row=3,
    messages=(Message('user', 'What is 3+1?'),),
    answer='4',
    kind='math',
    solution='3+1 = 4.\n#### 4',
    source='train',
    columns=LINES[3],
  )
  assert [question.row for question in dataset] == list(range(20))


def test_field_names_can_be_configured(config, jsonl):
  config = dataclasses.replace(
    config, question_field='problem', answer_field='truth', solution_field='proof'
  )
  dataset = questions.load(
    config,
    jsonl(
      {'problem': '1+1', 'truth': '2', 'proof': 'by counting', 'question': 'no', 'answer': 'no'},
      {'problem': '2+2', 'truth': 4.50, 'proof': None},
      {'problem': '3+3', 'truth': 6},
    ),
  )
  assert [(q.answer, q.solution) for q in dataset] == [('2', 'by counting'), ('4.5', ''), ('6', '')]
  assert dataset[0].messages == (Message('user', '1+1'),)


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


def test_numbers_keep_their_spelling(config, jsonl):
  dataset = questions.load(config, jsonl('{"question": "q", "answer": 0.50}'))
  assert dataset[0].answer == '0.50'


def test_a_byte_order_mark_is_skipped(config, jsonl):
  assert questions.load(config, jsonl('\ufeff{"question": "q", "answer": "a"}'))[0].answer == 'a'


def test_blank_lines_are_skipped_but_counted_in_line_numbers(config, jsonl):
  assert len(questions.load(config, jsonl(LINES[0], '', '  ', LINES[1], ''))) == 2
  with pytest.raises(InputError, match=r'train\.jsonl:3: not valid JSON'):
    questions.load(config, jsonl(LINES[0], '', '{'))


GOOD = {'question': 'q', 'answer': 'a'}


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    pytest.param('{"question": "q", "answ', r'train\.jsonl:2: not valid JSON', id='cut_off'),
    pytest.param(
      '["q", "a"]', r"train\.jsonl:2: \['q', 'a'\] is not an object", id='not_an_object'
    ),
    pytest.param(
      {'question': 'q', 'solution': 'a'},
      r"train\.jsonl:2: no field 'answer' \(has: 'question', 'solution'\); "
      r'set config\.data\.answer_field\.',
      id='missing_answer',
    ),
    pytest.param(
      {'text': 'q', 'answer': 'a'},
      r"no field 'question' \(has: 'text', 'answer'\); set config\.data\.question_field",
      id='missing_question',
    ),
    pytest.param(
      {'question': 'q', 'answer': None},
      r"1 rows have no answer that can be checked \('answer' has no answer: 1\), the first at "
      r"train\.jsonl:2; .* config\.data\.unverifiable='drop'",
      id='null',
    ),
    pytest.param(
      '{"question": "q", "answer": NaN}', r"'answer' is NaN: 1\), .* at train\.jsonl:2", id='nan'
    ),
    pytest.param(
      {'question': 'q', 'answer': ' NaN'}, r"the answer is 'nan': 1\), .*:2; give", id='nan_as_text'
    ),
    pytest.param(
      '{"question": NaN, "answer": 1}', "train.jsonl:2: field 'question' is nan", id='nan_question'
    ),
    pytest.param(
      '{"question": "q", "answer": "3", "answer": "2"}',
      r"train\.jsonl:2: 'answer' is there 2 times \(has: 'question', 'answer', 'answer'\),",
      id='answer_twice',
    ),
    pytest.param(
      {'question': 'q', 'answer': ['a']}, r"field 'answer' is \['a'\]; it must", id='list'
    ),
    pytest.param(
      {'question': 'q', 'answer': True}, "field 'answer' is True; it must", id='boolean'
    ),
    pytest.param({'question': ' ', 'answer': 'a'}, "field 'question' is ' '; it must", id='blank'),
    pytest.param(
      {'question': 'q', 'answer': 'so\n#### \n'},
      r"'answer' has no answer: 1\), the first at train\.jsonl:2",
      id='nothing_after_the_mark',
    ),
    pytest.param(
      '{"question": "\\ud800", "answer": "a"}',
      "field 'question' is not valid Unicode",
      id='lone_surrogate',
    ),
  ],
)
def test_error_names_the_invalid_line(config, jsonl, line, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, jsonl(GOOD, line))


def test_error_names_the_line_that_is_not_utf8(config, tmp_path):
  (tmp_path / 'latin.jsonl').write_bytes('{"question": "é", "answer": "a"}'.encode('latin-1'))
  with pytest.raises(InputError, match=r'latin\.jsonl:1: not valid JSON .*UTF-8'):
    questions.load(config, str(tmp_path / 'latin.jsonl'))


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


def test_error_names_a_solution_of_the_wrong_type(config, jsonl):
  config = dataclasses.replace(config, solution_field='proof')
  with pytest.raises(InputError, match=r"train\.jsonl:1: field 'proof' is \['x'\]"):
    questions.load(config, jsonl({**GOOD, 'proof': ['x']}))


@pytest.mark.parametrize('content', ['', '\n\n'], ids=['empty', 'blank_lines'])
def test_an_empty_file_is_refused(config, jsonl, content):
  with pytest.raises(InputError, match=r'train\.jsonl: the file holds no question'):
    questions.load(config, jsonl(content))


# ---- parquet ----


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


def test_without_a_style_the_source_decides(config, parquet):
  row = {**VERL, 'data_source': 'arc_c', 'reward_model': {'ground_truth': 'A'}}
  assert questions.load(config, parquet(row))[0].kind == 'choice'


def test_a_parquet_column_of_solutions(config, parquet):
  config = dataclasses.replace(config, solution_field='target')
  dataset = questions.load(config, parquet({**VERL, 'target': 'so 2'}, {**VERL, 'target': None}))
  assert [question.solution for question in dataset] == ['so 2', '']
  assert questions.load(config, parquet(VERL))[0].solution == ''


@pytest.mark.parametrize(
  ('column', 'message'), [('prompt', 'the question'), ('reward_model', 'the answer')]
)
def test_error_names_a_missing_column_and_the_present_ones(config, parquet, column, message):
  row = {name: value for name, value in VERL.items() if name != column}
  with pytest.raises(
    InputError, match=rf"bench\.parquet: no column is known to be {message} \(has: .*'extra_info'"
  ):
    questions.load(config, parquet(row))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    pytest.param(
      {'reward_model': {'ground_truth': None, 'style': 'rule'}},
      r"'reward_model.ground_truth' has no answer: 1\), the first at bench\.parquet: row 1",
      id='null_truth',
    ),
    pytest.param({'reward_model': None}, 'row 1: reward_model is None', id='null_reward_model'),
    pytest.param(
      {'prompt': []}, r'row 1: prompt is \[\]; it must be text or a list', id='empty_prompt'
    ),
    pytest.param(
      {'prompt': [{'role': 'tool', 'content': 'x'}]}, 'row 1: prompt is .*tool', id='unknown_role'
    ),
    pytest.param(
      {'prompt': [{'role': 'user', 'content': None}]},
      "row 1: field 'content' is null",
      id='null_content',
    ),
    pytest.param({'data_source': None}, "row 1: field 'data_source' is null", id='null_source'),
    pytest.param(
      {'data_source': 'mine'},
      r"row 1: data_source 'mine' is not a known one \(aime, .*mmlu_pro\)"
      r'.*config\.data\.default_kind',
      id='unknown_source',
    ),
    pytest.param(
      {'reward_model': {'ground_truth': '2', 'style': 'model'}},
      "row 1: reward_model.style is 'model'; it must be 'rule'.*'math', 'choice', 'text'",
      id='unknown_style',
    ),
  ],
)
def test_error_names_the_invalid_parquet_row(config, parquet, change, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, parquet(VERL, {**VERL, **change}))


def test_a_text_reward_model_is_refused(config, parquet):
  with pytest.raises(
    InputError, match="row 0: reward_model is '2'; it must be a struct with ground_truth"
  ):
    questions.load(config, parquet({**VERL, 'reward_model': '2'}))


@pytest.mark.parametrize('kind', [pa.string(), pa.binary()], ids=str)
def test_error_names_the_row_whose_text_is_not_utf8(config, tmp_path, kind):
  answers = pa.array([b'2', b'caf\xe9'], pa.binary()).view(kind)
  pq.write_table(pa.table({'question': ['1+1', 'q'], 'answer': answers}), tmp_path / 'x.parquet')
  with pytest.raises(InputError, match=r"x\.parquet: row 1: .*'utf-8' codec .*write it again"):
    questions.load(config, str(tmp_path / 'x.parquet'))


def test_not_a_number_is_no_answer_in_a_parquet_column_of_numbers(config, parquet):
  path = parquet({'question': '1+1', 'answer': 2.5}, {'question': 'q', 'answer': float('nan')})
  with pytest.raises(
    InputError, match=r"\('answer' is NaN: 1\), the first at bench\.parquet: row 1"
  ):
    questions.load(config, path)


def test_two_columns_of_one_name_are_refused(config, tmp_path):
  arrays = [pa.array([text]) for text in ('1+1', '2', '3')]
  pq.write_table(pa.table(arrays, ['question', 'answer', 'answer']), tmp_path / 'x.parquet')
  with pytest.raises(InputError, match=r"x\.parquet: 'answer' is there 2 times"):
    questions.load(config, str(tmp_path / 'x.parquet'))


def test_a_parquet_without_rows_is_refused(config, tmp_path):
  pq.write_table(pa.Table.from_pylist([VERL]).slice(0, 0), tmp_path / 'none.parquet')
  with pytest.raises(InputError, match=r'none\.parquet: the file holds no question'):
    questions.load(config, str(tmp_path / 'none.parquet'))


def test_a_truncated_parquet_file_is_refused(config, parquet):
  path = pathlib.Path(parquet(VERL))
  path.write_bytes(path.read_bytes()[:-20])
  with pytest.raises(InputError, match='not a complete parquet file'):
    questions.load(config, str(path))
