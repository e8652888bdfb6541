"""Pools of echoes, grading and environments, whose workers do what a text says (misbehaving.act).

Each of `POOLS` opens one, and gives a function that submits texts and returns another one, which
waits for their replies.
"""

import contextlib
from typing import NamedTuple

from exgrpo_jax.datatypes import Message, Question
from exgrpo_jax.environments import pool as environments
from exgrpo_jax.environments import settings
from exgrpo_jax.grading import pool as grading
from exgrpo_jax.grading import settings as grading_settings
from exgrpo_jax.grading import verifier
from exgrpo_jax.workers import pool
from exgrpo_jax.workers.pool import Failure, Pool, Program

ECHO = Program(
  pool.command('tests.helpers.echo'),
  {},
  'an echo process',
  late_reason='no reply after 1 s',
  memory_limit=256,
  starts=3,
  standby_delay=0.1,
)


class Reply(NamedTuple):
  """What became of a request: the process that answered it, or why none did."""

  pid: int = 0
  outcome: str = ''
  reason: str = ''


@contextlib.contextmanager
def of_echoes(count=1, time_limit=30.0):
  with contextlib.closing(Pool(ECHO, count)) as running:

    def submit(*texts):
      futures = [running.submit(asking(text, time_limit)) for text in texts]
      return lambda: [reply_of(future.result()) for future in futures]

    yield submit


def asking(text, time_limit):
  return lambda worker: worker.call(lambda: (text, time_limit))


def reply_of(result):
  failed = isinstance(result, Failure)
  return Reply(0, result.outcome, result.reason) if failed else Reply(result['pid'])


@contextlib.contextmanager
def of_grading(count=1, time_limit=30.0):
  config = grading_settings.GradingConfig(
    workers=count,
    memory_limit=256,
    time_limit=time_limit,
    max_length=10**7,
    rewards=('tests.helpers.misbehaving:pid',),
  )
  with grading.Grader(config, verifier.ANYTHING) as running:

    def submit(*texts):
      for n, text in enumerate(texts):
        running.submit(n, grading.Submission(lambda text=text: text, ''))
      return lambda: [
        Reply(int(v.reward)) if v.components else Reply(0, v.outcome, v.reason)
        for v in running.collect().values()
      ]

    yield submit


@contextlib.contextmanager
def of_environments(count=1, time_limit=30.0):
  name = 'tests.helpers.misbehaving:Misbehaving'
  running = environments.Pool(
    settings.EnvironmentConfig(name=name, workers=count, time_limit=time_limit, memory_limit=256)
  )
  begin = environments.beginning(
    Question(0, (Message('user', 'begin'),), '', 'math', '', 't', {}), 0
  )

  def submit(*texts):
    for n, text in enumerate(texts):
      running.submit(str(n), begin, [text])

    def wait():
      found = {}
      while len(found) < len(texts):
        found |= {int(key): result for key, result, _ in running.answers(wait=True)}
      return [
        Reply(0, found[n].outcome, found[n].reason)
        if isinstance(found[n], Failure)
        else Reply(int(found[n].messages[0]['content']))
        for n in range(len(texts))
      ]

    return wait

  yield submit
  for holder in running._holders:
    holder.pool.close()


POOLS = {'echoes': of_echoes, 'grading': of_grading, 'environments': of_environments}
