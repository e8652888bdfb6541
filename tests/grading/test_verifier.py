"""Our verifier on whole responses, including hostile ones."""

import dataclasses
import json
import re

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.grading.cases import explain, score
from exgrpo_jax.grading.verifier import Truth
from tests.helpers import cases, tiny
from tests.helpers.paths import REAL_DATA

BOX = verifier.VerifierConfig(('box',))
THINK = verifier.VerifierConfig(('think',))


def read_real_data(name):
  path = REAL_DATA / name
  if not path.exists():
    pytest.skip(f'{path} does not exist: real data is kept outside of the repository')
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def test_a_response_is_correct_wrong_or_without_an_answer():
  assert verifier.judge(r'\boxed{2/4}', '0.5') == 'correct'
  assert verifier.judge(r'\boxed{2/3}', '0.5') == 'wrong'
  assert verifier.judge('The answer is 7 apples.', '7 apples') == 'correct'
  assert verifier.judge('I do not know.', '0.5') == 'no answer'
  assert verifier.judge('0.5', '0.5', BOX) == 'no answer'
  assert verifier.judge(r'\boxed{0.5}', '0.5', THINK) == 'no answer'


def test_an_unknown_kind_is_refused():
  with pytest.raises(InputError, match=r"kind='maths' .*math, choice, text"):
    verifier.is_correct('', '', kind='maths')


@pytest.mark.parametrize(
  ('arguments', 'named'),
  [
    *((('5', answer), r'answer=.* a string\. Write a number') for answer in (5, None, ['5'])),
    *(((response, '5'), 'response=.* a string. Decode') for response in (5, None, b'5', [3, 4])),
    (('5', '5', ('box',)), 'config=.* a VerifierConfig'),
  ],
)
def test_an_argument_of_the_wrong_type_is_refused(arguments, named):
  with pytest.raises(InputError, match=f'^{named}'):
    verifier.judge(*arguments)


def test_a_verifier_sees_the_text_after_the_thought_if_requirements_are_met():
  class Echo:
    def judge(self, response, question):
      return verifier.Judgement('correct', f'{response}/{question.answer}')

  judged = verifier.judge_with(Echo(), '7</think>8', verifier.Truth('9'))
  assert judged == ('correct', '8/9')
  assert verifier.judge_with(Echo(), '8', verifier.Truth('9'), BOX) == ('no answer', None)


# ---- Hostile answers ----

TRUTHS = (
  *('1e999', r'x+\sqrt{2}', r'(1,\sqrt2)', r'\begin{pmatrix}1&0\\0&1\end{pmatrix}'),
  *('C', r'1,2,\sqrt3', 'x<5', 'y=x'),
)
M = 10**6  # characters


def boxed(text):
  return r'\boxed{' + text + '}'


