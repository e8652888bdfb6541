"""The records of the recorded run (conftest.py), held to what its stages read and returned."""

import dataclasses
import functools

import numpy as np
import pytest

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Experience
from exgrpo_jax.reporting import metrics, step_metrics, step_records, step_rows
from exgrpo_jax.reporting.step_metrics import OUTCOMES
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


def split(responses):
  """(fresh, replayed) rows."""
  return (
    [row for row in responses if not row['is_replay']],
    [row for row in responses if row['is_replay']],
  )


def mean(rows, name):
  return np.mean([row[name] for row in rows])


# ---- Each row is what happened ----


def test_every_response_of_every_step_has_a_row(recorded, records):
  for number, step in recorded.steps.items():
    responses, questions = records[number]
    assert [(row['group'], row['sample']) for row in responses] == [
      (group, sample) for group in range(Q) for sample in range(K)
    ]
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
    pairs = [
      pair for group in zip(step.responses, step.verdicts) for pair in zip(*group, strict=True)
    ]
    for row, (response, verdict) in zip(fresh, pairs, strict=True):
      text = decode(response.tokens)
      has_code = any(line.strip(' \t').startswith('```') for line in text.split('\n'))
      assert (
        row
        | {
          'reward': verdict.reward,
          'outcome': verdict.outcome,
          'answer': text[:64],  # the replaced verifier takes all for the answer
          'length': len(response.tokens),
          'truncated': response.truncated,
          'entropy': pytest.approx(response.entropy.mean(dtype=np.float64), rel=1e-5),
          'probability': pytest.approx(np.exp(response.logp.astype(np.float64)).mean(), rel=1e-5),
          'has_code_block': has_code,
          'valid_steps': None,  # no task that could check them
          'ratio_mean': None,
          'times_replayed': None,
        }
        == row
      )


def test_a_replayed_row_has_the_values_of_the_policy_as_the_step_began(recorded, records):
  """Computed in float64 from all logits."""
  model = recorded.experiment.model
  seen = 0
  for number, step in list(recorded.steps.items())[::3]:
    _, replayed = split(records[number][0])
    for row in replayed:
      prompt, stored = step.plan.prompts[row['group']], step.plan.candidates[row['group']]
      chosen = step.replays[row['group']]

      @functools.cache
      def values_of(n, prompt=prompt, stored=stored, params=step.params):
        tokens = stored[n].tokens
        logp_TV = tiny.full_log_probabilities(params, model, np.concatenate([prompt, tokens]))
        logp_TV = logp_TV[len(prompt) - 1 :]
        logp_T = logp_TV[np.arange(len(tokens)), tokens]
        return logp_T, -(np.exp(logp_TV) * logp_TV).sum(-1)

      place = [t is chosen for t in stored].index(True)
      logp_T, entropy_T = values_of(place)
      w = np.exp(logp_T - chosen.logp)
      f = w / (w + 0.1)
      close = functools.partial(pytest.approx, rel=1e-4, abs=1e-7)
      assert (
        row
        | {
          'reward': chosen.reward,
          'outcome': 'correct',
          'answer': None,
          'length': len(chosen.tokens),
          'truncated': chosen.tokens[-1] not in recorded.experiment.tokenizer.eos_ids,
          'entropy': close(entropy_T.mean()),
          'probability': close(np.exp(logp_T).mean()),
          'candidate_entropies': close([values_of(n)[1].mean() for n in range(len(stored))]),
          'ratio_mean': close(w.mean()),
          'ratio_max': close(w.max()),
          'shaped_mean': close(f.mean()),
          'shaped_variance': close(f.var(), abs=1e-6),
        }
        == row
      )
      assert row['entropy'] == min(row['candidate_entropies'])
      seen += len(stored) > 1 and w.max() > 1.1
  assert seen > 2


def test_how_often_a_trajectory_was_replayed_is_counted_over_the_whole_run(recorded, records):
  count = {}
  for number, step in recorded.steps.items():
    for row in split(records[number][0])[1]:
      chosen = step.replays[row['group']]
      key = (row['question'], chosen.step, chosen.tokens.tobytes())
      count[key] = count.get(key, 0) + 1
      assert row['times_replayed'] == count[key]
  assert max(count.values()) > 2


def bucketed(config, step):
  """The buffers before and after the step."""
  return [
    replay.Bucketed(buffer, replay.buckets(config, buffer, K))
    for buffer in (step.buffer, step.after)
  ]


def test_a_question_row_is_its_visit(recorded, records):
  retired = {}
  for number, step in recorded.steps.items():
    before, after = (
      either.bucket_of for either in bucketed(recorded.experiment.config.replay, step)
    )
    for row, replayed, verdicts in zip(
      records[number][1], step.replays, step.verdicts, strict=True
    ):
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


# ---- The rows add up to the metrics ----


