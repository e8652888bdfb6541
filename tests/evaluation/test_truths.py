"""The kinds of a dataset's ground truths, and which of them are odd."""

import re
import types

import pytest

from exgrpo_jax.configs import base
from exgrpo_jax.data import questions, tokenizer
from exgrpo_jax.evaluation import preview, truths
from exgrpo_jax.experiment.experiment import parse_config
from tests.helpers import forked
from tests.helpers.paths import CHECKPOINTS, REAL_DATA


class Truths(list):
  """A dataset of these ground truths."""

  def read(self, rows):
    return [types.SimpleNamespace(row=row, answer=self[row][0], kind=self[row][1]) for row in rows]


def summary(*answers, kind='math'):
  return truths.summary(Truths((answer, kind) for answer in answers))


@pytest.mark.parametrize(
  ('truth', 'kind'),
  [
    ('42', 'integers'),
    ('She has 48/2 = 24 left, so that is it.\n#### 24', 'integers'),
    (r'The sum of all of them is \boxed{7}', 'integers'),
    (r'\frac{1}{2}', 'fractions'),
    (r'\sqrt{2}', 'other numbers'),
    ('50%', 'percentages'),
    ('x^2+1', 'expressions'),
    ('1, 2, 3', 'lists'),
    (r'\{1, 2\}', 'sets'),
    ('[0, 1)', 'tuples and intervals'),
    ('x = 3', 'equations and inequalities'),
    ('Yes', 'words or letters'),
    (r'\text{Evelyn}', 'words or letters'),
    ('blue and red', 'words or letters'),
    ('How many clips did she sell?', 'sentences'),
    ('  ', 'empty'),
    ('1+' * 1500 + '1', 'compared as text, because they are too long'),
  ],
)
def test_a_truth_has_the_kind_that_the_verifier_reads(truth, kind):
  assert truths.kind_of(truth) == kind


def test_the_kind_of_the_row_decides_how_a_truth_is_read():
  assert truths.kind_of('B', 'choice') == truths.kind_of('(C)', 'choice') == 'letters'
  assert truths.kind_of('42', 'choice') == 'other than a letter'
  assert truths.kind_of('It is a sentence of some length.', 'text') == 'text'


def test_rare_kinds_are_odd_if_another_kind_is_common():
  lines = summary(*['7'] * 299, '1/2')
  assert lines == [
    '300 of 300 read',
    '  integers     299 (99.7%), such as 7',
    '  fractions      1 (0.3%), such as 1/2',
    '  odd: row 299, one of the few fractions: 1/2',
  ]
  assert 'odd' not in ''.join(summary(*['7'] * 200, *['x+1'] * 99, '1/2')), 'no kind has 90%'
  assert 'odd' not in ''.join(summary(*['7'] * 95, *['1/2'] * 5)), '5% are not rare'


def test_five_odd_truths_are_listed_and_long_ones_are_cut():
  found = summary(
    '1', 'nobody at all knows it yet', '1+' * 150 + '1', *['this is no answer at all'] * 4
  )
  assert [line.split(':')[1] for line in found if 'odd:' in line] == [
    ' row 1, a sentence',
    ' row 2, 301 characters',
    *(f' row {row}, a sentence' for row in (3, 4, 5)),
  ]
  assert f'{"1+" * 30}…' in '\n'.join(found) and found[-1] == '  and 1 more odd ones'


def test_only_evenly_spaced_rows_of_a_large_data_set_are_read():
  answers = [('1', 'math')] * 10_000
  read = list[int]()

  class Counted(Truths):
    def read(self, rows):
      read.extend(rows)
      return super().read(rows)

  assert truths.summary(Counted(answers))[0] == '2,000 of 10,000 read'
  assert (read[0], read[-1], len(set(read))) == (0, 9_999, 2_000)


@pytest.mark.full
@pytest.mark.skipif(not REAL_DATA.exists(), reason=f'{REAL_DATA} is absent')
def test_real_data_sets_have_the_expected_kinds(tmp_path):
  config = base.get_config()
  config.data.cache_dir = str(tmp_path)

  def shown(name):
    spec = str(REAL_DATA / name)
    return truths.summary(questions.load(parse_config(config).data, spec))

  assert shown('gsm8k_test.jsonl')[:2] == [
    '1,319 of 1,319 read',
    '  integers  1,319 (100.0%), such as 18',
  ]
  kinds = ' '.join(shown('math_benchmarks.parquet'))
  assert all(kind in kinds for kind in ('fractions', 'expressions', 'matrices', 'words'))


# ---- The output of `exgrpo data show` ----

NUMINA = {'problem_type': 'Algebra', 'source': 'olympiads', 'solution': 'By adding.'}
ROWS = [
  *({**NUMINA, 'problem': f'{n}+{n}?', 'answer': f'{2 * n}'} for n in range(1, 5)),
  {**NUMINA, 'problem': '1+1?', 'answer': '2', 'solution': 'x' * 301},
  {**NUMINA, 'problem': 'Prove it.', 'answer': 'proof'},
  {**NUMINA, 'problem': '1' * 30, 'answer': '1'},
]


@pytest.fixture
def shown(jsonl, tmp_path):
  """A function that returns the output for ROWS with these settings."""

  def show(opened=None, rows=ROWS, **changes):
    values = base.get_config()
    values.data.cache_dir = str(tmp_path / 'cache')
    values.rollout.max_prompt = 5  # the length of the shortest prompt, in tokens
    for key, value in changes.items():
      section, name = key.split('__')
      values[section][name] = value
    return preview.describe(jsonl(*rows), parse_config(values), opened)

  return show


