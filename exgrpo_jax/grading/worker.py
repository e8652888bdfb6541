"""The worker process, which judges responses one after another.

workers.py makes its setup, and ../workers/server.py defines how requests reach it:

  {'config', 'required', 'row',     fields of the two configs, of a row of the data to try rewards
   'is_batched'}                    that read it, and True to call the rewards that take batches;
                                    answered by {'asks': names of the values that the verifier and
                                    the rewards ask for besides `OWN`}
  [kind]                            answered by {} after the package that judges answers of this
                                    kind has been imported
  [response, answer, kind, facts]   answered by fields of a Verdict
  [index of a reward, [facts, …]]   if the rewards take batches; answered by
                                    {'rewards': [number, …]}

Facts are values by the names of parameters (reward_functions.py). The worker imports no jax.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.grading import reasoning_gym, reward_functions, verifier
from exgrpo_jax.grading.reward_functions import RewardFunction
from exgrpo_jax.grading.settings import GradingConfig
from exgrpo_jax.grading.verifier import Judgement, Verifier
from exgrpo_jax.workers import server, user_code
from exgrpo_jax.workers.server import Reply, Say
from exgrpo_jax.workers.user_code import ERRORS, summarize

MAX_ANSWER = 64  # characters of an extracted answer that are reported

# Facts about a response that the worker knows by itself.
OWN = ('response', 'answer', 'outcome', 'overlong_buffer')

_TRYING = 'trying it on three responses'


def main() -> None:
  """Serve until the socket is closed or the parent ends."""
  server.serve(_load)


def _load(setup: Mapping[str, Any], say: Say) -> tuple[Reply, Callable[[Sequence[Any]], Reply]]:
  """Import and try the verifier and rewards of the config; see server.Load."""
  config, required = GradingConfig(**setup['config']), verifier.VerifierConfig(**setup['required'])
  is_batched = setup['is_batched']
  one_by_one = [spec for spec in config.rewards if spec not in config.batched]
  chosen = None if is_batched else _verifier(config.verifier, say)
  rewards = [
    _reward(spec, config, is_batched, setup['row'], say)
    for spec in (config.batched if is_batched else one_by_one)
  ]
  own = {'overlong_buffer': config.overlong_buffer}

  def answer(request: Sequence[Any]) -> Reply:
    if request == [reasoning_gym.KIND]:
      reasoning_gym.load()
      return {}
    if chosen:
      return _grade(_Judge(config, required, chosen, rewards), *request)
    index, rows = request
    return {'rewards': rewards[index].of_batch([{**row, **own} for row in rows])}

  asked = {name for reward in rewards for name in (*reward.required, *reward.optional)}
  asked |= {reasoning_gym.COLUMN} if chosen else set()
  return {'asks': sorted(asked.difference(() if is_batched else OWN))}, answer


def bounded(response: str, max_length: int) -> str | None:
  """Return the part of a response to judge: the end of a long one, if it has the whole solution.

  If a response has more than `max_length` characters, the last `max_length` are judged if they
  contain the last '</think>', because then only thought is lost, which is never an answer.
  Otherwise None, because the end of a thought must not pass for an answer.
  """
  if len(response) <= max_length:
    return response
  end = response[-max_length:]
  return end if '</think>' in end else None


class _Judge(NamedTuple):
  """The settings, the verifier and the rewards that judge a response."""

  config: GradingConfig
  required: verifier.VerifierConfig
  verifier: Verifier
  rewards: Sequence[RewardFunction]


def _grade(judge: _Judge, response: str, answer: str, kind: str, facts: Mapping[str, Any]) -> Reply:
  place = judge.config.verifier  # the code that an error comes from
  try:
    text = bounded(response, judge.config.max_length)
    outcome, given = 'no answer', None
    if text is not None:
      truth = verifier.Truth(answer, kind, facts)
      outcome, given = _checked(verifier.judge_with(judge.verifier, text, truth, judge.required))
    own = (response, answer, outcome, judge.config.overlong_buffer)
    known = {**facts, **dict(zip(OWN, own, strict=True))}
    components = {}
    for reward in judge.rewards:
      place = reward.spec
      components[reward_functions.name_of(reward.spec)] = reward.of_one(known)
  except ERRORS as error:  # only this response has failed
    return server.failed(error, f'{place}: ')
  return {'outcome': outcome, 'components': components, 'answer': given and given[:MAX_ANSWER]}


def _verifier(spec: str, say: Say) -> Verifier:
  """Import the verifier and try it; raises InputError if it cannot be used."""
  with user_code.refusing('grading.verifier', spec):
    say('grading.verifier', spec, 'importing it')
    chosen = verifier.load(spec)
    say('grading.verifier', spec, _TRYING)
    for trial in reward_functions.TRIALS:
      _checked(chosen.judge(trial['response'], verifier.Truth(trial['answer'])))
  return chosen


def _reward(
  spec: str, config: GradingConfig, is_batched: bool, row: Mapping[str, Any] | None, say: Say
) -> RewardFunction:
  """Import a reward and try it; raises InputError if it cannot be used.

  A reward that reads the row is tried only if there is one; any other, only if there is none.
  """
  with user_code.refusing('grading.rewards', spec):
    say('grading.rewards', spec, 'importing it')
    reward = reward_functions.load(spec)
    say('grading.rewards', spec, _TRYING)
    if reward.reads_row == (row is not None):
      _try(reward, {**(row or {}), 'overlong_buffer': config.overlong_buffer}, is_batched)
  return reward


def _checked(judgement: Judgement) -> Judgement:
  """Return a judgement; raises ValueError if a user's verifier returned something else."""
  outcome, given = judgement
  if outcome not in verifier.OUTCOMES or not (given is None or isinstance(given, str)):
    raise ValueError(
      f'judge returned {judgement!r}, but must return one of {verifier.OUTCOMES} and a text or None'
    )
  return judgement


def _try(reward: RewardFunction, row: Mapping[str, Any], is_batched: bool) -> None:
  """Raise ValueError if a reward fails on the trials or asks for a column that is missing."""
  for name in reward.columns:
    if name not in row:
      columns = [f"'{name}'" for name in row if name not in reward_functions.PARAMETERS]
      raise ValueError(
        f"it asks for '{name}', which is not a column of the data (they have: "
        f'{", ".join(columns) or "none"}) and not one of {", ".join(reward_functions.PARAMETERS)}'
      )
  rows = [{**row, **trial} for trial in reward_functions.TRIALS]
  for trials in [rows] if is_batched else [[row] for row in rows]:
    try:
      reward.of_batch(trials) if is_batched else reward.of_one(trials[0])
    except ERRORS as error:
      tried = tuple(trials[0][name] for name in ('response', 'answer', 'outcome'))
      shown = f'a batch of {len(trials)} responses' if is_batched else tried
      raise ValueError(f'tried on {shown}: {summarize(error)}') from error


if __name__ == '__main__':
  main()
