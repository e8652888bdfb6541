"""The speed of grading: responses per second, and the latency of a single response."""

import statistics
import time

from benchmarks.frame import Bench, Figure, in_turns
from exgrpo_jax.grading import pool, verifier

_RESPONSES = 100_000  # at scale 1
_CHARACTERS = 8000  # per response, about 2,000 tokens
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


def measure(bench: Bench) -> list[Figure]:
  """Measure how fast a batch of responses is graded, and how long a single response takes."""
  count = max(8, round(bench.size.scale * _RESPONSES))
  pairs = [[text.format(n=n) for text in _ANSWERS[n % len(_ANSWERS)]] for n in range(count)]
  thought = _THOUGHT * (_CHARACTERS // len(_THOUGHT))
  responses = [rf'{thought}</think>{thought[:200]}\boxed{{{boxed}}}.' for boxed, _ in pairs]
  answers = [truth for _, truth in pairs]
  single = []
  required = verifier.VerifierConfig(('think',))
  with pool.Grader(bench.config.grading, required) as grader:
    [total] = in_turns(bench.size.repeats, lambda: grader.grade(responses, answers))
    for response, answer in list(zip(responses, answers))[:100]:
      start = time.perf_counter()
      grader.grade([response], [answer])
      single.append(1e3 * (time.perf_counter() - start))
  return [
    Figure('grading', count / total, 'responses/s', f'{count:,} of {_CHARACTERS:,} characters'),
    Figure('single', statistics.median(single), 'ms', f'the slowest takes {max(single):.3g} ms'),
  ]
