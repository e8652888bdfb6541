"""Tests of columns: public data sets are recognised by their columns, as they are published."""

import dataclasses
import pathlib

import pytest

from exgrpo_jax.data import columns, questions
from exgrpo_jax.data.columns import Fields
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError

NOTHING_SAID = Fields(question='', answer='', solution='', default_kind='')
USER = {'role': 'user', 'content': 'What is 1+1?'}
WORKED = r'We add: $1+1 = \boxed{2}$, so it is.'
OTHER_BOX = r'Not \boxed{3}. ' + WORKED

# A row of each set, with all of its columns.
PUBLISHED = {
  'DAPO-Math-17k, processed': {
    'prompt': 'What is 1+1?',
    'solution': '2',
    'data_source': 'math_dapo',
    'source_prompt': [USER],
    'ability': 'MATH',
    'reward_model': {'ground_truth': '2', 'style': 'rule-lighteval/MATH_v2'},
    'extra_info': {'index': '9a'},
  },
  "verl's columns": {  # DAPO-Math-17k
    'data_source': 'math_dapo',
    'prompt': [USER],
    'ability': 'MATH',
    'reward_model': {'ground_truth': '2', 'style': 'rule-lighteval/MATH_v2'},
    'extra_info': {'index': '9a'},
  },
  'OpenR1-Math-220k': {
    'problem': 'What is 1+1?',
    'solution': WORKED,
    'answer': '2',
    'problem_type': 'Algebra',
    'question_type': 'math-word-problem',
    'source': 'olympiads',
    'uuid': 'e3',
    'is_reasoning_complete': [True],
    'generations': ['<think>…'],
    'correctness_math_verify': [True],
    'correctness_llama': None,
    'finish_reasons': None,
    'correctness_count': 1,
    'messages': [USER, {'role': 'assistant', 'content': '<think>…'}],
  },
  'NuminaMath-1.5': {
    'problem': 'What is 1+1?',
    'solution': WORKED,
    'answer': '2',
    'problem_type': 'Algebra',
    'question_type': 'math-word-problem',
    'problem_is_valid': 'Yes',
    'solution_is_valid': 'Yes',
    'source': 'olympiads',
    'synthetic': False,
  },
  'NuminaMath-CoT': {
    'source': 'olympiads',
    'problem': 'What is 1+1?',
    'solution': OTHER_BOX,
    'messages': [USER, {'role': 'assistant', 'content': OTHER_BOX}],
  },
  'MATH': {
    'problem': 'What is 1+1?',
    'level': 'Level 1',
    'type': 'Algebra',
    'solution': OTHER_BOX,
  },
  'MATH-500': {
    'problem': 'What is 1+1?',
    'solution': WORKED,
    'answer': '2',
    'subject': 'Algebra',
    'level': 1,
    'unique_id': 'test/algebra/1.json',
  },
  'DeepMath-103K': {
    'question': 'What is 1+1?',
    'final_answer': '2',
    'difficulty': 1.5,
    'topic': 'Algebra',
    'r1_solution_1': WORKED,
    'r1_solution_2': 'long',
    'r1_solution_3': 'long',
  },
}
# What has no name of its own.
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
def test_a_public_set_is_recognised(config, parquet, name):
  (question,) = loaded = questions.load(config, parquet(PUBLISHED[name]))
  assert loaded.source.preparation.layouts[0].startswith(f'{name}: ')
  assert question.messages == (Message('user', 'What is 1+1?'),)
  assert (question.answer, question.kind) == ('2', 'math')


@pytest.mark.parametrize('name', COMMON)
def test_columns_in_common_use_are_recognised(config, jsonl, name):
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
  ],
)
def test_worked_solutions_are_kept(config, jsonl, row, solution):
  assert questions.load(config, jsonl(row))[0].solution == solution


def test_a_column_that_the_user_names_comes_first(config, jsonl):
  row = {**PUBLISHED['MATH-500'], 'asked': 'And 2+2?', 'key': {'value': '4'}, 'work': 'by hand'}
  named = dataclasses.replace(
    config, question_field='asked', answer_field='key.value', solution_field='work'
  )
  (question,) = questions.load(named, jsonl(row))
  assert question.messages == (Message('user', 'And 2+2?'),)
  assert (question.answer, question.solution) == ('4', 'by hand')
  chat = dataclasses.replace(config, question_field='conversation')
  (question,) = questions.load(chat, jsonl({'conversation': COMMON['chat']['messages']}))
  assert (question.answer, question.solution) == ('2', OTHER_BOX)


@pytest.mark.parametrize(
  ('names', 'message'),
  [
    (
      ['question', 'prompt', 'answer'],
      "x: 'question', 'prompt' could each be the question .*; set config.data.question_field to",
    ),
    (
      ['question', 'answer', 'final_answer'],
      "x: 'answer', 'final_answer' could each be the answer .* set config.data.answer_field to one",
    ),
    (['text', 'answer'], "x: no column is known to be the question .has: 'text', 'answer'.; set "),
    (['prompt', 'completion'], 'x: no column is known to be the answer .*MATH-500, DeepMath-103K'),
    ([], 'no column is known to be the question .has: nothing.'),
  ],
)
def test_columns_that_could_mean_several_things_or_none_are_refused(names, message):
  with pytest.raises(InputError, match=message):
    columns.recognize(names, NOTHING_SAID, 'x')


