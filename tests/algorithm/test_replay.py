"""Experience management: a test for each sentence of the paper's section 3, as we read it."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax.algorithm import question_stream, replay
from exgrpo_jax.datatypes import Cursor, Plan, Question, Response, Span, Turn, Verdict
from exgrpo_jax.errors import InputError
from tests.helpers.buffers import entry, trajectory

K = 4
PAPER = replay.ReplayConfig()
STARTED = replay.Buffer(started=True)
SOLVED, FAILED = {7: (False, '++++')}, {7: (False, '----')}


def changed(**values):
  return dataclasses.replace(PAPER, **values)


def response(*tokens, **values):
  logp = -np.arange(len(tokens), dtype=np.float32)
  return Response(np.array(tokens, np.int32), logp, -logp, **dict(truncated=False) | values)


def question(row):
  return Question(row=row, messages=(), answer='', kind='math', solution='', source='s')


def buffer_of(correctness, started=True):
  """Return a buffer with a trajectory per row of {row: correctness}, whose token is the row."""
  entries = {row: entry(value, 3, trajectory(row)) for row, value in correctness.items()}
  return replay.Buffer(entries=entries, started=started)


def record(buffer, groups, config=PAPER, step=5, **options):
  """Return the buffer after recording groups {row: (is_replay, outcomes)} in epoch 2.

  Outcomes are '+' and '-' for distinct responses, or pairs (Response, Verdict).
  """
  responses, verdicts, replays = [], [], []
  for row, (is_replay, outcomes) in groups.items():
    if isinstance(outcomes, str):
      outcomes = [(response(10 * step + n, 1), verdict(one)) for n, one in enumerate(outcomes)]
    replays.append(buffer.entries[row].trajectories[0] if is_replay else None)
    responses.append([one for one, _ in outcomes])
    verdicts.append([one for _, one in outcomes])
  candidates = tuple((one,) if one else () for one in replays)
  questions, prompts = tuple(map(question, groups)), (np.zeros(3, np.int32),) * len(groups)
  is_drawn = tuple(map(bool, replays))
  plan = Plan(step, Cursor(2), buffer.started, questions, prompts, candidates, is_drawn)
  return replay.record_step(config, buffer, plan, replays, responses, verdicts, **options)


def verdict(sign, reward=None):
  is_right = sign == '+'
  return Verdict(float(is_right) if reward is None else reward, 'correct' if is_right else 'wrong')


def stored(buffer, row=7):
  """The tokens of a question's trajectories."""
  return [one.tokens.tolist() for one in buffer.entries[row].trajectories]


# ---- Recording a group ----


def test_a_success_is_stored_unchanged_with_the_step_of_its_first_token():
  """Step 5 trains on all three and sampled all of the first; the oldest are stored first."""
  spans = [(), (Span(3, 1), Span(5, 1)), (Span(4, 2),)]
  written = [response(n, 1, spans=own, truncated=n == 2) for n, own in enumerate(spans)]
  group = [*zip(written, [verdict('+', 1.0), verdict('+', -3.0), verdict('+', 1.0)])]
  entry = record(STARTED, {7: (False, [*group, (response(9), verdict('-', 9.0))])}).entries[7]
  found = [(one.step, *one.tokens, one.reward, one.truncated) for one in entry.trajectories]
  assert found == [(3, 1, 1, -3.0, False), (4, 2, 1, 1.0, True), (5, 0, 1, 1.0, False)]
  assert all(one.logp.tolist() == [0, -1] for one in entry.trajectories)
  assert (entry.correctness, entry.prompt_length) == (0.75, 3)  # whatever the rewards


@pytest.mark.parametrize('store', ['successes', 'all'])
def test_truncated_responses_count_but_need_not_be_stored(store):
  group = [(response(n, 1, truncated=n < 2), verdict(sign)) for n, sign in enumerate('+-+-')]
  config, groups = changed(store=store), {7: (False, group), 8: (False, group[:2])}
  every = record(STARTED, groups, config)
  whole = record(STARTED, groups, config, store_truncated=False)
  assert [len(found.entries[7].trajectories) for found in (every, whole)] == (
    [2, 1] if store == 'successes' else [4, 2]
  )
  assert stored(whole)[0] == [2, 1]
  assert whole.entries[7].correctness == every.entries[7].correctness == 0.5
  assert 8 in every.entries and 8 not in whole.entries  # both its responses are truncated


