"""The recorded run's records (conftest.py), compared with what its stages read and returned."""

import dataclasses
import functools
import itertools
import math
import types

import numpy as np
import pytest

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import (
  Cursor,
  Experience,
  Message,
  Plan,
  Question,
  ReplayScores,
  Response,
  Trajectory,
  Turn,
  Verdict,
)
from exgrpo_jax.reporting import metrics, step_records, step_rows
from tests.helpers import tiny

Q, K = tiny.QUESTIONS, tiny.ROLLOUTS


@pytest.fixture(scope='module')
def records(recorded):
  """(responses, questions) of the run, by step: lists of rows."""
  tables = step_records.read(recorded.workdir)
  by_step = {number: ([], []) for number in recorded.steps}
  for place, table in enumerate(tables):
    for row in table.to_pylist():
      by_step[row['step']][place].append(row)
  return by_step


@pytest.fixture(scope='module')
def measured(recorded):
  """The run's metrics, by step."""
  return {int(record['step']): record for record in metrics.read(recorded.workdir)}


@pytest.fixture(scope='module')
def tokens(recorded):
  """The rows of tokens of the run, by step."""
  by_step = {number: [] for number in recorded.steps}
  for row in tiny.token_rows(recorded.workdir):
    by_step[row['step']].append(row)
  return by_step


def split(responses):
  """(fresh, replayed) rows."""
  return [[row for row in responses if row['is_replay'] == kind] for kind in (False, True)]


def mean(rows, name):
  return np.mean([row[name] for row in rows])


def experience_of(step, **changed):
  """Return the step's experience, with some of it changed."""
  names = ('plan', 'replays', 'scores', 'responses', 'verdicts', 'batch', 'partial_groups')
  values = {name: getattr(step, name) for name in names} | changed
  return Experience(**values, sampling={}, mismatch={})


def rows_with(recorded, step, **changed):
  """Return the rows of a changed step; only group 0 has token rows."""
  config, tokenizer = recorded.experiment.config.replay, recorded.experiment.tokenizer
  experience = experience_of(step, **changed)
  return step_rows.rows(config, tokenizer, experience, *bucketed(config, step), with_tokens=[0])


def bucketed(config, step):
  """The buffers before and after the step."""
  return [
    replay.Bucketed(buffer, replay.buckets(config, buffer, K))
    for buffer in (step.buffer, step.after)
  ]


# ---- Rows compared with the run ----


def test_every_response_of_every_step_has_a_row(recorded, records):
  for number, step in recorded.steps.items():
    responses, questions = records[number]
    places = [(row['group'], row['sample']) for row in responses]
    assert places == list(itertools.product(range(Q), range(K)))
    rows = [question.row for question in step.plan.questions]
    assert [row['question'] for row in questions] == rows
    assert [row['question'] for row in responses] == np.repeat(rows, K).tolist()
    assert [row['is_replay'] for row in responses] == step.batch.is_replay_B.tolist()
    assert [row['advantage'] for row in responses] == step.batch.advantage_B.tolist()
    assert [row['policy_step'] for row in responses] == step.batch.policy_step_B.tolist()


def test_a_fresh_row_is_a_response_and_its_verdict(recorded, records):
  decode = recorded.experiment.tokenizer.decode
  for number, step in recorded.steps.items():
    fresh, _ = split(records[number][0])
    groups = zip(step.responses, step.verdicts)
    pairs = [pair for group in groups for pair in zip(*group, strict=True)]
    for row, (response, verdict) in zip(fresh, pairs, strict=True):
      text, close = decode(response.tokens), functools.partial(pytest.approx, rel=1e-5)
      expected = {
        'reward': verdict.reward,
        'outcome': verdict.outcome,
        'answer': text[:64],  # the fake verifier extracts the whole text
        'length': len(response.tokens),
        'truncated': response.truncated,
        'entropy': close(response.entropy.mean(dtype=np.float64)),
        'probability': close(np.exp(response.logp.astype(np.float64)).mean()),
        'has_code_block': any(line.strip(' \t').startswith('```') for line in text.split('\n')),
        'reason': verdict.reason or None,
        'valid_steps': None,  # this task cannot check steps
        **dict.fromkeys(('ratio_mean', 'ratio_variance', 'times_replayed')),
      }
      assert row | expected == row


