"""Rewards to be named in config.grading.reward, in place of the verifier's 1 or 0.

A reward is a function (response, answer, outcome) -> float of the text that the model wrote, the
ground truth and the verifier's outcome: 'correct', 'wrong' or 'no answer'. It runs in grading's
worker processes under their limits, so this file must not import jax.
"""


def think_format(response: str, answer: str, outcome: str) -> float:
  """1 for the format that the paper's template requests, else 0; the answer does not matter.

  The prompt has already opened the think section (prompt.THINK), so the response must close it
  once, open none, and have text both before and after.
  """
  del answer, outcome
  thought, _, solution = response.partition('</think>')
  return float(
    bool(thought.strip())
    and bool(solution.strip())
    and '</think>' not in solution
    and '<think>' not in response
  )
