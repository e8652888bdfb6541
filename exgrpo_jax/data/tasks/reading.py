"""What the embedded tasks share: how a response in steps is read."""

import re

# Not \d, which matches the digits of every script. Bounded, since int() raises over 4,300 digits.
NUMBER = '(?:0|[1-9][0-9]{0,17})'
_BOX = re.compile(rf'\\boxed\{{({NUMBER})\}}')


def read_steps(response: str, step: re.Pattern[str]) -> tuple[list[re.Match[str]], int] | None:
  """The steps of a response, which white space separates, and the number in the box after them.

  None where a step does not match `step`, or no box is last.
  """
  *written, last = response.split() or ['']
  matches = [step.fullmatch(text) for text in written]
  steps = [match for match in matches if match]
  box = _BOX.fullmatch(last)
  return (steps, int(box[1])) if box and len(steps) == len(matches) else None
