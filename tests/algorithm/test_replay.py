"""Experience management: a test for each sentence of the paper's section 3, as we read it."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Plan, Question, Response, Span, Trajectory, Verdict

K = 4
PAPER = replay.Config(
  ratio=0.5,
  start_pass_rate=0.35,
  sigma=1.0,
  question_selection='gaussian',
  trajectory_selection='lowest_entropy',
  bucket_by='correctness',
  difficulty='all',
  count_replayed=True,
  lower_bound=0.0,
  upper_bound=1.0,
  max_trajectories=8,
  retire='with_replay',
  failed='stay',
)

STARTED = replay.Buffer(started=True)


def changed(**values):
  return dataclasses.replace(PAPER, **values)


def trajectory(*tokens, step=0):
  return Trajectory(
    tokens=np.array(tokens, np.int32),
    logp=np.zeros(len(tokens), np.float32),
    reward=1.0,
    step=step,
  )


def response(*tokens, truncated=False):
  values = np.arange(len(tokens), dtype=np.float32)
  return Response(
    tokens=np.array(tokens, np.int32), logp=-values, entropy=values, truncated=truncated
  )


def question(row):
  return Question(row=row, messages=(), answer='', kind='math', solution='', source='s')


def buffer_of(correctness, started=True):
  """A trajectory for each row of row -> correctness, with the row as its token."""
  entries = {
    row: replay.Entry(correctness=value, prompt_length=3, trajectories=(trajectory(row),))
    for row, value in correctness.items()
  }
  return replay.Buffer(entries=entries, started=started)


def record(buffer, groups, config=PAPER, step=5, epoch=2):
  """The buffer after groups given as {row: (is_replay, [(tokens, correct), ...])}."""
  plan = Plan(
    step=step,
    epoch=epoch,
    replay_started=buffer.started,
    questions=tuple(map(question, groups)),
    prompts=(np.zeros(3, np.int32),) * len(groups),
    candidates=tuple((trajectory(99),) if is_replay else () for is_replay, _ in groups.values()),
  )
  responses = [[response(*tokens) for tokens, _ in group] for _, group in groups.values()]
  verdicts = [
    [Verdict(float(correct), 'correct' if correct else 'wrong') for _, correct in group]
    for _, group in groups.values()
  ]
  replays = [
    buffer.entries[row].trajectories[0] if is_replay else None
    for row, (is_replay, _) in groups.items()
  ]
  return replay.record_step(config, buffer, plan, replays, responses, verdicts)


def group(*correct, start=10):
  """(tokens, correct) of each response; all tokens differ."""
  return [((start + i, 1), bool(c)) for i, c in enumerate(correct)]


def record_row_7(responses, verdicts, step=1):
  """The started, empty buffer after one fresh group of question 7."""
  plan = Plan(
    step=step,
    epoch=0,
    replay_started=True,
    questions=(question(7),),
    prompts=(np.zeros(2, np.int32),),
    candidates=((),),
  )
  return replay.record_step(PAPER, STARTED, plan, [None], [responses], [verdicts])


# ---- Recording a group ----


def test_a_success_is_as_old_as_its_first_token():
  """Trained in step 5, which wrote all of the first one; the oldest are stored first."""
  spans = [(), (Span(3, 1), Span(5, 1)), (Span(4, 2),), (Span(5, 2),)]
  written = [dataclasses.replace(response(n, 1), spans=own) for n, own in enumerate(spans)]
  verdicts = [Verdict(1.0, 'correct')] * 3 + [Verdict(0.0, 'wrong')]
  stored = record_row_7(written, verdicts, step=5).entries[7].trajectories
  assert [(one.step, one.tokens[0]) for one in stored] == [(3, 1), (4, 2), (5, 0)]


def test_a_fully_solved_question_is_retired_and_its_trajectories_dropped():
  buffer = record(buffer_of({7: 0.5}), {7: (False, group(1, 1, 1, 1))})
  assert 7 not in buffer.entries and buffer.retired_epoch == {7: 2}


def test_a_replayed_row_counts_as_one_of_the_group():
  solved = {7: (True, group(1, 1, 1))}
  assert record(buffer_of({7: 0.5}), solved).retired_epoch == {7: 2}
  half = record(buffer_of({7: 0.5}), {7: (True, group(1, 0, 0))})
  assert half.entries[7].correctness == 2 / 4


def test_a_replay_is_counted_also_where_nothing_else_changes():
  once = record(buffer_of({7: 0.5, 8: 0.5}), {7: (True, group(0, 0, 0))})  # it stays as it is
  twice = record(once, {7: (True, group(1, 0, 0, start=50))})
  assert [t.times_replayed for t in once.entries[7].trajectories] == [1]
  assert [t.times_replayed for t in twice.entries[7].trajectories] == [2, 0]  # and a new success
  assert [t.times_replayed for t in twice.entries[8].trajectories] == [0]


def test_without_count_replayed_only_fresh_rows_count():
  config = changed(count_replayed=False, failed='bucket_0')
  buffer = record(buffer_of({7: 0.5}), {7: (True, group(1, 0, 0))}, config)
  assert buffer.entries[7].correctness == 1 / 3
  failed = record(buffer_of({7: 0.5}), {7: (True, group(0, 0, 0))}, config)
  assert replay.buckets(config, failed, K) == {7: 0}


def test_a_retired_question_is_never_stored_again_and_keeps_its_epoch():
  before = replay.Buffer(retired_epoch={7: 0}, started=True)
  assert record(before, {7: (False, group(1, 0, 0, 0))}) == before
  assert record(before, {7: (False, group(1, 1, 1, 1))}).retired_epoch == {7: 0}


def test_retirement_counts_before_replay_has_started():
  buffer = record(replay.Buffer(), {7: (False, group(1, 1, 1, 1)), 8: (False, group(1, 0, 0, 0))})
  assert buffer.retired_epoch == {7: 2} and not buffer.entries


def test_every_fresh_success_is_added_once_compared_by_tokens():
  twice = [((1, 2), True), ((1, 2), True), ((1, 3), True), ((1, 4), False)]
  buffer = record(buffer_of({7: 0.5}), {7: (False, twice)})
  assert [t.tokens.tolist() for t in buffer.entries[7].trajectories] == [[7], [1, 2], [1, 3]]
  again = record(buffer, {7: (False, twice)}, step=6)
  assert again.entries[7].trajectories == buffer.entries[7].trajectories


def test_a_stored_success_keeps_its_log_probabilities_step_and_reward():
  buffer = record(STARTED, {7: (False, [((4, 5, 6), True), *group(0, 0, 0)])}, step=9)
  (stored,) = buffer.entries[7].trajectories
  np.testing.assert_array_equal(stored.logp, [0.0, -1.0, -2.0])
  assert stored.step == 9 and stored.reward == 1.0 and buffer.entries[7].prompt_length == 3


@pytest.mark.parametrize(('failed', 'bucket'), [('stay', 3), ('bucket_0', 0)])
def test_a_group_without_success_adds_nothing_and_stays_or_moves_to_bucket_0(failed, bucket):
  config = changed(failed=failed)
  groups = {7: (False, group(0, 0, 0, 0)), 8: (False, group(0, 0, 0, 0))}
  buffer = record(buffer_of({7: 0.75}), groups, config)
  assert replay.buckets(config, buffer, K) == {7: bucket}
  assert [t.tokens.tolist() for t in buffer.entries[7].trajectories] == [[7]]


@pytest.mark.parametrize(
  ('retire', 'ratio', 'retires'),
  [
    ('with_replay', 0.5, True),
    ('with_replay', 0.0, False),
    ('always', 0.0, True),
    ('never', 0.5, False),
  ],
)
def test_solved_questions_retire_with_replay_always_or_never(retire, ratio, retires):
  buffer = record(
    replay.Buffer(), {7: (False, group(1, 1, 1, 1))}, changed(retire=retire, ratio=ratio)
  )
  assert set(buffer.retired_epoch) == ({7} if retires else set())


def test_a_solved_question_that_does_not_retire_is_stored_in_the_last_bucket():
  config = changed(retire='never')
  buffer = record(buffer_of({7: 0.5}), {7: (False, group(1, 1, 1, 1))}, config)
  assert replay.buckets(config, buffer, K) == {7: K - 1}
  assert len(buffer.entries[7].trajectories) == 5 and not buffer.retired_epoch


def test_a_correct_response_that_was_truncated_is_stored_as_it_is():
  buffer = record_row_7(
    [response(5, 6, truncated=True), *[response(1)] * 3],
    [Verdict(1.0, 'correct'), *[Verdict(0.0, 'wrong')] * 3],
  )
  np.testing.assert_array_equal(buffer.entries[7].trajectories[0].tokens, [5, 6])


def test_the_newest_trajectories_are_kept():
  buffer = STARTED
  for step in range(5):
    buffer = record(
      buffer,
      {7: (False, group(1, 0, 0, 0, start=10 + step))},
      changed(max_trajectories=2),
      step=step,
    )
  assert [t.step for t in buffer.entries[7].trajectories] == [3, 4]


def test_a_limit_of_0_trajectories_keeps_all():
  buffer = STARTED
  for step in range(5):
    buffer = record(
      buffer,
      {7: (False, group(1, 1, 1, 0, start=10 * step))},
      changed(max_trajectories=0),
      step=step,
    )
  assert [t.step for t in buffer.entries[7].trajectories] == [
    step for step in range(5) for _ in range(3)
  ]


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
  config = changed(lower_bound=bounds[0], upper_bound=bounds[1])
  for successes in range(5):
    before = buffer_of({7: 0.9})  # in the buffer already, unlike question 8
    results = group(*[1] * successes, *[0] * (4 - successes))
    after = record(before, {7: (False, results), 8: (False, results)}, config)
    if successes == 4:
      assert not after.entries and after.retired_epoch == {7: 2, 8: 2}
    elif successes in recorded:
      assert after.entries[7].correctness == after.entries[8].correctness == successes / 4
      assert len(after.entries[7].trajectories) == 1 + successes
    else:
      assert after == before


def test_a_failed_group_goes_to_bucket_0_whatever_the_bounds():
  config = changed(lower_bound=0.25, upper_bound=0.5, failed='bucket_0')
  failed = record(buffer_of({7: 0.5}), {7: (False, group(0, 0, 0, 0))}, config)
  assert replay.buckets(config, failed, K) == {7: 0} and len(failed.entries[7].trajectories) == 1


def test_a_solved_question_that_does_not_retire_keeps_to_the_upper_bound():
  config, solved = changed(retire='never', upper_bound=0.75), {7: (False, group(1, 1, 1, 1))}
  assert record(buffer_of({7: 0.5}), solved, config) == buffer_of({7: 0.5})


def test_a_reward_other_than_0_or_1_changes_nothing_in_the_bookkeeping():
  buffer = record_row_7(
    [response(i) for i in range(4)],
    [Verdict(-3.0, 'correct'), *(Verdict(reward, 'wrong') for reward in (9.0, 0.1, 0.0))],
  )
  assert buffer.entries[7].correctness == 0.25
  assert buffer.entries[7].trajectories[0].reward == -3.0


# ---- Buckets ----


def test_a_bucket_is_the_rounded_correctness_within_1_and_k_minus_1():
  expected = {
    (0, 8): 0,
    (1, 8): 1,
    (4, 8): 4,
    (7, 8): 7,
    (1, 7): 1,
    (3, 7): 3,
    (6, 7): 7,
    (1, 100): 1,
    (99, 100): 7,
  }
  assert {
    (successes, rows): replay.bucket(successes / rows, 8) for successes, rows in expected
  } == expected


def test_bucket_probabilities_are_the_papers_gaussian():
  weight = np.exp(-np.array([4.0, 1.0, 0.0, 1.0]) / 2)  # (k - 2)^2 / 2 for K = 4, sigma = 1
  probability = replay.bucket_probabilities(PAPER, np.ones(4, bool))
  np.testing.assert_allclose(probability, weight / weight.sum())


# Of buckets 0 … 3 of K = 4; see docs/algorithm.md.
WEIGHTS = {
  'linear': [0, 0.25, 0.5, 0.75],
  'linear_clip': [0, 0.25, 0.5, 0.5],
  'square_root': [0, 0.5, 0.5**0.5, 0.75**0.5],
}


@pytest.mark.parametrize('selection', WEIGHTS)
def test_bucket_probabilities_are_the_hand_computed_ones(selection):
  weight = np.array(WEIGHTS[selection])
  config = changed(question_selection=selection)
  probability = replay.bucket_probabilities(config, np.ones(4, bool))
  np.testing.assert_allclose(probability, weight / weight.sum())
  ends = replay.bucket_probabilities(config, np.array([True, True, False, True]))
  np.testing.assert_allclose(ends, weight * [1, 1, 0, 1] / (weight[1] + weight[3]))


@pytest.mark.parametrize('selection', WEIGHTS)
def test_a_bucket_of_weight_0_is_never_drawn(selection):
  config = changed(question_selection=selection)
  assert draw(buffer_of({1: 0.0, 2: 0.0}), config) == []
  assert set(draw(buffer_of({1: 0.0, 2: 0.25, 3: 0.0, 4: 0.75}), config)) == {2, 4}  # of 4 wanted
  assert len(draw(buffer_of({1: 0.0, 2: 0.25, 3: 0.0, 4: 0.75}))) == 4  # by the paper's weights


def test_empty_buckets_have_no_probability():
  probability = replay.bucket_probabilities(PAPER, np.array([True, False, False, True]))
  weight = np.exp([-2.0, -0.5])
  np.testing.assert_allclose(
    probability, [weight[0] / weight.sum(), 0, 0, weight[1] / weight.sum()]
  )


def test_bucket_probabilities_survive_many_rollouts():
  only_first = np.arange(256) < 1  # exp(-128^2 / 2) is 0 in float64
  assert replay.bucket_probabilities(PAPER, only_first)[0] == 1


@pytest.mark.parametrize('kind', ['question_length', 'response_length'])
def test_difficulty_by_length_is_the_rank_cut_into_equal_buckets(kind):
  lengths = {3: 50, 1: 10, 9: 30, 4: 20, 7: 40, 5: 60, 2: 80, 8: 70}
  entries = {
    row: replay.Entry(
      correctness=0.5,
      prompt_length=length if kind == 'question_length' else 1,
      trajectories=(trajectory(*range(length if kind == 'response_length' else 1)),),
    )
    for row, length in lengths.items()
  }
  buckets = replay.buckets(changed(bucket_by=kind), replay.Buffer(entries=entries, started=True), K)
  assert buckets == {1: 0, 4: 0, 9: 1, 7: 1, 3: 2, 5: 2, 8: 3, 2: 3}


# ---- Drawing ----


def draw(buffer, config=PAPER, questions=8, seed=0):
  return replay.draw_questions(config, buffer, questions, K, np.random.default_rng(seed))


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


def test_counts_per_bucket_follow_the_gaussian():
  correctness = {row: (row % 4) / 4 for row in range(4000)}  # 1000 questions in each bucket
  rows = draw(buffer_of(correctness), questions=1600)
  count_K = np.bincount([row % 4 for row in rows], minlength=4)
  expected_K = 800 * replay.bucket_probabilities(PAPER, np.ones(4, bool))
  assert ((count_K - expected_K) ** 2 / expected_K).sum() < 16.3  # chi-square, 3 degrees, p = .001


def test_what_exceeds_a_bucket_goes_to_the_others_by_the_same_weights():
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
  count = sum(
    row < 300
    for seed in range(50)
    for row in draw(buffer, changed(question_selection='uniform'), 80, seed)
  )
  assert abs(count - 1500) < 3.3 * np.sqrt(2000 * 0.75 * 0.25)


@pytest.mark.parametrize(
  ('difficulty', 'expected'),
  [('easy', {3}), ('medium', {2}), ('hard', {0, 1}), ('all', {0, 1, 2, 3})],
)
def test_training_on_one_difficulty_draws_only_that(difficulty, expected):
  buffer = buffer_of({0: 0.0, 1: 0.25, 2: 0.5, 3: 0.75})
  assert set(draw(buffer, changed(difficulty=difficulty))) == expected


def test_the_same_generator_draws_the_same():
  buffer = buffer_of({row: (row % 4) / 4 for row in range(50)})
  shuffled = replay.Buffer(entries=dict(reversed(buffer.entries.items())), started=True)
  assert draw(buffer, seed=3) == draw(shuffled, seed=3) != draw(buffer, seed=4)


# ---- Delayed start ----


def test_replay_starts_when_the_pass_rate_first_exceeds_the_threshold():
  at = record(replay.Buffer(), {1: (False, group(1, 0, 0, 0))}, changed(start_pass_rate=0.25))
  above = record(replay.Buffer(), {1: (False, group(1, 1, 0, 0))}, changed(start_pass_rate=0.25))
  assert not at.started and above.started


def test_the_step_that_crosses_is_not_stored_and_the_next_one_is():
  crossing = record(replay.Buffer(), {1: (False, group(1, 1, 1, 0))})
  assert crossing.started and not crossing.entries
  after = record(crossing, {2: (False, group(1, 0, 0, 0))})
  assert after.started and set(after.entries) == {2}  # below the threshold the switch stays on


def test_without_replay_it_never_starts_and_stores_nothing():
  buffer = record(replay.Buffer(), {1: (False, group(1, 1, 1, 0))}, changed(ratio=0.0))
  assert buffer == replay.Buffer()


def test_recording_leaves_the_buffer_it_was_given_as_it_was():
  before = buffer_of({7: 0.5})
  record(before, {7: (False, group(1, 1, 1, 1)), 8: (False, group(1, 0, 0, 0))})
  assert set(before.entries) == {7} and not before.retired_epoch
