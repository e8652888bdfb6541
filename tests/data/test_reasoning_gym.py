"""Questions that tasks of reasoning_gym generate."""

import importlib.util
import json

import numpy as np
import pytest

from exgrpo_jax.data import questions, reasoning_gym
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError

needs_package = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None,
  reason="pip install 'exgrpo_jax[reasoning-gym]'",
)


def in_full(test):
  return pytest.mark.full(needs_package(test))


@pytest.fixture
def splits(config):
  """The texts of the questions of each split."""

  def read(tasks):
    found = (questions.load(config, f'reasoning_gym:{tasks}:{split}') for split in SPLITS)
    return [[question.messages[-1].content for question in data] for data in found]

  return read


SPLITS = ('train', 'validation', 'test')


def test_without_the_package_the_extra_is_named(config, monkeypatch):
  monkeypatch.setattr(reasoning_gym.importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(
    InputError, match=r"gcd:train: the reasoning-gym package is .* 'exgrpo_jax\[reasoning-gym\]'"
  ):
    questions.load(config, 'reasoning_gym:gcd:train')


@in_full
def test_a_question_is_the_tasks_text_and_its_answer_boxed_is_the_solution(config):
  data = questions.load(config, 'reasoning_gym:chain_sum(min_terms=2,max_terms=2,size=8):train[:3]')
  assert len(data) == 3
  question = data[0]
  entry = question.columns['entry']
  assert question.messages == (Message('user', entry['question']),)
  first, sign, second, _ = entry['question'].rpartition(':')[2].split()
  assert int(question.answer) == int(first) + int(f'{sign}{second}')
  assert (question.kind, question.source) == ('reasoning_gym', 'chain_sum')
  assert question.solution == f'\\boxed{{{question.answer}}}'
  assert entry['config'] == {'min_terms': 2, 'max_terms': 2}
  assert data.store.layouts == ['chain_sum: 8 train, 2 validation, 2 test']


@in_full
def test_a_split_is_prepared_once(config, monkeypatch):
  first = questions.load(config, 'reasoning_gym:gcd(size=4):train')
  monkeypatch.setattr(reasoning_gym.subprocess, 'run', None)
  assert list(questions.load(config, 'reasoning_gym:gcd(size=4):train')) == list(first)
  assert len(questions.load(config, 'reasoning_gym:gcd(size=4):test')) == 1


@in_full
@pytest.mark.parametrize('times', [1, 2])  # a task that comes twice has each question once
def test_no_two_splits_share_a_question_also_where_there_are_few(splits, times):
  texts = splits('+'.join(['products(max_digits=1)'] * times))
  assert len(set().union(*texts)) == sum(map(len, texts)) == 100  # 0 to 9 by 0 to 9


@in_full
def test_a_question_is_in_the_same_split_whatever_the_arguments_and_the_seed(splits):
  texts, others = splits('products(max_digits=1)'), splits('products(max_digits=2,size=400,seed=7)')
  shared = [[bool({*one} & {*other}) for other in others] for one in texts]
  assert np.array_equal(shared, np.eye(3))


@in_full
def test_another_seed_has_other_questions(splits):
  first, second = splits('gcd(size=40)')[0], splits('gcd(size=40,seed=1)')[0]
  assert len(set(first) & set(second)) < 4


@in_full
@pytest.mark.parametrize('task', ['isomorphic_strings', 'list_functions'])
def test_every_host_makes_the_same(tmp_path, monkeypatch, task):
  """The first goes through sets of texts, the second draws from Python's global generator."""
  made = []
  for seed in ('1', '2'):
    monkeypatch.setenv('PYTHONHASHSEED', seed)
    store = reasoning_gym.prepared(str(tmp_path / seed), 'spec', f'{task}(size=20)')
    made.append(store.reader('train')(range(20)))
  assert made[0] == made[1]


@in_full
def test_tasks_are_mixed_by_their_weights_in_every_part_of_a_split(config):
  data = questions.load(config, 'reasoning_gym:chain_sum(size=20)*2+gcd(size=20):train')
  sources = [question.source for question in data]
  assert (sources.count('chain_sum'), sources.count('gcd')) == (40, 20)
  assert set(sources[:15]) == {'chain_sum', 'gcd'}


@in_full
def test_a_task_may_have_no_answer_of_its_own(config):
  """Any plan that frees the car is right."""
  question = questions.load(config, 'reasoning_gym:rush_hour(size=1):train')[0]
  assert (question.answer, question.solution) == ('', '')
  assert question.columns['entry']['answer'] is None


@in_full
def test_entries_survive_as_json(config):
  """One compares tuples, the other holds a fraction."""
  data = questions.load(config, 'reasoning_gym:rearc(size=2)+gsm_symbolic(size=20):train')
  assert {question.source for question in data} == {'rearc', 'gsm_symbolic'}
  assert len(data) == 22


@needs_package
def test_a_level_of_the_curriculum_sets_what_is_not_given():
  [task] = reasoning_gym.parse('spec', 'chain_sum(level=2,max_digits=7)')
  [easier] = reasoning_gym.parse('spec', 'chain_sum(level=1)')
  assert task.config['max_digits'] == 7 != easier.config['max_digits']
  assert task.config['max_terms'] > easier.config['max_terms']


@in_full
@pytest.mark.parametrize(
  ('tasks', 'message'),
  [
    ('chain_sun', "reasoning_gym has no 'chain_sun'; did you mean 'chain_sum'?"),
    ('chain_sum(max_term=3)', "chain_sum has no 'max_term'; did you mean 'max_terms'?"),
    ('chain_sum(min_terms=5,max_terms=3)', 'chain_sum: max_terms must be >= min_terms.'),
    ('chain_sum(min_terms="a")', 'chain_sum: TypeError: '),
    ('chain_sum(min_terms=print(1))', 'min_terms=print(1) must be a number, a quoted string, '),
    ('chain_sum(seed=1,seed=2)', 'seed is given twice'),
    ('chain_sum(seed=None)', 'seed=None must be an integer of at least 0'),
    ('chain_sum(size=0)', 'size=0 must be an integer of at least 1'),
    ('chain_sum(level=99)', 'level=99 is out of range'),
    ('acre(level=1)', 'acre: level=1 has no effect because the task has no curriculum'),
    ('caesar_cipher(level=3)', 'caesar_cipher: rotation must be in range [1,25].'),
    ('chain_sum(2)', "'chain_sum(2)' does not name tasks. Write it like chain_sum(min_terms=2,"),
    ('chain_sum*0', "'chain_sum * 0' does not name tasks. "),
    ('chain_sum-gcd', "'chain_sum - gcd' does not name tasks. "),
    ('chain_sum(', "'chain_sum(' does not name tasks. "),
    ('countdown', 'countdown: this task is rejected because its score_answer runs model output '),
  ],
)
def test_what_cannot_be_is_refused_in_one_line(tasks, message):
  with pytest.raises(InputError) as error:
    reasoning_gym.parse('the spec', tasks)
  assert str(error.value).startswith('the spec: ')
  assert message in str(error.value)
  assert '\n' not in str(error.value)


@in_full
@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    (
      'gcd',
      "reasoning_gym:gcd: a data spec must end in a split, such as 'reasoning_gym:gcd:train'",
    ),
    ('gcd(size=4):ood', r"gcd\(size=4\) has no split 'ood' \(has: train, validation, test\)"),
    (
      'complex_arithmetic(size=4):train',
      "complex_arithmetic: none of the questions can be used: score_answer returns 1 for .* 'nan'",
    ),
    ('game_of_life_halting(size=4):train', r"score_answer returns 1 for the answer '\?'"),
  ],
)
def test_a_split_that_cannot_be_had_is_refused(config, spec, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, f'reasoning_gym:{spec}')


@in_full
def test_what_its_own_answer_does_not_solve_is_left_out_and_counted(config):
  data = questions.load(config, 'reasoning_gym:ab(size=200):train')
  assert all(question.answer for question in data)  # nothing remains of some rows of tokens
  reason = "left out, the first because score_answer returns less than 1 for the task's own answer"
  assert reason in data.store.layouts[0]


@in_full
@pytest.mark.parametrize('task', ['gcd', 'rush_hour'])  # the second has no answer of its own
def test_a_prefiltered_file_keeps_what_judging_needs(config, tmp_path, task):
  question = questions.load(config, f'reasoning_gym:{task}(size=1):train')[0]
  row = {
    'prompt': [message._asdict() for message in question.messages],
    'reward_model': {'ground_truth': question.answer, 'style': question.kind},
    'data_source': question.source,
    'solution': question.solution,
    'columns': json.dumps(dict(question.columns)),
    'pass_rate': 0.5,
  }
  (tmp_path / 'kept.jsonl').write_text(json.dumps(row))
  read = questions.load(config, str(tmp_path / 'kept.jsonl'))[0]
  assert (read.kind, read.columns['entry']) == ('reasoning_gym', question.columns['entry'])
  assert read.answer == question.answer