def test_fresh_rows_add_up_to_the_metrics_exactly(records, measured):
  for number, (responses, questions) in records.items():
    fresh, replayed = split(responses)
    record = measured[number]
    expected = {
      'reward': mean(fresh, 'reward'),
      'reward_std': np.std([row['reward'] for row in fresh]),
      'pass_rate/all': np.mean([row['outcome'] == 'correct' for row in fresh]),
      'length/mean': mean(fresh, 'length'),
      'length/max': max(row['length'] for row in fresh),
      'length/total': sum(row['length'] for row in fresh),
      'length/truncated': mean(fresh, 'truncated'),
      'probability/fresh': mean(fresh, 'probability'),
      'code_blocks/fresh': mean(fresh, 'has_code_block'),
      'groups/solved_by_all': np.mean([row['correctness'] == 1 for row in questions]),
      'groups/solved_by_none': np.mean([row['correctness'] == 0 for row in questions]),
      'replay/rows': len(replayed),
    } | {
      f'grading/{outcome.replace(" ", "_")}': np.mean([row['outcome'] == outcome for row in fresh])
      for outcome in OUTCOMES
    }
    for name, is_correct in (('entropy/correct', True), ('entropy/incorrect', False)):
      of_kind = [row for row in fresh if (row['outcome'] == 'correct') == is_correct]
      if of_kind:
        expected[name] = mean(of_kind, 'entropy')
    for name, replay_question in (('pass_rate/fresh', False), ('pass_rate/replay', True)):
      groups = {row['group'] for row in questions if row['is_replay'] == replay_question}
      if groups:
        expected[name] = np.mean(
          [row['outcome'] == 'correct' for row in fresh if row['group'] in groups]
        )
    assert {name: record[name] for name in expected} == expected


def test_replayed_rows_add_up_to_the_metrics_exactly(records, measured):
  with_replay = 0
  for number, (responses, questions) in records.items():
    _, replayed = split(responses)
    names = {'replay/times_mean', 'replay/bucket_1', 'probability/replayed', 'length/replayed'}
    if not replayed:
      assert not names & set(measured[number])
      continue
    with_replay += 1
    buckets = [row['bucket_before'] for row in questions if row['is_replay']]
    expected = {
      'replay/age_mean': np.mean([number - row['policy_step'] for row in replayed]),
      'replay/age_max': max(number - row['policy_step'] for row in replayed),
      'replay/times_mean': mean(replayed, 'times_replayed'),
      'replay/times_max': max(row['times_replayed'] for row in replayed),
      'length/replayed': mean(replayed, 'length'),
      'probability/replayed': mean(replayed, 'probability'),
      'code_blocks/replayed': mean(replayed, 'has_code_block'),
      **{f'replay/bucket_{k}': buckets.count(k) for k in range(K)},
    }
    assert names < set(expected)
    assert {name: measured[number][name] for name in expected} == expected
  assert with_replay > 10


def test_the_metrics_of_the_loss_are_near_those_of_rows(records, measured):
  """Those of the second minibatch are under the policy after the first update."""
  for number, (responses, _) in records.items():
    for chosen, column, name in (
      (responses, 'entropy', 'entropy'),
      (split(responses)[1], 'shaped_mean', 'replay/shaped_mean'),
    ):
      if chosen:
        lengths = [row['length'] for row in chosen]
        expected = np.average([row[column] for row in chosen], weights=lengths)
        assert measured[number][name] == pytest.approx(expected, rel=0.1), (number, name)


# ---- Counted by hand ----


def test_shares_of_code_blocks_and_of_valid_steps_counted_by_hand(recorded):
  """3 fresh responses have code, 2 of 3 right ones valid steps, and 1 replayed one has code."""
  tokenizer = recorded.experiment.tokenizer
  step = next(step for step in recorded.steps.values() if any(step.replays))
  group = next(index for index, replayed in enumerate(step.replays) if replayed)
  facts = iter(
    [
      # (outcome, has_code_block, valid_steps)
      ('correct', True, True),
      ('correct', False, True),
      ('correct', True, False),
      ('wrong', True, True),  # right steps, but another question's: no right response
    ]
  )
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
  replays[group] = dataclasses.replace(
    replays[group], tokens=tokens, logp=np.zeros(len(tokens), np.float32)
  )
  scores[group] = dataclasses.replace(scores[group], logp=np.zeros(len(tokens), np.float32))
  experience = Experience(
    plan=step.plan,
    replays=replays,
    scores=scores,
    responses=step.responses,
    verdicts=verdicts,
    batch=step.batch,
    parity={},
    alignment={},
  )
  config = recorded.experiment.config.replay
  rows = step_rows.rows(config, tokenizer, experience, *bucketed(config, step))
  values = step_metrics.record_metrics(rows, K)
  num_fresh, num_replayed = sum(map(len, step.responses)), sum(map(bool, replays))
  assert values['code_blocks/fresh'] == 3 / num_fresh
  assert values['code_blocks/replayed'] == 1 / num_replayed
  assert values['valid_steps/correct'] == pytest.approx(2 / 3)


def test_answers_that_no_file_can_hold_are_escaped(recorded):
  step = recorded.steps[1]
  experience = Experience(
    plan=step.plan,
    replays=step.replays,
    scores=step.scores,
    responses=step.responses,
    verdicts=[[v._replace(answer='\ud800') for v in judged] for judged in step.verdicts],
    batch=step.batch,
    parity={},
    alignment={},
  )
  config, tokenizer = recorded.experiment.config.replay, recorded.experiment.tokenizer
  rows = step_rows.rows(config, tokenizer, experience, *bucketed(config, step))
  assert set(rows['responses']['answer']) == {r'\ud800'}
