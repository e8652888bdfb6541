"""Scores of a study's runs and the metrics that explain them, computed by hand."""

import csv
import json
import re

import jax.numpy as jnp
import pyarrow as pa
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.learner import checkpoint, storage
from exgrpo_jax.learner.optimizer import TrainState
from exgrpo_jax.reporting import metrics, step_records
from exgrpo_jax.runtime import environment
from studies import runs
from tests.helpers import tiny

STEP = {'replay/rows': 0, 'length/total': 10, 'time/step': 1.0}


def write_metrics(workdir, steps):
  """Write metrics for steps 0, 1, …: the given ones, and those that every training step has."""
  lines = [{'step': step, **(STEP if step else {}), **given} for step, given in enumerate(steps)]
  (workdir / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))


def write_questions(workdir, first_step, questions):
  """Write a file of records with the questions of consecutive steps, starting at `first_step`."""
  rows = [(first_step + i, row) for i, step in enumerate(questions) for row in step]
  filled = {'group': 0, 'is_replay': False, 'correctness': 0.5}
  schema = step_records.QUESTIONS
  table = pa.Table.from_pylist(
    [{**dict.fromkeys(schema.names), **filled, 'step': s, 'question': q} for s, q in rows], schema
  )
  (workdir / step_records.FOLDER).mkdir(exist_ok=True)
  step_records.write_file(step_records.path_of(workdir, 'questions', first_step), table)


def scored(value):
  return {'eval/sums/pass@1': value}


def test_what_explains_a_score_is_the_mean_since_the_evaluation_before(tmp_path):
  """Only steps that have the metric count. Step 4's mean excludes step 1; step 2 has no replay."""
  write_metrics(
    tmp_path,
    [
      scored(0.1),
      scored(0.2) | {'replay/times_mean': 9.0},
      {'alignment/fresh': 0.5, 'environment/turns_mean': 4.0},
      {'replay/rows': 2, 'replay/times_mean': 1.0, 'replay/effective_sample_size': 0.4},
      scored(0.3)
      | {'replay/rows': 4, 'replay/times_mean': 3.0, 'replay/effective_sample_size': 0.8},
    ],
  )
  before, first, last = runs.evaluations(str(tmp_path), 8)
  assert (before.step, before.explaining) == (0, {})
  assert first.explaining == {'replay/rows': 0.0, 'replay/times_mean': 9.0}
  assert last.explaining == pytest.approx(
    {
      'replay/rows': 2.0,  # mean of 0, 2 and 4
      'replay/times_mean': 2.0,
      'replay/effective_sample_size': 0.6,
      'alignment/fresh': 0.5,
      'environment/turns_mean': 4.0,
    }
  )


def test_fresh_questions_include_those_of_dropped_groups(tmp_path):
  """Each step has 8 questions and replays 2. Step 2 draws 11 fresh ones to fill its 6 groups."""
  replays = {'replay/questions': 2}
  write_metrics(tmp_path, [{}, replays, replays | {'groups/drawn': 11} | scored(0.5)])
  (only,) = runs.evaluations(str(tmp_path), 8)
  assert only.fresh_questions == 6 + 11


def test_scores_of_later_evaluations_are_added_to_the_last(tmp_path):
  """Except scores of another step, and scores that the run has measured itself."""
  write_metrics(tmp_path, [scored(0.1), scored(0.2)])
  (tmp_path / 'evaluation').mkdir()
  later = [
    {'step': 0, 'scores': {'eval/sums/avg@4': 0.3}},
    {'step': 1, 'scores': {'eval/sums/avg@4': 0.4, 'eval/sums/avg@8': 0.5}},
    {'step': 1, 'scores': {'eval/sums/pass@1': 0.6, 'eval/sums/avg@4': 0.7}},
  ]
  lines = ''.join(json.dumps(line) + '\n' for line in later)
  (tmp_path / 'evaluation' / 'evaluations.jsonl').write_text(lines)
  before, last = runs.evaluations(str(tmp_path), 8)
  assert before.scores == scored(0.1)
  assert last.scores == {**scored(0.2), 'eval/sums/avg@4': 0.7, 'eval/sums/avg@8': 0.5}


