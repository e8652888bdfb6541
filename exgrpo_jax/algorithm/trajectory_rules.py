"""Which stored success of a question is replayed: one rule a line."""

from collections.abc import Callable

import numpy as np

from exgrpo_jax.datatypes import ReplayScores

# By config.replay.trajectory_selection: what the replayed trajectory has least of, from its scores
# under the current policy; None where no score is needed.
RULES: dict[str, Callable[[ReplayScores], float] | None] = {
  'lowest_entropy': lambda scores: float(np.mean(scores.entropy)),
  'highest_entropy': lambda scores: -float(np.mean(scores.entropy)),
  'lowest_perplexity': lambda scores: -float(np.mean(scores.logp)),
  'highest_perplexity': lambda scores: float(np.mean(scores.logp)),
  # Right by luck is what it avoids: a wrong step that the policy has unlearnt since has dropped.
  'smallest_drop': lambda scores: -float(np.min(scores.log_ratio)),
  'valid_steps': lambda scores: float(np.mean(scores.entropy)),  # of `selection.with_valid_steps`
  'newest': None,
  'random': None,
}