def test_a_replayed_row_has_the_values_of_the_policy_at_the_start_of_the_step(recorded, records):
  """The stages' tests compare the step's scores with the full logits."""
  seen = 0
  for number, step in recorded.steps.items():
    _, replayed = split(records[number][0])
    for row in replayed:
      chosen, scores = step.replays[row['group']], step.scores[row['group']]
      w = np.exp(scores.logp - np.float64(chosen.logp))
      f = w / (w + 0.1)
      close = functools.partial(pytest.approx, rel=1e-4, abs=1e-7)
      expected = {
        'reward': chosen.reward,
        'outcome': 'correct',
        'answer': None,
        'length': len(chosen.tokens),
        'truncated': chosen.tokens[-1] not in recorded.experiment.tokenizer.eos_ids,
        'entropy': close(scores.entropy.mean()),
        'probability': close(np.exp(scores.logp).mean()),
        'candidate_entropies': close(list(scores.candidate_entropies)),
        'ratio_mean': close(w.mean()),
        'ratio_max': close(w.max()),
        'ratio_variance': close(w.var(), rel=1e-3, abs=1e-6),
        'reason': None,
        'shaped_mean': close(f.mean()),
        'shaped_variance': close(f.var(), abs=1e-6),
      }
      assert row | expected == row
      assert row['entropy'] == min(row['candidate_entropies'])
      seen += len(row['candidate_entropies']) > 1 and w.max() > 1.1
  assert seen > 2


def test_replays_of_a_trajectory_are_counted_over_the_whole_run(recorded, records):
  count = {}
  for number, step in recorded.steps.items():
    for row in split(records[number][0])[1]:
      chosen = step.replays[row['group']]
      key = (row['question'], chosen.step, chosen.tokens.tobytes())
      count[key] = count.get(key, 0) + 1
      assert row['times_replayed'] == count[key]
  assert max(count.values()) > 2


def test_a_question_row_describes_the_visit(recorded, records):
  retired = {}
  config = recorded.experiment.config.replay
  for number, step in recorded.steps.items():
    before, after = (either.bucket_of for either in bucketed(config, step))
    for row, question, replayed, verdicts in zip(
      records[number][1], step.plan.questions, step.replays, step.verdicts, strict=True
    ):
      assert row['text'] == f'{question.row}+0'  # as tiny.write_questions has it
      assert row['answer'] == question.answer == str(question.row)
      correct = sum(verdict.correct for verdict in verdicts) + (replayed is not None)
      assert row['is_replay'] == (replayed is not None)
      assert row['correctness'] == correct / K
      assert row['bucket_before'] == before.get(row['question'])
      assert row['bucket_after'] == after.get(row['question'])
      assert (row['bucket_before'] is not None) >= row['is_replay']
      if row['retired_step'] is not None:
        assert correct == K and row['retired_step'] == number and row['bucket_after'] is None
        assert retired.setdefault(row['question'], number) == number
  assert set(retired) == set(recorded.steps[tiny.NUM_STEPS].after.retired_epoch)


# ---- Token by token ----


def test_a_token_row_is_a_response_from_a_chosen_group(recorded, tokens):
  count = recorded.experiment.config.metrics.recorded_groups
  replayed_rows = 0
  for number, step in recorded.steps.items():
    groups = step_rows.recorded_groups(step.plan, count, tiny.SEED)
    assert len(groups) == count and groups == sorted(set(groups))
    places = [(row['group'], row['sample']) for row in tokens[number]]
    assert places == list(itertools.product(groups, range(K)))
    for row in tokens[number]:
      group = row['group']
      assert row['question'] == step.plan.questions[group].row
      if row['sample'] < len(step.responses[group]):
        written = step.responses[group][row['sample']]
        expected = written.tokens, written.logp, written.entropy, None
      else:
        replayed_rows += 1
        stored, scores = step.replays[group], step.scores[group]
        expected = stored.tokens, scores.logp, scores.entropy, stored.logp
        assert not np.array_equal(stored.logp, scores.logp)
      for name, values in zip(('tokens', 'logp', 'entropy', 'past_logp'), expected, strict=True):
        assert row[name] == (None if values is None else values.tolist())
  assert replayed_rows > 10


