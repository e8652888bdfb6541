import threading

import pytest

from exgrpo_jax import grading, verifier
from exgrpo_jax.types import Verdict

CONFIG = verifier.Config(require_think=False, require_box=True)
RIGHT, WRONG = Verdict(1.0, True), Verdict(0.0, False)


def test_verdicts_stand_in_the_order_of_the_responses():
  with grading.Grader(CONFIG) as grader:
    assert grader.grade([r'\boxed{1}', r'\boxed{1}', 'none'], ['1', '2', '1']) == [
        RIGHT, WRONG, WRONG]


def test_collect_gives_each_verdict_once_under_its_key():
  with grading.Grader(CONFIG) as grader:
    grader.submit(('question', 0), r'\boxed{1}', '1')
    grader.submit(('question', 1), r'\boxed{2}', '1')
    assert grader.collect() == {('question', 0): RIGHT, ('question', 1): WRONG}
    assert grader.collect() == {}


def test_grading_a_list_leaves_what_was_submitted():
  with grading.Grader(CONFIG) as grader:
    grader.submit(0, r'\boxed{1}', '1')
    assert grader.grade([r'\boxed{3}'], ['4']) == [WRONG]
    assert grader.collect() == {0: RIGHT}


def test_submit_does_not_wait_for_the_verdict(monkeypatch):
  release = threading.Event()
  monkeypatch.setattr(verifier, 'is_correct', lambda *_: release.wait(5))
  with grading.Grader(CONFIG) as grader:
    grader.submit(0, '', '')  # would hang here, and give False, if it waited
    release.set()
    assert grader.collect() == {0: RIGHT}


def test_a_key_is_not_submitted_twice():
  with grading.Grader(CONFIG) as grader:
    grader.submit(0, '', '')
    with pytest.raises(KeyError, match='key 0'):
      grader.submit(0, '', '')


def test_responses_and_answers_are_as_many():
  with grading.Grader(CONFIG) as grader, pytest.raises(ValueError, match='zip'):
    grader.grade(['a', 'b'], ['1'])


def test_leaving_the_context_ends_the_thread():
  with grading.Grader(CONFIG) as grader:
    grader.grade([''], ['1'])
    assert any(t.name.startswith('grader') for t in threading.enumerate())
  assert not any(t.name.startswith('grader') for t in threading.enumerate())
