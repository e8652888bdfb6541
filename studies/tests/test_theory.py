"""Checks the formulas and numbers of studies/theory.md by enumeration with the real loss."""

import numpy as np
import pytest

from exgrpo_jax.algorithm import objective
from studies import theory
from tests.helpers.enumeration import entropy, gradients, softmax
from tests.helpers.losses import changed

PAGE = theory.PICTURE.with_name('theory.md').read_text(encoding='utf-8')
PAPER, UNIT_SLOPE, UNSHAPED = {}, dict(shaping='unit_slope'), dict(shaping='none')
FRESH, ZERO, BALANCED = (
  dict(baseline='fresh'),
  dict(replay_advantage='zero'),
  dict(replay_advantage='balanced'),
)
# Keys are the beginnings of table rows.
ROWS = {
  'mixed, the paper': PAPER,
  '`baseline=fresh`': FRESH,
  '`replay_advantage=zero`': ZERO,
  '`balanced`': BALANCED,
  '`unit_slope`': UNIT_SLOPE,
}
WRONG = np.array([0.5, 0.3, 0.2])  # shares of the wrong answers


def logits_of(pass_rate):
  return np.log([pass_rate, *(1 - pass_rate) * WRONG])


def slopes(logits):
  """Compute the gradients of pass rate and entropy with respect to the logits."""
  probability = softmax(logits)
  of_right = np.eye(len(logits))[0] - probability
  return probability[0] * of_right, -probability * (np.log(probability) + entropy(logits))


def numbers(row, table):
  """Return the numbers of the row that begins with `row`, in the table that begins with `table`."""
  (block,) = [own for own in PAGE.split('\n\n') if own.startswith(table)]
  (line,) = [line for line in block.splitlines() if line.startswith(f'| {row}')]
  return [float(cell.replace('−', '-')) for cell in line.strip('| ').split(' | ')[1:]]


def moved(values, logits, group_size, **given):
  """Compute the expected gradients of fresh and stored rows. The stored row is correct."""
  chance, fresh, stored = gradients(changed(**values), logits, group_size, **given)
  return chance @ fresh, chance @ stored


@pytest.mark.parametrize('ratio', [1.0, 0.3])
@pytest.mark.parametrize('pass_rate', [1 / 8, 1 / 2])
@pytest.mark.parametrize('values', [PAPER, UNSHAPED, FRESH, ZERO, BALANCED, BALANCED | UNIT_SLOPE])
def test_what_a_group_adds_is_the_formula(values, pass_rate, ratio):
  k, logits, config = 6, logits_of(pass_rate), changed(**values)
  of_pass_rate, _ = slopes(logits)
  s = {
    'policy_shaping': 0.1 * ratio / (ratio + 0.1) ** 2,
    'unit_slope': 1.21 * ratio / (ratio + 0.1) ** 2,
    'none': ratio,
  }[config.shaping]
  a, b = (k - 1) ** 2 / k, s * (1 - 1 / k) * (1 - pass_rate)
  if config.baseline == 'fresh':
    a = k - 2
  elif config.replay_advantage == 'zero':
    b = 0
  elif config.replay_advantage == 'balanced':
    first = 1.0 if config.shaping == 'unit_slope' else 0.1 / 1.21
    a = (k - 1) * (k - 2 + first) / (k - 1 + first)
    b = s * (k - 1) * (1 - pass_rate) / (k - 1 + first)
  fresh, stored = moved(values, logits, k, stored=0, ratio=ratio)
  np.testing.assert_allclose(fresh, a * of_pass_rate, atol=1e-5)
  np.testing.assert_allclose(stored, b * (np.eye(4)[0] - softmax(logits)), atol=1e-5)


def test_without_a_stored_row_a_group_adds_one_less_than_its_rows():
  logits = logits_of(1 / 8)
  fresh, _ = moved(PAPER, logits, 6)
  np.testing.assert_allclose(fresh, 5 * slopes(logits)[0], atol=1e-5)


@pytest.mark.parametrize('row', ROWS)
def test_the_gains_of_the_page_are_those_of_the_loss(row):
  for column, pass_rate in enumerate((1 / 8, 1 / 4, 1 / 2, 3 / 4)):
    logits = logits_of(pass_rate)
    of_pass_rate, _ = slopes(logits)
    fresh, stored = moved(ROWS[row], logits, 8, stored=0)
    gain = (fresh + stored) @ of_pass_rate / (7 * of_pass_rate @ of_pass_rate)
    table = '| pass rate | 1/8'
    assert numbers(row, table)[column] == pytest.approx(gain, abs=6e-4)
    quotient = stored @ of_pass_rate / (fresh @ of_pass_rate)
    shaping = {'mixed, the paper': 'the paper', '`unit_slope`': '`unit_slope`'}.get(row)
    if shaping:
      name = f'stored row relative to the fresh rows in its group, {shaping}'
      assert numbers(name, table)[column] == pytest.approx(quotient, abs=6e-4)