def test_a_replayed_row_counts_as_one_of_the_group():
  assert record(buffer_of({7: 0.5}), {7: (True, '+++')}).retired_epoch == {7: 2}
  assert record(buffer_of({7: 0.5}), {7: (True, '+--')}).entries[7].correctness == 2 / 4
  config = changed(count_replayed=False, on_all_failed='bucket_0')
  assert record(buffer_of({7: 0.5}), {7: (True, '+--')}, config).entries[7].correctness == 1 / 3
  assert record(buffer_of({7: 0.5}), {7: (True, '---')}, config).entries[7].correctness == 0


def test_a_replay_is_counted_even_if_nothing_else_changes():
  once = record(buffer_of({7: 0.5, 8: 0.5}), {7: (True, '---')})  # it stays as it is
  twice = record(once, {7: (True, '+--')})
  counts = [[t.times_replayed for t in b.entries[7].trajectories] for b in (once, twice)]
  assert counts == [[1], [2, 0]]  # and a new success
  assert [t.times_replayed for t in twice.entries[8].trajectories] == [0]


def test_store_all_keeps_failures_which_count_as_failures_when_replayed():
  config = changed(store='all', retire='never', max_trajectories=3)
  timed_out = (response(1, 1), Verdict(0.0, 'timed out'))
  first = record(STARTED, {7: (False, '----'), 8: (False, '++++'), 9: (False, [timed_out])}, config)
  assert {row: entry.correctness for row, entry in first.entries.items()} == {7: 0, 8: 1}
  assert [one.correct for one in first.entries[7].trajectories] == [False] * 3
  assert [one.reward for one in first.entries[8].trajectories] == [1.0] * 3
  after = record(first, {7: (True, '++-'), 8: (True, '++-')}, config, step=6)
  assert [after.entries[row].correctness for row in (7, 8)] == [2 / 4, 3 / 4]
  newest = [[(one.step, one.correct) for one in after.entries[row].trajectories] for row in (7, 8)]
  assert newest == [[(6, True), (6, True), (6, False)]] * 2


def test_a_retired_question_is_never_stored_again_and_keeps_its_epoch():
  before = replay.Buffer(retired_epoch={7: 0}, started=True)
  assert record(before, {7: (False, '+---')}) == before
  assert record(before, SOLVED).retired_epoch == {7: 0}


def test_solved_questions_retire_before_replay_has_started():
  buffer = record(replay.Buffer(), SOLVED | {8: (False, '+---')})
  assert buffer.retired_epoch == {7: 2} and not buffer.entries


def test_every_fresh_success_is_added_once_compared_by_tokens():
  group = [(response(1, n), verdict(sign)) for n, sign in zip((2, 2, 3, 4), '+++-')]
  buffer = record(buffer_of({7: 0.5}), {7: (False, group)})
  assert stored(buffer) == [[7], [1, 2], [1, 3]]
  assert stored(record(buffer, {7: (False, group)}, step=6)) == stored(buffer)


@pytest.mark.parametrize('bounds', [(0.0, 1.0), (0.25, 0.5)])
@pytest.mark.parametrize(('failed', 'correctness'), [('stay', 0.75), ('bucket_0', 0)])
def test_a_group_without_success_stays_or_moves_to_bucket_0(failed, correctness, bounds):
  groups = FAILED | {8: (False, '----')}
  buffer = record(
    buffer_of({7: 0.75}), groups, changed(on_all_failed=failed, correctness_range=bounds)
  )
  assert set(buffer.entries) == {7} and stored(buffer) == [[7]]
  assert buffer.entries[7].correctness == correctness


@pytest.mark.parametrize(
  ('retire', 'ratio', 'retires'),
  [('with_replay', 0.5, 1), ('with_replay', 0, 0), ('always', 0, 1), ('never', 0.5, 0)],
)
def test_solved_questions_retire_with_replay_always_or_never(retire, ratio, retires):
  buffer = record(replay.Buffer(), SOLVED, changed(retire=retire, ratio=ratio))
  assert set(buffer.retired_epoch) == ({7} if retires else set())


