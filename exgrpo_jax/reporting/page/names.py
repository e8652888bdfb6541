"""What runs and settings are called on the page."""

import os
import pathlib
from collections.abc import Sequence

from exgrpo_jax.reporting.figures import runs
from exgrpo_jax.reporting.figures.runs import Group


def of_runs(workdirs: Sequence[str]) -> list[str]:
  """The names of the runs' folders, with as much of the paths before them as tells them apart."""
  paths = [pathlib.Path(os.path.realpath(workdir)).parts for workdir in workdirs]
  names: list[str] = []
  for count in range(1, max(map(len, paths)) + 1):
    names = ['/'.join(parts[-count:]) for parts in paths]
    if len(set(names)) == len(names):
      break
  return names


def of_groups(groups: Sequence[Group]) -> list[str]:
  """The names of the folders where each group is one run, else what tells the settings apart."""
  if len(groups) > 1 and all(len(group.runs) == 1 for group in groups):
    return of_runs([group.runs[0].workdir for group in groups])
  return [group.label for group in groups] if len(groups) == 1 else _of_settings(groups)


def _of_settings(groups: Sequence[Group]) -> list[str]:
  """Values of as few settings as tell the groups apart: how much they replay, then short ones."""
  configs = [runs.setting(group.runs[0]) for group in groups]
  values = {
    name: [f'{name}={config.get(name, "-")}' for config in configs]
    for name in sorted({name for config in configs for name in config})
  }
  by_length = sorted(values, key=lambda name: (name != 'replay.ratio', sum(map(len, values[name]))))
  names = [''] * len(groups)
  for name in by_length:
    longer = [', '.join(filter(None, pair)) for pair in zip(names, values[name])]
    if len(set(longer)) > len(set(names)):
      names = longer
  return names
