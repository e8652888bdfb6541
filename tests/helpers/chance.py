"""A grading worker whose verifier is replaced by chance that the text decides: see tiny.py."""

import zlib

from exgrpo_jax.grading import verifier, worker

QUARTERS = (0, 0, 1, 2, 2, 2, 3, 3, 4, 4, 4, 4)  # by answer, which is 0, 1, 2, ...


def is_correct(response, answer):
  """Whether chance lets this response solve the question: QUARTERS of all do."""
  return zlib.crc32(f'{answer}/{response}'.encode()) % 4 < QUARTERS[int(answer)]


def judge(response, answer, config, kind):
  """In place of verifier.judge."""
  del config, kind
  return 'correct' if is_correct(response, answer) else 'wrong'


if __name__ == '__main__':
  verifier.judge = judge
  worker.main()