@pytest.fixture
def opened(tmp_path):
  tokenizer.train(['1+1?'], 263, tmp_path / 'tokenizer.model')  # no merges
  return tokenizer.load(tmp_path / 'tokenizer.model')


def test_the_preview_says_how_columns_are_read_and_what_is_left_out(shown, opened):
  lines = shown(opened).splitlines()
  assert re.fullmatch(r'.*train\.jsonl: 6 questions', lines[0])
  for line in (
    "  read as    NuminaMath-1.5: question 'problem', answer 'answer', solution 'solution', "
    "source 'source'",
    '  columns    problem_type, source, solution, problem, answer (rewards can read them)',
    "  prompts    tokens in template 'plain': 5 (50%), 31 (90%), 31 (99%), 31 (longest)",
    "  left out   1 row of the file: the answer is 'proof', first at train.jsonl:6; a run refuses "
    "them unless config.data.on_unverifiable='drop'",
    '  left out   1 question: over config.rollout.max_prompt=5 tokens; a run refuses them '
    "unless config.data.on_overlong='drop'",
    '  repeated   1 with the text of an earlier question; kept, because every row counts as a '
    'question',
  ):
    assert line in lines
  dropping = shown(opened, data__on_unverifiable='drop', data__on_overlong='drop')
  assert 'left out   1 row of' in dropping and 'a run refuses' not in dropping


def test_a_wrong_answer_column_is_visible_in_its_truths(shown):
  asked = [f'How many clips did she sell on day {n}?' for n in range(9)]
  rows = [{'question': text, 'answer': str(n)} for n, text in enumerate(asked)]
  lines = shown(rows=rows).splitlines()
  assert '             integers      9 (100.0%), such as 0' in lines
  lines = shown(rows=rows, data__answer_field='question').splitlines()
  assert f'             sentences      9 (100.0%), such as {asked[0]}' in lines
  assert f'             odd: row 0, a sentence: {asked[0]}' in lines


def test_the_preview_shows_three_questions_as_the_model_sees_them(shown):
  opened = tokenizer.load(CHECKPOINTS / 'qwen2_tied')
  text = shown(opened, prompt__template='chat', prompt__system='Be brief.')
  heads = re.findall(r'^question \d+: \d+ tokens, kind math, source olympiads$', text, re.M)
  assert len(heads) == 3
  assert '<|im_start|>system\n           | Be brief.<|im_end|>' in text
  assert '| 3+3?<|im_end|>' in text and '  answer   | 6\n  solution | By adding.\n' in text
  assert '4+4?' not in text


def test_a_long_solution_is_cut(shown):
  assert '| ' + 'x' * 300 + '…\n' in shown(rows=ROWS[4:5])


def test_without_a_tokenizer_characters_are_counted(shown):
  text = shown(rows=ROWS[:2])
  assert 'prompts    characters in template ' in text and '5 (longest)' in text
  assert 'left out   prompts over the limit cannot be counted without a tokenizer' in text


@pytest.mark.full
def test_the_command_accepts_a_model_and_settings(jsonl, tmp_path):
  path = jsonl({'ask': '1+1?', 'answer': 2})
  settings = [f'data.cache_dir={tmp_path}/cache', 'data.question_field=ask', 'prompt.template=chat']
  flags = ['--config=base', *(f'--config.{one}' for one in settings)]
  model = f'--model={CHECKPOINTS / "qwen2_tied"}'
  outcome = forked.run_one(['data', 'show', path, *flags, model])
  assert outcome.status == 0 and not outcome.used_device, outcome.err
  assert 'train.jsonl: 1 question\n' in outcome.out and '<|im_start|>user' in outcome.out


@pytest.mark.full
def test_with_an_environment_an_episode_is_shown(tmp_path, jsonl):
  values = base.get_config()
  values.data.cache_dir = str(tmp_path / 'cache')
  values.prompt.template = 'plain'
  values.environment.update(dict(name='guess', workers=1, max_turns=9))
  text = preview.describe('guess:test[:2]', parse_config(values), None)
  first, second = text.split('\n\n')[1:]
  assert '  prompt   | 1-64' in first
  turns = re.findall(r'policy: (\d+)\n +\| environment: (\w*) \[reward (\d)\]', first)
  (answer,) = re.findall(r'answer   \| (\d+)', first)
  expected = {True: 'higher', False: 'lower'}
  for guess, said, reward in turns[:-1]:
    assert (said, reward) == (expected[int(guess) < int(answer)], '0')
  assert len(turns) > 1 and second.startswith('question 1: ')
  values.environment.name = 'tests.helpers.environments:Announced'
  text = preview.describe('guess:test[:1]', parse_config(values), None)
  assert re.search('prompt   [|] a number in 1-64\n', text) and '| policy: 1\n' in text
  values.environment.name = 'tests.helpers.environments:Chance'
  text = preview.describe('guess:test[:1]', parse_config(values), None)
  assert ':Chance: playing an episode failed for row 0 (' in text
  assert 'TypeError: Chance has no method demonstrate(rng)' in text
  rows = jsonl({'question': '1-9', 'answer': '3', 'board': 7})
  assert 'question, answer, board (the environment can' in preview.describe(
    rows, parse_config(values), None
  )
