"""Tests of records: columns are recognized, and errors name the place and field of invalid rows."""

import csv
import dataclasses
import decimal
import json
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.data import questions, records
from exgrpo_jax.data.records import Fields
from exgrpo_jax.datatypes import Message, Question
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier

NOTHING_SAID = Fields(question='', answer='', solution='', default_kind='')
GOOD = {'question': 'q', 'answer': 'a'}
VERL = {
  'data_source': 'math',
  'prompt': [{'role': 'system', 'content': 'Think.'}, {'role': 'user', 'content': 'What is 1+1?'}],
  'reward_model': {'ground_truth': '2', 'style': 'rule'}, 'extra_info': {'index': 0},
}  # fmt: skip


def load(config, path, **changes):
  return questions.load(dataclasses.replace(config, **changes), path)


# ---- jsonl ----


def test_gsm8k_fields_are_the_default(config, jsonl):
  lines = [
    {'question': f'What is {i}+1?', 'answer': f'{i}+1 = <<{i}+1={i + 1}>>{i + 1}.\n#### {i + 1}'}
    for i in range(4)
  ]
  dataset = questions.load(config, jsonl(*lines))
  assert [question.row for question in dataset] == list(range(4))
  assert dataset[3] == Question(
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
    ('72', '72', ''),
    ('two\n#### 1,234', '1,234', 'two\n#### 1,234'),
    ('#### 1\n#### 2\n', '2', '#### 1\n#### 2\n'),
    ('48/2 = $<<48/2=24>>24\n#### 24', '24', '48/2 = $24\n#### 24'),
    ('$\\frac{1}{2}$', '$\\frac{1}{2}$', ''),
  ],
  ids=['bare', 'commas_are_kept', 'last_one_counts', 'calculator', 'latex'],
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
      r"1 row has no answer .*\('answer' has no answer: 1\)\. The first is at train\.jsonl:2\. "
      r".* config\.data\.on_unverifiable='drop'",
    ),
    ('{"question": "q", "answer": NaN}', r"'answer' is NaN: 1\)\. .* at train\.jsonl:2"),
    ({'question': 'q', 'answer': ' NaN'}, r"the answer is 'nan': 1\)\. .*:2\. Give"),
    ('{"question": NaN, "answer": 1}', "train.jsonl:2: field 'question' is nan"),
    ({'question': 'q', 'answer': {'a': 1}}, r"field 'answer' is {'a': '1'}\. It must"),
    ({'question': 'q', 'answer': ['a', None]}, r"jsonl:2: field 'answer\[1\]' is null\. It must"),
    ({'question': 'q', 'answer': [['a']]}, r"jsonl:2: field 'answer\[0\]' is \['a'\]\. It must"),
    ('{"question": "q", "answer": [1, NaN]}', r"field 'answer\[1\]' is nan\. It must"),
    ({'question': 'q', 'answer': []}, r"\('answer' has no answer: 1\)\. .* at train\.jsonl:2"),
    *(
      (
        {'question': [{'role': role, 'content': 'x'} for role in roles], 'answer': 'a'},
        r"train\.jsonl:2: 'question' has no message with the 'user' role",
      )
      for roles in (['system'], ['system', 'assistant'], ['assistant'])
    ),
    ({'question': 'q', 'answer': True}, r"field 'answer' is True\. It must"),
    ({'question': ' ', 'answer': 'a'}, r"field 'question' is ' '\. It must"),
    ({'question': 'q', 'answer': 'so\n#### \n'}, r"'answer' has no answer: 1\)\. .*train\.jsonl:2"),
    ('{"question": "\\ud800", "answer": "a"}', "field 'question' is not valid Unicode"),
  ],
)
def test_error_names_the_invalid_line(config, jsonl, line, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, jsonl(GOOD, line))


def test_the_parts_of_a_message_are_joined(config, jsonl, parquet):
  texts = [{'type': 'text', 'text': text} for text in ('What is ', '1+1', '?')]
  row = {'messages': [{'role': 'user', 'content': texts}], 'answer': '2'}
  for path in (jsonl(row), parquet(row)):
    (question,) = questions.load(config, path)
    assert question.messages == (Message('user', 'What is 1+1?'),)