@pytest.mark.parametrize('row', ['K fresh rows', *list(ROWS)[2:], 'mixed, the paper'])
def test_the_signal_of_a_group_over_its_noise(row):
  values, stored_answer = ROWS.get(row, PAPER), None if row == 'K fresh rows' else 0
  for column, pass_rate in enumerate((1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)):
    chance, fresh, stored = gradients(
      changed(**values), logits_of(pass_rate), 8, stored=stored_answer
    )
    group = fresh + stored
    mean = chance @ group
    noise = chance @ ((group - mean) ** 2).sum(axis=1)
    said = numbers(row, '| signal over noise')[column]
    assert said == pytest.approx(mean @ mean / noise, abs=0.006)


def test_the_shift_of_fresh_advantages_is_no_force_on_entropy_but_noise():
  """Averaged over all groups, a small step changes the entropy as the expected gradient does."""
  logits = logits_of(1 / 2)
  of_pass_rate, of_entropy = slopes(logits)
  variance = {}
  for name, values in {'paper': PAPER, 'fresh': FRESH}.items():
    chance, fresh, stored = gradients(changed(**values), logits, 8, stored=0)
    step = 1e-3
    change = sum(
      share * (entropy(logits + step * group) - entropy(logits))
      for share, group in zip(chance, fresh + stored)
      if share > 1e-9
    )
    a = {'paper': 49 / 8, 'fresh': 6}[name]
    b = 0.1 / 1.21 * 7 / 8 / 2
    formula = a * of_entropy @ of_pass_rate + b * of_entropy @ (np.eye(4)[0] - softmax(logits))
    assert change / step == pytest.approx(formula, rel=3e-3)
    mean = chance @ (fresh + stored)
    variance[name] = chance @ ((fresh + stored - mean) ** 2).sum(axis=1)
  assert 'is .72 instead of .61' in ' '.join(PAGE.split())
  assert variance == pytest.approx({'paper': 0.72, 'fresh': 0.61}, abs=0.005)


CLIPPED = {
  'mixed, as in': PAPER,
  '`baseline=fresh`': FRESH,
  '`balanced`': BALANCED,
  'K fresh rows': None,
}


@pytest.mark.parametrize('row', CLIPPED)
def test_clipped_minibatches_weigh_the_shift(row):
  before, found, unclipped = logits_of(1 / 4), [], []
  for moves in ([0.6, 0, 0, 0], [0, 0.6, 0, 0]):
    logits = before + moves
    of_pass_rate, of_entropy = slopes(logits)
    values = CLIPPED[row]
    stored = None if values is None else 0
    fresh, free = (
      moved(values or {}, logits, 6, stored=stored, before=before, clip=clip)[0]
      for clip in (True, False)
    )
    found += [fresh @ of_pass_rate / (free @ of_pass_rate)]
    found += [fresh @ of_entropy / (free @ of_pass_rate)]
    unclipped += [1.0, free @ of_entropy / (free @ of_pass_rate)]
  table = '| | the right answer has become 1.5'
  assert numbers(row, table) == pytest.approx(found, abs=6e-4)
  assert numbers('any of them', table) == pytest.approx(unclipped, abs=6e-4)


def test_the_picture_shows_the_slopes_of_the_loss():
  ratio = np.float32([0.01, 0.1, 1.0, 10.0])
  paper, unit_slope = (theory.slope(name, ratio) for name in ('policy_shaping', 'unit_slope'))
  np.testing.assert_allclose(paper, 0.1 * ratio / (ratio + 0.1) ** 2, rtol=1e-5)
  np.testing.assert_allclose(unit_slope, 12.1 * paper, rtol=1e-5)
  np.testing.assert_allclose(theory.slope('none', ratio), ratio, rtol=1e-5)
  assert paper[2] == pytest.approx(objective.replay_slope(changed()), rel=1e-5)
  assert theory.break_even(paper)[2] == pytest.approx(0.0763, abs=1e-4)
  assert theory.quotient(paper, theory.break_even(paper)) == pytest.approx(1.0)
