"""The successes that a run's newest checkpoint holds of some questions."""

from collections.abc import Sequence

from exgrpo_jax.datatypes import Trajectory
from exgrpo_jax.learner import buffer_files, checkpoint

Stored = dict[int, tuple[Trajectory, ...]]  # by the question's row


def read(workdir: str, rows: Sequence[int], max_tokens: int) -> Stored | None:
  """Of each of these questions that is in the buffer its trajectories, oldest first.

  Questions are taken in their order as long as their tokens fit. None where there is no checkpoint
  that can be read. A run that goes on may delete one meanwhile, so older ones are tried too.
  """
  for step in reversed(checkpoint.steps(workdir)):
    try:
      return buffer_files.read_some(checkpoint.buffer_folder(workdir, step), rows, max_tokens)
    except (OSError, ValueError):
      continue
  return None