def test_the_choice_of_recorded_groups_depends_only_on_seed_and_question(recorded):
  plan = recorded.steps[1].plan
  rows = [question.row for question in plan.questions]
  chosen = [rows[group] for group in step_rows.recorded_groups(plan, 2, tiny.SEED)]
  turned = dataclasses.replace(plan, step=9, questions=plan.questions[::-1])
  assert [rows[::-1][g] for g in step_rows.recorded_groups(turned, 2, tiny.SEED)] == chosen[::-1]
  assert len({tuple(step_rows.recorded_groups(plan, 2, seed)) for seed in range(20)}) > 5
  assert step_rows.recorded_groups(plan, 0, tiny.SEED) == []
  assert step_rows.recorded_groups(plan, 99, tiny.SEED) == list(range(Q))


# ---- The rows add up to the metrics ----


def test_rows_add_up_to_the_metrics_exactly(records, measured):
  for number, (responses, questions) in records.items():
    fresh, replayed = split(responses)
    correct = [row for row in fresh if row['outcome'] == 'correct']
    incorrect = [row for row in fresh if row['outcome'] != 'correct']
    buckets = [row['bucket_before'] for row in questions if row['is_replay']]
    means = {
      ('length/truncated', 'truncated'): fresh,
      ('reward', 'reward'): fresh,
      ('length/mean', 'length'): fresh,
      ('probability/fresh', 'probability'): fresh,
      ('code_blocks/fresh', 'has_code_block'): fresh,
      ('entropy/correct', 'entropy'): correct,
      ('entropy/incorrect', 'entropy'): incorrect,
      ('replay/times_mean', 'times_replayed'): replayed,
      ('length/replayed', 'length'): replayed,
      ('probability/replayed', 'probability'): replayed,
      ('code_blocks/replayed', 'has_code_block'): replayed,
    }
    expected = {name: mean(rows, column) for (name, column), rows in means.items() if rows} | {
      'pass_rate/all': len(correct) / len(fresh),
      'groups/solved_by_all': np.mean([row['correctness'] == 1 for row in questions]),
      'groups/solved_by_none': np.mean([row['correctness'] == 0 for row in questions]),
      'replay/rows': len(replayed),
    }
    if replayed:
      expected['replay/age_mean'] = np.mean([number - row['policy_step'] for row in replayed])
      expected['replay/times_max'] = max(row['times_replayed'] for row in replayed)
      expected |= {f'replay/bucket_{k}': buckets.count(k) for k in range(K)}
    record = measured[number]
    assert {name: record[name] for name in expected} == expected
    assert bool(replayed) == ('replay/bucket_1' in record) == ('probability/replayed' in record)
  assert sum(map(bool, (split(responses)[1] for responses, _ in records.values()))) > 10


# ---- Counted by hand ----


