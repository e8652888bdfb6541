import json
import subprocess
import sys

import pytest

from exgrpo_jax.commands import verify
from tests.grading import cases


def test_an_explanation_says_what_was_extracted_and_how_it_was_read():
  assert verify.explain(r'So \boxed{\frac{10}{9}}.', '[0, 1)').splitlines() == [
    r'extracted  \frac{10}{9}',
    'response   fraction 10/9',
    'answer     interval [0, 1)',
    'verdict    wrong',
  ]
  assert 'extracted  nothing' in verify.explain('none', '1')


# Truth: how it is described.
DESCRIPTIONS = {
  '1,2': 'list of 1, 2',
  r'\text{even}': 'text: even',
  '204_5': 'numeral 204 in base 5',
  'x<5': 'x: tuple or interval (minus infinity, 5)',
  'y=x': 'y: expression in x',
  'x+y=1': 'equation',
  r'\neq 5': 'anything but a value',
  r'\pm 2': 'list of 2, -2',
  '1:2': 'ratio of 1, 2',
  'a=1,b=2': 'a: integer 1; b: integer 2',
  r'x\sqrt{2}': 'expression in x',
  r'\pi': 'number near 3.14159265359',
  'i': 'i',
  r'10^{9000}': 'rational number of many digits',
  r'\begin{pmatrix}1\end{pmatrix}': 'matrix of 1 by 1',
  r'(-\infty, 2]': 'interval (minus infinity, 2]',
  '45^\\circ': 'integer 45 degree',
  '20\\%': 'integer 20 percent',
  'f(1)<f(2)': 'relation',
  r'\infty': 'infinity',
  '1/0': 'divide',
  '9' * 3000: 'text of 3000 characters, compared as it stands',
}


def test_every_reading_has_a_description():
  described = {truth: verify.explain(truth, truth).splitlines()[-2] for truth in DESCRIPTIONS}
  assert described == {truth: f'answer     {text}' for truth, text in DESCRIPTIONS.items()}


def test_a_truth_that_is_a_worked_solution_is_described_by_its_answer():
  assert 'answer     integer 42\n' in verify.explain('42', '6 * 7 = 42\n#### 42')


def test_other_kinds_are_described_by_their_text():
  assert 'answer     text: north' in verify.explain('North', r'\text{North}', kind='text')


def test_the_command_explains_one_answer(capsys):
  verify.main([r'--response=\boxed{5}', '--answer=6'])
  assert capsys.readouterr().out.endswith('verdict    wrong\n')


def test_the_command_scores_a_file(tmp_path, capsys):
  path = tmp_path / 'cases.jsonl'
  path.write_text(
    '\n'.join(
      json.dumps(row)
      for row in (
        {'gold': '5', 'response': r'\boxed{5}'},
        {'answer': '5', 'response': r'\boxed{6}', 'expected': False},
        {'answer': 'C', 'response': r'\boxed{d}', 'kind': 'choice'},
      )
    )
  )
  verify.main([f'--file={path}'])
  assert capsys.readouterr().out == (
    f"{path}:3: wrong, expected correct: 'd' for 'C'\n"
    '3 cases: 1 correct, 2 wrong, 0 no answer; 2 as expected\n'
  )


def test_the_command_scores_our_cases(capsys):
  verify.main([f'--file={cases.PATH}'])
  count = len(cases.read())
  (totals,) = capsys.readouterr().out.splitlines()
  assert totals.startswith(f'{count} cases: ') and totals.endswith(f'; {count} as expected')


def test_requirements_are_passed_on(capsys):
  for flag in ('--require_box', '--require_think'):
    verify.main(['--response=5', '--answer=5', flag])
    assert capsys.readouterr().out.endswith('verdict    no answer\n')


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
def test_bad_input_is_one_clear_error(tmp_path, line, message, capsys):
  path = tmp_path / 'cases.jsonl'
  if line is not None:
    path.write_text('{"gold": "5", "response": ""}\n' + line)
  assert message in refusal(capsys, f'--file={path}')


def test_a_file_without_a_case_is_refused(tmp_path, capsys):
  path = tmp_path / 'cases.jsonl'
  path.write_text('\n')
  assert f'--file={path} has no case in it' in refusal(capsys, f'--file={path}')


def refusal(capsys, *arguments):
  """The one line with which the command refuses them."""
  with pytest.raises(SystemExit, match=r'^2$'):
    verify.main([*arguments])
  out, err = capsys.readouterr()
  assert out == '' and err.startswith('error: ') and err.count('\n') == 1
  return err


def test_the_command_needs_a_response_or_a_file(capsys):
  assert 'give --response and --answer, or --file, e.g. ' in refusal(capsys)


def test_wrong_usage_is_one_line_too(capsys):
  assert 'unrecognized arguments: --respons=5; --help lists' in refusal(capsys, '--respons=5')
  assert 'argument --file: expected one argument' in refusal(capsys, '--file')


def test_help_names_the_options_and_gives_an_example(capsys):
  with pytest.raises(SystemExit, match=r'^0$'):
    verify.main(['--help'])
  text = capsys.readouterr().out
  assert '--require_think' in text and 'exgrpo verify --file=cases.jsonl' in text


def test_the_command_imports_no_jax():
  program = (
    'import runpy, sys; sys.argv = ["verify", "--response=5", "--answer=5"]; '
    'runpy.run_module("exgrpo_jax.commands.verify", run_name="__main__"); '
    'assert not {"jax", "jaxlib", "flax", "numpy"} & set(sys.modules)'
  )
  run = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert run.stdout.endswith('verdict    correct\n')