# Wrong for any ground truth, and rejected fast.
LARGE = {
  'nines': '9' * M,
  'nines_boxed': boxed('9' * M),
  'thousands': '9' + ',999' * (M // 4) + '9',
  'opening_braces': r'\boxed{' + '{' * M,
  'closing_braces': r'\boxed{' + '}' * M,
  'nested_braces': boxed('{' * (M // 2) + '}' * (M // 2)),
  'escaped_braces': r'\boxed{' + r'\{' * (M // 2),
  'boxes': r'\boxed{' * (M // 7),
  'boxes_closed': r'\boxed{' * (M // 8) + '}' * (M // 8),
  'many_boxes': boxed('1 or') * (M // 12),
  'boxes_without_braces': r'\boxed ' * (M // 7),
  'fractions': r'\frac{9' * (M // 7),
  'slashes': '1/' * (M // 2),
  'spaces': r'\boxed' + ' ' * M,
  'spaces_within': boxed(' ' * M),
  'backslashes': r'\boxed{' + '\\' * M,
  'dollars': '$' * M + '3',
  'dollars_apart': '$ ' * (M // 2) + '3',
  'math': r'\(' * (M // 2) + '3',
  'answers': 'answer is ' * (M // 10),
  'answers_colon': 'answer: ' * (M // 8),
  'stars': 'the answer is' + '*' * M,
  'hashes': '#' * M,
  'brackets_after_an_answer': 'the answer is 5' + ' (' * (M // 2),
  'separators_after_an_answer': 'the answer is 5' + ' ;,(–—-' * (M // 7),
  'spaces_after_an_answer': 'the answer is 5' + ' ' * M + 'x',
  'newlines': 'the answer is' + '\n' * M,
  'think_tags': '</think>' * (M // 8),
  'open_think_tags': '<think>' * (M // 7),
  'unicode': '𝟗²½٣' * (M // 4),
  'zeros': '\x00' * M,
  'surrogates': '\ud800' * M,
}

LENGTH = 1990  # just below answer.MAX_LENGTH, so that the parser sees all of it
# Contents of a box that are expensive or malformed.
PLAIN = r"""
1e999999999  10^{999999999}  10^{-999999999}  9^{9^{9^{9}}}  9^9^9^9  \sqrt{2}^{999999999}
e^{e^{e^{e^{9}}}}  9!!!!!!!!  99999999!  \binom{99999999}{9999999}  \sin(10^{4000})
\sqrt[999999999]{2}  \log_{1}{2}  \frac{1}{0}  \frac{1}{\sqrt{2}\sqrt{2}-2}  0^{-1}
\lfloor i \rfloor  \lfloor \pi^{500} \rfloor  \begin{pmatrix}1&2
__import__('os').system('touch executed')  eval('1+1')  (lambda: 5)()  [x for x in range(10**9)][-1]
\foo\bar\input{/etc/passwd}  \end{pmatrix}  None  .  nan"""
SMALL = {text: text for text in re.split(r'  |\n', PLAIN.strip())}
SMALL |= {
  'product_of_powers': '(9^9999)' * 240,
  'sum_of_powers': '+'.join(['9^{9999}'] * 220),
  'fractional_powers': '+'.join([rf'(\frac{{{k}}}{{7}})^{{900}}' for k in range(90)]),
  'sines': r'\sin ' * 300 + '1',
  'roots': r'\sqrt{' * 280 + '2' + '}' * 280,
  'many_roots': '+'.join([rf'\sqrt{{{k}}}' for k in range(2, 150)]),
  'parentheses': '(' * 900 + '1' + ')' * 900,
  'open_parentheses': '(' * LENGTH,
  'calls': 'f(' * 300 + 'x' + ')' * 300,
  'products': 'x(' * 39 + 'y+1' + ')' * 39,
  'mixed_numbers': r'1\frac{' * 200,
  'braces': '{' * 900 + '1' + '}' * 900,
  'sets': r'\{' * 400 + '1' + r'\}' * 400,
  'bars': '|' * LENGTH,
  'minus_signs': '-' * 1900 + '5',
  'carets': '^' * LENGTH,
  'underscores': 'x_' * 900,
  'commas': ',' * LENGTH,
  'list': ','.join(['1'] * 900),
  'list_of_roots': ','.join([r'\sqrt{2}'] * 180),
  'semicolons': '1;2,' * 480,
  'equations': 'x=' * 900 + '5',
  'inequalities': 'x<' * 900 + '5',
  'letters': 'x' * LENGTH,
  'commutators': '+'.join(['AB-BA'] * 300),
  'inverses': '+'.join(['ab^{-1}'] * 200),
  'powers_of_matrices': 'A^{12}B^{-12}' * 140,
  'crosses': r'\times'.join([r'\vec a'] * 180),
  'compositions': r'\circ '.join('fgh' * 80),
  'derivatives': r'\frac{d}{dx}' * 150 + 'y',
  'floors': r'\lfloor x ' * 90 + r'\rfloor' * 90,
  'dashes': '-'.join(['12'] * 600),
  'units': '5' + ' m/s' * 400,
  'symbols': '+'.join('abcdfghjklmnopqrstuvwxyz' * 35),
  'plus_minus': r'\pm 1' * 300,
  'plus_minus_lists': ','.join([r'1 \pm 2'] * 200),
  'matrix': r'\begin{pmatrix}' + '1&' * 600 + r'1\end{pmatrix}',
  'matrices': r'\begin{pmatrix}1&2\\3&4\end{pmatrix}' * 45,
  'thousands': '1' + ',111' * 490,
  'spaces': '5' + ' ' * 1990 + 'x',
  'digits': '9' * LENGTH,
  'decimal': '.' + '9' * LENGTH,
  'superscript': '²',
  'arabic_digits': '٥',
  'fullwidth_power': '９^９^９^９',
  'zero_width': '\u200b' * 500,
  'right_to_left': '\u202e5',
  'null': '\x00',
  'text_of_text': r'\text{' * 300 + '5' + '}' * 300,
  'only_backslash': '\\',
  'percent_signs': '5' + r'\%' * 900,
  'degrees': '5' + r'^\circ' * 380,
  'primes': 'f' + "'" * 1900,
  'subscripts': '5_{' * 400,
  'numeral': 'Z' * 900 + '_{36}',
  'empty': '',
}


# Parametrized, not a loop: pytest then names the answer that hangs or crashes the process.
@pytest.mark.parametrize('response', LARGE.values(), ids=LARGE.keys())
def test_a_megabyte_is_not_an_answer(response):
  assert not any(verifier.is_correct(response, truth) for truth in TRUTHS[:2])


@pytest.mark.full
@pytest.mark.parametrize('answer', SMALL.values(), ids=SMALL.keys())
def test_a_hostile_answer_is_wrong_and_judging_it_ends(answer):
  assert not any(verifier.is_correct(boxed(answer), truth) for truth in TRUTHS)
  assert verifier.judge(boxed(answer), answer) in verifier.OUTCOMES


def test_model_output_is_never_executed(tmp_path):
  target = tmp_path / 'executed'
  for code in (f"__import__('pathlib').Path('{target}').touch()", f"open('{target}', 'w')"):
    verifier.judge(boxed(code), code)
    verifier.judge(f'The answer is {code}', '5')
  assert not target.exists()


def test_an_answer_too_long_to_parse_is_compared_as_text():
  assert verifier.is_correct(r'\boxed{' + '9' * 5000 + '}', '9' * 5000, BOX)
  assert not verifier.is_correct(r'\boxed{' + '9' * 5000 + '}', '9' * 5001, BOX)


# Whole responses, our own and real ones.


# Rounded; a comma that may separate two numbers; a boxed intermediate result; boxes separated by
# words other than 'and'.
REFUSED = ['006', '127', '173', '239', '249', '252']


def test_math_verifys_cases_are_judged_as_expected():
  rows = read_real_data('answers_math_verify.jsonl')
  judged = {row['id']: verifier.is_correct(row['response'], row['gold']) for row in rows}
  expected = {row['id']: row['expected'] for row in rows}
  assert judged == expected | {f'mv-{number}': False for number in REFUSED}


# In the format of GSM8K.
SOLUTIONS = [
  'Each of the 6 crates holds 24 jars, so 6 * 24 = <<6*24=144>>144 jars.\n#### 144',
  'Of 90 seats 2/5 are taken, 90 * 2 / 5 = <<90*2/5=36>>36.\nSo 90 - 36 = 54 are free.\n#### 54',
  'She saves $12.50 a week, in 8 weeks $12.50 * 8 = $<<12.5*8=100>>100.\n#### 100',
  'The 1,350 tiles at 4 each cost 1,350 * 4 = <<1350*4=5400>>5,400.\n#### 5,400',
]


@pytest.mark.parametrize('source', ['own', 'gsm8k'])
def test_worked_solutions_give_their_own_answers_and_no_others(source):
  solutions = (
    SOLUTIONS if source == 'own' else [row['answer'] for row in read_real_data('gsm8k_test.jsonl')]
  )
  answers = [solution.rpartition('####')[2].strip() for solution in solutions]
  refused = [pair for pair in zip(solutions, answers) if not verifier.is_correct(*pair)]
  assert refused == []
  following = answers[1:] + answers[:1]
  assert all(
    answer.replace(',', '') == other.replace(',', '')
    for solution, answer, other in zip(solutions, answers, following)
    if verifier.is_correct(solution, other)
  )


# ---- How a verdict is explained, and how a file of cases is scored ----


def test_an_explanation_says_what_was_extracted_and_how_it_was_read():
  assert explain(r'So \boxed{\frac{10}{9}}.', '[0, 1)').splitlines() == [
    r'extracted  \frac{10}{9}',
    'response   fraction 10/9',
    'answer     interval [0, 1)',
    'verdict    wrong',
  ]
  assert 'extracted  nothing' in explain('none', '1')


# Truth -> its description.
DESCRIPTIONS = {
  '1,2': 'list of 1, 2',
  r'\text{even}': 'text: even',
  '204_5': 'numeral 204 in base 5',
  'x<5': 'x: tuple or interval (minus infinity, 5)',
  'y=x': 'y: expression in x',
  'x+y=1': 'equation',
  r'\neq 5': 'any value except one',
  'a=1,b=2': 'a: integer 1; b: integer 2',
  r'\pi': 'number near 3.14159265359',
  'i': 'i',
  r'10^{9000}': 'rational number with many digits',
  r'\begin{pmatrix}1\end{pmatrix}': '1 by 1 matrix',
  '20\\%': 'integer 20 percent',
  'f(1)<f(2)': 'relation',
  '6 * 7 = 42\n#### 42': 'integer 42',  # a worked solution
  '9' * 3000: 'text of 3000 characters, compared verbatim',
}


def test_every_reading_has_a_description():
  described = {truth: explain(truth, truth).splitlines()[-2] for truth in DESCRIPTIONS}
  assert described == {truth: f'answer     {text}' for truth, text in DESCRIPTIONS.items()}
  assert 'answer     text: north' in explain('North', r'\text{North}', kind='text')


def written(folder, *rows):
  path = folder / 'cases.jsonl'
  path.write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows))
  return str(path)


def test_a_file_is_scored_against_expected_verdicts(tmp_path):
  path = written(
    tmp_path,
    {'gold': '5', 'response': r'\boxed{5}'},
    {'answer': '5', 'response': r'\boxed{6}', 'expected': False},
    {'answer': 'C', 'response': r'\boxed{d}', 'kind': 'choice'},
  )
  assert score(path, verifier.ANYTHING, 'math') == (
    f"{path}:3: wrong, expected correct: 'd' for 'C'\n"
    '3 cases: 1 correct, 2 wrong, 0 no answer; 2 as expected'
  )


def test_a_case_may_contain_a_reasoning_gym_entry(tmp_path):
  pytest.importorskip('reasoning_gym', reason="pip install 'exgrpo_jax[reasoning-gym]'")
  entry = {'task': 'gcd', 'config': {}, 'answer': '5', 'metadata': {}}
  case = {'gold': '5', 'response': r'\boxed{x = 5}', 'kind': 'reasoning_gym', 'entry': entry}
  assert score(written(tmp_path, case), verifier.ANYTHING, 'math').endswith('; 1 as expected')


def test_our_cases_are_judged_as_expected():
  count = len(cases.responses())
  assert count >= 60 and len({case['about'] for case in cases.responses()}) == count
  totals = score(str(cases.RESPONSES), verifier.ANYTHING, 'math')
  assert totals.startswith(f'{count} cases: ') and totals.endswith(f'; {count} as expected')


@pytest.mark.parametrize(
  ('line', 'named'),
  [
    ('{', "'{'"),
    ('5', "'5'"),
    ('{"response": ""}', "'gold' or 'answer' (has: 'response')"),
    ('{"gold": ""}', "'response' (has: 'gold')"),
    ('{"gold": 5, "response": ""}', 'gold=5'),
    ('{"gold": "5", "response": "", "expected": 1}', 'expected=1'),
    ('{"gold": "5", "response": "", "kind": "maths"}', "kind='maths'"),
    ('{"gold": "5", "response": "", "kind": "reasoning_gym", "entry": {}}', 'answer, config'),
    ('{"gold": "5", "response": "", "kind": "reasoning_gym", "entry": 5}', 'answer, config'),
  ],
)
def test_a_bad_case_is_refused_with_its_line(tmp_path, line, named):
  path = written(tmp_path, {'gold': '5', 'response': ''}, line)
  with pytest.raises(InputError) as refused:
    score(path, verifier.ANYTHING, 'math')
  assert f'{path}:2: ' in str(refused.value) and named in str(refused.value)


class Returning:
  def judge(self, response, question):
    pairs = {'upper': ('CORRECT', question.answer), 'number': ('correct', 5)}
    return {**pairs, 'bool': True, 'text': 'correct', 'nothing': None}[response]


@pytest.mark.parametrize('response', ['upper', 'number', 'bool', 'text', 'nothing', 'an error'])
def test_a_verifier_that_fails_is_refused_with_the_line_of_the_case(tmp_path, response):
  path = written(tmp_path, {'gold': '5', 'response': response})
  spec = f'{__name__}:Returning'
  with pytest.raises(InputError, match=rf'{path}:1: config.grading.verifier: .*Returning'):
    score(path, verifier.ANYTHING, 'math', spec)
  reason = 'KeyError' if response == 'an error' else 'judge returned .*, but must return a pair'
  with pytest.raises(InputError, match=rf'config.grading.verifier: .*Returning.*{reason}'):
    explain(response, '5', spec=spec)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
  path = written(tmp_path, '\ufeff' + json.dumps({'gold': '5', 'response': '5'}))
  assert score(path, verifier.ANYTHING, 'math').endswith('; 1 as expected')


def test_a_file_without_a_case_is_refused(tmp_path):
  with pytest.raises(InputError, match=r'--file=.*: the file contains no cases'):
    score(written(tmp_path, ''), verifier.ANYTHING, 'math')
  with pytest.raises(InputError, match=r'--file=.*nothing: the file cannot be read'):
    score(str(tmp_path / 'nothing'), verifier.ANYTHING, 'math')


# ---- Math-Verify as a verifier, also in worker processes ----


CONFIG = dataclasses.replace(tiny.GRADING, workers=1, time_limit=30.0, verifier='math_verify')


@pytest.fixture(scope='module')
def chosen():
  pytest.importorskip('math_verify', reason="pip install 'exgrpo_jax[math-verify]'")
  return verifier.load('math_verify')


@pytest.mark.parametrize(
  ('response', 'truth', 'expected'),
  [
    (r'So \boxed{2/4}.', Truth('0.5'), 'correct'),
    (
      r'\boxed{0.333333}',
      Truth(r'\frac{1}{3}'),
      'correct',
    ),  # wrong with our verifier, because it is rounded
    (r'\boxed{3}', Truth('$4$'), 'wrong'),
    (r'\boxed{4}', Truth('2 + 2 = 4\n#### 4'), 'correct'),
    ('I do not know.', Truth('4'), 'no answer'),
    ('(D) 45 degrees', Truth('D', 'choice'), 'wrong'),  # as with our verifier, without a box
    (r'\boxed{(D) 45 degrees}', Truth('D', 'choice'), 'correct'),
  ],
)
def test_math_verify_judges_math_and_our_verifier_all_else(chosen, response, truth, expected):
  assert chosen.judge(response, truth).outcome == expected


def test_math_verify_returns_the_answer_as_written(chosen):
  assert chosen.judge(r'So $x = \boxed{\frac{1}{2}}$.', Truth('0.5')).answer == r'\frac{1}{2}'


@pytest.mark.full
@pytest.mark.usefixtures('chosen')
def test_our_limits_apply_to_math_verify():
  required = verifier.VerifierConfig(('think',))
  endless = r'</think>\boxed{9^{9^{9^{9}}}}'  # it computes the power
  config = dataclasses.replace(CONFIG, time_limit=3.0)
  with pool.Grader(config, required) as running:
    verdicts = running.grade([r'\boxed{1}</think>\boxed{2}', endless, r'\boxed{2}'], ['2'] * 3)
  assert [verdict.outcome for verdict in verdicts] == ['correct', 'timed out', 'no answer']


def test_without_the_package_the_extra_is_named(monkeypatch):
  monkeypatch.setattr(verifier.importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(InputError, match=r"='math_verify': .*exgrpo_jax\[math-verify\]"):
    verifier.load('math_verify')