def test_shares_of_code_blocks_and_of_valid_steps_counted_by_hand(recorded, monkeypatch):
  """3 fresh responses have code, 2 of 3 right ones valid steps, and 1 replayed one has code."""
  monkeypatch.setattr(step_rows, 'step_checker', lambda _: lambda _: True)
  tokenizer = recorded.experiment.tokenizer
  step = next(step for step in recorded.steps.values() if any(step.replays))
  group = next(index for index, replayed in enumerate(step.replays) if replayed)
  right, wrong = ('correct', True, True), ('wrong', True, True)  # outcome, code block, valid steps
  facts = iter([right, ('correct', False, True), ('correct', True, False), wrong])
  verdicts = [
    [
      verdict._replace(outcome=outcome, has_code_block=has_code, valid_steps=valid)
      for verdict in judged
      for outcome, has_code, valid in [next(facts, ('wrong', False, None))]
    ]
    for judged in step.verdicts
  ]
  tokens = np.array([*tokenizer.encode('1+1\n```\n2\n```'), tokenizer.eos_ids[0]], np.int32)
  replays, scores = list(step.replays), list(step.scores)
  logp = np.zeros(len(tokens), np.float32)
  replays[group] = dataclasses.replace(replays[group], tokens=tokens, logp=logp)
  scores[group] = dataclasses.replace(scores[group], logp=logp)
  rows = rows_with(recorded, step, replays=replays, scores=scores, verdicts=verdicts)
  values = step_rows.record_metrics(rows, K)
  num_fresh, num_replayed = sum(map(len, step.responses)), sum(map(bool, replays))
  assert values['code_blocks/fresh'] == 3 / num_fresh
  assert values['code_blocks/replayed'] == 1 / num_replayed
  assert values['valid_steps/correct'] == pytest.approx(2 / 3)
  # In an episode, the environment's text does not count.
  written = len(tokenizer.encode('1+1\n'))
  for observed, count in ((len(tokens) - written - 1, 0), (0, 1)):
    turns = Turn(written, observed, 0.0), Turn(len(tokens) - written - observed, 0, 1.0)
    replays[group] = dataclasses.replace(replays[group], turns=turns)
    scores[group] = dataclasses.replace(scores[group], logp=logp[replays[group].own])
    rows = rows_with(recorded, step, replays=replays, scores=scores, verdicts=verdicts)
    share = step_rows.record_metrics(rows, K)['code_blocks/replayed']
    assert share == count / num_replayed
    checked = sum(map(bool, rows['responses']['valid_steps']))
    assert checked == 3 + num_replayed - 1, 'all but the episode'


def test_texts_that_cannot_be_stored_are_escaped(recorded):
  step = recorded.steps[1]
  bad, escaped = '\ud800', r'\ud800'
  verdicts = [[v._replace(answer=bad, reason=bad) for v in judged] for judged in step.verdicts]
  questions = tuple(
    dataclasses.replace(question, answer=bad, messages=(Message('user', bad),))
    for question in step.plan.questions
  )
  plan = dataclasses.replace(step.plan, questions=questions)
  rows = rows_with(recorded, step, plan=plan, verdicts=verdicts)
  for table, columns in ('responses', ('answer', 'reason')), ('questions', ('answer', 'text')):
    assert {text for column in columns for text in rows[table][column]} == {escaped}


def test_a_questions_text_consists_of_the_user_messages(recorded):
  step = recorded.steps[1]
  said = ('system', 'Be brief.'), ('user', '1+1?'), ('assistant', '2'), ('user', '2+2?')
  first, *others = step.plan.questions
  first = dataclasses.replace(first, messages=tuple(Message(*turn) for turn in said))
  plan = dataclasses.replace(step.plan, questions=(first, *others))
  assert rows_with(recorded, step, plan=plan)['questions']['text'][0] == '1+1?\n\n2+2?'


def test_why_grading_failed_is_recorded(recorded):
  step = recorded.steps[1]
  (first, *others), *groups = step.verdicts
  failed = first._replace(outcome='crashed', reason='it died', answer=None)
  rows = rows_with(recorded, step, verdicts=[[failed, *others], *groups])['responses']
  assert rows['reason'] == ['it died'] + [None] * (Q * K - 1)
  assert rows['answer'][:2] == [None, others[0].answer]


@pytest.mark.parametrize(
  ('ratios', 'variance'),
  [([1, 1], 0), ([1, 3], 1), ([1, math.inf], math.inf), ([0, 2e38], 1e76)],
)
def test_the_variance_of_ratios_counted_by_hand(recorded, ratios, variance):
  """An infinite ratio, or a square that overflows float32, causes no NaN and no warning."""
  step = recorded.steps[1]
  log_T = np.log(np.maximum(ratios, 1e-30)).clip(max=800)
  now_T, past_T = np.minimum(log_T, 0).astype(np.float32), -np.maximum(log_T, 0).astype(np.float32)
  zero_T = np.zeros(2, np.float32)
  replays, scores = [None] * Q, [None] * Q
  replays[0] = Trajectory(tokens=np.array([5, 1], np.int32), logp=past_T, reward=1.0, step=0)
  scores[0] = ReplayScores(replays[0], now_T, zero_T, shaped=zero_T, log_ratio=zero_T)
  responses = [step.responses[0][: K - 1], *step.responses[1:]]
  verdicts = [step.verdicts[0][: K - 1], *step.verdicts[1:]]
  changed = dict(replays=replays, scores=scores, responses=responses, verdicts=verdicts)
  rows = rows_with(recorded, step, **changed)['responses']
  assert rows['ratio_variance'][K - 1] == pytest.approx(variance, rel=1e-3)
  assert rows['ratio_variance'].count(None) == Q * K - 1


