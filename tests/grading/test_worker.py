"""What a worker judges of a long response, and what it imports."""

import subprocess
import sys

import pytest

from exgrpo_jax.grading import worker

# What the benchmark of grading judges, and most of what models write.
COMMON = (
  ('7.50', '7.5'),
  (r'\frac{7}{8}', '7/8'),
  (r'7\sqrt{3}', r'\sqrt{3}\cdot 7'),
  ('x^2+7x+1', '1+x^2+7x'),
  ('(7, 3]', '(7, 3)'),
  (r'(0,1)\cup(2,3)', r'(2,3)\cup(0,1)'),
  (r'2\begin{pmatrix}1\\2\end{pmatrix}', '(2,4)'),
  (r'\text{no}', 'yes'),
)


@pytest.mark.parametrize(
  ('response', 'expected'),
  [
    ('x' * 10, 'x' * 10),
    ('y' * 9 + '</think>12', '</think>12'),  # only thought is cut
    ('y' * 9 + '</think>123', None),  # the end of the thought would be lost
    ('</think>' + 'y' * 20 + '</think>1', 'y</think>1'),
    ('<think>' + 'x' * 4, None),  # its last characters could look like an answer
  ],
)
def test_a_long_response_loses_only_thought(response, expected):
  assert worker.bounded(response, 10) == expected


def test_a_worker_imports_sympy_only_for_an_answer_that_needs_it():
  code = f"""
import sys
from exgrpo_jax.grading import verifier, worker
for given, truth in {COMMON!r}:
  verifier.judge(chr(92) + 'boxed{{' + given + '}}', truth)
assert 'sympy' not in sys.modules and 'jax' not in sys.modules
assert verifier.is_correct(r'\\boxed{{(0,9)\\cup(9,36)}}', r'(0,36)\\setminus\\{{9\\}}')
assert 'sympy' in sys.modules
"""
  subprocess.run([sys.executable, '-c', code], check=True)
