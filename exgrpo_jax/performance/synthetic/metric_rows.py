"""The metrics of an invented run: the names that a real one writes, with plausible values."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from exgrpo_jax.performance.synthetic.history import Size

BENCHMARKS = ('first_benchmark', 'second_benchmark')
_NOISE = 0.05  # relative, of a value around its course
_BEGIN = 1_790_000_000  # seconds, the timestamp of the first record

# Name -> value at the first step and at the last; between them it goes evenly.
_COURSES = {
  'reward': (0.45, 0.7),
  'rewards/correctness': (0.45, 0.7),
  'pass_rate/all': (0.45, 0.7),
  'pass_rate/fresh': (0.4, 0.65),
  'pass_rate/replay': (0.5, 0.75),
  'reward_std': (0.5, 0.45),
  'reward_std_within': (0.35, 0.3),
  'zero_variance': (0.2, 0.3),
  'length/mean': (1500, 1400),
  'length/max': (8000, 8192),
  'length/total': (1.5e6, 1.4e6),
  'length/truncated': (0.02, 0.01),
  'length/replayed': (1300, 1200),
  'epoch': (1e-9, 1e-9),
  'grading/correct': (0.45, 0.7),
  'grading/wrong': (0.45, 0.25),
  'grading/no_answer': (0.09, 0.04),
  'grading/timed_out': (0.01, 0.01),
  'grading/crashed': (1e-9, 1e-9),
  'groups/solved_by_all': (0.1, 0.25),
  'groups/solved_by_none': (0.15, 0.05),
  'entropy': (0.4, 0.2),
  'entropy/correct': (0.3, 0.15),
  'entropy/incorrect': (0.5, 0.3),
  'probability/fresh': (0.75, 0.85),
  'probability/replayed': (0.8, 0.88),
  'code_blocks/fresh': (0.05, 0.03),
  'code_blocks/replayed': (0.05, 0.03),
  'replay/rows': (64, 64),
  'replay/age_mean': (2, 130),
  'replay/age_max': (4, 650),
  'replay/times_mean': (1, 4),
  'replay/times_max': (1, 20),
  'replay/ratio_mean': (1.0, 1.01),
  'replay/ratio_max': (3, 90),
  'replay/shaped_mean': (0.9, 0.88),
  'replay/shaped_variance': (1e-3, 4e-3),
  'replay/effective_sample_size': (0.98, 0.7),
  'buffer/questions': (90, 32_000),
  'buffer/retired': (10, 12_000),
  'buffer/trajectories': (300, 140_000),
  'buffer/started': (1, 1),
  'clip_share': (1e-4, 5e-4),
  'outside_clip_range': (2e-4, 6e-4),
  'loss': (0.01, 0.005),
  'gradient_norm': (0.006, 0.004),
  'parity/mean': (3e-3, 3e-3),
  'parity/max': (0.2, 0.3),
  'learning_rate': (1e-6, 1e-6),
  'skipped_updates': (1e-9, 1e-9),
  'time/log': (0.3, 0.3),
  'time/pick': (3, 3),
  'time/reshard': (1, 1),
  'time/generate': (90, 85),
  'time/old_logprobs': (1e-5, 1e-5),
  'time/grade': (2, 2),
  'time/assemble': (0.1, 0.1),
  'time/record': (0.05, 0.05),
  'time/plan': (0.02, 0.1),
  'time/records': (0.2, 0.2),
  'time/await_update': (60, 55),
  'time/evaluate': (30, 30),
  'time/save': (2, 4),
  'time/device_wait': (55, 50),
  'time/step': (160, 150),
  'time/compile_total': (90, 90),
  'rollout/slots_busy': (0.18, 0.18),
  'speed/compilations': (40, 40),
  'speed/tokens_per_second': (9500, 9800),
  'memory/host_peak': (20, 40),
  'memory/device_peak': (70, 70),
}


def make(size: Size, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
  """The records of metrics.jsonl, that of the evaluation before the first step included."""
  courses = dict(_COURSES)
  for k in range(size.samples):
    courses[f'replay/bucket_{k}'] = (8.0, 8.0)
    courses[f'buffer/bucket_{k}'] = (10.0, 4000.0)
  for step in range(size.steps + 1):
    share = step / size.steps
    record: dict[str, Any] = {'step': step}
    if step:
      noise = np.exp(rng.normal(0, _NOISE, len(courses))).tolist()
      record |= {
        name: (first + share * (last - first)) * factor
        for (name, (first, last)), factor in zip(courses.items(), noise)
      }
    if is_evaluated(size, step):
      record |= _evaluation(size, share, rng)
    if len(record) > 1:
      yield record | {'timestamp': _BEGIN + 150.0 * step}


def is_evaluated(size: Size, step: int) -> bool:
  """Whether there is an evaluation after the step."""
  return step % size.evaluate_every == 0 or step == size.steps


def pass_rate(share: float) -> float:
  """The chance of a right response in an evaluation, after this share of the steps."""
  return 0.3 + 0.3 * share


def _evaluation(size: Size, share: float, rng: np.random.Generator) -> dict[str, float]:
  found = {}
  for name in BENCHMARKS:
    score = rng.binomial(size.evaluated, pass_rate(share)) / size.evaluated
    found |= {
      f'eval/{name}/questions': float(size.evaluated),
      f'eval/{name}/pass@1': score,
      f'eval/{name}/pass@1_low': score - 0.04,
      f'eval/{name}/pass@1_high': score + 0.04,
      f'eval/{name}/truncated': 0.02,
    }
  return found