# ---- Samples ----


@pytest.fixture(scope='module')
def experiences(recorded):
  """The experience of all steps with both fresh and replayed questions."""
  mixed = [s for s in recorded.steps.values() if any(s.replays) and not all(s.replays)]
  return list(map(experience_of, mixed))


@pytest.fixture(scope='module')
def sample(recorded):
  """A function (experience, count) -> sample rows."""
  tokenizer = recorded.experiment.tokenizer
  return lambda experience, count: step_rows.sample_rows(tokenizer, experience, count, tiny.SEED)


def test_samples_are_a_fresh_response_per_group_and_the_replayed_one(recorded, experiences, sample):
  experience = experiences[0]
  tokenizer = recorded.experiment.tokenizer
  rows = sample(experience, 100)
  assert rows == sample(experience, 100) and sample(experience, 3) == rows[:3]
  fresh = [row for row in rows if not row['replayed']]
  groups = {question.row: index for index, question in enumerate(experience.plan.questions)}
  assert {row['row'] for row in fresh} == set(groups) and len(fresh) == len(groups)
  for row in fresh:
    group = groups[row['row']]
    texts = [tokenizer.decode(r.tokens, special=True) for r in experience.responses[group]]
    place = texts.index(row['response'])
    response, verdict = experience.responses[group][place], experience.verdicts[group][place]
    assert (row['reward'], row['outcome']) == (verdict.reward, verdict.outcome)
    assert row['truncated'] == response.truncated
  replayed = {row['row']: row for row in rows if row['replayed']}
  for question, trajectory in zip(experience.plan.questions, experience.replays):
    row = replayed.pop(question.row, None)
    assert (row is None) == (trajectory is None)
    if trajectory:
      assert row['response'] == tokenizer.decode(trajectory.tokens, special=True)
      assert (row['outcome'], row['written_in_step']) == ('correct', trajectory.step)
      assert row['truncated'] == (trajectory.tokens[-1] not in tokenizer.eos_ids)
  assert not replayed


def test_a_replayed_response_that_was_wrong_is_sampled_as_wrong(experiences, sample):
  """With `replay.store='all'` the buffer holds such responses."""
  experience = next(one for one in experiences if any(one.replays))
  replays = [one and dataclasses.replace(one, correct=False) for one in experience.replays]
  rows = sample(dataclasses.replace(experience, replays=replays), 100)
  marks = {(row['correct'], row['outcome']) for row in rows if row['replayed']}
  assert marks == {(False, 'wrong')}


@pytest.mark.parametrize('is_cut', [False, True])
def test_an_episode_without_an_end_token_may_be_complete_and_one_with_it_truncated(
  recorded, experiences, sample, is_cut
):
  end = recorded.experiment.tokenizer.eos_ids[0]

  def episode(written):
    tokens = np.append(written.tokens[:-1], np.int32(end if is_cut else end + 1))
    turns = (Turn(len(tokens), 0, 0.0),)
    return dataclasses.replace(written, tokens=tokens, turns=turns, truncated=is_cut)

  number = experiences[0].plan.step
  responses = [list(map(episode, group)) for group in experiences[0].responses]
  replays = [one and episode(one) for one in experiences[0].replays]
  changed = dict(responses=responses, replays=replays)
  rows = rows_with(recorded, recorded.steps[number], **changed)['responses']
  assert set(zip(rows['is_replay'], rows['truncated'])) == {(False, is_cut), (True, is_cut)}
  samples = sample(dataclasses.replace(experiences[0], **changed), 100)
  found = {(row['replayed'], row['truncated']) for row in samples}
  assert found == {(False, is_cut), (True, is_cut)}