@pytest.mark.parametrize(
  ('part', 'kind'),
  [
    ({'type': 'image', 'image': 'a.png'}, 'image'),
    ({'type': 'audio', 'text': 'x'}, 'audio'),
    ({'type': 'text', 'text': None}, 'text'),
    ({'text': 'x'}, None),
    ('x', 'str'),
  ],
)
def test_a_part_of_a_message_that_is_not_text_is_refused(config, jsonl, part, kind):
  parts = [{'type': 'text', 'text': 'See: '}, part]
  line = {'messages': [{'role': 'user', 'content': parts}], 'answer': '2'}
  message = rf'train\.jsonl:1: a content part has type {kind!r}: .* Only text is supported'
  with pytest.raises(InputError, match=message):
    questions.load(config, jsonl(line))


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
def test_a_list_of_accepted_answers_becomes_json_in_every_format(
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


def test_answers_in_a_list_keep_their_spelling(config, jsonl):
  line = '{"question": "q", "answer": [0.50, 7, "so #### 7"]}'
  (question,) = questions.load(config, jsonl(line))
  assert question.answer == '["0.50", "7", "so #### 7"]'
  assert question.columns['answer'] == [0.5, 7, 'so #### 7']


@pytest.mark.parametrize(
  ('kind', 'answers'),
  [
    (pa.decimal128(9, 2), ['0.10', '2.50', '33.30']),
    (pa.decimal256(60, 12), ['0.100000000000', '2.500000000000', '33.300000000000']),
  ],
  ids=str,
)
def test_parquet_decimals_keep_all_digits(config, tmp_path, kind, answers):
  column = pa.array(map(decimal.Decimal, answers), kind)
  models = pa.StructArray.from_arrays([column], ['ground_truth'])
  asked = ['one tenth?', 'five halves?', 'a hundredth of 3330?']
  table = pa.table({'question': asked, 'answer': column, 'of': models})
  pq.write_table(table, tmp_path / 'x.parquet')
  for field in ('answer', 'of.ground_truth'):
    loaded = load(config, f'{tmp_path}/x.parquet', answer_field=field)
    assert [question.answer for question in loaded] == answers
  assert loaded[0].columns['answer'] == answers[0]


def test_a_tiny_decimal_is_written_without_an_exponent(config, tmp_path):
  task = 'import decimal\ndef get_task():\n  return {"a": [{"question": "q", "answer": %s}]}'
  (tmp_path / 'x.py').write_text(task % 'decimal.Decimal("1E-12")')
  assert questions.load(config, f'{tmp_path}/x.py:a')[0].answer == '0.000000000001'


def test_tfds_floats_keep_their_precision():
  layout = records.recognize(['question', 'answer'], NOTHING_SAID, 'x')
  values = {'question': 'q', 'answer': np.float32([0.1, 2.5])}
  record = records.record(layout, NOTHING_SAID, values, 'x', 'x')
  assert record['answer'] == '["0.1", "2.5"]'
  assert json.loads(record['columns'])['answer'] == [0.1, 2.5]


def test_error_names_a_solution_of_the_wrong_type(config, jsonl):
  with pytest.raises(InputError, match=r"train\.jsonl:1: field 'proof' is {'x': 'y'}"):
    load(config, jsonl({**GOOD, 'proof': {'x': 'y'}}), solution_field='proof')


def test_nan_as_text_is_an_answer_if_answers_are_compared_as_text(config, jsonl):
  path = jsonl({'question': '0/0 in Java?', 'answer': 'NaN'}, '{"question": "q", "answer": NaN}')
  loaded = load(config, path, default_kind='text', on_unverifiable='drop')
  assert [question.answer for question in loaded] == ['NaN']


def test_an_integer_of_5000_digits_is_an_answer_and_a_column_as_text(config, jsonl, tmp_path):
  digits = '7' * 5000
  line = f'{{"question": "q", "answer": {digits}, "n": {digits}}}'
  row = '{"question": "q", "answer": -(10**5000 // 9 * 7), "n": -(10**5000 // 9 * 7)}'
  (tmp_path / 'x.py').write_text(f'def get_task():\n  return {{"a": [{row}]}}')
  for path, text in ((jsonl(line), digits), (f'{tmp_path}/x.py:a', f'-{digits}')):
    (question,) = questions.load(config, path)
    assert question.answer == question.columns['n'] == text
  assert verifier.judge(rf'So \boxed{{{digits}}}', digits) == 'correct'
  assert verifier.judge(rf'So \boxed{{{digits}1}}', digits) == 'wrong'


# ---- verl's columns ----


def test_verl_columns(config, parquet):
  dataset = questions.load(config, parquet(VERL, {**VERL, 'data_source': 'aime'}))
  assert dataset[1] == Question(
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
    ('openai/gsm8k', 'rule', '', 'math'),
  ],
)
def test_source_or_style_determines_how_answers_are_compared(
  config, parquet, source, style, default, kind
):
  row = {**VERL, 'data_source': source, 'reward_model': {'ground_truth': '2', 'style': style}}
  assert load(config, parquet(row), default_kind=default)[0].kind == kind


