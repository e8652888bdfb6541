"""The comparison of runs on the page: their names, and the steps at which they are compared."""

import json

import pytest

from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.page import comparison, evaluations
from exgrpo_jax.reporting.runs import Group, Recorded

SCORE = 'eval/chains/pass@1'


def recorded(workdir, scores, seed=0, **settings):
  """A run with these scores by step, and nothing else."""
  config = {'seed': seed, 'replay.ratio': 0.5, 'num_steps': 60} | settings
  metrics = [{'step': step, SCORE: score} for step, score in scores.items()]
  tables = [step_records.SCHEMAS[name].empty_table() for name in ('responses', 'questions')]
  return Recorded(workdir, config, metrics, *tables)


def group(*runs, label='label'):
  return Group(label, runs)


def benchmark(rights_by_step):
  """A run's evaluations for the page: the correct questions at each step."""
  evaluations = [
    {'step': step, 'made': '', 'correct': list(rights), 'samples': 1, 'responses': {}}
    for step, rights in rights_by_step.items()
  ]
  rows = list(range(len(next(iter(rights_by_step.values()), ()))))
  digests = list(map(str, rows))
  shown = {'rows': rows, 'digests': digests, 'evaluations': evaluations}
  return [{'name': 'chains', 'source': 'chains', **shown}]


def described(*runs, rights):
  """The comparison of single runs; `rights` of each are by step."""
  benchmarks = {run.workdir: benchmark(own) for run, own in zip(runs, rights)}
  return comparison.describe([group(run) for run in runs], benchmarks)


# ---- The step at which runs are compared ----


def test_runs_of_different_lengths_are_compared_at_their_last_common_evaluation():
  long = recorded('/runs/long', {0: 0.5, 12: 0.25, 24: 0.25, 60: 1.0})
  short = recorded('/runs/short', {0: 0.5, 24: 0.75}, **{'replay.ratio': 0.0})
  none, one, three, four = (0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 1, 0), (1, 1, 1, 1)
  rights = {0: none, 12: one, 24: one, 60: four}, {0: none, 24: three}
  found = described(long, short, rights=rights)
  (row,) = found['differences']
  assert (row['from'], row['to'], row['step']) == ('long', 'short', 24)
  assert row['estimate'][0] == 0.5 and row['paired'] == '4 questions'
  first, second = found['scores']
  assert (first['step'], first['common'][0], first['last'][0]) == (24, 0.25, 1)
  assert (second['step'], second['common'][0], second['last'][0]) == (24, 0.75, 0.75)
  assert (first['last_steps'], second['last_steps']) == ([60], [24])


def test_a_run_without_a_benchmark_is_not_listed_as_not_compared():
  rights = [{20: (1, 0, 0, 0)}, {}]
  runs = [recorded(f'/runs/{name}', {20: 0.25} if name == 'a' else {}) for name in 'ab']
  found = described(*runs, rights=rights)
  assert (found['differences'], found['not_compared'], len(found['scores'])) == ([], [], 1)


@pytest.mark.parametrize(
  ('steps', 'said'),
  [([0, 15, 30], 'b after 15, 30'), ([0], 'b never'), (range(7, 100, 7), 'b after 7, 14, …, 98')],
)
def test_runs_without_a_common_evaluation_after_step_0_are_not_compared(steps, said):
  rights = [dict.fromkeys(own, (1, 0, 0, 0)) for own in ([0, 20, 40], steps)]
  runs = [
    recorded(f'/runs/{name}', dict.fromkeys(own, 0.25), **{'replay.ratio': ratio})
    for name, own, ratio in zip('ab', rights, (0.5, 0.0))
  ]
  found = described(*runs, rights=rights)
  assert found['differences'] == []
  assert found['not_compared'] == [
    'chains: a and b have no evaluation in common after step 0, so they are not compared '
    f'(evaluated: a after 20, 40; {said}).'
  ]
  assert [row['common'] for row in found['scores']] == [None, None]


