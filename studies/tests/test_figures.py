"""The figures of runs. Plain Python recomputes the numbers in their tables."""

import collections
import csv
import json
import math
import statistics
import types

import pytest

from exgrpo_jax.reporting import runs, step_records
from studies import training_figures
from studies.drawing import NothingToDrawError
from tests.helpers import forked, other_runs, tiny

NAMES = (
  'dynamics', 'buffer', 'reasoning_entropy', 'correctness_entropy', 'code_share', 'evaluations',
  'ablation',
)  # fmt: skip
EXGRPO, GRPO = 'replay.ratio=0.5', 'replay.ratio=0.0'
LAST = tiny.NUM_STEPS
QUESTIONS = step_records.QUESTIONS.empty_table()


def lines(path):
  return path.read_text().splitlines()


@pytest.fixture(scope='module')
def drawn(recorded, tmp_path_factory):
  """Draw two seeds of ExGRPO and one of GRPO. Return their folders, tables and output."""
  place = tmp_path_factory.mktemp('figures')
  folders = [
    other_runs.copied(recorded, place / name, seed=seed, ratio=ratio, shift=shift)
    for name, seed, ratio, shift in (
      ('a', 5, 0.5, 0.0),
      ('b', 6, 0.5, 0.25),
      ('c', 5, 0.0, 0.125),
    )
  ]
  (outcome,) = forked.run([['studies.__main__', 'figures', *folders, f'--out={place}/out/deep']])
  assert outcome.status == 0, outcome.err
  out = place / 'out' / 'deep'
  tables = {name: list(csv.DictReader(lines(out / f'{name}.csv'))) for name in NAMES}
  metrics = {
    folder.name: list(map(json.loads, lines(folder / 'metrics.jsonl'))) for folder in folders
  }
  responses = {folder.name: step_records.read(folder).responses.to_pylist() for folder in folders}
  return types.SimpleNamespace(
    out=out, tables=tables, metrics=metrics, responses=responses, said=outcome.out
  )


def test_every_figure_is_written_in_three_formats_with_its_numbers(drawn):
  starts = {'png': b'\x89PNG', 'svg': b'<?xml', 'pdf': b'%PDF'}
  for name in NAMES:
    for kind, start in starts.items():
      content = (drawn.out / f'{name}.{kind}').read_bytes()
      assert content.startswith(start) and len(content) > 5000, (name, kind)
    assert drawn.tables[name], name
  assert {path.suffix for path in drawn.out.iterdir()} == {'.png', '.svg', '.pdf', '.csv'}
  assert f'{EXGRPO}: ' in drawn.said and 'left out' not in drawn.said
  svg = (drawn.out / 'dynamics.svg').read_text()  # with one legend
  assert svg.count(f'{EXGRPO} (2 seeds: mean, min to max)') == svg.count(f'>{GRPO}<') == 1


def values(drawn, run, name):
  return {int(r['step']): r[name] for r in drawn.metrics[run] if name in r}


