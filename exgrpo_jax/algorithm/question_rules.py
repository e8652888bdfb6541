"""Rules for weighting the buffer's questions when a step draws questions to replay."""

from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from exgrpo_jax.datatypes import Trajectory

_IN_ORDER = 1e9  # scales headroom so that the Gumbel noise of a draw cannot change the order


class Questions(NamedTuple):
  """The buffer's N questions, in ascending order of their rows."""

  row_N: np.ndarray  # in the data source
  correctness_N: np.ndarray  # the pass rate of the question's latest group
  age_N: np.ndarray  # steps since the question's newest stored trajectory was sampled
  trajectories: Sequence[Sequence[Trajectory]]  # oldest first; with store='all', also failures


# config.replay.question_selection -> a function from the bucket numbers 0 … K - 1, K and the
# ReplayConfig to the log of each bucket's unnormalized probability: [K]. Questions in a bucket are
# equally likely. Only 'gaussian', the paper's rule, draws bucket 0; the others give it -inf. All
# rules except 'hardest' are in the authors' code. The weights of 'hardest' differ by factors too
# large for float64, so it exhausts each bucket before it draws from the next one.
BUCKET_RULES: dict[str, Callable[[np.ndarray, int, Any], np.ndarray]] = {
  'gaussian': lambda k, num, config: -((k - num / 2) ** 2) / (2 * config.sigma**2),
  'linear': lambda k, num, _: np.log(k / num),
  'linear_clip': lambda k, num, _: np.log(np.minimum(k / num, 0.5)),
  'square_root': lambda k, num, _: np.log(k / num) / 2,
  'hardest': lambda k, _, __: np.where(k > 0, -1000.0 * k, -np.inf),
}


def headroom(trajectories: Sequence[Trajectory]) -> float:
  """Compute how much the probabilities of a question's stored tokens can still improve.

  Headroom (arXiv:2609.03941, eq. 14): the mean over tokens of 1 - p for successes and of p for
  failures, where p is the token's probability under the policy that sampled it.
  """
  room = (
    trajectory.num_own * abs(trajectory.correct - trajectory.probability)
    for trajectory in trajectories
  )
  return sum(room) / sum(trajectory.num_own for trajectory in trajectories)


# config.replay.question_selection -> a function from `Questions` to the log of each question's
# unnormalized probability: [N], -inf for questions that must not be drawn; None if all are equal.
# Buckets play no role.
RULES: dict[str, Callable[[Questions], np.ndarray] | None] = {
  'uniform': None,
  'advantage': lambda questions: np.log1p(-questions.correctness_N),
  'headroom_drift': lambda questions: np.array(
    [_IN_ORDER * headroom(trajectories) for trajectories in questions.trajectories]
  ),
}

ALL = ChainMap[str, Any](RULES, BUCKET_RULES)
