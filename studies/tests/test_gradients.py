"""The estimates of gradients.py for the table of gradients in studies/README.md."""

import math
import pathlib

import numpy as np
import pytest

from exgrpo_jax.reporting import metrics, step_records
from studies import gradients
from studies.study import MEASURED


def test_the_estimates_of_a_questions_pass_rate_are_without_bias(monkeypatch):
  p, weights, sums = 0.3, [], np.zeros(2)
  step = {'step': 1.0, 'alignment/replayed_projection': 1.0}
  step['alignment/fresh_in_mixed_groups_projection'] = 2.0
  monkeypatch.setattr(metrics, 'read', lambda _: [step])
  for successes in range(8):
    monkeypatch.setattr(gradients, '_fresh_successes', lambda _, c=successes: {1: [c]})
    ((_, row),) = gradients.comparisons(pathlib.Path())
    weights.append(math.comb(7, successes) * p**successes * (1 - p) ** (7 - successes))
    sums += weights[-1] * np.array([row['harder'], row['even']])
  assert sum(weights) == pytest.approx(1)
  np.testing.assert_allclose(sums, [(1 - p) ** 2, p * (1 - p)], rtol=1e-9)


def test_the_stored_success_is_not_counted_among_the_fresh_ones(monkeypatch):
  class Table:
    def to_pylist(self):
      return [
        {'step': 4, 'is_replay': True, 'correctness': 3 / 8},
        {'step': 4, 'is_replay': False, 'correctness': 1.0},
      ]

  monkeypatch.setattr(step_records, 'files', lambda *_: ['one'])
  monkeypatch.setattr(step_records, 'read_file', lambda *_: Table())
  assert gradients._fresh_successes(pathlib.Path()) == {4: [2]}


def test_a_quotient_and_its_error_by_hand():
  runs = [[{'a': 1.0, 'b': 2.0}], [{'a': 3.0, 'b': 2.0}], [{'a': 2.0, 'b': 4.0}]]
  value, error = gradients.quotient(runs, 'a', 'b')
  left_out = [5 / 6, 3 / 6, 4 / 4]
  mean = sum(left_out) / 3
  assert value == 6 / 8
  assert error == pytest.approx(math.sqrt(2 / 3 * sum((x - mean) ** 2 for x in left_out)))


def test_the_readme_has_the_table_of_the_csv():
  said = (MEASURED.parent / 'README.md').read_text()
  for line in gradients.table(MEASURED / 'replay_pays_gradients.csv'):
    assert line in said
