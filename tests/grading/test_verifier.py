import json

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier
from tests.helpers import hostile
from tests.helpers.paths import REAL_DATA

DATA = REAL_DATA
ANYTHING = verifier.Config(require_think=False, require_box=False)
BOX = verifier.Config(require_think=False, require_box=True)
THINK = verifier.Config(require_think=True, require_box=False)


def read(name):
  if not (DATA / name).exists():
    pytest.skip(f'{DATA / name} is not there: real data is kept beside the repository')
  return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def test_a_response_is_correct_wrong_or_without_an_answer():
  assert verifier.judge(r'\boxed{2/4}', '0.5') == 'correct'
  assert verifier.judge(r'\boxed{2/3}', '0.5') == 'wrong'
  assert verifier.judge('I do not know.', '0.5') == 'no answer'
  assert verifier.judge('0.5', '0.5', BOX) == 'no answer'
  assert verifier.judge(r'\boxed{0.5}', '0.5', THINK) == 'no answer'


def test_an_unknown_kind_is_refused_at_once():
  with pytest.raises(InputError, match="kind='maths' must be one of math, choice, text"):
    verifier.is_correct('', '', ANYTHING, 'maths')


ANSWERS = (
  '1e999',
  r'x+\sqrt{2}',
  r'(1,\sqrt2)',
  r'\begin{pmatrix}1&0\\0&1\end{pmatrix}',
  'C',
  r'1,2,\sqrt3',
  'x<5',
  'y=x',
)


@pytest.mark.parametrize('response', hostile.LARGE.values(), ids=hostile.LARGE.keys())
def test_a_megabyte_is_no_answer(response):
  assert not any(verifier.is_correct(response, answer) for answer in ANSWERS[:2])


@pytest.mark.parametrize('answer', hostile.SMALL.values(), ids=hostile.SMALL.keys())
def test_a_hostile_answer_is_wrong_and_ends(answer):
  assert not any(verifier.is_correct(hostile.boxed(answer), truth) for truth in ANSWERS)
  assert verifier.judge(hostile.boxed(answer), answer) in verifier.OUTCOMES


@pytest.mark.parametrize('response', hostile.CHEATS.values(), ids=hostile.CHEATS.keys())
def test_a_cheat_is_not_five(response):
  assert not verifier.is_correct(response, '5')


def test_nothing_that_a_model_wrote_is_executed(tmp_path):
  target = tmp_path / 'executed'
  for code in (f"__import__('pathlib').Path('{target}').touch()", f"open('{target}', 'w')"):
    verifier.judge(hostile.boxed(code), code)
    verifier.judge(f'The answer is {code}', '5')
  assert not target.exists()


def test_a_large_power_is_compared_by_its_form():
  assert verifier.is_correct(r'\boxed{9^{9^{9}}}', '9^{9^9}')
  assert not verifier.is_correct(r'\boxed{9^{9^{9}}+1}', '9^{9^9}')


def test_an_answer_too_long_to_parse_is_compared_as_it_stands():
  assert verifier.is_correct(r'\boxed{' + '9' * 5000 + '}', '9' * 5000, BOX)
  assert not verifier.is_correct(r'\boxed{' + '9' * 5000 + '}', '9' * 5001, BOX)


def test_gsm8k_solutions_give_their_own_answers_and_no_others():
  solutions = [row['answer'] for row in read('gsm8k_test.jsonl')]
  answers = [solution.rpartition('####')[2].strip() for solution in solutions]
  assert all(verifier.is_correct(s, a, ANYTHING) for s, a in zip(solutions, answers))
  following = answers[1:] + answers[:1]
  accepted = {
    (a, b) for s, a, b in zip(solutions, answers, following) if verifier.is_correct(s, b, ANYTHING)
  }
  assert all(a.replace(',', '') == b.replace(',', '') for a, b in accepted)


# Rounded, and a comma that may as well part two numbers.
REFUSED = {'mv-127', 'mv-006'}


def test_math_verifys_cases_are_judged_as_expected():
  rows = [
    row
    for row in read('answers_math_verify.jsonl')
    if not {'gold_multi_box', 'response_multi_box'} & set(row['tags'])
  ]
  wrong = {
    row['id']
    for row in rows
    if verifier.is_correct(row['response'], row['gold']) != row['expected']
  }
  assert wrong == REFUSED
  assert len(wrong) <= len(rows) // 100


def test_what_was_extracted_and_how_it_was_read_is_told():
  told = verifier.explain(r'So \boxed{\frac{10}{9}}.', '[0, 1)')
  assert told.splitlines() == [
    r'extracted  \frac{10}{9}',
    'response   fraction 10/9',
    'answer     interval [0, 1)',
    'verdict    wrong',
  ]
  assert 'extracted  nothing' in verifier.explain('none', '1')
  for truth in (
    '1,2',
    r'\text{even}',
    '204_5',
    'x<5',
    'y=x',
    'x+y=1',
    r'\neq 5',
    r'\pm 2',
    '1:2',
    'a=1,b=2',
    r'x\sqrt{2}',
    r'\pi',
    'i',
    r'10^{9000}',
    r'\begin{pmatrix}1\end{pmatrix}',
    r'(-\infty, 2]',
    '45^\\circ',
    '20\\%',
    'f(1)<f(2)',
    r'\infty',
    '1/0',
    '9' * 3000,
  ):
    assert verifier.explain(truth, truth).count('\n') >= 2


def test_the_command_explains_one_answer(capsys):
  verifier.main([r'--response=\boxed{5}', '--answer=6'])
  assert capsys.readouterr().out.endswith('verdict    wrong\n')


def test_the_command_scores_a_file(tmp_path, capsys):
  cases = tmp_path / 'cases.jsonl'
  cases.write_text(
    '\n'.join(
      json.dumps(row)
      for row in (
        {'gold': '5', 'response': r'\boxed{5}'},
        {'answer': '5', 'response': r'\boxed{6}', 'expected': False},
        {'answer': 'C', 'response': r'\boxed{d}', 'kind': 'choice'},
      )
    )
  )
  verifier.main([f'--file={cases}'])
  assert capsys.readouterr().out == (
    f"{cases}:3: wrong, expected correct: 'd' for 'C'\n"
    '3 cases: 1 correct, 2 wrong, 0 no answer; 2 as expected\n'
  )


@pytest.mark.parametrize(
  ('line', 'message'),
  [
    ('{', ":2: '{' is not JSON"),
    ('5', ":2: '5' must be an object"),
    ('{"response": ""}', ":2: no field 'gold' or 'answer' (has: 'response')"),
    ('{"gold": ""}', ":2: no field 'response' (has: 'gold')"),
    ('{"gold": 5, "response": ""}', ':2: gold=5 must be of type str'),
    ('{"gold": "5", "response": "", "expected": 1}', ':2: expected=1 must be of type bool'),
    ('{"gold": "5", "response": "", "kind": "maths"}', ":2: kind='maths' must be one of math"),
    (None, 'cannot be read'),
  ],
)
def test_bad_input_is_one_clear_error(tmp_path, line, message):
  cases = tmp_path / 'cases.jsonl'
  if line is not None:
    cases.write_text('{"gold": "5", "response": ""}\n' + line)
  with pytest.raises(SystemExit) as error:
    verifier.main([f'--file={cases}'])
  assert message in error.value.code
  assert '\n' not in error.value.code


def test_the_command_needs_a_response_or_a_file():
  with pytest.raises(SystemExit, match='give --response and --answer, or --file'):
    verifier.main([])