def test_a_solved_question_that_does_not_retire_is_stored_in_the_last_bucket():
  config = changed(retire='never')
  buffer = record(buffer_of({7: 0.5}), SOLVED, config)
  assert replay.buckets(config, buffer, K) == {7: K - 1}
  assert len(stored(buffer)) == 5 and not buffer.retired_epoch
  # Unless it is above the upper bound.
  config = changed(retire='never', correctness_range=(0.0, 0.75))
  assert record(buffer_of({7: 0.5}), SOLVED, config) == buffer_of({7: 0.5})


@pytest.mark.parametrize(('limit', 'kept'), [(2, [3, 4]), (0, [0, 1, 2, 3, 4])])
def test_the_newest_trajectories_are_kept_or_all(limit, kept):
  buffer = STARTED
  for step in range(5):
    buffer = record(buffer, {7: (False, '+---')}, changed(max_trajectories=limit), step)
  assert [t.step for t in buffer.entries[7].trajectories] == kept


@pytest.mark.parametrize(
  ('bounds', 'recorded'),
  [
    ((0.0, 1.0), {1, 2, 3}),
    ((0.25, 1.0), {2, 3}),  # above the lower bound
    ((0.0, 0.5), {1, 2}),  # at most the upper one
    ((0.25, 0.5), {2}),
  ],
)
def test_only_groups_within_the_bounds_store_successes_or_move_their_question(bounds, recorded):
  config = changed(correctness_range=bounds)
  for successes in range(5):
    before = buffer_of({7: 0.9})  # in the buffer already, unlike question 8
    group = False, '+' * successes + '-' * (4 - successes)
    after = record(before, {7: group, 8: group}, config)
    if successes == 4:
      assert not after.entries and after.retired_epoch == {7: 2, 8: 2}
    elif successes in recorded:
      assert after.entries[7].correctness == after.entries[8].correctness == successes / 4
      assert len(stored(after)) == 1 + successes
    else:
      assert after == before


def test_recording_does_not_modify_its_input():
  before = buffer_of({7: 0.5})
  record(before, SOLVED | {8: (False, '+---')})
  assert set(before.entries) == {7} and not before.retired_epoch


# ---- Buckets ----


def test_a_bucket_is_the_rounded_correctness_within_1_and_k_minus_1():
  cases = ['0/8 0', '1/8 1', '4/8 4', '7/8 7', '1/7 1', '3/7 3', '6/7 7', '1/100 1', '99/100 7']
  for share, expected in map(str.split, cases):
    successes, rows = map(int, share.split('/'))
    assert replay.bucket(successes / rows, 8) == int(expected), share


# Of buckets 0 … 3 of K = 4; see docs/algorithm.md.
WEIGHTS = {
  'gaussian': np.exp([-2, -0.5, 0, -0.5]),  # (k - 2)^2 / 2 for K = 4, sigma = 1
  'linear': [0, 0.25, 0.5, 0.75],
  'linear_clip': [0, 0.25, 0.5, 0.5],
  'square_root': [0, 0.5, 0.5**0.5, 0.75**0.5],
}


@pytest.mark.parametrize('selection', WEIGHTS)
def test_bucket_probabilities_are_the_hand_computed_ones(selection):
  config = changed(question_selection=selection)
  for is_open in ([1, 1, 1, 1], [1, 1, 0, 1], [1, 0, 0, 1]):
    weight = np.array(WEIGHTS[selection]) * is_open
    found = replay.bucket_probabilities(config, np.array(is_open, bool))
    np.testing.assert_allclose(found, weight / weight.sum())


def test_bucket_probabilities_survive_many_rollouts():
  only_first = np.arange(256) < 1  # exp(-128^2 / 2) is 0 in float64
  assert replay.bucket_probabilities(PAPER, only_first)[0] == 1


@pytest.mark.parametrize('kind', ['question_length', 'response_length'])
def test_length_buckets_are_equal_parts_of_the_ranking(kind):
  lengths = {3: 50, 1: 10, 9: 30, 4: 20, 7: 40, 5: 60, 2: 80, 8: 70}
  of_question = kind == 'question_length'
  entries = {
    row: entry(0.5, n, trajectory(0)) if of_question else entry(0.5, 1, trajectory(*range(n)))
    for row, n in lengths.items()
  }
  buckets = replay.buckets(changed(bucket_by=kind), replay.Buffer(entries=entries, started=True), K)
  assert buckets == {1: 0, 4: 0, 9: 1, 7: 1, 3: 2, 5: 2, 8: 3, 2: 3}


