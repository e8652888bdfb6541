"""Grading: how many responses a second, and the latency of a single one."""

import statistics
import time

import numpy as np

from exgrpo_jax.grading import pool, settings, verifier
from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.timing import median_seconds

NUM_RESPONSES = 1024  # in a batch
_CHARACTERS = 8000  # of each response, about 2,000 tokens
_THOUGHT = 'So we find that $x_1 + 3 = 7$, whence 12 of them are left. '
# (boxed, ground truth), with a number so that no two responses are equal.
_ANSWERS = (
  ('{n}', '{n}'),
  ('{n}.50', '{n}.5'),
  (r'\frac{{{n}}}{{7}}', r'\frac{{{n}}}{{8}}'),
  (r'{n}\sqrt{{3}}', r'\sqrt{{3}}\cdot {n}'),
  (r'x^2 + {n}x + 1', r'1 + x^2 + {n}x'),
  ('({n}, 3]', '({n}, 3)'),
  (r'\{{1, {n}\}}', r'\{{{n}, 1\}}'),
  (r'\text{{no {n}}}', 'yes'),
)


def measure(workers: int, repeats: int, num_responses: int = NUM_RESPONSES) -> list[Measurement]:
  """How fast a batch of responses is graded, and how long a single one takes.

  Args:
    workers: grading processes; 0 is one per core.
    repeats: of the batch; the median counts.
    num_responses: in the batch.
  """
  config = settings.Config(
    workers=workers,
    time_limit=5.0,
    memory_limit=1024,
    max_length=200_000,
    max_failures=0.0,
    rewards=('correctness',),
    weights=(),
    batched=(),
    batch_size=64,
    batch_timeout=60.0,
    overlong_buffer=0,
  )
  verifier_config = verifier.Config(require_think=True, require_box=False)
  responses, answers = _responses_and_answers(num_responses)
  milliseconds = []
  with pool.Grader(config, verifier_config) as grader:
    (total,) = median_seconds(repeats, lambda: grader.grade(responses, answers))
    for response, answer in zip(responses, answers):
      start = time.perf_counter()
      grader.grade([response], [answer])
      milliseconds.append(1e3 * (time.perf_counter() - start))
  return [
    Measurement(
      'grading',
      num_responses / total,
      'responses/s',
      f'{total:.2f} s for {num_responses:,} of {_CHARACTERS:,} characters',
    ),
    Measurement(
      'single',
      statistics.median(milliseconds),
      'ms',
      f'the median; the 95th percentile is {np.percentile(milliseconds, 95):.2f} ms',
    ),
  ]


def _responses_and_answers(count: int) -> tuple[list[str], list[str]]:
  thought = _THOUGHT * (_CHARACTERS // len(_THOUGHT))
  pairs = [[text.format(n=n) for text in _ANSWERS[n % len(_ANSWERS)]] for n in range(count)]
  responses = [rf'{thought}</think>{thought[:200]}\boxed{{{boxed}}}.' for boxed, _ in pairs]
  return responses, [truth for _, truth in pairs]
