"""Weights & Biases: refused early where it cannot work; each start is a run there."""

import importlib
import pathlib
from collections.abc import Mapping
from typing import Any

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import hosts


def check(project: str) -> None:
  """Refuses a project where wandb is not installed or not logged in; '' is no project.

  Called before anything that takes long. Where there is a terminal, wandb asks for the key.
  """
  if project and hosts.is_first():
    wandb = _package(project)
    try:
      wandb.login()
    except wandb.Error as error:
      raise InputError(
        f"config.metrics.wandb_project='{project}': {_one_line(error)}; set WANDB_API_KEY, run "
        'wandb login, or set WANDB_MODE=offline.'
      ) from error


def start(project: str, workdir: pathlib.Path, first_step: int, settings: Mapping[str, Any]) -> Any:
  """A new run in the project, with the resolved config; its files lie in workdir/wandb.

  Weights & Biases cannot take back steps, and a resumed run repeats those since its checkpoint. So
  each start is a run of its own there, in a group with the name of the workdir.
  """
  wandb = _package(project)
  group = workdir.resolve().name
  try:
    return wandb.init(
      project=project,
      group=group,
      name=f'{group}-from-{first_step}',
      dir=str(workdir),
      config=dict(settings),
    )
  except wandb.Error as error:
    raise InputError(
      f"config.metrics.wandb_project='{project}': {_one_line(error)}; the same command tries "
      'again, and WANDB_MODE=offline keeps the metrics in the workdir.'
    ) from error


def _package(project: str) -> Any:
  """The wandb module; InputError if it is not installed."""
  try:
    wandb = importlib.import_module('wandb')
  except ImportError:
    wandb = None
  # A folder wandb/, such as wandb leaves behind, can be imported too.
  if not hasattr(wandb, 'init'):
    raise InputError(
      f"config.metrics.wandb_project='{project}' needs wandb, which is not installed: run "
      "pip install -e '.[wandb]' in the clone (elsewhere pip install wandb), or leave the project "
      'empty.'
    )
  return wandb


def _one_line(error: Exception) -> str:
  return ' '.join(str(error).split()).rstrip('.')