# ---- Drawing ----


def draw(buffer, config=PAPER, questions=8, seed=0, step=5, in_flight=()):
  rng = np.random.default_rng(seed)
  with np.errstate(divide='raise'):  # the logarithm of a weight of 0 must not warn
    return replay.draw_questions(config, buffer, questions, K, step, rng, in_flight)


def test_nothing_is_drawn_before_the_start():
  assert draw(buffer_of({1: 0.5, 2: 0.5}, started=False)) == []


@pytest.mark.parametrize(
  ('eligible', 'ratio', 'expected'), [(3, 0.5, 3), (9, 0.5, 4), (9, 0.3, 2), (9, 0, 0)]
)
def test_the_number_drawn_is_the_smaller_of_eligible_and_the_floor_of_the_share(
  eligible, ratio, expected
):
  rows = draw(buffer_of(dict.fromkeys(range(eligible), 0.5)), changed(ratio=ratio))
  assert len(rows) == len(set(rows)) == expected


@pytest.mark.parametrize('selection', ['linear', 'linear_clip', 'square_root'])
def test_a_bucket_of_weight_0_is_never_drawn(selection):
  config = changed(question_selection=selection)
  assert draw(buffer_of({1: 0.0, 2: 0.0}), config) == []
  assert set(draw(buffer_of({1: 0.0, 2: 0.25, 3: 0.0, 4: 0.75}), config)) == {2, 4}  # of 4 wanted
  assert len(draw(buffer_of({1: 0.0, 2: 0.25, 3: 0.0, 4: 0.75}))) == 4  # by the paper's weights


def test_an_empty_buffer_has_nothing_to_draw(monkeypatch):
  rule = lambda questions: questions.age_N / questions.age_N.max()  # noqa: E731
  monkeypatch.setitem(replay.question_rules.RULES, 'mine', rule)
  config = dataclasses.replace(PAPER, question_selection='mine')
  assert draw(STARTED, config) == []


def test_a_rule_that_returns_nan_for_a_question_is_refused(monkeypatch):
  rule = lambda questions: np.where(questions.age_N > 3, np.nan, 0.0)  # noqa: E731
  monkeypatch.setitem(replay.question_rules.RULES, 'mine', rule)
  buffer = replay.Buffer({n: entry(0.5, 1, trajectory(n)) for n in range(5)}, started=True)
  with pytest.raises(InputError, match=r"question_selection: 'mine' .*returned nan at index"):
    draw(buffer, dataclasses.replace(PAPER, question_selection='mine'), step=5)


def test_questions_in_flight_are_not_drawn_but_still_count_in_the_ranks_by_length():
  buffer = replay.Buffer({n: entry(0.5, n, trajectory(0)) for n in range(8)}, started=True)
  config = changed(question_selection='linear', bucket_by='question_length', ratio=0.9)
  assert [own for own, k in replay.buckets(config, buffer, K).items() if k == 0] == [0, 1]
  assert sorted(draw(buffer, config, in_flight=[0, 1, 2])) == [3, 4, 5, 6, 7]
  assert sorted(draw(buffer, config, in_flight=[5])) == [2, 3, 4, 6, 7]


def test_counts_per_bucket_follow_the_gaussian():
  correctness = {row: (row % 4) / 4 for row in range(4000)}  # 1000 questions in each bucket
  rows = draw(buffer_of(correctness), questions=1600)
  count_K = np.bincount([row % 4 for row in rows], minlength=4)
  expected_K = 800 * replay.bucket_probabilities(PAPER, np.ones(4, bool))
  assert ((count_K - expected_K) ** 2 / expected_K).sum() < 16.3  # chi-square, 3 degrees, p = .001


