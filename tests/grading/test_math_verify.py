"""Math-Verify behind the protocol of our verifiers, in our processes."""

import dataclasses

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.grading.verifier import Truth
from tests.helpers import tiny

CONFIG = dataclasses.replace(tiny.GRADING, workers=1, time_limit=30.0, verifier='math_verify')


@pytest.fixture(scope='module')
def chosen():
  pytest.importorskip('math_verify', reason="pip install 'exgrpo_jax[math-verify]'")
  return verifier.load('math_verify')


@pytest.mark.parametrize(
  ('response', 'truth', 'expected'),
  [
    (r'So \boxed{2/4}.', Truth('0.5'), 'correct'),
    (r'\boxed{0.333333}', Truth(r'\frac{1}{3}'), 'correct'),  # ours: rounded, so wrong
    (r'\boxed{3}', Truth('$4$'), 'wrong'),
    (r'\boxed{4}', Truth('2 + 2 = 4\n#### 4'), 'correct'),
    ('I do not know.', Truth('4'), 'no answer'),
    ('(D) 45 degrees', Truth('D', 'choice'), 'wrong'),  # as ours has it, without a box
    (r'\boxed{(D) 45 degrees}', Truth('D', 'choice'), 'correct'),
  ],
)
def test_it_judges_mathematics_and_ours_what_else_there_is(chosen, response, truth, expected):
  assert chosen.judge(response, truth).outcome == expected


def test_it_tells_the_answer_as_written(chosen):
  assert chosen.judge(r'So $x = \boxed{\frac{1}{2}}$.', Truth('0.5')).given == r'\frac{1}{2}'


@pytest.mark.usefixtures('chosen')
def test_our_limits_hold_for_it():
  required = verifier.Config(require_think=True, require_box=False)
  endless = r'</think>\boxed{9^{9^{9^{9}}}}'  # it computes the power
  config = dataclasses.replace(CONFIG, time_limit=3.0)
  with pool.Grader(config, required) as running:
    verdicts = running.grade([r'\boxed{1}</think>\boxed{2}', endless, r'\boxed{2}'], ['2'] * 3)
  assert [verdict.outcome for verdict in verdicts] == ['correct', 'timed out', 'no answer']


def test_without_the_package_the_extra_is_named(monkeypatch):
  monkeypatch.setattr(verifier.importlib.util, 'find_spec', lambda _: None)
  with pytest.raises(InputError, match=r"='math_verify' .*exgrpo_jax\[math-verify\]"):
    verifier.load('math_verify')
