"""Rules that choose which stored success of a question is replayed: one rule a line."""

from collections.abc import Callable, Sequence

import numpy as np

from exgrpo_jax.datatypes import ReplayScores


def _mean_entropy(scores: ReplayScores) -> float:
  return float(np.mean(scores.entropy))


# By config.replay.trajectory_selection: a trajectory's cost, from its scores under the current
# policy. The lowest cost is replayed. None if no score is needed.
RULES: dict[str, Callable[[ReplayScores], float] | None] = {
  'lowest_entropy': _mean_entropy,
  'highest_entropy': lambda scores: -_mean_entropy(scores),
  'lowest_perplexity': lambda scores: -float(np.mean(scores.logp)),
  'highest_perplexity': lambda scores: float(np.mean(scores.logp)),
  # Avoids successes by luck: the policy has since unlearnt their wrong step, so its logp dropped.
  'smallest_drop': lambda scores: -float(np.min(scores.log_ratio)),
  'valid_steps': _mean_entropy,  # among `scoring.with_valid_steps`
  'released': None,  # by `released_costs`
  'newest': None,
  'random': None,
}

_TOGETHER = 8  # candidates in a forward pass of the released code


def released_costs(
  entropies: Sequence[np.ndarray], lengths: Sequence[int], longest: int
) -> list[float]:
  """Compute the costs that the authors' released code uses in place of the paper's entropies.

  It has three faults at once (https://github.com/ElliottYan/LUFFY, experience_helpers.py; its issue
  57). A candidate's entropies stand at the right end of a window as long as the longest response,
  after its prompt's, with zeros before. The mask is made from responses at the left end, and it
  selects their padding. Every candidate uses a mask of the last pass of up to eight candidates. So
  a cost is the mean of the window from some other candidate's length on.

  Args:
    entropies: of each candidate, nats [P - 1 + T]: of its prompt's tokens except the first, then of
      its response's tokens.
    lengths: tokens of each response that are not the padding token. An end token may be padding.
    longest: tokens of the window, `rollout.max_response`.

  Returns:
    Costs. An empty mean gives -inf: it is NaN in the authors' code, and NumPy's argmin takes the
      first NaN.
  """
  last = lengths[(len(lengths) - 1) // _TOGETHER * _TOGETHER :]
  starts = [*last, *[0] * (_TOGETHER - len(last))]  # their code adds rows of padding
  costs = []
  for place, entropy in enumerate(entropies):
    window = np.zeros(longest, np.float32)
    shown = entropy[-longest:]
    window[longest - len(shown) :] = shown
    seen = window[starts[place % _TOGETHER] :]
    costs.append(float(np.mean(seen)) if len(seen) else -np.inf)
  return costs