def test_draws_beyond_a_buckets_size_go_to_the_others_by_the_same_weights():
  correctness = {0: 0.5, 1: 0.5}
  correctness |= dict.fromkeys(range(10, 510), 0.25) | dict.fromkeys(range(1000, 1500), 0.75)
  rows = draw(buffer_of(correctness), questions=800)
  assert len(rows) == 400 and {0, 1} <= set(rows)  # all of the small, likeliest bucket
  in_bucket_1 = sum(10 <= row < 1000 for row in rows)  # buckets 1 and 3 have the same weight
  assert abs(in_bucket_1 - 199) < 3.3 * np.sqrt(398 / 4)


def test_within_a_bucket_all_questions_are_equally_likely():
  buffer = buffer_of(dict.fromkeys(range(10), 0.5))
  rows = [row for seed in range(2000) for row in draw(buffer, questions=6, seed=seed)]
  count = np.bincount(rows, minlength=10)
  assert ((count - 600) ** 2 / 600).sum() < 27.9  # chi-square, 9 degrees, p = .001


def test_uniform_selection_ignores_buckets():
  buffer = buffer_of({row: 0.25 if row < 300 else 0.5 for row in range(400)})
  config = changed(question_selection='uniform')
  count = sum(row < 300 for seed in range(50) for row in draw(buffer, config, 80, seed))
  assert abs(count - 1500) < 3.3 * np.sqrt(2000 * 0.75 * 0.25)


def test_the_hardest_are_drawn_from_bucket_1_upwards():
  correctness = dict.fromkeys(range(3), 0.0) | dict.fromkeys(range(10, 13), 0.25)
  correctness |= dict.fromkeys(range(20, 40), 0.5) | dict.fromkeys(range(50, 60), 0.75)
  config = changed(question_selection='hardest')
  for seed in range(20):
    rows = draw(buffer_of(correctness), config, 16, seed)
    assert len(set(rows)) == 8 and set(rows[:3]) == {10, 11, 12}
    assert all(20 <= row < 40 for row in rows[3:])


def test_advantage_selection_weights_questions_by_their_share_of_failures():
  buffer = buffer_of({1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0})  # 4 was solved by all: nothing to gain
  config = changed(question_selection='advantage')
  rows = [row for seed in range(3000) for row in draw(buffer, config, 2, seed)]
  count, expected = np.bincount(rows, minlength=5)[1:], np.array([1500, 1000, 500])
  assert count[3] == 0 and len(draw(buffer, config, 100)) == 3
  assert ((count[:3] - expected) ** 2 / expected).sum() < 13.8  # chi-square, 2 degrees, p = .001


def written_with(*probabilities, **values):
  """Return a stored response whose tokens were sampled with these probabilities."""
  one = trajectory(*range(len(probabilities)), **values)
  return dataclasses.replace(one, logp=np.log(np.float32(probabilities)))


def test_the_questions_with_the_most_headroom_are_drawn_first():
  stored = {  # and their headroom: the mean of 1 - p over tokens, or of p for failures
    1: [written_with(0.9)],  # 0.1
    2: [written_with(0.4, 0.6)],  # 0.5
    3: [written_with(0.8, correct=False)],  # 0.8
    4: [written_with(0.1), written_with(0.7, 0.7, 0.7)],  # 1.8 / 4
    5: [written_with(0.9), written_with(0.95, correct=False)],  # 1.05 / 2
    6: [written_with(0.2, 1.0, turns=(Turn(1, 1, 0.0),))],  # 0.8 / 1, an episode
  }
  entries = {row: entry(0.5, 3, *own) for row, own in stored.items()}
  buffer = replay.Buffer(entries=entries, started=True)
  config = changed(question_selection='headroom_drift')
  for seed in range(10):
    rows = draw(buffer, config, questions=12, seed=seed)
    assert set(rows[:2]) == {3, 6} and rows[2:] == [5, 2, 4, 1]
    assert rows[:4] == draw(buffer, config, questions=8, seed=seed)