def test_a_named_column_settles_what_is_ambiguous():
  said = NOTHING_SAID._replace(question='prompt')
  layout = columns.recognize(['question', 'prompt', 'answer'], said, 'x')
  assert (layout.question, layout.answer) == ('prompt', 'answer')


def test_columns_named_for_other_data_leave_those_of_verl_as_they_are(config, parquet):
  """A run that trains on a file with columns of its own may be evaluated on verl's."""
  named = dataclasses.replace(config, question_field='asked', answer_field='key')
  (question,) = questions.load(named, parquet(PUBLISHED["verl's columns"]))
  assert (question.messages[0].content, question.answer) == ('What is 1+1?', '2')


def test_columns_named_in_a_spec_are_of_this_data_alone(config, jsonl, parquet):
  """They take the place of what the config names for all data, for whatever set."""
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
    message = (
      rf"{{{held}=nil}}: .*: no field 'nil', which the data spec names\. It has: 'data_source'"
    )
    with pytest.raises(InputError, match=message):
      questions.load(config, f'{verl}{{{held}=nil}}')
  for task in ('arithmetic:train', 'reasoning_gym:gcd:train'):
    with pytest.raises(InputError, match=f'^{task}{{answer=key}}: a task has no columns'):
      questions.load(config, f'{task}{{answer=key}}')


# ---- Rows without an answer ----

UNVERIFIABLE = [
  {**PUBLISHED['NuminaMath-1.5'], **change}
  for change in (
    {'answer': 'proof'},
    {'answer': 'notfound'},
    {'answer': None},
    {'answer': ' '},
    {'question_type': 'proof'},
    {'problem_type': 'proof'},
  )
]


def test_rows_without_an_answer_are_refused_unless_they_are_to_be_dropped(config, parquet):
  path = parquet(PUBLISHED['NuminaMath-1.5'], *UNVERIFIABLE, PUBLISHED['NuminaMath-1.5'])
  with pytest.raises(
    InputError,
    match=r"x\.parquet: 6 rows have no answer that can be checked \(the answer is 'proof': 1, .*"
    r"'answer' has no answer: 2.*\), the first at x\.parquet: row 1; .*unverifiable='drop'",
  ):
    questions.load(config, path)
  dropping = dataclasses.replace(config, unverifiable='drop')
  loaded = questions.load(dropping, path)
  assert [question.row for question in loaded] == [0, 1]
  assert loaded.source.preparation.left_out["'answer' has no answer"] == (2, 'x.parquet: row 3')
  assert len(list(pathlib.Path(config.cache_dir).glob('questions/*'))) == 1


def test_a_worked_solution_without_a_box_has_no_answer(config, jsonl):
  dropping = dataclasses.replace(config, unverifiable='drop')
  texts = ('It is 2.', r'\boxed{2', r'So \boxed 2.', WORKED)
  lines = [{**PUBLISHED['MATH'], 'solution': text} for text in texts]
  assert [question.solution for question in questions.load(dropping, jsonl(*lines))] == [WORKED]
  with pytest.raises(InputError, match=r"no row has an answer that can be .* 'solution' has no "):
    questions.load(dropping, jsonl(*lines[:3]))


def test_a_text_answer_may_be_the_word_proof(config, jsonl):
  text = dataclasses.replace(config, default_kind='text')
  assert questions.load(text, jsonl({'question': 'q', 'answer': 'proof'}))[0].answer == 'proof'


# ---- The other columns ----


def test_the_whole_row_is_kept_but_for_bulky_columns(config, jsonl, parquet):
  row = {**PUBLISHED['OpenR1-Math-220k'], 'level': 3, 'rate': 0.50, 'tests': ['a', {'b': None}]}
  left = {name: row[name] for name in row if name not in ('generations', 'messages')}
  assert questions.load(config, jsonl(row))[0].columns == left
  kept = questions.load(config, parquet(row | {'tests': ['a', 'b']}))[0].columns
  assert kept == left | {'tests': ['a', 'b']}


def test_the_same_question_in_the_columns_of_gsm8k_trl_and_verl_is_the_same(config, jsonl, parquet):
  chat = [{'role': 'user', 'content': 'Ann has 7 pens and buys 1,000 more. How many has she?'}]
  worked = {'question': chat[0]['content'], 'answer': 'It is 7+1000=<<7+1000=1007>>.\n#### 1,007'}
  trl = {'prompt': chat, 'solution': '1,007'}
  verl = {
    'data_source': 'openai/gsm8k',
    'prompt': chat,
    'ability': 'math',
    'reward_model': {'style': 'rule', 'ground_truth': '1,007'},
    'extra_info': {'index': 0, 'split': 'train'},
  }
  for path in (jsonl(worked), jsonl(trl, name='trl.jsonl'), parquet(trl), parquet(verl)):
    (question,) = questions.load(config, path)
    assert question.messages == (Message(**chat[0]),)
    assert (question.answer, question.kind) == ('1,007', 'math')
