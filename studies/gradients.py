"""Gradients of stored successes relative to their groups' fresh rows, measured and predicted.

python -m studies.gradients /tmp/replay_pays studies/measured/replay_pays_gradients.csv

This script reads a study's runs that replay stored successes and measure `alignment`. It writes a
row for each comparison and prints the table in README.md. theory.md derives the prediction for one
question, s(1 - p)/(p(K - 1)). Questions are weighted by their gradients, which are assumed to be
p(1 - p).
"""

import csv
import pathlib
import statistics
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from exgrpo_jax.algorithm import objective
from exgrpo_jax.reporting import metrics, step_records

SAMPLES = 8  # K
NEIGHBOURS = SAMPLES - 1  # fresh rows in a group with a stored row
PAPER, NORMALISED = (
  objective.replay_slope(objective.ObjectiveConfig(shaping=shaping))
  for shaping in ('policy_shaping', 'unit_slope')
)
# Arm -> the theory's prediction for a question, in units of (1 - p)/p.
PULLS = {
  'exgrpo': PAPER / NEIGHBOURS,
  'exgrpo_clipped': PAPER / NEIGHBOURS,
  'released': PAPER / NEIGHBOURS,
  'balanced': PAPER / (NEIGHBOURS - 1 + PAPER),
  'normalised': NORMALISED / NEIGHBOURS,
  'normalised_hardest': NORMALISED / NEIGHBOURS,
}
NUMBERS = ('stored', 'fresh', 'harder', 'even')
Row = dict[str, float]  # a value for each name in NUMBERS


def comparisons(workdir: pathlib.Path) -> Iterator[tuple[int, Row]]:
  """Yield (step, numbers) for each step of a run with stored and fresh projections.

  'stored' and 'fresh' are the projections. 'harder' and 'even' are unbiased estimates of the sums
  of (1 - p)^2 and p(1 - p) over the replayed questions. They are computed from the number of
  successes among each question's K - 1 fresh responses.
  """
  steps = {int(record['step']): record for record in metrics.read(workdir)}
  fresh = _fresh_successes(workdir)
  for step, record in steps.items():
    stored = record.get('alignment/replayed_projection')
    neighbours = record.get('alignment/fresh_in_mixed_groups_projection')
    if stored is not None and neighbours is not None:
      wrong = NEIGHBOURS - (right := np.array(fresh[step]))
      pairs = NEIGHBOURS * (NEIGHBOURS - 1)
      harder, even = np.sum(wrong * (wrong - 1)) / pairs, np.sum(wrong * right) / pairs
      yield (
        step,
        {'stored': stored, 'fresh': neighbours, 'harder': float(harder), 'even': float(even)},
      )


def _fresh_successes(workdir: pathlib.Path) -> dict[int, list[int]]:
  """Return step -> number of fresh successes for each replayed question."""
  found: dict[int, list[int]] = {}
  for table in step_records.tables(workdir, 'questions'):
    for row in table.to_pylist():
      if row['is_replay']:  # its correctness includes the stored success
        found.setdefault(row['step'], []).append(round(SAMPLES * row['correctness']) - 1)
  return found


def quotient(runs: Sequence[Sequence[Row]], of: str, by: str) -> tuple[float, float]:
  """Return the quotient of two sums over all runs, and its jackknife standard error over runs."""

  def of_all(chosen: Sequence[Sequence[Row]]) -> float:
    return sum(r[of] for run in chosen for r in run) / sum(r[by] for run in chosen for r in run)

  left_out = [of_all([*runs[:i], *runs[i + 1 :]]) for i in range(len(runs))]
  return of_all(runs), statistics.pstdev(left_out) * (len(runs) - 1) ** 0.5


def write(study: pathlib.Path, path: pathlib.Path) -> None:
  """Write a row for each comparison in the study's runs."""
  with open(path, 'w', encoding='utf-8', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(['setting', 'arm', 'seed', 'step', *NUMBERS])
    for workdir in sorted(study.glob('*,*,seed=*')):
      setting, arm, seed = workdir.name.split(',')
      for step, row in comparisons(workdir) if arm in PULLS else ():
        numbers = [f'{row[name]:.6g}' for name in NUMBERS]
        writer.writerow([setting, arm, seed.removeprefix('seed='), step, *numbers])


def table(path: pathlib.Path) -> Iterator[str]:
  """Yield lines of Markdown with the measurement and the prediction for each arm and setting.

  The quotient is '-' if the fresh rows' projection is at most two standard errors above 0.
  """
  by_arm: dict[tuple[str, str], dict[str, list[Row]]] = {}
  with open(path, encoding='utf-8', newline='') as file:
    for row in csv.DictReader(file):
      runs = by_arm.setdefault((row['setting'], row['arm']), {})
      runs.setdefault(row['seed'], []).append({name: float(row[name]) for name in NUMBERS})
  yield "| start | arm | projection of the group's fresh rows | stored / fresh | predicted |"
  yield '| --- | --- | --- | --- | --- |'
  for (setting, arm), of_seeds in by_arm.items():
    runs = list(of_seeds.values())
    means = [statistics.fmean(row['fresh'] for row in run) for run in runs]
    fresh, error = statistics.fmean(means), statistics.stdev(means) / len(means) ** 0.5
    measured = '{:.3f} ± {:.3f}'.format(*quotient(runs, 'stored', 'fresh'))
    odds, odds_error = (PULLS[arm] * value for value in quotient(runs, 'harder', 'even'))
    yield (
      f'| {setting} | {arm} | {fresh:.4f} ± {error:.4f} | {measured if fresh > 2 * error else "-"} '
      f'| {odds:.3f} ± {odds_error:.3f} |'
    )


if __name__ == '__main__':
  write(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
  print(*table(pathlib.Path(sys.argv[2])), sep='\n')