def test_trajectories_that_were_not_admitted_leave_the_buffer():
  config = changed(question_selection='headroom_drift')
  entries = {row: entry(0.5, 3, trajectory(1), trajectory(2)) for row in (7, 8, 9)}
  buffer = replay.Buffer(entries=entries, started=True)
  kept = {7: entries[7].trajectories[1:], 8: (), 9: ()}
  plan = Plan(
    step=5,
    cursor=Cursor(2),
    replay_started=True,
    questions=tuple(map(question, kept)),
    prompts=(np.zeros(3, np.int32),) * 3,
    candidates=tuple(kept.values()),
    is_drawn=(True, True, False),  # 9 comes from the stream
  )
  groups = [[(response(n, 1), verdict('-')) for n in range(4)] for _ in kept]
  judged = [[one for _, one in group] for group in groups]
  written = [[one for one, _ in group] for group in groups]
  after = replay.record_step(config, buffer, plan, [None] * 3, written, judged)
  assert {row: stored(after, row) for row in after.entries} == {7: [[2]], 9: [[1], [2]]}
  revisit = dataclasses.replace(config, include_trajectory=False)  # replays no stored response
  after = replay.record_step(revisit, buffer, plan, [None] * 3, written, judged)
  assert after.entries == buffer.entries


def test_counts_are_halved_with_each_visit_and_begin_with_a_success_and_a_failure():
  """Compared with eq. 24 of arXiv:2603.18444, over visits with 3 or 4 fresh responses."""
  rng, buffer, visits = np.random.default_rng(0), STARTED, {}
  for step in range(30):
    rows = rng.choice(6, 3, replace=False).tolist()
    history = {row: buffer.history[row] for row in rows if row in buffer.history}
    judged = [[verdict(sign) for sign in rng.choice([*'+-'], 3 + row % 2)] for row in rows]
    questions = tuple(map(question, rows))
    plan = Plan(step, Cursor(), True, questions, (), (), (), history=history)
    buffer = replay.with_history(buffer, plan, judged)
    for row, own in zip(rows, judged):
      visits.setdefault(row, []).append([one.correct for one in own])
  assert set(buffer.history) == set(visits)
  for row, own in visits.items():
    weights = 0.5 ** np.arange(len(own))[::-1]
    successes = np.array([sum(one) for one in own])
    failures = np.array([len(one) for one in own]) - successes
    expected = [0.5 ** len(own) + weights @ counts for counts in (successes, failures)]
    np.testing.assert_allclose(buffer.history[row], expected, rtol=1e-12)
  assert record(buffer, SOLVED).history == buffer.history  # recording a step keeps them


def aged(ages, now=20):
  """Return a buffer whose questions have a success of step 1 and one of the given age."""
  entries = {
    row: entry(0.5, 3, trajectory(1, step=1), trajectory(2, step=now - age))
    for row, age in ages.items()
  }
  return replay.Buffer(entries=entries, started=True)


def test_successes_older_than_max_age_are_not_replayed():
  buffer, config = aged({1: 2, 2: 3, 3: 4}), changed(max_age=3)
  assert set(draw(buffer, config, step=20)) == {1, 2}
  assert [one.step for one in replay.candidates(config, buffer.entries[2], 20)] == [17]
  assert [one.step for one in replay.candidates(PAPER, buffer.entries[2], 20)] == [1, 17]


def test_older_successes_are_drawn_less_often():
  """Within a bucket, a success that is 11 steps older is a third as likely to be drawn."""
  buffer = aged({1: 8, 2: 19})
  for selection in ('gaussian', 'uniform'):
    config = changed(age_decay=11 / np.log(3), question_selection=selection)
    rows = [draw(buffer, config, 2, seed, step=20)[0] for seed in range(1000)]
    assert abs(rows.count(1) - 750) < 3.3 * np.sqrt(1000 * 0.75 * 0.25), selection


@pytest.mark.parametrize(
  ('difficulty', 'expected'),
  [('easy', {3}), ('medium', {2}), ('hard', {0, 1}), ('all', {0, 1, 2, 3})],
)
def test_only_questions_of_the_configured_difficulty_are_drawn(difficulty, expected):
  buffer = buffer_of({0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75})
  assert set(draw(buffer, changed(difficulty=difficulty))) == expected


def test_the_same_generator_draws_the_same():
  buffer = buffer_of({row: (row % 4) / 4 for row in range(50)})
  shuffled = replay.Buffer(entries=dict(reversed(buffer.entries.items())), started=True)
  assert draw(buffer, seed=3) == draw(shuffled, seed=3) != draw(buffer, seed=4)


# ---- Delayed start ----


