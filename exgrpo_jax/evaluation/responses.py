"""A policy's responses to a user's prompts, and its episodes in an environment."""

import dataclasses
import numbers
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from exgrpo_jax.datatypes import Message, Question, Response
from exgrpo_jax.errors import InputError, check_argument
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import check_embedded, load_questions
from exgrpo_jax.experiment.generation import make_sampler
from exgrpo_jax.experiment.policies import Policy
from exgrpo_jax.rollout.sampler import requests_for
from exgrpo_jax.runtime.randomness import Purpose

_SHORTEST_PREFILL = 64  # tokens; prompts are padded to powers of two to limit compilation


def sample(
  policy: Policy, prompts: Iterable[str], samples: int = 1, *, seed: int = 0
) -> list[list[Response]]:
  """Sample responses to prompts, using the settings in config.evaluation.

  Each prompt is a single user message, rendered with config.prompt, and gets `samples` responses.
  The same `seed` gives the same responses.

  Log-probabilities and entropies are in nats. They refer to the sampling distribution or, if the
  temperature is 0, to the distribution at temperature 1. Raises InputError if `prompts` is not a
  list of strings, if a prompt is longer than config.rollout.max_prompt, or if an environment is
  set.
  """
  policies.check(policy)
  tokenizer, config = policy.experiment.tokenizer, policy.experiment.config
  if name := config.environment.name:
    raise InputError(
      f'config.environment.name={name!r}: the environment asks its own questions. Instead '
      'of --prompt, pass --row with the row number of a question in config.data.train.'
    )
  texts = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else []
  if not texts or not all(isinstance(text, str) for text in texts):
    raise InputError(
      f'prompts={prompts!r}: this must be a list of strings. For a single prompt, write '
      "['48+3-9+7']. For a system message, set config.prompt.system."
    )
  prompt_tokens = [np.array(tokenizer.encode(render(policy, text)), np.int32) for text in texts]
  check_embedded(policy.experiment, prompt_tokens, 'a prompt')
  longest, limit = max(map(len, prompt_tokens)), config.rollout.max_prompt
  if longest > limit:
    raise InputError(
      f'config.rollout.max_prompt={limit}: a prompt is {longest} tokens long after rendering. '
      'Shorten the prompt or raise the limit.'
    )
  return _sample(policy, prompt_tokens, range(len(texts)), samples, seed)


def play(
  policy: Policy, row: int, samples: int = 1, *, seed: int = 0
) -> tuple[np.ndarray, list[Response]]:
  """Play episodes in the environment named in the policy's config, sampling as `sample` does.

  `row` is the question's row in config.data.train. The same `seed` gives the same episodes. Returns
  the prompt's tokens and the episodes. Raises InputError if the config has no environment or the
  data has no such row.
  """
  experiment = policy.experiment
  if not experiment.config.environment.name:
    raise InputError(
      f"--row={row}: config.environment.name='', so there is no episode to play. Use --prompt "
      'instead.'
    )
  data = load_questions(experiment, experiment.config.data.train)
  if row not in range(len(data.questions)):
    raise InputError(
      f'--row={row}: {data.spec} only has rows 0 to {len(data.questions) - 1}. Choose one of them.'
    )
  (question,) = data.questions.read([row])
  (episodes,) = _sample(policy, [data.prompts[row]], [row], samples, seed, [question])
  return data.prompts[row], episodes


def check_samples(samples: int) -> None:
  """Raise InputError unless the number of responses per prompt is a positive integer."""
  check_argument('samples', samples, numbers.Integral, 'an integer number of responses per prompt')
  if samples < 1:
    raise InputError(f'samples={samples}: the number of responses must be at least 1.')


def _sample(
  policy: Policy,
  prompts: Sequence[np.ndarray],
  rows: Sequence[int],
  samples: int,
  seed: int,
  questions: Sequence[Question] = (),
) -> list[list[Response]]:
  """Sample responses to each prompt, with a decoder just large enough for these prompts."""
  check_samples(samples)
  check_argument('seed', seed, numbers.Integral, 'an integer')
  experiment, longest = policy.experiment, max(map(len, prompts))
  rollout = experiment.config.rollout
  rollout = dataclasses.replace(
    rollout,
    questions=len(prompts),
    partial=False,  # its limits on the number of prompts apply only to training
    slots=min(rollout.slots, len(prompts) * samples),
    max_prompt=min(rollout.max_prompt, max(_SHORTEST_PREFILL, 1 << (longest - 1).bit_length())),
  )
  config = dataclasses.replace(experiment.config, rollout=rollout)
  sampler = make_sampler(
    dataclasses.replace(experiment, config=config),
    Purpose.GENERATE,
    seed=seed,
    distribution=experiment.config.evaluation.distribution,
  )
  requests = requests_for(prompts, rows, samples, 0, rollout.max_response, questions)
  with jax.set_mesh(experiment.meshes.training):
    responses, _ = sampler.generate(policy.decode_params, requests)
  return [responses[start : start + samples] for start in range(0, len(responses), samples)]


def render(policy: Policy, text: str) -> str:
  """Render a user's text as the prompt that the model reads."""
  experiment = policy.experiment
  return experiment.tokenizer.render([Message('user', text)], experiment.config.prompt)
