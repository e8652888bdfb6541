"""When a run is told that it stands still because its groups teach nothing."""

import pytest

from exgrpo_jax.reporting import plateau

EASY = {'zero_variance': 0.8, 'groups/solved_by_all': 0.7, 'groups/solved_by_none': 0.1}
HARD = {'zero_variance': 0.8, 'groups/solved_by_all': 0.1, 'groups/solved_by_none': 0.7}
MIXED = {'zero_variance': 0.2, 'groups/solved_by_all': 0.1, 'groups/solved_by_none': 0.1}


def steps(rates, groups, first=1):
  """Steps with these pass rates of fresh questions, and such groups in each."""
  return [
    {'step': step, 'pass_rate/fresh': rate} | groups for step, rate in enumerate(rates, first)
  ]


def noisy(rates, by=0.05):
  """The same, in turn a little higher and lower, as of few questions."""
  return [rate + (by if place % 2 else -by) for place, rate in enumerate(rates)]


def rising(low, high, count=20):
  return [low + (high - low) * place / (count - 1) for place in range(count)]


def test_a_plateau_by_saturation_says_how_many_groups_teach_nothing_since_when_and_what_to_change():
  flat = steps(noisy([0.9] * 10 + [0.91] * 10), EASY, first=41)
  assert plateau.explain(flat) == (
    'the pass rate of fresh questions has stopped rising (0.90 in steps 41 to 50, 0.91 in 51 to '
    '60), and 80% of the groups since step 51 had equal rewards and taught nothing: 70% were '
    'solved by all responses, 10% by none. Give harder questions in config.data.train, keep only '
    'those that are solved sometimes (exgrpo data prefilter --checkpoint=WORKDIR), '
    'or raise config.rollout.samples.'
  )


def test_what_is_a_rise_depends_on_how_much_the_steps_differ():
  rates = [0.9] * 10 + [0.91] * 10
  assert plateau.explain(steps(rates, EASY)) == ''
  assert plateau.explain(steps(noisy(rates), EASY))


def test_questions_that_nobody_solves_should_be_easier():
  text = plateau.explain(steps([0.1] * 20, HARD))
  assert 'Give easier questions' in text and '70% by none' in text


@pytest.mark.parametrize('rates', [[0.9] * 20, noisy([0.9] * 20), rising(0.9, 0.6)])
def test_a_plateau_where_the_groups_still_differ_is_not_blamed_on_saturation(rates):
  assert plateau.explain(steps(rates, MIXED)) == ''
  assert plateau.explain(steps(rates, EASY))


@pytest.mark.parametrize('groups', [EASY, HARD, MIXED])
@pytest.mark.parametrize('rates', [rising(0.1, 0.3), noisy(rising(0.1, 0.3)), rising(0.9, 0.91)])
def test_a_run_that_rises_is_on_no_plateau(rates, groups):
  assert plateau.explain(steps(rates, groups)) == ''


def test_only_the_second_half_must_be_saturated():
  mixed_first = steps([0.9] * 10, MIXED) + steps([0.9] * 10, EASY, first=11)
  assert plateau.explain(mixed_first)
  mixed_last = steps([0.9] * 10, EASY) + steps([0.9] * 10, MIXED, first=11)
  assert plateau.explain(mixed_last) == ''


def test_metrics_of_an_older_version_say_nothing():
  older = [{'step': step, 'pass_rate/fresh': 0.9, 'zero_variance': 1.0} for step in range(20)]
  assert plateau.explain(older) == '' and plateau.explain([]) == ''


# ---- Of a whole run ----


@pytest.mark.parametrize(('num_steps', 'judged'), [(4, 20), (60, 20), (700, 140)])
def test_a_fifth_of_the_run_is_judged_and_no_less_than_twenty_steps(num_steps, judged):
  assert plateau.num_judged(num_steps) == judged


def test_the_latest_plateau_of_a_run_is_found_while_it_is_not_long_past():
  before = {'step': 0, 'eval/chains/pass@1': 0.4}
  risen = steps(rising(0.4, 0.9, 30), EASY)
  flat = steps([0.9] * 20, EASY, first=31)
  again = steps(rising(0.9, 1.0, 25), EASY, first=51)
  assert plateau.latest([before, *risen], 60) is None
  assert plateau.latest([before, *risen, *flat], 60).step == 50
  found = plateau.latest([before, *risen, *flat, *again[:5]], 60)
  assert 50 <= found.step <= 55
  assert plateau.latest([before, *risen, *flat, *again], 60) is None


@pytest.mark.parametrize('count', [1, 5, 19])
def test_early_steps_say_nothing(count):
  assert plateau.latest(steps([0.5] * count, EASY), 60) is None
