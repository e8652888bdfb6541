"""Responses to tasks of reasoning_gym, judged by their own score_answer."""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, reasoning_gym, rewards, verifier
from exgrpo_jax.grading.verifier import Truth
from tests.helpers import tiny

needs_package = pytest.mark.skipif(
  importlib.util.find_spec('reasoning_gym') is None,
  reason="pip install 'exgrpo_jax[reasoning-gym]'",
)


def entry(task, answer, **metadata):
  return {'task': task, 'config': {}, 'question': '', 'answer': answer, 'metadata': metadata}


EQUATION = entry('simple_equations', '5')  # letter by letter
SUM = entry('chain_sum', '-35')
WORD = entry('spell_backward', 'olleh')
LIST = entry('list_functions', '[3, 5]')


def judge(response, known):
  truth = Truth(known['answer'], reasoning_gym.KIND, {reasoning_gym.COLUMN: known})
  return verifier.judge_with(verifier.BuiltIn(), response, truth).outcome


RIGHT = [  # answers that a user would call right
  (EQUATION, [r'\boxed{5}', 'The answer is 5.', '5', 'so 2 + 3 is 5', '#### 5', '**5**']),
  (EQUATION, [r'\boxed{x = 5}', 'The answer is x = 5.', '$x = 5$', r'\boxed{5.0}', '+5']),
  (EQUATION, [r'\boxed{\text{5}}', r'\boxed{5 \text{ apples}}', '<think>4</think> 5']),
  (SUM, [r'\boxed{−35}', 'The answer is $-35$.', '-35.00']),
  (entry('count_primes', '1234'), ['1,234', r'\boxed{1{,}234}', '1234.0']),
  (WORD, [r'\boxed{olleh}', 'The answer is "olleh".', 'It is\n\nolleh', '`olleh`', '**olleh**']),
  (WORD, [r'\boxed{\text{olleh}}', r'$\boxed{\texttt{olleh}}$', 'OLLEH']),  # its own tolerance
  (LIST, ['[3, 5]', r'\boxed{[3, 5]}', 'The answer is [3, 5].']),
]
WRONG = [
  (EQUATION, ['6', r'\boxed{50}', r'\boxed{5.5}', '5 6', r'\boxed{5 or 6}', r'\boxed{5\%}']),
  (EQUATION, [r'\boxed{2+3}', r'\boxed{10/2}', r'\boxed{5} no, \boxed{6}']),
  (SUM, [r'\boxed{32 - 67}', '32 - 67 = -3', r'\boxed{35}', r'\boxed{nan}', r'\boxed{-35,000}']),
  (WORD, ['hello', 'olleh it is', r'\boxed{olle}', 'The answer is hello, not olleh.']),
  (LIST, ['5', '[5, 3]', '[3, 5, 7]']),
  (entry('bitwise_arithmetic', '0x4', problem='(0x2 + 0x2)'), [r'\boxed{(0x2 + 0x2)}']),
  (entry('prime_factorization', '2 × 3'), [r'\boxed{two}']),  # its score_answer raises
]


@needs_package
@pytest.mark.parametrize(('cases', 'expected'), [(RIGHT, 'correct'), (WRONG, 'wrong')])
def test_a_response_is_judged_by_the_tasks_own_score(cases, expected):
  judged = {(known['task'], text): judge(text, known) for known, texts in cases for text in texts}
  assert judged == dict.fromkeys(judged, expected)


@pytest.mark.parametrize('response', ['', 'I do not know.', r'\boxed{5', '<think>5'])
def test_a_response_without_an_answer_has_none(response):
  assert judge(response, EQUATION) == 'no answer'


@pytest.mark.parametrize('end', ['', ' =', ' = ?', ' =\n', ' =.'])
@pytest.mark.parametrize('formula', ['8 - 8 + 5', '(2 - 5)', '1 × 5', r'1 \times 5', '4 + (-5)'])
def test_a_question_that_is_repeated_without_a_result_is_no_answer(formula, end):
  """Even if its last number is right by luck."""
  assert judge(f'It is 7: {formula}{end}', EQUATION) == 'no answer'


@needs_package
def test_partial_credit_is_a_reward_but_never_correct():
  assert judge('olleX', WORD) == 'wrong'
  assert rewards.score_answer('<think>x</think>olleX', 'wrong', WORD) == pytest.approx(0.8)
  assert rewards.score_answer('olleh', 'correct', WORD) == 1
  assert rewards.score_answer('olleh', 'no answer', WORD) == 0  # a required part is missing


