"""The worker process: judges what a model wrote, one response after another.

worker_slot.py starts it as `exgrpo grading.worker` and kills it where it must. Both
sides send lines of JSON over a socket, which is the worker's standard input:

  the fields of `Setup`                 answered by {'trying': a reward, 'how': …} before each is
                                        imported or tried, then by {'asks': names of what they ask
                                        for besides `OWN`} or {'refused': reason, 'reward': which}
  [response, answer, kind, facts]       answered by {'outcome': …, 'components': {name: reward},
                                        'reason': …, 'given': …, 'must_be_replaced': …}
  [index of a reward, [facts, …]]       where the rewards take batches; answered by
                                        {'rewards': [number, …]} or {'reason': …}

Facts are values by the names of parameters (reward_functions.py). Requests come as often as the
other side asks. Whatever a reward prints goes to standard error and cannot pass for a verdict. The
worker imports no jax: it must start in an instant, and leave the accelerator alone.
"""

import ctypes
import dataclasses
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from exgrpo_jax.grading import reward_functions, verifier
from exgrpo_jax.grading.reward_functions import RewardFunction

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
MAX_ANSWER = 64  # characters of an extracted answer that are reported
_MAX_REASON = 500  # characters of an error's text
_ERRORS = (Exception, SystemExit)  # the user's code may raise anything, and call sys.exit

# What the worker knows by itself of a response that it judges.
OWN = ('response', 'answer', 'outcome', 'overlong_buffer')


@dataclasses.dataclass(frozen=True)
class Setup:
  """What the pool sends first."""

  parent: int  # process id
  memory_limit: int  # MiB, in addition to what the process uses when it is ready; 0 is none
  max_length: int  # characters
  rewards: Sequence[str]  # see reward_functions.load
  is_batched: bool  # whether these take batches
  overlong_buffer: int  # tokens
  # Question, messages and columns of a row, to try the rewards that read these; None: the others.
  row: Mapping[str, Any] | None
  verifier: verifier.Config


def main() -> None:
  """Serves until the socket is closed or the parent ends."""
  requests, replies = os.fdopen(os.dup(0), 'rb'), os.fdopen(os.dup(0), 'wb', 0)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  values = json.loads(requests.readline() or 'null')
  if values is None:
    return  # the parent has ended already
  setup = Setup(**values | {'verifier': verifier.Config(**values['verifier'])})
  _die_with(setup.parent)
  loaded: list[RewardFunction] = []
  for spec in setup.rewards:
    try:  # said before, because it may never come back
      _write(replies, {'trying': spec, 'how': 'importing it'})
      loaded.append(reward_functions.load(spec))
      _write(replies, {'trying': spec, 'how': 'trying it on three responses'})
      _try(loaded[-1], setup)
    except _ERRORS as error:
      _write(replies, {'refused': _summarize(error), 'reward': spec})
      return
  if setup.memory_limit:
    _limit_memory(setup.memory_limit)
  asked = {name for reward in loaded for name in (*reward.required, *reward.optional)}
  _write(replies, {'asks': sorted(asked.difference(() if setup.is_batched else OWN))})
  for line in requests:
    request = json.loads(line)
    reply = _score if setup.is_batched else _grade
    _write(replies, reply(*request, rewards=loaded, setup=setup))


def bounded(response: str, max_length: int) -> str | None:
  """The part of a response that is judged: of a long one the end, if that is all its solution.

  Of more than `max_length` characters the last `max_length` are judged if they contain the last
  '</think>', because then only thought is lost, which is no answer anyway. Otherwise None: the
  end of a thought must not pass for an answer.
  """
  if len(response) <= max_length:
    return response
  end = response[-max_length:]
  return end if '</think>' in end else None


def _grade(
  response: str,
  answer: str,
  kind: str,
  facts: Mapping[str, Any],
  rewards: Sequence[RewardFunction],
  setup: Setup,
) -> dict[str, Any]:
  place = ''  # whose error it is
  try:
    judged = bounded(response, setup.max_length)
    given = None if judged is None else verifier.extract(judged, setup.verifier)
    outcome = verifier.compare(given, answer, kind)
    own = dict(zip(OWN, (response, answer, outcome, setup.overlong_buffer), strict=True))
    components = {}
    for reward in rewards:
      place = f'{reward.spec}: '
      components[reward_functions.name_of(reward.spec)] = reward.of_one({**facts, **own})
    return {
      'outcome': outcome,
      'components': components,
      'reason': '',
      'given': given and given[:MAX_ANSWER],
      'must_be_replaced': False,
    }
  except _ERRORS as error:  # concerns this response alone
    return {
      'outcome': 'crashed',
      'components': None,
      'reason': place + _summarize(error),
      'given': None,
      'must_be_replaced': isinstance(error, MemoryError),  # it may have left things inconsistent
    }


def _score(
  index: int,
  rows: Sequence[Mapping[str, Any]],
  rewards: Sequence[RewardFunction],
  setup: Setup,
) -> dict[str, Any]:
  own = {'overlong_buffer': setup.overlong_buffer}
  try:
    return {'rewards': rewards[index].of_batch([{**row, **own} for row in rows])}
  except _ERRORS as error:
    return {'reason': f'{rewards[index].spec}: {_summarize(error)}'}


def _try(reward: RewardFunction, setup: Setup) -> None:
  """Raises ValueError if it gives no reward for the trials, or asks for a column that is not there.

  Tries nothing where `setup` lacks the row that it reads, or has one for rewards that read it.
  """
  if reward.reads_row != (setup.row is not None):
    return
  row = {**(setup.row or {}), 'overlong_buffer': setup.overlong_buffer}
  for name in reward.columns:
    if name not in row:
      columns = [f"'{name}'" for name in row if name not in reward_functions.PARAMETERS]
      raise ValueError(
        f"it asks for '{name}', which is no column of the data (they have: "
        f'{", ".join(columns) or "none"}) and none of {", ".join(reward_functions.PARAMETERS)}'
      )
  rows = [row | trial for trial in reward_functions.TRIALS]
  for trials in [rows] if setup.is_batched else [[row] for row in rows]:
    try:
      reward.of_batch(trials) if setup.is_batched else reward.of_one(trials[0])
    except _ERRORS as error:
      tried = tuple(trials[0][name] for name in ('response', 'answer', 'outcome'))
      shown = f'a batch of {len(trials)} responses' if setup.is_batched else tried
      raise ValueError(f'tried on {shown}: {_summarize(error)}') from error


def _summarize(error: BaseException) -> str:
  """An error on one short line; it may quote the response."""
  text = f'{type(error).__name__}: {error}'[:_MAX_REASON]
  return ''.join(c if c.isprintable() else ' ' for c in text).strip(': ')


def _die_with(parent: int) -> None:
  """Makes this process end with its parent, even while it is busy with a response."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != parent:  # it ended before the call above
    os._exit(0)


def _limit_memory(mebibytes: int) -> None:
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash writes no core file
  if sys.platform != 'linux':
    return  # elsewhere the limit is not enforced, or counts memory that is only reserved
  # Imported libraries take a large address space, which is not the response's doing.
  with open('/proc/self/statm') as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
  limit = used + mebibytes * 2**20
  _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
  if hard_limit != resource.RLIM_INFINITY:
    limit = min(limit, hard_limit)
  resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _write(replies: io.RawIOBase, value: dict[str, Any]) -> None:
  replies.write(json.dumps(value).encode() + b'\n')


if __name__ == '__main__':
  main()
