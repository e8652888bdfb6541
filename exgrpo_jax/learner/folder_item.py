"""An item of a checkpoint that is a folder of our own files.

The first host writes it in the background, and every host reads it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future

from exgrpo_jax.runtime import hosts


class Handler(ocp.AsyncCheckpointHandler):
  """Calls the functions of `Save` and `Restore`."""

  async def async_save(self, directory: epath.Path, args: 'Save') -> list[future.Future]:
    """Starts writing."""
    return [future.CommitFutureAwaitingContractedSignals(self._write(directory, args))]

  async def _write(self, directory: epath.Path, args: 'Save') -> None:
    self.save(directory, args)

  def save(self, directory: epath.Path, args: 'Save') -> None:
    """Writes at once."""
    if hosts.is_first():
      args.write(directory)

  def restore(self, directory: epath.Path, args: 'Restore') -> Any:
    """What `args.read` returns."""
    return args.read(directory)


@ocp.args.register_with_handler(Handler, for_save=True)
@dataclasses.dataclass
class Save(ocp.args.CheckpointArgs):
  """Writes into an existing, empty folder, values that do not change meanwhile."""

  write: Callable[[epath.Path], None]


@ocp.args.register_with_handler(Handler, for_restore=True)
@dataclasses.dataclass
class Restore(ocp.args.CheckpointArgs):
  """Reads the folder that `Save` wrote."""

  read: Callable[[epath.Path], Any]
