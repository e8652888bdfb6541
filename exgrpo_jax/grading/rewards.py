"""Rewards other than the verifier's, to be named in config.grading.reward.

A reward is a function (response, answer, outcome) -> float of the text that the model
wrote, the ground truth and the verifier's word: 'correct', 'wrong' or 'no answer'. It runs in
grading's processes under their limits, so this file imports no jax.
"""


def think_format(response: str, answer: str, outcome: str) -> float:
  """1 for the format that the paper's template asks for, else 0; the answer does not matter.

  The prompt has opened the think section (prompt.THINK), so the response closes it
  once, opens none, and has text both before and after.
  """
  del answer, outcome
  thought, _, solution = response.partition('</think>')
  return float(
    bool(thought.strip())
    and bool(solution.strip())
    and '</think>' not in solution
    and '<think>' not in response
  )
