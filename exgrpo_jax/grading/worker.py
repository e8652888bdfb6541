"""The worker process, which judges one response at a time.

programs.py builds the setup, and ../workers/server.py delivers these requests:

  {'config', 'requirements', 'row', the setup: the fields of both configs; a data row for trying the
   'is_batched'}                    rewards that read rows, or None; True for batched rewards.
                                    The reply is {'asks': names of the values that the verifier and
                                    the rewards need besides `WORKER_FACTS`}
  [kind]                            the reply is {} once the package that judges this kind has been
                                    imported
  [response, answer, kind, facts]   the reply contains the fields of a Verdict
  [reward index, [facts, …]]        only for batched rewards; the reply is {'rewards': [number, …]}

Facts map parameter names to values (reward_functions.py). The worker must not import jax.
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

MAX_ANSWER = 1024  # characters of an extracted answer to report

# Facts that the worker already has, so requests omit them from `facts`.
WORKER_FACTS = ('response', 'answer', 'outcome', 'overlong_buffer')

_TRYING = 'trying it on three responses'


def main() -> None:
  """Serve until the socket is closed or the parent exits."""
  server.serve(_load)


def _load(setup: Mapping[str, Any], say: Say) -> tuple[Reply, Callable[[Sequence[Any]], Reply]]:
  """Import and try the config's verifier and rewards; see server.Load."""
  config = GradingConfig(**setup['config'])
  requirements = verifier.VerifierConfig(**setup['requirements'])
  is_batched = setup['is_batched']
  unbatched = [spec for spec in config.rewards if spec not in config.batched]
  instance = None if is_batched else _verifier(config.verifier, say)
  rewards = [
    _reward(spec, config, is_batched, setup['row'], say)
    for spec in (config.batched if is_batched else unbatched)
  ]
  config_facts = {'overlong_buffer': config.overlong_buffer}

  def answer(request: Sequence[Any]) -> Reply:
    if request == [reasoning_gym.KIND]:
      reasoning_gym.load()
      return {}
    if instance:
      return _grade(_Judge(config, requirements, instance, rewards), *request)
    index, rows = request
    return {'rewards': rewards[index].of_batch([{**row, **config_facts} for row in rows])}

  names = {name for reward in rewards for name in (*reward.required, *reward.optional)}
  names |= {reasoning_gym.COLUMN} if instance else set()
  return {'asks': sorted(names.difference(() if is_batched else WORKER_FACTS))}, answer


def bounded(response: str, max_length: int) -> str | None:
  """Return the part of a response that is judged, at most `max_length` characters.

  If a response is longer, its beginning is dropped, provided that the rest still contains
  '</think>'. So only reasoning is lost, never the answer. Without a '</think>' in the rest, the
  result is None, because the end of the reasoning must not be mistaken for an answer.
  """
  if len(response) <= max_length:
    return response
  end = response[-max_length:]
  return end if '</think>' in end else None


class _Judge(NamedTuple):
  """The settings, verifier and rewards for judging a response."""

  config: GradingConfig
  requirements: verifier.VerifierConfig
  verifier: Verifier
  rewards: Sequence[RewardFunction]


def _grade(judge: _Judge, response: str, truth: str, kind: str, facts: Mapping[str, Any]) -> Reply:
  place = judge.config.verifier  # the code that is running, for error messages
  try:
    text = bounded(response, judge.config.max_length)
    outcome, answer = 'no answer', None
    if text is not None:
      question = verifier.Truth(truth, kind, facts)
      judgement = verifier.judge_with(judge.verifier, text, question, judge.requirements)
      outcome, answer = checked(judgement)
    values = (response, truth, outcome, judge.config.overlong_buffer)
    row = {**facts, **dict(zip(WORKER_FACTS, values, strict=True))}
    components = {}
    for reward in judge.rewards:
      place = reward.spec
      components[reward_functions.name_of(reward.spec)] = reward.of_one(row)
  except ERRORS as error:  # only this response fails
    return server.failure_reply(error, f'{place}: ')
  return {'outcome': outcome, 'components': components, 'answer': answer and answer[:MAX_ANSWER]}


def _verifier(spec: str, say: Say) -> Verifier:
  """Import the verifier and try it; raises InputError if it cannot be used."""
  with user_code.refusing('grading.verifier', spec):
    say('grading.verifier', spec, 'importing it')
    instance = verifier.load(spec)
    say('grading.verifier', spec, _TRYING)
    for trial in reward_functions.TRIALS:
      checked(instance.judge(trial['response'], verifier.Truth(trial['answer'])))
  return instance


def _reward(
  spec: str, config: GradingConfig, is_batched: bool, row: Mapping[str, Any] | None, say: Say
) -> RewardFunction:
  """Import a reward and try it; raises InputError if it cannot be used.

  A reward that reads a row is tried only if `row` is given. Other rewards are tried only if `row`
  is None.
  """
  with user_code.refusing('grading.rewards', spec):
    say('grading.rewards', spec, 'importing it')
    reward = reward_functions.load(spec)
    say('grading.rewards', spec, _TRYING)
    if reward.reads_row == (row is not None):
      _try(reward, {**(row or {}), 'overlong_buffer': config.overlong_buffer}, is_batched)
  return reward


def checked(judgement: Judgement) -> Judgement:
  """Return a verifier's result; raises ValueError if it is not a valid Judgement."""
  # User code may return anything.
  is_pair = isinstance(judgement, tuple | list) and len(judgement) == 2
  outcome, answer = judgement if is_pair else ('', None)
  if outcome not in verifier.OUTCOMES or not (answer is None or isinstance(answer, str)):
    raise ValueError(
      f'judge returned {judgement!r}, but must return a pair: an outcome (one of '
      f'{verifier.OUTCOMES}), and a string or None'
    )
  return judgement


def _try(reward: RewardFunction, row: Mapping[str, Any], is_batched: bool) -> None:
  """Raise ValueError if a reward fails on the trials or requires a missing column."""
  for name in reward.columns:
    if name not in row:
      columns = [f"'{name}'" for name in row if name not in reward_functions.PARAMETERS]
      raise ValueError(
        f"it asks for '{name}', which is neither a column of the data (columns: "
        f'{", ".join(columns) or "none"}) nor one of {", ".join(reward_functions.PARAMETERS)}'
      )
  rows = [{**row, **trial} for trial in reward_functions.TRIALS]
  for trials in [rows] if is_batched else [[row] for row in rows]:
    try:
      reward.of_batch(trials) if is_batched else reward.of_one(trials[0])
    except ERRORS as error:
      values = tuple(trials[0][name] for name in ('response', 'answer', 'outcome'))
      description = f'a batch of {len(trials)} responses' if is_batched else values
      raise ValueError(f'it failed when tried on {description}: {summarize(error)}') from error


if __name__ == '__main__':
  main()
