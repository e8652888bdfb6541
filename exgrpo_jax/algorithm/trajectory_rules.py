"""Rules that choose which of a question's stored successes to replay."""

from collections.abc import Callable, Sequence

import numpy as np

from exgrpo_jax.datatypes import ReplayScores


def _mean_entropy(scores: ReplayScores) -> float:
  return float(np.mean(scores.entropy))


# config.replay.trajectory_selection -> a function from a trajectory's scores under the current
# policy to its cost, or None if the rule needs no scores. The trajectory with the lowest cost is
# replayed.
RULES: dict[str, Callable[[ReplayScores], float] | None] = {
  'lowest_entropy': _mean_entropy,
  'highest_entropy': lambda scores: -_mean_entropy(scores),
  'lowest_perplexity': lambda scores: -float(np.mean(scores.logp)),
  'highest_perplexity': lambda scores: float(np.mean(scores.logp)),
  # Avoids lucky successes: the policy has since unlearned their wrong step, so its logp dropped.
  'smallest_drop': lambda scores: -float(np.min(scores.log_ratio)),
  'valid_steps': _mean_entropy,  # chosen among `scoring.with_valid_steps`
  'released': None,  # uses `released_costs`
  'newest': None,
  'random': None,
}


def released_costs(
  entropies: Sequence[np.ndarray], lengths: Sequence[int], longest: int
) -> list[float]:
  """Compute the costs that the authors' released code uses in place of the paper's entropies.

  That code (experience_helpers.py in https://github.com/ElliottYan/LUFFY, issue 57) has three bugs.
  A candidate's prompt and response entropies are right-aligned in a window of `longest` tokens,
  with zeros on the left. The mask assumes left-aligned responses, so it selects the padding after
  them. Candidates are processed in passes of up to eight, but every pass uses the masks of the last
  pass. So a cost is the mean of the window from n to the end, where n is the length of the
  candidate at the same index in the last pass.

  `entropies` are the token entropies of each candidate, in nats, [P - 1 + T]: its prompt except the
  first token, then its response. `lengths` are the numbers of tokens in each response, not counting
  the padding token, even if it also serves as an end token. `longest` is `rollout.max_response`.
  The mean of an empty window is -inf here. It is NaN in the authors' code, and NumPy's argmin picks
  the first NaN.
  """
  num_per_pass = 8  # candidates per forward pass in the released code
  last_lengths = lengths[(len(lengths) - 1) // num_per_pass * num_per_pass :]
  # Their code adds padding rows.
  starts = [*last_lengths, *[0] * (num_per_pass - len(last_lengths))]
  costs = []
  for place, entropy in enumerate(entropies):
    window = np.zeros(longest, np.float32)
    tail = entropy[-longest:]
    window[longest - len(tail) :] = tail
    selection = window[starts[place % num_per_pass] :]
    costs.append(float(np.mean(selection)) if len(selection) else -np.inf)
  return costs
