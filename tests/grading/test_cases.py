"""How a verdict is explained, and how a file of cases is scored."""

import json

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import verifier
from exgrpo_jax.grading.cases import explain, score
from tests.grading import cases


def test_an_explanation_says_what_was_extracted_and_how_it_was_read():
  assert explain(r'So \boxed{\frac{10}{9}}.', '[0, 1)').splitlines() == [
    r'extracted  \frac{10}{9}',
    'response   fraction 10/9',
    'answer     interval [0, 1)',
    'verdict    wrong',
  ]
  assert 'extracted  nothing' in explain('none', '1')


# Truth: how it is described.
DESCRIPTIONS = {
  '1,2': 'list of 1, 2',
  r'\text{even}': 'text: even',
  '204_5': 'numeral 204 in base 5',
  'x<5': 'x: tuple or interval (minus infinity, 5)',
  'y=x': 'y: expression in x',
  'x+y=1': 'equation',
  r'\neq 5': 'anything but a value',
  'a=1,b=2': 'a: integer 1; b: integer 2',
  r'\pi': 'number near 3.14159265359',
  'i': 'i',
  r'10^{9000}': 'rational number of many digits',
  r'\begin{pmatrix}1\end{pmatrix}': 'matrix of 1 by 1',
  '20\\%': 'integer 20 percent',
  'f(1)<f(2)': 'relation',
  '6 * 7 = 42\n#### 42': 'integer 42',  # a worked solution
  '9' * 3000: 'text of 3000 characters, compared as it stands',
}


def test_every_reading_has_a_description():
  described = {truth: explain(truth, truth).splitlines()[-2] for truth in DESCRIPTIONS}
  assert described == {truth: f'answer     {text}' for truth, text in DESCRIPTIONS.items()}
  assert 'answer     text: north' in explain('North', r'\text{North}', kind='text')


def written(folder, *rows):
  path = folder / 'cases.jsonl'
  path.write_text('\n'.join(row if isinstance(row, str) else json.dumps(row) for row in rows))
  return str(path)


def test_a_file_is_scored_by_what_was_expected(tmp_path):
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


def test_a_case_may_have_the_entry_of_a_task_of_reasoning_gym(tmp_path):
  pytest.importorskip('reasoning_gym', reason="pip install 'exgrpo_jax[reasoning-gym]'")
  entry = {'task': 'gcd', 'config': {}, 'answer': '5', 'metadata': {}}
  case = {'gold': '5', 'response': r'\boxed{x = 5}', 'kind': 'reasoning_gym', 'entry': entry}
  assert score(written(tmp_path, case), verifier.ANYTHING, 'math').endswith('; 1 as expected')


def test_our_cases_are_judged_as_expected():
  count = len(cases.read())
  assert count >= 60 and len({case['about'] for case in cases.read()}) == count
  totals = score(str(cases.PATH), verifier.ANYTHING, 'math')
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
  ],
)
def test_a_bad_case_is_refused_with_its_line(tmp_path, line, named):
  path = written(tmp_path, {'gold': '5', 'response': ''}, line)
  with pytest.raises(InputError) as refused:
    score(path, verifier.ANYTHING, 'math')
  assert f'{path}:2: ' in str(refused.value) and named in str(refused.value)


def test_a_file_without_a_case_is_refused(tmp_path):
  with pytest.raises(InputError, match='no case'):
    score(written(tmp_path, ''), verifier.ANYTHING, 'math')
  with pytest.raises(InputError, match='cannot be read'):
    score(str(tmp_path / 'nothing'), verifier.ANYTHING, 'math')
