"""An invented run as its buffer sees it: which questions each step works on, and how they go.

The bookkeeping is that of replay.py, in arrays and without responses, so that a run of the paper's
size takes a second.
"""

import dataclasses

import numpy as np

_DELAY = 5  # steps before replay starts


@dataclasses.dataclass(frozen=True)
class Size:
  """Of a run; by default the paper's, with two benchmarks of 500 questions."""

  steps: int = 700
  questions: int = 128  # of a step
  samples: int = 8  # responses to each
  rows: int = 46_000  # questions of the data
  median: int = 1000  # tokens of a response
  longest: int = 8192
  recorded: int = 4  # groups of a step that are recorded token by token
  evaluated: int = 500  # questions of a benchmark
  evaluate_every: int = 10
  stored: int = 400  # questions of the checkpoint's buffer


@dataclasses.dataclass(frozen=True)
class Visits:
  """Questions of steps, in the order of steps and groups; the shape of all is [visits]."""

  step: np.ndarray
  question: np.ndarray
  group: np.ndarray
  is_replay: np.ndarray  # bool
  successes: np.ndarray  # of K, the replayed one counted in
  before: np.ndarray  # the bucket before the step; 0 where it is not in the buffer
  after: np.ndarray
  retires: np.ndarray  # bool
  written: np.ndarray  # the step that wrote what is replayed
  times: np.ndarray  # how often that was replayed, this time included
  is_recorded: np.ndarray  # bool; token by token

  def of_steps(self, first: int, last: int) -> 'Visits':
    """Those of these steps, the last included."""
    chosen = (first <= self.step) & (self.step <= last)
    return Visits(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))


def simulate(size: Size, rng: np.random.Generator) -> Visits:
  """All visits of a run whose policy learns."""
  order = rng.permutation(size.rows)
  difficulty = rng.normal(0, 2, size.rows)
  priority = rng.permutation(size.rows)  # of being recorded, as in step_rows.recorded_groups
  bucket, written, times = np.zeros((3, size.rows), int)
  steps, position = [], 0
  for step in range(1, size.steps + 1):
    wanted = size.questions // 2 if step > _DELAY else 0
    replayed = _draw(bucket, size.samples, wanted, rng)
    fresh = np.roll(order, -position)[: size.questions - len(replayed)]
    replayed = replayed[~np.isin(replayed, fresh)]  # in a second epoch
    position += len(fresh)
    question = np.concatenate([replayed, fresh])
    is_replay = np.arange(len(question)) < len(replayed)
    skill = 2 * step / size.steps - 0.5
    chance = 1 / (1 + np.exp(difficulty[question] - skill))
    successes = rng.binomial(size.samples - is_replay, chance) + is_replay
    retires = successes == size.samples
    before, after = bucket[question], np.where(retires, 0, successes)
    times[question] += is_replay
    ranks = np.argsort(np.argsort(priority[question]))
    steps.append(
      Visits(
        step=np.full(len(question), step),
        question=question,
        group=np.arange(len(question)),
        is_replay=is_replay,
        successes=successes,
        before=before,
        after=after,
        retires=retires,
        written=written[question],
        times=times[question],
        is_recorded=ranks < size.recorded,
      )
    )
    bucket[question] = after
    written[question] = np.where(successes > is_replay, step, written[question])
  names = [field.name for field in dataclasses.fields(Visits)]
  return Visits(*(np.concatenate([getattr(visits, name) for visits in steps]) for name in names))


def _draw(bucket: np.ndarray, samples: int, count: int, rng: np.random.Generator) -> np.ndarray:
  """At most `count` questions of the buffer, those solved half of the time most often."""
  stored = np.flatnonzero(bucket)
  weight = np.exp(-((bucket[stored] - samples / 2) ** 2) / 2)
  # The largest of such keys are a sample without replacement (Efraimidis and Spirakis, 2006).
  keys = np.log(rng.random(len(stored))) / weight
  return stored[np.argsort(-keys)[:count]]