def test_dynamics_are_means_and_extremes_over_seeds(drawn):
  rows = [row for row in drawn.tables['dynamics'] if row['setting'] == EXGRPO]
  for name in ('reward', 'pass_rate/fresh', 'entropy', 'length/mean', 'policy/clip_fraction'):
    a, b = values(drawn, 'a', name), values(drawn, 'b', name)
    found = {int(row['step']): row for row in rows if row['metric'] == name}
    assert set(found) == set(a) and len(a) > 20, name
    for step, row in found.items():
      both = (a[step], b[step])
      expected = (sum(both) / 2, min(both), max(both))
      assert tuple(float(row[key]) for key in ('mean', 'min', 'max')) == pytest.approx(expected)
      assert row['seeds'] == '2'
  evaluated = [row for row in rows if row['metric'] == 'evaluation']
  assert [int(row['step']) for row in evaluated] == [0, LAST // 2, LAST]


def test_the_buffer_is_that_of_the_settings_that_have_one(drawn):
  rows = drawn.tables['buffer']
  assert {row['setting'] for row in rows} == {EXGRPO}
  for row, record in zip(rows, drawn.metrics['a'][1:], strict=True):
    for name in ('buffer/questions', 'buffer/retired', 'buffer/trajectories'):
      assert float(row[name]) == record[name]
    buckets = [float(row[f'buffer/bucket_{k}']) for k in range(tiny.ROLLOUTS)]
    assert sum(buckets) == record['buffer/questions']
    assert buckets == [record[f'buffer/bucket_{k}'] for k in range(tiny.ROLLOUTS)]


def of_setting(drawn, *runs):
  """Return (run, response) for all responses."""
  return [(run, row) for run in runs for row in drawn.responses[run]]


def kind_of(row):
  if row['outcome'] != 'correct':
    return 'wrong'
  return {True: 'right, valid steps', False: 'right, invalid steps'}.get(row['valid_steps'])


def successes_of(rows):
  """Return (run, step, group) -> correct responses, including the replayed one."""
  return collections.Counter(
    (run, row['step'], row['group']) for run, row in rows if row['outcome'] == 'correct'
  )


def test_entropies_are_means_over_fresh_responses_by_step_and_by_successes(drawn):
  rows = of_setting(drawn, 'a', 'b')
  successes, expected = successes_of(rows), collections.defaultdict(list)
  for run, row in rows:
    if not row['is_replay'] and (kind := kind_of(row)):
      expected[kind, 'step', row['step']].append(row['entropy'])
      count = successes[run, row['step'], row['group']]
      expected[kind, 'successes', count].append(row['entropy'])
  table = [row for row in drawn.tables['reasoning_entropy'] if row['setting'] == EXGRPO]
  found = {(row['responses'], row['over'], int(row['value'])): row for row in table}
  assert any(len(entropies) < 5 for (_, over, _), entropies in expected.items() if over != 'step')
  expected = {
    key: entropies for key, entropies in expected.items() if key[1] == 'step' or len(entropies) >= 5
  }
  assert set(found) == set(expected) and len({kind for kind, _, _ in expected}) == 3
  for key, entropies in expected.items():
    assert float(found[key]['entropy']) == pytest.approx(statistics.mean(entropies), rel=1e-5)
    assert int(found[key]['count']) == len(entropies)
    if len(entropies) == 5:
      half = 2.77645 * statistics.stdev(entropies) / math.sqrt(5)
      assert float(found[key]['half_interval_95']) == pytest.approx(half, rel=1e-4)


def test_cells_of_correctness_against_entropy_count_visits(drawn):
  rows = of_setting(drawn, 'c')
  successes, entropies = successes_of(rows), collections.defaultdict(list)
  for run, row in rows:
    if row['outcome'] == 'correct' and not row['is_replay']:
      entropies[run, row['step'], row['group']].append(row['entropy'])
  table = [row for row in drawn.tables['correctness_entropy'] if row['setting'] == GRPO]
  assert sum(int(row['questions']) for row in table) == len(entropies)
  by_successes = collections.Counter(successes[key] for key in entropies)
  for count, visits in by_successes.items():
    cells = [row for row in table if int(row['successes']) == count]
    assert sum(int(row['questions']) for row in cells) == visits
    means = [statistics.mean(entropies[key]) for key in entropies if successes[key] == count]
    low, high = float(cells[1]['entropy_from']), float(cells[1]['entropy_to'])
    assert int(cells[1]['questions']) == sum(low <= mean < high for mean in means)


def test_shares_of_code_blocks_are_those_of_each_steps_responses(drawn):
  rows = of_setting(drawn, 'a', 'b')
  kinds = {
    'fresh, all': lambda row: not row['is_replay'],
    'fresh, right': lambda row: not row['is_replay'] and row['outcome'] == 'correct',
    'fresh, wrong': lambda row: not row['is_replay'] and row['outcome'] != 'correct',
    'replayed': lambda row: row['is_replay'],
  }
  table = [row for row in drawn.tables['code_share'] if row['setting'] == EXGRPO]
  assert {row['responses'] for row in table} == set(kinds)
  for found in table:
    marked = [
      row['has_code_block']
      for _, row in rows
      if row['step'] == int(found['step']) and kinds[found['responses']](row)
    ]
    assert float(found['share']) == pytest.approx(sum(marked) / len(marked))
    assert int(found['count']) == len(marked)


def test_evaluations_and_ablation_are_means_over_seeds_with_their_intervals(drawn):
  (source,) = {row['benchmark'] for row in drawn.tables['evaluations']}
  name = f'eval/{source}/pass@1'
  a, b, c = (values(drawn, run, name)[LAST] for run in 'abc')
  last = {row['setting']: row for row in drawn.tables['evaluations'] if int(row['step']) == LAST}
  assert float(last[EXGRPO]['mean']) == pytest.approx((a + b) / 2)
  lows = [values(drawn, run, f'{name}_low')[LAST] for run in 'ab']
  assert float(last[EXGRPO]['low_95']) == pytest.approx(sum(lows) / 2)
  bars = {row['setting']: row for row in drawn.tables['ablation']}
  assert float(bars[EXGRPO]['mean']) == pytest.approx((a + b) / 2)
  half = 12.7062 * statistics.stdev([a, b]) / math.sqrt(2)
  assert float(bars[EXGRPO]['high_95']) == pytest.approx((a + b) / 2 + half)
  assert (bars[EXGRPO]['interval_over'], bars[EXGRPO]['step']) == ('seeds', str(LAST))
  assert float(bars[GRPO]['mean']) == pytest.approx(c)
  assert float(bars[GRPO]['low_95']) == pytest.approx(values(drawn, 'c', f'{name}_low')[LAST])
  assert bars[GRPO]['interval_over'] == 'questions'


def setting(label, *seeds):
  """Return a setting whose runs were evaluated: `seeds` are step -> score."""

  def run(score_at):
    ends = ('', '_low', '_high')
    metrics = [
      {'step': step, **{f'eval/sums/pass@1{end}': score for end in ends}}
      for step, score in score_at.items()
    ]
    return runs.Recorded('', {}, metrics, step_records.RESPONSES.empty_table(), QUESTIONS)

  return runs.Group(label, tuple(map(run, seeds)))


def test_the_ablation_is_of_the_last_step_after_0_that_all_runs_have():
  """At step 0, nothing has been trained, so all settings are the same."""
  groups = [setting('a', {0: 0.1, 5: 0.2, 10: 0.3}, {0: 0.1, 5: 0.4}), setting('b', {0: 0, 5: 0.5})]
  drawn = training_figures.ablation(groups)
  assert [(row['step'], row['mean']) for row in drawn.rows] == [(5, pytest.approx(0.3)), (5, 0.5)]
  with pytest.raises(NothingToDrawError, match='no step after 0 at which all runs were evaluated'):
    training_figures.ablation([setting('a', {0: 0.1, 5: 0.2}), setting('b', {0: 0.1})])


def test_seeds_that_are_all_equal_have_no_interval_in_the_ablation():
  groups = [setting('a', {5: 0.5}, {5: 0.5}), setting('b', {5: 0.25}, {5: 0.75})]
  equal, apart = training_figures.ablation(groups).rows
  assert [equal[name] for name in ('mean', 'low_95', 'high_95')] == [0.5, '', '']
  assert apart['high_95'] == pytest.approx(0.5 + 12.7062 * 0.25)
  assert (equal['interval_over'], apart['interval_over']) == ('', 'seeds')


# ---- What cannot be drawn ----


def test_a_figure_without_data_is_left_out_with_a_line_that_says_why(recorded, tmp_path):
  (outcome,) = forked.run(
    [['studies.__main__', 'figures', recorded.workdir, f'--out={tmp_path}/out']]
  )
  assert outcome.status == 0, outcome.err
  for line in (
    'ExGRPO, replay.ratio=0.5: ',
    'reasoning_entropy: left out because no run has a task with steps that can be checked',
    'ablation: left out because all runs have the same setting, so there is nothing to compare',
  ):
    assert line in outcome.out
  assert not (tmp_path / 'out' / 'ablation.png').exists()
  assert (tmp_path / 'out' / 'buffer.png').exists()


@pytest.mark.full
def test_what_cannot_be_is_refused_in_one_line(recorded, tmp_path):
  (tmp_path / 'file').touch()
  cases = {
    '--out is missing. Pass a folder for the figures': [recorded.workdir],
    'cannot create this folder': [recorded.workdir, f'--out={tmp_path}/file/x'],
  }
  outcomes = forked.run(['studies.__main__', 'figures', *words] for words in cases.values())
  for message, outcome in zip(cases, outcomes, strict=True):
    assert outcome.status == 2 and message in outcome.err, outcome.err
    assert outcome.err.count('\n') == 1


# ---- A study's results ----


def test_the_results_of_a_study_are_made_again_from_its_csv(tmp_path):
  """Check a difference and its corrected interval against docs/results.md."""
  (outcome,) = forked.run(
    [['studies.__main__', 'figures', 'replay_pays_smollm2', f'--out={tmp_path}']]
  )
  assert outcome.status == 0, outcome.err
  (row,) = [
    row for row in csv.DictReader(lines(tmp_path / 'differences.csv')) if row['arm'] == 'normalised'
  ]
  mean, low = float(row['mean']), float(row['low'])
  assert (round(mean, 3), round(mean - low, 3)) == (0.016, 0.063)
  assert 'Seeds: 3, none of them used before.' in (tmp_path / 'results.md').read_text()
  assert (tmp_path / 'curves.png').exists()