def test_replay_starts_when_the_pass_rate_first_exceeds_the_threshold_and_stays_on():
  config = changed(start_pass_rate=0.25)
  at = record(replay.Buffer(), {1: (False, '+---')}, config)
  crossing = record(at, {1: (False, '++--')}, config)
  after = record(crossing, {2: (False, '+---')}, config)
  assert [one.started for one in (at, crossing, after)] == [False, True, True]
  assert not crossing.entries and set(after.entries) == {2}  # the step that crosses is not stored


def test_plain_grpo_never_starts_replay_and_stores_nothing():
  buffer = record(replay.Buffer(), {1: (False, '+++-')}, changed(ratio=0.0))
  assert buffer == replay.Buffer()


# ---- The stream: the order of questions, and skipped questions ----


def order(epoch, size=10, seed=7):
  return question_stream.permutation(seed, epoch, size).tolist()


def take(cursor, count, retired=(), taken=(), size=10, at_once=4):
  return question_stream.take(Cursor(*cursor), count, size, 7, dict(retired), taken, at_once)


def test_seed_and_epoch_determine_the_permutation():
  generator = np.random.default_rng(np.random.SeedSequence(7, spawn_key=(7, 3)))
  assert order(3) == generator.permutation(10).tolist()
  assert order(3) != order(4)


def test_a_step_may_end_with_an_epoch_without_leaving_it():
  assert take((0, 6), 4) == (order(0)[6:], Cursor(0, 10))
  assert take((0, 10), 4)[1] == Cursor(1, 4)
  for taken in ([0, 1, 2, 3], [*range(8)]):  # more if it resumed with fewer slots
    assert take((2, 10), 0, taken=taken) == ([], Cursor(2, 10))


def test_a_step_crosses_into_the_next_epoch_and_never_repeats_a_question():
  for seed in range(20):
    rows, cursor = question_stream.take(Cursor(0, 7), 8, 10, seed, {}, (), 8)
    assert len(set(rows)) == 8
    last = order(0, seed=seed)[7:]
    fresh = [row for row in order(1, seed=seed) if row not in last][:5]
    assert rows == last + fresh
    assert cursor == Cursor(1, order(1, seed=seed).index(fresh[-1]) + 1)


def test_replayed_questions_are_skipped():
  first = order(0)
  rows, cursor = take((0, 0), 2, taken=[first[0], first[2]])
  assert (rows, cursor) == ([first[1], first[3]], Cursor(0, 4))


def test_a_retired_question_stays_in_its_own_epoch_and_is_out_of_the_next():
  row = order(0)[0]
  assert take((0, 0), 1, retired={row: 0})[0] == [row]
  position = order(1).index(row)
  rows, cursor = take((1, position), 1, retired={row: 0})
  assert (rows, cursor) == ([order(1)[position + 1]], Cursor(1, position + 2))


def test_a_question_retired_in_this_epoch_is_out_once_the_step_has_crossed():
  row = order(1)[0]
  assert take((0, 10), 1, retired={row: 0}) == ([order(1)[1]], Cursor(1, 2))
  assert take((0, 10), 1, retired={row: 1}) == ([row], Cursor(1, 1))


def test_retired_questions_return_when_too_few_others_are_left():
  def reads_retired(epoch):
    return question_stream.reads_retired(epoch, 10, retired, at_once=4)

  retired = dict.fromkeys(range(6), 0)
  assert not reads_retired(1)  # 4 are left, and 4 are needed
  assert sorted(take((1, 0), 4, retired)[0]) == [6, 7, 8, 9]
  retired[6] = 0
  assert reads_retired(1)
  assert take((1, 0), 4, retired) == (order(1)[:4], Cursor(1, 4))
  assert not reads_retired(0)  # in the epoch in which they retired they are still read


def test_if_all_have_retired_the_questions_not_replayed_are_read():
  all_retired = dict.fromkeys(range(4), 0)
  rows, _ = take((1, 0), 2, all_retired, taken=[0, 1], size=4)
  assert sorted(rows) == [2, 3]


def test_fewer_questions_than_a_step_needs_are_refused():
  with pytest.raises(InputError, match='has 3 questions, but a step needs 4 distinct'):
    take((0, 0), 1, size=3)
  with pytest.raises(ValueError, match='count=3 plus the 2 rows already taken exceeds at_once=4'):
    take((0, 0), 3, taken=[1, 2])
