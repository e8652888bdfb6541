"""Which stored success of a question is replayed: one rule a line."""

from collections.abc import Callable, Sequence

import numpy as np

from exgrpo_jax.datatypes import ReplayScores


def _mean_entropy(scores: ReplayScores) -> float:
  return float(np.mean(scores.entropy))


# By config.replay.trajectory_selection: what the replayed trajectory has least of, from its scores
# under the current policy; None where no score is needed.
RULES: dict[str, Callable[[ReplayScores], float] | None] = {
  'lowest_entropy': _mean_entropy,
  'highest_entropy': lambda scores: -_mean_entropy(scores),
  'lowest_perplexity': lambda scores: -float(np.mean(scores.logp)),
  'highest_perplexity': lambda scores: float(np.mean(scores.logp)),
  # Right by luck is what it avoids: a wrong step that the policy has unlearnt since has dropped.
  'smallest_drop': lambda scores: -float(np.min(scores.log_ratio)),
  'valid_steps': _mean_entropy,  # among `selection.with_valid_steps`
  'released': None,  # by `released_costs`
  'newest': None,
  'random': None,
}

_TOGETHER = 8  # candidates in a forward pass of the released code


def released_costs(
  entropies: Sequence[np.ndarray], lengths: Sequence[int], longest: int
) -> list[float]:
  """What the authors' released code compares where the paper has entropies.

  Three faults at once (https://github.com/ElliottYan/LUFFY, experience_helpers.py; its issue 57).
  The entropies of a candidate stand at the right end of a window as long as the longest response,
  its prompt before them and zeros before that; the mask is made from responses at the left end, of
  which it takes the padding; and every mask is one of those that the last eight candidates have. So
  a cost is the mean of the window from some other candidate's length on.

  Args:
    entropies: of each candidate, nats [P - 1 + T]: of its prompt's tokens, but the first, and its
      response's.
    lengths: tokens of each response that are not the padding token, which an end token may be.
    longest: tokens of the window, `rollout.max_response`.

  Returns:
    -inf for an empty mean, a NaN there, of which NumPy's argmin takes the first.
  """
  last = lengths[(len(lengths) - 1) // _TOGETHER * _TOGETHER :]
  starts = [*last, *[0] * (_TOGETHER - len(last))]  # it fills up with rows of padding
  costs = []
  for place, entropy in enumerate(entropies):
    window = np.zeros(longest, np.float32)
    shown = entropy[-longest:]
    window[longest - len(shown) :] = shown
    seen = window[starts[place % _TOGETHER] :]
    costs.append(float(np.mean(seen)) if len(seen) else -np.inf)
  return costs
