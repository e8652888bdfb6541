"""Whether a run still learns, and replay still helps it; a warning with a remedy where not.

Each check reads the metrics of the last `WINDOW` steps, that of a plateau of as many or more, so a
single odd step says nothing and there is no warning before that many steps. A kind of warning comes
at most once in `PAUSE` steps: often enough to be seen where it lasts, and a value that crosses its
bound to and fro stays quiet. The numbers measured for the bounds are of runs of
configs/arithmetic.py, if nothing else is said.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping

from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.reporting import plateau
from exgrpo_jax.reporting.records import Run

WINDOW = 20  # steps
PAUSE = 100  # steps between two warnings of a kind
# Half: a question of the middle buckets is replayed every second step.
MAX_DRAWN = 0.5
# A replayed success has then been replayed twice before or more often. It is 1.9 to 2.4 with chains
# of which the pool is read once or twice, and 1.3 to 1.6 with 2,560 sums, although at each step
# nearly all of the middle buckets is drawn: what is replayed leaves them. Of a pool that is read
# five times it is 2.8 to 3.7.
MAX_TIMES_REPLAYED = 2.5
# Under a third of the replayed tokens then hold the weight of all. It is about .9 for trajectories
# of 80 steps ago; single steps fall to .02 for one token, which the median passes over.
MIN_EFFECTIVE_SAMPLE_SIZE = 0.3
# It is .005 to .006 where clipping is on. With config.objective.clip=until_replay it was .009 to
# .014 from step 40 on, and the pass rate of fresh questions stayed near .75 from step 60 on.
MAX_OUTSIDE = 0.0075
# Replayed questions are half solved and fresh ones may be harder, which made .2 at a pass rate of
# .2 and nothing from .5 on; where a policy collapsed they were .35 to .49 against .03 to .08.
MAX_GAP = 0.3


@dataclasses.dataclass(frozen=True)
class Setup:
  """What of a run its warnings depend on."""

  num_steps: int
  pool: int  # questions to train on
  questions: int  # that a step works on, Q or those in flight
  samples: int  # K, rollouts of a question
  replay: replay.Config
  objective: objective.Config


@dataclasses.dataclass(frozen=True)
class History:
  """What the next step is judged by; metrics.jsonl gives it back to a resumed run."""

  recent: Run = ()  # of the last steps, oldest first, as many as a check looks at
  warned: Mapping[str, float] = dataclasses.field(default_factory=dict)  # kind -> its latest step


def history(setup: Setup, records: Run) -> History:
  """The history of a run with these metrics; evaluation before the first step is no step."""
  past = History()
  for record in records:
    if record['step'] > 0:
      past, _ = observe(setup, past, record)
  return past


def observe(
  setup: Setup, past: History, record: Mapping[str, float]
) -> tuple[History, tuple[str, ...]]:
  """The history with one more step, and the warnings that are due after it.

  Args:
    setup: of the run.
    past: up to the step before.
    record: the step's metrics and its 'step'.
  """
  recent, step = (*past.recent, record)[-plateau.num_judged(setup.num_steps) :], record['step']
  if len(recent) < WINDOW:
    return History(recent, past.warned), ()
  due = {
    check.__name__: warning
    for check, seen in {**dict.fromkeys(_CHECKS, recent[-WINDOW:]), stands_still: recent}.items()
    if step - past.warned.get(check.__name__, -math.inf) >= PAUSE
    and (warning := check(setup, seen))
  }
  warned = dict(past.warned) | dict.fromkeys(due, step)
  return History(recent, warned), tuple(f'step {step:.0f}: {text}' for text in due.values())


# ---- The checks: '' if all is well ----


def empty_pool(setup: Setup, recent: Run) -> str:
  """Whether fewer unretired questions than a step works on will be left before the end.

  At the window's pace. Retired ones are then read again, and what can be replayed is used up. With
  R of N questions retired and r more a step, fewer than Q are left after (N - R - Q) / r steps.
  """
  first, last = recent[0], recent[-1]
  retired = last['buffer/retired']
  pace = (retired - first['buffer/retired']) / (last['step'] - first['step'])
  if pace <= 0:
    return ''
  wait = (setup.pool - retired - setup.questions) / pace
  empty = last['step'] + math.floor(wait) + 1
  if max(empty, last['step']) >= setup.num_steps:
    return ''
  since = f'from about step {empty:.0f} of {setup.num_steps} on' if wait >= 0 else 'now'
  return (
    f'{retired:,.0f} of {setup.pool:,} training questions are retired, and {pace:.1f} more in each '
    f'of the last {WINDOW} steps: {since} fewer than the {setup.questions} that a step works on '
    'are left, so retired ones are read again. Give a larger config.data.train, fewer steps, or '
    'config.replay.retire=never.'
  )


def small_middle(setup: Setup, recent: Run) -> str:
  """Whether replay goes round in middle buckets that hold too few questions for it.

  The middle are the buckets within sigma of K/2, which the Gaussian draws most. What is drawn from
  them over what they held, summed over the window, is the mean number of draws of a question in a
  step, in [0, 1]: the expected n P(k) / size(k), as it came out. Where they are nearly emptied at
  each step, the same successes still need not return: a question that is replayed may leave the
  middle, and others come. So 'replay/times_mean' must be over its bound as well.
  """
  times = _known(recent, 'replay/times_mean')
  if setup.replay.question_selection != 'gaussian' or not times:
    return ''
  center = setup.samples / 2
  middle = [k for k in range(setup.samples) if abs(k - center) <= setup.replay.sigma]
  held = sum(record[f'buffer/bucket_{k}'] for record in recent[:-1] for k in middle)
  drawn = sum(record[f'replay/bucket_{k}'] for record in recent[1:] for k in middle)
  times_replayed = statistics.median(times)
  if drawn <= MAX_DRAWN * held or times_replayed < MAX_TIMES_REPLAYED:
    return ''
  steps = len(recent) - 1
  return (
    f'the buckets within config.replay.sigma={setup.replay.sigma:g} of {center:g} held '
    f'{held / steps:.0f} questions, and {drawn / steps:.0f} of them were replayed in each of the '
    f'last {WINDOW} steps; a replayed success was on average replayed {times_replayed:.1f} times '
    'by then, so the same ones return again and again. Let the buffer fill before replay '
    '(config.replay.start_pass_rate), give a larger config.data.train, a larger '
    'config.replay.sigma, or config.replay.question_selection=uniform.'
  )


def few_effective_samples(setup: Setup, recent: Run) -> str:
  """Whether few replayed tokens hold most of the importance weight."""
  del setup
  sizes = _known(recent, 'replay/effective_sample_size')
  if not sizes:
    return ''
  # Ratios beyond float32 make it NaN.
  size = statistics.median(value if math.isfinite(value) else 0.0 for value in sizes)
  if size >= MIN_EFFECTIVE_SAMPLE_SIZE:
    return ''
  return (
    f'the effective sample size of replayed tokens is {size:.2f} of their number (median of '
    f'{WINDOW} steps), below {MIN_EFFECTIVE_SAMPLE_SIZE:g}: the policy has moved far from those '
    'that wrote them. Take a smaller config.optimizer.learning_rate, or younger successes: '
    'config.replay.trajectory_selection=newest or a smaller config.replay.max_trajectories.'
  )


def unclipped_ratios(setup: Setup, recent: Run) -> str:
  """Whether clipping is off and the ratios of fresh tokens leave the range it would hold them in.

  In a step's first minibatch they are 1, so the share over all minibatches understates it.
  """
  outside = _known(recent, 'outside_clip_range')
  # A step is clipped by whether replay had started before it.
  is_clipped = objective.clips_fresh_ratios(setup.objective, bool(recent[0]['buffer/started']))
  if is_clipped or not outside or (share := statistics.median(outside)) <= MAX_OUTSIDE:
    return ''
  return (
    f"config.objective.clip='{setup.objective.clip}' leaves fresh ratios unclipped, and those of "
    f'{share:.1%} of the fresh tokens (median of {WINDOW} steps) lie outside '
    f'{1 - setup.objective.clip_epsilon:g} to {1 + setup.objective.clip_epsilon_high:g}: the '
    "updates of a step are too large to go unbounded. Set config.objective.clip='always', or take "
    'a smaller config.optimizer.learning_rate.'
  )


def replayed_far_ahead(setup: Setup, recent: Run) -> str:
  """Whether replayed questions are solved far more often than fresh ones."""
  fresh, replayed = (_known(recent, f'pass_rate/{name}') for name in ('fresh', 'replay'))
  if not fresh or not replayed:
    return ''
  fresh_mean, replayed_mean = statistics.mean(fresh), statistics.mean(replayed)
  if replayed_mean - fresh_mean <= MAX_GAP:
    return ''
  return (
    f'the pass rate of replayed questions is {replayed_mean:.2f} and that of fresh ones '
    f'{fresh_mean:.2f} (means of {WINDOW} steps): the policy remembers what is replayed, or fresh '
    f'questions are too hard to learn from. Take a smaller config.replay.ratio than '
    f'{setup.replay.ratio:g}, a larger config.replay.start_pass_rate, or easier questions.'
  )


def stands_still(setup: Setup, recent: Run) -> str:
  """Whether the pass rate stands still where most groups teach nothing; see plateau.py."""
  if len(recent) < plateau.num_judged(setup.num_steps):
    return ''
  return plateau.explain(recent)


_CHECKS: tuple[Callable[[Setup, Run], str], ...] = (
  empty_pool,
  small_middle,
  few_effective_samples,
  unclipped_ratios,
  replayed_far_ahead,
)


def _known(recent: Run, name: str) -> list[float]:
  """The metric in each step; empty where a step has none, as before replay."""
  values = [record[name] for record in recent if name in record]
  return values if len(values) == len(recent) else []