@pytest.mark.full
@needs_package
def test_grading_processes_judge_and_score_tasks():
  config = dataclasses.replace(
    tiny.GRADING, workers=1, memory_limit=1024, rewards=('correctness', 'score_answer')
  )
  asked = [EQUATION, SUM, WORD, WORD]
  with pool.Grader(config, verifier.VerifierConfig(('think', 'box'))) as grader:
    verdicts = grader.grade(
      [r'</think>\boxed{x = 5}', r'</think>\boxed{32 - 67}', r'</think>\boxed{olleX}', 'olleh'],
      [known['answer'] for known in asked],
      [reasoning_gym.KIND] * 4,
      [functools.partial(dict, entry=known) for known in asked],
    )
  assert [verdict.outcome for verdict in verdicts] == ['correct', 'wrong', 'wrong', 'no answer']
  scores = [(verdict.components or {})['score_answer'] for verdict in verdicts]
  assert scores == pytest.approx([1, 0, 0.8, 0])


@pytest.mark.full
@needs_package
def test_process_limits_apply_to_tasks():
  endless = Truth('0.5', reasoning_gym.KIND)
  config = dataclasses.replace(tiny.GRADING, workers=1, time_limit=3.0, memory_limit=1024)
  with pool.Grader(config, verifier.ANYTHING) as grader:
    verdicts = grader.grade(
      [r'\boxed{1e999999999}', r'\boxed{0.5}'],  # as a Fraction: a power of ten
      [endless.answer] * 2,
      [endless.kind] * 2,
      [functools.partial(dict, entry=entry('coin_flip', '0.5'))] * 2,
    )
  assert verdicts[0].outcome != 'correct'
  assert verdicts[1].outcome == 'correct'


@pytest.mark.full
def test_import_time_does_not_count_toward_the_time_limit(tmp_path, monkeypatch):
  package = tmp_path / 'reasoning_gym'
  package.mkdir()
  (package / '__init__.py').write_text('import time\ntime.sleep(3)\n')
  (package / 'factory.py').write_text(
    'class Task:\n'
    '  def __init__(self, settings): pass\n'
    '  def score_answer(self, answer, entry): return float(answer == entry["answer"])\n'
    'DATASETS = {"coin_flip": (Task, dict)}\n'
  )
  monkeypatch.syspath_prepend(tmp_path)
  config = dataclasses.replace(tiny.GRADING, workers=1, time_limit=2.5)
  with pool.Grader(config, verifier.ANYTHING) as grader:
    known = functools.partial(dict, entry=entry('coin_flip', '0.5'))
    (verdict,) = grader.grade([r'\boxed{0.5}'], ['0.5'], [reasoning_gym.KIND], [known])
  assert verdict.outcome == 'correct', verdict
  monkeypatch.setattr(pool, 'START_TIMEOUT', 1.0)
  with (
    pool.Grader(config, verifier.ANYTHING) as grader,
    pytest.raises(InputError, match='importing this package in a worker took longer than 1 s'),
  ):
    grader.grade([r'\boxed{0.5}'], ['0.5'], [reasoning_gym.KIND], [known])


def test_a_worker_imports_the_package_only_when_needed():
  code = 'import exgrpo_jax.grading.worker, sys; print("reasoning_gym" in sys.modules)'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, check=True, text=True)
  assert done.stdout.strip() == 'False'


def test_a_question_without_its_entry_is_refused():
  with pytest.raises(InputError, match="kind='reasoning_gym': the question has no column 'entry'"):
    verifier.judge(r'\boxed{5}', '5', kind=reasoning_gym.KIND)


@needs_package
def test_an_unknown_task_is_refused():
  with pytest.raises(InputError, match="has no task 'sums'"):
    judge(r'\boxed{5}', entry('sums', '5'))


# Prints the tasks whose score_answer compiles text that contains the answer's digits.
FINDER = """
import contextlib, io, json, sys, warnings
from reasoning_gym.factory import DATASETS
warnings.simplefilter('ignore')
DIGITS, compiled = '71234567', []
sys.addaudithook(lambda event, args: compiled.append(args[0]) if event == 'compile' else None)
found = []
for name, (generator, settings) in DATASETS.items():
  if name == 'composite':
    continue
  with contextlib.redirect_stdout(io.StringIO()):
    task = generator(settings(seed=0))
    entry = task[0]
    for answer in (DIGITS, f'[[{DIGITS}]]', f'print({DIGITS})', f'{DIGITS} + 1', f'"{DIGITS}"'):
      compiled.clear()
      with contextlib.suppress(Exception):
        task.score_answer(answer, entry)
      if any(DIGITS in str(source) for source in compiled):
        found.append(name)
        break
print(json.dumps(sorted(found)))
"""


@pytest.mark.full
@needs_package
def test_exactly_the_tasks_that_evaluate_model_output_are_refused():
  from reasoning_gym.factory import DATASETS

  done = subprocess.run([sys.executable, '-c', FINDER], capture_output=True, check=True, text=True)
  evaluating = json.loads(done.stdout)
  assert 'countdown' in evaluating
  for name in evaluating:
    with pytest.raises(InputError, match='because its score_answer runs model output through'):
      reasoning_gym.dataset(name, {})
  for name in DATASETS.keys() - {'composite', *evaluating}:
    reasoning_gym.dataset(name, {})
