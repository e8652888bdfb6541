"""Items of a checkpoint that the first host alone writes, in the background, and all hosts read."""

import abc
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import future

from exgrpo_jax.runtime import hosts


class Handler(ocp.AsyncCheckpointHandler):
  """What is saved is a value, so the run may go on with the next one while it is written."""

  @abc.abstractmethod
  def write(self, directory: epath.Path, args: Any) -> None:
    """Writes what `args` hold into an existing, empty folder."""

  async def async_save(self, directory: epath.Path, args: Any) -> list[future.Future]:
    """Begins to write."""
    return [future.CommitFutureAwaitingContractedSignals(self._write(directory, args))]

  async def _write(self, directory: epath.Path, args: Any) -> None:
    self.save(directory, args)

  def save(self, directory: epath.Path, args: Any) -> None:
    """Writes it at once."""
    if hosts.is_first():
      self.write(directory, args)