def test_a_parquet_column_of_solutions(config, parquet):
  path = parquet({**VERL, 'target': 'so 2'}, {**VERL, 'target': None})
  loaded = load(config, path, solution_field='target')
  assert [question.solution for question in loaded] == ['so 2', '']
  assert load(config, parquet(VERL), solution_field='target')[0].solution == ''
  chat = parquet({**VERL, 'target': [{'role': 'assistant', 'content': 'so 2'}]})  # OpenR1-Math-46k
  assert load(config, chat, solution_field='target')[0].solution == 'so 2'


def test_a_struct_field_may_contain_solutions_and_nan(config, jsonl):
  told = VERL | {'extra_info': {'answer': 'so 2'}}
  path = jsonl(told, VERL, VERL | {'extra_info': None})
  loaded = load(config, path, solution_field='extra_info.answer')
  assert [question.solution for question in loaded] == ['so 2', '', '']
  assert questions.load(config, f'{path}{{solution=extra_info.answer}}')[0].solution == 'so 2'
  assert load(config, path, solution_field='absent.answer')[0].solution == ''
  path = jsonl(told, VERL | {'extra_info': {'answer': float('nan')}})
  with pytest.raises(InputError, match=r"'extra_info\.answer' is NaN: 1\)"):
    load(config, path, answer_field='extra_info.answer')


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      {'reward_model': {'ground_truth': None, 'style': 'rule'}},
      r"'reward_model.ground_truth' has no answer: 1\)\. The first is at x\.parquet: row 1",
    ),
    ({'reward_model': None}, r'row 1: reward_model is None\. It must be a struct'),
    ({'prompt': []}, r'row 1: prompt is \[\]\. It must be text or a list'),
    ({'prompt': [{'role': 'tool', 'content': 'x'}]}, 'row 1: prompt is .*tool'),
    ({'prompt': [{'role': 'user', 'content': None}]}, "row 1: field 'content' is null"),
    ({'data_source': None}, "row 1: field 'data_source' is null"),
    (
      {'data_source': 'mine'},
      r"row 1: data_source='mine' .* known source \(aime, .*config\.data\.default_kind",
    ),
    (
      {'reward_model': {'ground_truth': '2', 'style': 'model'}},
      "row 1: reward_model.style='model' .* Set it to 'rule'.*'math', 'choice', 'text'",
    ),
  ],
)
def test_error_names_the_invalid_parquet_row(config, parquet, change, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, parquet(VERL, {**VERL, **change}))


# ---- Recognizing columns ----

USER = {'role': 'user', 'content': 'What is 1+1?'}
WORKED = r'We add: $1+1 = \boxed{2}$, so it is.'
OTHER_BOX = r'Not \boxed{3}. ' + WORKED