@pytest.mark.parametrize(
  ('second', 'first_step', 'counted'),
  [
    pytest.param([[5, 7]], 3, [0, 2, 3, 3], id='each_question_once'),
    pytest.param([[7, 8]], 4, [0, 2, 3, None], id='not_past_missing_records'),
  ],
)
def test_different_questions_are_counted(second, first_step, counted, tmp_path):
  write_metrics(tmp_path, [scored(0), scored(0), scored(0), scored(0)])
  write_questions(tmp_path, 1, [[5, 6], [6, 7]])
  write_questions(tmp_path, first_step, second)
  found = runs.evaluations(str(tmp_path), 2)
  assert [one.distinct_questions for one in found] == counted
  assert [one.fresh_questions for one in found] == [0, 2, 4, 6]


def test_a_run_is_known_by_the_parameters_that_it_began_with(tmp_path):
  """The optimizer state does not matter. A resumed run keeps the digest of its first start."""

  def digest(params, moments=0.0):
    state = TrainState({'w': jnp.array(params)}, (jnp.array(moments),))
    return storage.digest(state, checkpoint.NO_BASE)

  assert runs.warm_start(str(tmp_path)) == ''
  environment.record_start(str(tmp_path), 0, {environment.PARAMETERS: digest([1.0, 2.0])})
  environment.record_start(str(tmp_path), 3, {})
  assert runs.warm_start(str(tmp_path)) == digest([1.0, 2.0], moments=3.0)
  assert runs.warm_start(str(tmp_path)) != digest([1.0, 2.5])


def test_what_a_run_does_not_have_is_empty_in_the_table(tmp_path):
  """One of two runs has no replay, alignment, records or digest. Both are read as written."""

  def run(seed, warm_start, evaluation):
    return runs.StudyRun('sums', 'grpo', seed, 'python', (), warm_start, True, (evaluation,))

  told = {'replay/times_mean': 1.5, 'alignment/fresh': 0.25}
  written = [
    run(0, 'abc', runs.Evaluation(2, 16, 20, 2.0, 11, told, scored(0.5))),
    run(1, '', runs.Evaluation(2, 16, 20, 2.0, None, {}, scored(0.25))),
  ]
  runs.write_csv(tmp_path / 'results.csv', written)
  names = (
    *('distinct_questions', 'alignment/fresh', 'replay/effective_sample_size', 'replay/rows'),
    *('replay/times_mean', 'warm_start'),
  )
  rows = list(csv.DictReader((tmp_path / 'results.csv').open()))
  assert [rows[0][name] for name in names] == ['11', '0.25', '', '', '1.5', 'abc']
  assert [rows[1][name] for name in names] == [''] * 6
  assert [row['eval/sums/pass@1'] for row in rows] == ['0.5', '0.25']
  assert runs.read_csv(tmp_path / 'results.csv') == written


def test_a_real_run_is_read_as_its_records_have_it(recorded):
  found = runs.evaluations(str(recorded.workdir), tiny.QUESTIONS)
  written = metrics.read(recorded.workdir)
  trained = [record for record in written if record['step'] > 0]
  assert [one.step for one in found] == [
    record['step'] for record in written if any(name.startswith('eval/') for name in record)
  ]
  last = found[-1]
  assert last.step == tiny.NUM_STEPS == len(trained)
  questions = step_records.read(recorded.workdir).questions.to_pylist()
  assert last.fresh_questions == sum(not question['is_replay'] for question in questions)
  assert 0 < last.fresh_questions < len(questions)
  assert last.distinct_questions == len({question['question'] for question in questions})
  assert last.distinct_questions < last.fresh_questions, 'the second pass reads no new ones'
  assert {'replay/times_mean', 'replay/effective_sample_size'} <= {*found[-1].explaining}
  assert re.fullmatch('[0-9a-f]{12}', runs.warm_start(str(recorded.workdir)))
  assert last.generated_tokens == sum(record['length/total'] for record in trained)
  assert 0 < last.training_seconds < sum(record['time/step'] for record in trained)


def test_a_measure_that_no_run_has_is_refused_with_those_there_are():
  evaluation = runs.Evaluation(2, 16, 20, 2.0, None, {}, scored(0.5))
  run = runs.StudyRun('sums', 'grpo', 0, 'python', (), '', True, (evaluation,))
  with pytest.raises(InputError, match=r"'eval/sums/avg@4' was not measured .* eval/sums/pass@1"):
    runs.finished([run], 'sums', 'grpo', 'eval/sums/avg@4')