def test_special_tokens_are_shown(recorded, experiences, sample):
  """In a prompt, they come from the chat template."""
  end = recorded.experiment.tokenizer.eos_ids[0]
  rows = []
  for experience in experiences:
    prompts = [[end, *prompt] for prompt in experience.plan.prompts]
    templated = dataclasses.replace(experience.plan, prompts=prompts)
    rows += sample(dataclasses.replace(experience, plan=templated), 100)
  assert all(row['question'].startswith('</s>') for row in rows)
  ends = {row['response'].endswith('</s>'): row['truncated'] for row in rows}
  assert ends == {True: False, False: True}


def test_neither_the_group_nor_the_response_is_always_the_first(recorded, experiences, sample):
  tokenizer = recorded.experiment.tokenizer
  groups, responses = set(), set()
  for experience in experiences:
    (row,) = sample(experience, 1)
    group = [question.row for question in experience.plan.questions].index(row['row'])
    texts = [tokenizer.decode(r.tokens, special=True) for r in experience.responses[group]]
    groups.add(group)
    responses.add(texts.index(row['response']))
  assert len(groups) > 3 and len(responses) > 2


# ---- Metrics of a step, by hand ----

ROLLOUTS = 3
CONFIG = replay.ReplayConfig()


def question(row):
  return Question(row=row, messages=(), answer='', kind='math', solution='', source='s')


def response(length, truncated=False):
  tokens_T, values_T = np.zeros(length, np.int32), np.zeros(length, np.float32)
  return Response(tokens=tokens_T, logp=values_T, entropy=values_T, truncated=truncated)


def trajectory(step):
  values_T = np.zeros(2, np.float32)
  return Trajectory(tokens=np.zeros(2, np.int32), logp=values_T, reward=1.0, step=step)


def entry(correctness, *trajectories):
  return replay.Entry(correctness=correctness, prompt_length=3, trajectories=trajectories)


def stored(routes=None):
  nothing = np.zeros(0, np.float32)
  return Trajectory(tokens=nothing, logp=nothing, reward=1.0, step=1, routes=routes)


RIGHT, WRONG, NO_ANSWER, TIMED_OUT, CRASHED = (
  Verdict(reward=float(outcome == 'correct'), outcome=outcome, reason='')
  for outcome in step_rows.OUTCOMES
)
# Step 10 has three groups: one with one success in three, one that replays a trajectory of step 4
# and solves the rest, and one that solves nothing.
PLAN = Plan(
  step=10,
  cursor=Cursor(2),
  replay_started=True,
  questions=tuple(map(question, range(3))),
  prompts=(np.zeros(1, np.int32),) * 3,
  candidates=((), (trajectory(4),), ()),
  is_drawn=(False, True, False),
)
RESPONSES = [
  [response(1), response(2), response(3)],
  [response(4), response(6, truncated=True)],
  [response(2), response(2), response(4, truncated=True)],
]
REPLAYS = [None, trajectory(4), None]
VERDICTS = [[RIGHT, WRONG, WRONG], [RIGHT, RIGHT], [WRONG] * 3]


def rollout_metrics(
  plan=PLAN, responses=RESPONSES, replays=REPLAYS, verdicts=VERDICTS, advantages=(0.0,)
):
  batch = types.SimpleNamespace(advantage_B=np.array(advantages * len(verdicts)))
  unread = dict(partial_groups=(), scores=(), sampling={}, mismatch={})
  return step_rows.rollout_metrics(
    Experience(plan, responses, verdicts, replays=replays, batch=batch, **unread)
  )