def test_seeds_are_paired_at_their_last_common_step():
  groups = [
    group(
      *(
        recorded(f'/runs/{ratio}{seed}', scores, seed, **{'replay.ratio': ratio})
        for seed, scores in enumerate(of_seeds)
      ),
      label=f'replay.ratio={ratio}',
    )
    for ratio, of_seeds in (
      (0.5, ({0: 0.1, 20: 0.5, 40: 0.9}, {0: 0.1, 20: 0.25, 40: 0.9})),
      (0.0, ({0: 0.1, 20: 0.75, 40: 0.9}, {0: 0.1, 20: 0.75})),
    )
  ]
  (row,) = comparison.describe(groups, {})['differences']
  assert (row['step'], row['paired'], row['estimate'][0]) == (20, '2 seeds', 0.375)
  assert (row['from'], row['to']) == ('replay.ratio=0.5', 'replay.ratio=0.0')


# ---- Names of runs ----


def test_runs_are_named_after_their_folders():
  assert comparison.run_names(['/runs/chains', '/runs/grpo']) == ['chains', 'grpo']
  same = ['first/chains', 'second/chains']
  assert comparison.run_names(['/first/chains', '/second/chains']) == same
  assert comparison.run_names(['/runs/chains']) == ['chains']


# ---- Curves ----


def test_a_run_keeps_its_color_and_grpo_has_no_replay_curves():
  plain, replaying = (
    recorded(f'/runs/{ratio}', {}, **{'replay.ratio': ratio}) for ratio in (0.0, 0.5)
  )
  for run in (plain, replaying):
    run.metrics.extend({'step': step, 'reward': 0.5, 'buffer/questions': 0} for step in (1, 2))
  found = described(plain, replaying, rights=[{}, {}])
  panels = {panel['title']: panel for panel in found['panels']}
  assert [line['place'] for line in panels['Reward']['lines']] == [0, 1]
  (line,) = panels['Questions in the buffer']['lines']
  assert (line['label'], line['place']) == ('0.5', 1)


def write_evaluation(workdir, name, asked):
  (workdir / 'evaluation').mkdir(exist_ok=True)
  lines = [
    json.dumps(
      dict(row=row, source='x', question=question, answer=answer, correct=[True])
      | dict(responses=['a'], outcomes=['correct'], lengths=[1])
    )
    for row, (question, answer) in enumerate(asked)
  ]
  (workdir / 'evaluation' / name).write_text('\n'.join(lines))


@pytest.mark.parametrize(
  ('asked', 'questions'),
  [
    ([('Guess the number.', '1'), ('Guess the number.', '2')], 2),  # as in an environment
    ([(f'{kind} {"x" * 400}', '1') for kind in ('Add', 'Subtract')], 2),  # the same ending
    ([('Add 1 and 2.', '3'), ('Add 1 and 2.', '3')], 1),
  ],
)
def test_rows_belong_together_if_question_and_answer_are_the_same(tmp_path, asked, questions):
  write_evaluation(tmp_path, 'step_000000_x.jsonl', asked)
  shares = evaluations.by_step(evaluations.describe(tmp_path, 10_000), 'x')
  assert len({key for _, key in shares[0]}) == questions


def test_results_for_different_questions_are_shown_separately(tmp_path):
  """A resumed run may have other data, and so may a manual evaluation."""
  old, new, manual = ([(f'{kind} question', '1')] for kind in ('old', 'new', 'manual'))
  made = 'x_temperature_0.6_samples_1_noon.jsonl'
  for name, asked in (('10_x.jsonl', old), ('20_x.jsonl', new), ('30_x.jsonl', new)):
    write_evaluation(tmp_path, f'step_0000{name}', asked)
  write_evaluation(tmp_path, f'step_000030_{made}', manual)
  benchmarks = evaluations.describe(tmp_path, 10_000)
  assert [(one['name'], one['texts'], len(one['evaluations'])) for one in benchmarks] == [
    ('x', ['old question'], 1),
    ('x (from step 20)', ['new question'], 2),
    ('x (temperature 0.6, noon)', ['manual question'], 1),
  ]
  assert list(evaluations.by_step(benchmarks, 'x')) == [10, 20, 30]
