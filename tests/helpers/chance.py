"""A grading worker with a verifier that draws verdicts pseudo-randomly; see tiny.py."""

import zlib

from exgrpo_jax.grading import verifier, worker

# How many quarters of all responses are correct, by the question's answer, which is 0, 1, 2, ...
QUARTERS = (0, 0, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4)


def is_correct(response, answer):
  """Whether this response counts as correct, by a hash of its text."""
  return zlib.crc32(f'{answer}/{response}'.encode()) % 4 < QUARTERS[int(answer)]


class Chance(verifier.BuiltIn):
  """A verifier for which all of a response is its answer."""

  def judge(self, response, question):
    is_right = is_correct(response, question.answer)
    return verifier.Judgement('correct' if is_right else 'wrong', response)


if __name__ == '__main__':
  verifier.BuiltIn = Chance
  worker.main()