def test_the_metrics_of_a_step():
  assert rollout_metrics() == {
    'reward': 3 / 8,
    'reward_std': pytest.approx((3 * 5) ** 0.5 / 8),  # sqrt(p (1 - p))
    'reward_std_within': pytest.approx(2**0.5 / 9),  # one success in three, and two equal groups
    'pass_rate/all': 3 / 8,
    'pass_rate/fresh': 1 / 6,
    'pass_rate/replay': 1.0,
    'groups/zero_advantage': pytest.approx(2 / 3),
    'length/mean': 3.0,
    'length/max': 6,
    'length/total': 24,
    'length/truncated': 2 / 8,
    'epoch': 2,
    'replay/questions': 1,
    'replay/rows': 1,
    'replay/age_mean': 6.0,
    'replay/age_max': 6,
    'grading/correct': 3 / 8,
    'grading/wrong': 5 / 8,
    'grading/no_answer': 0,
    'grading/timed_out': 0,
    'grading/crashed': 0,
  }


def test_the_replayed_reward_counts_in_the_variance_of_its_group():
  failed = [VERDICTS[0], [WRONG, WRONG], VERDICTS[2]]  # with the replayed success: 0, 0, 1
  assert rollout_metrics(verdicts=failed)['groups/zero_advantage'] == pytest.approx(1 / 3)
  assert rollout_metrics(advantages=(0.1,))['groups/zero_advantage'] == 0  # by a question's history


def test_rewards_that_are_equal_in_float32_count_as_equal():
  """Advantages are computed in float32."""
  third = [WRONG._replace(reward=0.3), WRONG._replace(reward=0.1 + 0.2), WRONG._replace(reward=0.3)]
  assert third[0].reward != third[1].reward
  metrics = rollout_metrics(verdicts=[VERDICTS[0], [RIGHT, WRONG], third])
  assert metrics['groups/zero_advantage'] == pytest.approx(1 / 3)


def test_without_replay_there_is_no_replay_pass_rate_and_no_age():
  first = dict(questions=PLAN.questions[:1], prompts=PLAN.prompts[:1], candidates=((),))
  plan = dataclasses.replace(PLAN, **first)
  names = set(rollout_metrics(plan, RESPONSES[:1], [None], VERDICTS[:1]))
  assert not names & {'pass_rate/replay', 'replay/age_mean', 'replay/age_max'}
  assert 'pass_rate/fresh' in names


def test_all_rewards_are_averaged_but_only_correctness_sets_the_pass_rate():
  odd = [[RIGHT._replace(reward=-2.0), WRONG._replace(reward=5.0), WRONG], *VERDICTS[1:]]
  metrics = rollout_metrics(verdicts=odd)
  assert metrics['reward'] == 5 / 8 and metrics['pass_rate/all'] == 3 / 8


def test_the_shares_of_the_grading_outcomes():
  last = [CRASHED, TIMED_OUT, TIMED_OUT]
  metrics = rollout_metrics(verdicts=[[RIGHT, NO_ANSWER, TIMED_OUT], [RIGHT, WRONG], last])
  assert {name: value * 8 for name, value in metrics.items() if name.startswith('grading/')} == {
    'grading/correct': 2,
    'grading/wrong': 1,
    'grading/no_answer': 1,
    'grading/timed_out': 3,
    'grading/crashed': 1,
  }


def test_the_metrics_of_the_buffer():
  one, other = stored(), stored(np.zeros((5, 2, 3), np.uint16))
  of_questions = {1: entry(0.0, one), 2: entry(2 / 3, one, other), 5: entry(2 / 3, other)}
  buffer = replay.Buffer(entries=of_questions, retired_epoch={7: 0, 8: 1}, started=True)
  bucketed = replay.Bucketed(buffer, replay.buckets(CONFIG, buffer, ROLLOUTS))
  assert step_rows.buffer_metrics(bucketed, ROLLOUTS) == {
    'buffer/questions': 3,
    'buffer/retired': 2,
    'buffer/trajectories': 4,
    'buffer/started': True,
    'buffer/route_bytes': 2 * 5 * 2 * 3 * 2,
    'buffer/bucket_0': 1,
    'buffer/bucket_1': 0,
    'buffer/bucket_2': 2,
  }
  empty = step_rows.buffer_metrics(replay.Bucketed(replay.Buffer(), {}), ROLLOUTS)
  assert set(empty.values()) == {0}
