"""The worker process: judges what a model wrote, one response after another.

workers.py says how it is started, runtime/worker_slot.py kills it where it must. Both sides send
lines of JSON over a socket, which is the worker's standard input:

  the fields of `Setup`                 answered by {'trying': a setting, 'how': …} before each
                                        verifier or reward is imported or tried, then by
                                        {'asks': names of what the verifier and the rewards ask
                                        for besides `OWN`} or {'refused': what is wrong}
  [kind]                                answered by {} once what judges answers of that kind has
                                        been imported
  [response, answer, kind, facts]       answered by fields of a Verdict, and 'must_be_replaced'
                                        after an error that may have left things inconsistent
  [index of a reward, [facts, …]]       where the rewards take batches; answered by
                                        {'rewards': [number, …]} or {'reason': …}

Facts are values by the names of parameters (reward_functions.py). Whatever a reward prints goes to
standard error and cannot pass for a verdict. The worker imports no jax: it must start in an
instant, and leave the accelerator alone.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import reasoning_gym, reward_functions, user_code, verifier
from exgrpo_jax.grading.reward_functions import RewardFunction
from exgrpo_jax.grading.user_code import ERRORS, summarize
from exgrpo_jax.grading.verifier import Config, Judgement, Verifier
from exgrpo_jax.runtime import worker_limits

MAX_ANSWER = 64  # characters of an extracted answer that are reported

# What the worker knows by itself of a response that it judges.
OWN = ('response', 'answer', 'outcome', 'overlong_buffer')

_TRYING = 'trying it on three responses'


@dataclasses.dataclass(frozen=True)
class Setup:
  """What the pool sends first."""

  parent: int  # process id
  memory_limit: int  # MiB, in addition to what the process uses when it is ready; 0 is none
  max_length: int  # characters
  verifier: str  # see user_code.load_verifier
  rewards: Sequence[str]  # see reward_functions.load
  is_batched: bool  # whether these take batches; then no verifier is called
  overlong_buffer: int  # tokens
  # Question, messages and columns of a row, to try the rewards that read these; None: the others.
  row: Mapping[str, Any] | None
  required: Config


def main() -> None:
  """Serves until the socket is closed or the parent ends."""
  requests, replies = worker_limits.streams()
  values = json.loads(requests.readline() or 'null')
  if values is None:
    return  # the parent has ended already

  def reply(value: dict[str, Any]) -> None:
    replies.write(json.dumps(value).encode() + b'\n')

  setup = Setup(**values | {'required': Config(**values['required'])})
  worker_limits.die_with(setup.parent)
  try:
    chosen, loaded = _load(
      setup, lambda key, spec, how: reply({'trying': f'config.grading.{key}: {spec!r}', 'how': how})
    )
  except InputError as error:
    reply({'refused': str(error)})
    return
  if setup.memory_limit:
    worker_limits.limit_memory(setup.memory_limit)
  asked = {name for reward in loaded for name in (*reward.required, *reward.optional)}
  asked |= {reasoning_gym.COLUMN} if chosen else set()
  reply({'asks': sorted(asked.difference(() if setup.is_batched else OWN))})
  for line in requests:
    request = json.loads(line)
    if request == [reasoning_gym.KIND]:
      reasoning_gym.load()
      reply({})
    elif chosen:
      reply(_grade(*request, judged_by=chosen, rewards=loaded, setup=setup))
    else:
      reply(_score(*request, rewards=loaded, setup=setup))


def bounded(response: str, max_length: int) -> str | None:
  """The part of a response that is judged: the end of a long one, if that is all its solution.

  Of more than `max_length` characters the last `max_length` are judged if they contain the last
  '</think>', because then only thought is lost, which is no answer anyway. Otherwise None: the
  end of a thought must not pass for an answer.
  """
  if len(response) <= max_length:
    return response
  end = response[-max_length:]
  return end if '</think>' in end else None


# Requests.


def _grade(
  response: str,
  answer: str,
  kind: str,
  facts: Mapping[str, Any],
  judged_by: Verifier,
  rewards: Sequence[RewardFunction],
  setup: Setup,
) -> dict[str, Any]:
  place = f'{setup.verifier}: '  # whose error it is
  try:
    text, truth = bounded(response, setup.max_length), verifier.Truth(answer, kind, facts)
    outcome, given = 'no answer', None
    if text is not None:
      outcome, given = _checked(verifier.judge_with(judged_by, text, truth, setup.required))
    own = dict(zip(OWN, (response, answer, outcome, setup.overlong_buffer), strict=True))
    components = {}
    for reward in rewards:
      place = f'{reward.spec}: '
      components[reward_functions.name_of(reward.spec)] = reward.of_one({**facts, **own})
    return {'outcome': outcome, 'components': components, 'answer': given and given[:MAX_ANSWER]}
  except ERRORS as error:  # concerns this response alone
    return {
      'outcome': 'crashed',
      'reason': place + summarize(error),
      'must_be_replaced': isinstance(error, MemoryError),
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
  except ERRORS as error:
    return {'reason': f'{rewards[index].spec}: {summarize(error)}'}


# What the config names is imported, and tried on three responses.


def _load(
  setup: Setup, say: Callable[[str, str, str], None]
) -> tuple[Verifier | None, list[RewardFunction]]:
  """The verifier and the rewards; says what it does before it does it, as it may never come back.

  Raises:
    InputError: one of them cannot be used.
  """
  chosen, loaded = None, []
  if not setup.is_batched:
    with user_code.refusing('grading.verifier', setup.verifier):
      say('verifier', setup.verifier, 'importing it')
      chosen = user_code.load_verifier(setup.verifier)
      say('verifier', setup.verifier, _TRYING)
      for trial in reward_functions.TRIALS:
        _checked(chosen.judge(trial['response'], verifier.Truth(trial['answer'])))
  for spec in setup.rewards:
    with user_code.refusing('grading.rewards', spec):
      say('rewards', spec, 'importing it')
      loaded.append(reward_functions.load(spec))
      say('rewards', spec, _TRYING)
      _try(loaded[-1], setup)
  return chosen, loaded


def _checked(judgement: Judgement) -> Judgement:
  """Raises ValueError where a user's verifier returned something else."""
  outcome, given = judgement
  if outcome not in verifier.OUTCOMES or not (given is None or isinstance(given, str)):
    raise ValueError(f'judge returned {judgement!r}, not one of {verifier.OUTCOMES} and a text')
  return judgement


def _try(reward: RewardFunction, setup: Setup) -> None:
  """Raises ValueError if it gives no reward for the trials, or asks for a column that is missing.

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
    except ERRORS as error:
      tried = tuple(trials[0][name] for name in ('response', 'answer', 'outcome'))
      shown = f'a batch of {len(trials)} responses' if setup.is_batched else tried
      raise ValueError(f'tried on {shown}: {summarize(error)}') from error


if __name__ == '__main__':
  main()