# A row of each set with all of its columns. The row in verl's format is from DAPO-Math-17k.
PUBLISHED = {
  'DAPO-Math-17k, processed': {
    'prompt': 'What is 1+1?', 'solution': '2', 'data_source': 'math_dapo', 'source_prompt': [USER],
    'ability': 'MATH', 'reward_model': {'ground_truth': '2', 'style': 'rule-lighteval/MATH_v2'},
    'extra_info': {'index': '9a'},
  },
  "verl's columns": {
    'data_source': 'math_dapo', 'prompt': [USER], 'ability': 'MATH',
    'reward_model': {'ground_truth': '2', 'style': 'rule-lighteval/MATH_v2'},
    'extra_info': {'index': '9a'},
  },
  'OpenR1-Math-220k': {
    'problem': 'What is 1+1?', 'solution': WORKED, 'answer': '2', 'problem_type': 'Algebra',
    'question_type': 'math-word-problem', 'source': 'olympiads', 'uuid': 'e3',
    'is_reasoning_complete': [True], 'generations': ['<think>…'], 'correctness_math_verify': [True],
    'correctness_llama': None, 'finish_reasons': None, 'correctness_count': 1,
    'messages': [USER, {'role': 'assistant', 'content': '<think>…'}],
  },
  'NuminaMath-1.5': {
    'problem': 'What is 1+1?', 'solution': WORKED, 'answer': '2', 'problem_type': 'Algebra',
    'question_type': 'math-word-problem', 'problem_is_valid': 'Yes', 'solution_is_valid': 'Yes',
    'source': 'olympiads', 'synthetic': False,
  },
  'NuminaMath-CoT': {
    'source': 'olympiads', 'problem': 'What is 1+1?', 'solution': OTHER_BOX,
    'messages': [USER, {'role': 'assistant', 'content': OTHER_BOX}],
  },
  'NuminaMath-TIR': {
    'problem': 'What is 1+1?', 'solution': OTHER_BOX,
    'messages': [USER, {'role': 'assistant', 'content': OTHER_BOX}],
  },
  'MATH': {'problem': 'What is 1+1?', 'level': 'Level 1', 'type': 'Algebra', 'solution': OTHER_BOX},
  'MATH-500': {
    'problem': 'What is 1+1?', 'solution': WORKED, 'answer': '2', 'subject': 'Algebra', 'level': 1,
    'unique_id': 'test/algebra/1.json',
  },
  'DeepMath-103K': {
    'question': 'What is 1+1?', 'final_answer': '2', 'difficulty': 1.5, 'topic': 'Algebra',
    'r1_solution_1': WORKED, 'r1_solution_2': 'long', 'r1_solution_3': 'long',
  },
}  # fmt: skip
# Layouts without a named set.
COMMON = {
  'gsm8k': {'question': 'What is 1+1?', 'answer': 'It is <<1+1=2>>2.\n#### 2'},
  'trl_solution': {'prompt': [USER], 'solution': '2'},
  'trl_worked': {'prompt': 'What is 1+1?', 'solution': WORKED},
  'trl_answer': {'prompt': [USER], 'answer': '2'},
  'worked': {'problem': 'What is 1+1?', 'solution': OTHER_BOX},
  'chat': {'messages': [USER, {'role': 'assistant', 'content': OTHER_BOX}]},
  'chat_gsm8k': {'messages': [USER, {'role': 'assistant', 'content': 'It is 2.\n#### 2'}]},
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_a_public_set_is_recognized(config, parquet, name):
  (question,) = loaded = questions.load(config, parquet(PUBLISHED[name]))
  assert loaded.store.layouts[0].startswith(f'{name}: ')
  assert question.messages == (Message('user', 'What is 1+1?'),)
  assert (question.answer, question.kind) == ('2', 'math')


@pytest.mark.parametrize(
  ('name', 'row'),
  [
    ('MMLU-Pro', {'options': ['1', '2', '3'], 'answer': 'B', 'answer_index': 1, 'cot_content': ''}),
    ('MMLU', {'subject': 'algebra', 'choices': ['1', '2', '3'], 'answer': 1}),
  ],
)
def test_options_in_another_column_follow_the_question(config, jsonl, parquet, name, row):
  row = {'question': 'What is 1+1?', **row}
  for path in (jsonl(row), parquet(row)):
    (question,) = loaded = questions.load(config, path)
    assert loaded.store.layouts[0].startswith(f'{name}: ')
    assert question.messages == (Message('user', 'What is 1+1?\n\nA. 1\nB. 2\nC. 3'),)
    assert question.answer == 'B' and question.columns == row
    assert verifier.is_correct('The answer is (B).', question.answer, kind=question.kind)
  (question,) = questions.load(config, f'{jsonl(row | {"ask": "1+1?"})}{{question=ask}}')
  assert question.messages[0].content == '1+1?', 'another column may already contain the options'
  for bad in (['1'], ['1', None], ['1', True], '1', [*map(str, range(27))]):
    path = jsonl(row | {'options': bad, 'choices': bad})
    with pytest.raises(InputError, match=r"train\.jsonl:1: field '\w+' is .*\. It must be a list"):
      questions.load(config, path)
    (question,) = questions.load(config, f'{path}{{question=question}}')  # the message's advice
    assert question.messages[0].content == 'What is 1+1?'


@pytest.mark.parametrize(
  ('changes', 'shown', 'answer'),
  [
    ({'choices': None}, 'Which?', '1'),
    ({'choices': []}, 'Which?', '1'),
    ({'question': [{'role': 'user', 'content': 'Which?'}]}, 'Which?', '1'),
    ({'question': 'Which?\nA. x\nB. y\nC. z'}, 'Which?\nA. x\nB. y\nC. z', 'B'),
    ({'question': '(A) x\n(B) y\n(C) z\nWhich?'}, '(A) x\n(B) y\n(C) z\nWhich?', 'B'),
    ({'question': 'A. x or B. y or C. z?'}, 'A. x or B. y or C. z?\n\nA. x\nB. y\nC. z', 'B'),
    ({'choices': ['A. x', 'B. y', 'C. z']}, 'Which?\n\nA. x\nB. y\nC. z', 'B'),
    ({'choices': ['(A) x', '(B) y'], 'answer': 'y'}, 'Which?\n\nA. x\nB. y', 'B'),
    ({'choices': ['A*B', 'B*A']}, 'Which?\n\nA. A*B\nB. B*A', 'B'),
    ({'question': '**A.** x\n**B.** y\n**C.** z\n'}, '**A.** x\n**B.** y\n**C.** z\n', 'B'),
    ({'choices': ['A. Smith', 'y']}, 'Which?\n\nA. A. Smith\nB. y', 'B'),
    ({'answer': 'z'}, 'Which?\n\nA. x\nB. y\nC. z', 'C'),
    ({'choices': ['B', 'C', 'A'], 'answer': 'B'}, 'Which?\n\nA. B\nB. C\nC. A', 'B'),
    ({'choices': ['x', 'y', 'y'], 'answer': 'y'}, 'Which?\n\nA. x\nB. y\nC. y', 'y'),
    ({'choices': [10, 20], 'answer': 20}, 'Which?\n\nA. 10\nB. 20', 'B'),
  ],
)
def test_options_are_shown_once_and_the_answer_is_a_letter(config, jsonl, changes, shown, answer):
  row = {'question': 'Which?', 'subject': 's', 'choices': ['x', 'y', 'z'], 'answer': 1} | changes
  (question,) = questions.load(config, jsonl(row))
  assert (question.messages[0].content, question.answer) == (shown, answer)


@pytest.mark.parametrize('name', COMMON)
def test_common_column_names_are_recognized(config, jsonl, name):
  (question,) = questions.load(config, jsonl(COMMON[name]))
  assert question.messages == (Message('user', 'What is 1+1?'),)
  assert (question.answer, question.source) == ('2', 'train')


@pytest.mark.parametrize(
  ('row', 'solution'),
  [
    (PUBLISHED['MATH'], OTHER_BOX),
    (PUBLISHED['DeepMath-103K'], WORKED),
    (PUBLISHED['OpenR1-Math-220k'], WORKED),
    (COMMON['trl_solution'], ''),
    (COMMON['trl_worked'], WORKED),
    (COMMON['chat'], OTHER_BOX),
    ({**COMMON['chat'], 'answer': '2', 'solution': 'mine'}, 'mine'),
    ({'': '0', **COMMON['gsm8k']}, 'It is 2.\n#### 2'),  # pandas wrote its index
    (
      {'question': 'q', 'final_answer': ['2'], 'solution': [WORKED, 'Or so.']},
      f'{WORKED}\n\nOr so.',
    ),
    ({'question': 'q', 'final_answer': ['2'], 'solution': []}, ''),
  ],
)
def test_worked_solutions_are_kept(config, jsonl, row, solution):
  assert questions.load(config, jsonl(row))[0].solution == solution


def test_columns_named_by_the_user_take_precedence(config, jsonl):
  row = {**PUBLISHED['MATH-500'], 'asked': 'And 2+2?', 'key': {'value': '4'}, 'work': 'by hand'}
  fields = dict(question_field='asked', answer_field='key.value', solution_field='work')
  (question,) = load(config, jsonl(row), **fields)
  assert question.messages == (Message('user', 'And 2+2?'),)
  assert (question.answer, question.solution) == ('4', 'by hand')
  path = jsonl({'conversation': COMMON['chat']['messages']})
  (question,) = load(config, path, question_field='conversation')
  assert (question.answer, question.solution) == ('2', OTHER_BOX)


@pytest.mark.parametrize(
  ('names', 'message'),
  [
    (
      'question prompt answer',
      "x: any of 'question', 'prompt' could be the question .*. Set config.data.question_field to",
    ),
    (
      'question answer final_answer',
      "x: any of 'answer', 'final_answer' could be the answer .* Set config.data.answer_field to",
    ),
    ('text answer', "x: no column is recognized as the question .has: 'text', 'answer'.. Set "),
    ('prompt completion', 'x: no column is recognized as the answer .*MATH-500, DeepMath-103K'),
    ('', 'no column is recognized as the question .has: nothing.'),
  ],
)
def test_ambiguous_or_unknown_columns_are_refused(names, message):
  with pytest.raises(InputError, match=message):
    records.recognize(names.split(), NOTHING_SAID, 'x')


def test_naming_a_column_resolves_an_ambiguity():
  said = NOTHING_SAID._replace(question='prompt')
  layout = records.recognize(['question', 'prompt', 'answer'], said, 'x')
  assert (layout.question, layout.answer) == ('prompt', 'answer')


def test_columns_named_for_other_data_do_not_affect_verls_columns(config, parquet):
  """A run that trains on a file with other columns may be evaluated on data in verl's format."""
  path = parquet(PUBLISHED["verl's columns"])
  (question,) = load(config, path, question_field='asked', answer_field='key')
  assert (question.messages[0].content, question.answer) == ('What is 1+1?', '2')


def test_columns_named_in_a_spec_apply_only_to_its_data(config, jsonl, parquet):
  """They replace the columns that the config names for all data."""
  named = dataclasses.replace(config, question_field='asked', solution_field='work')
  ours = jsonl({'ask': '2+2?', 'key': '4', 'work': 'none'})
  (question,) = questions.load(named, f'{ours}{{question=ask,answer=key}}')
  found = question.messages[0].content, question.answer, question.solution
  assert found == ('2+2?', '4', '')
  verl = parquet(PUBLISHED["verl's columns"] | {'key': '3'})
  (question,) = questions.load(named, f'{verl}{{answer=key}}[:1]')
  assert (question.messages[0].content, question.answer) == ('What is 1+1?', '3')
  of_filtered = {'solution': '', 'columns': '{}', 'pass_rate': 0.5, 'key': '4'}
  filtered = parquet(PUBLISHED["verl's columns"] | of_filtered)
  assert questions.load(named, f'{filtered}{{answer=key}}')[0].answer == '4'
  for held in ('question', 'answer', 'solution'):
    message = rf"{{{held}=nil}}: .*: the data spec names the field 'nil', but .* only 'data_source'"
    with pytest.raises(InputError, match=message):
      questions.load(config, f'{verl}{{{held}=nil}}')
  for task in ('arithmetic:train', 'reasoning_gym:gcd:train'):
    with pytest.raises(InputError, match=f'^{task}{{answer=key}}: tasks have no columns'):
      questions.load(config, f'{task}{{answer=key}}')


# ---- Rows without an answer ----


def test_rows_without_an_answer_are_refused_or_dropped(config, parquet):
  good = PUBLISHED['NuminaMath-1.5']
  changes = [{'answer': answer} for answer in ('proof', 'notfound', None, ' ')]
  changes += [{'question_type': 'proof'}, {'problem_type': 'proof'}]
  path = parquet(good, *(good | change for change in changes), good)
  with pytest.raises(
    InputError,
    match=r"x\.parquet: 6 rows have no answer that can be checked \(the answer is 'proof': 1, .*"
    r"'answer' has no answer: 2.*\)\. The first is at x\.parquet: row 1\. .*on_unverifiable='drop'",
  ):
    questions.load(config, path)
  loaded = load(config, path, on_unverifiable='drop')
  assert [question.row for question in loaded] == [0, 1]
  assert loaded.store.left_out["'answer' has no answer"] == (2, 'x.parquet: row 3')
  assert len(list(pathlib.Path(config.cache_dir).glob('questions/*'))) == 1


def test_a_worked_solution_without_a_box_has_no_answer(config, jsonl):
  texts = ('It is 2.', r'\boxed{2', r'So \boxed 2.', WORKED)
  lines = [{**PUBLISHED['MATH'], 'solution': text} for text in texts]
  loaded = load(config, jsonl(*lines), on_unverifiable='drop')
  assert [question.solution for question in loaded] == [WORKED]
  with pytest.raises(InputError, match=r"no row has an answer that can be .* 'solution' has no "):
    load(config, jsonl(*lines[:3]), on_unverifiable='drop')


# ---- The other columns ----


def test_all_columns_are_kept_except_bulky_ones(config, jsonl, parquet):
  row = {**PUBLISHED['OpenR1-Math-220k'], 'level': 3, 'rate': 0.50, 'tests': ['a', {'b': None}]}
  left = {name: row[name] for name in row if name not in ('generations', 'messages')}
  assert questions.load(config, jsonl(row))[0].columns == left
  kept = questions.load(config, parquet(row | {'tests': ['a', 'b']}))[0].columns
  assert kept == left | {'tests': ['a', 'b']}
