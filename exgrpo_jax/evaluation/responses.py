"""Responses of a policy to prompts of a user."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from exgrpo_jax.datatypes import Message, Response
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.policies import Policy
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import scheduler
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

_SHORTEST_PREFILL = 64  # tokens: prompts are padded to a power of two, so that few programs compile


def sample(
  policy: Policy, prompts: Sequence[str], samples: int = 1, *, seed: int = 0
) -> list[list[Response]]:
  """Responses to some prompts, sampled as config.evaluation of the policy's experiment says.

  Args:
    policy: which one.
    prompts: the text of a user each; rendered by config.prompt.
    samples: responses to each prompt.
    seed: of sampling; the same seed draws the same.

  Returns:
    For each prompt its responses, log-probabilities and entropies in nats under the distribution
    that was sampled from; at temperature 0, under that of temperature 1.

  Raises:
    InputError: a prompt is longer than config.rollout.max_prompt.
  """
  experiment, tokenizer = policy.experiment, policy.experiment.tokenizer
  rollout, evaluation = experiment.config.rollout, experiment.config.evaluation
  encoded = [np.array(tokenizer.encode(render(policy, text)), np.int32) for text in prompts]
  longest = max(map(len, encoded))
  if longest > rollout.max_prompt:
    raise InputError(
      f'a prompt has {longest} tokens, as the model reads it, and '
      f'config.rollout.max_prompt={rollout.max_prompt}: shorten it, or raise the limit.'
    )
  sized = dataclasses.replace(
    rollout,
    questions=len(prompts),
    slots=min(rollout.slots, len(prompts) * samples),
    max_prompt=min(rollout.max_prompt, max(_SHORTEST_PREFILL, 1 << (longest - 1).bit_length())),
  )
  with jax.set_mesh(experiment.meshes.training):
    responses = scheduler.generate(
      experiment.model,
      model.decode_layout(experiment.model, policy.params, experiment.meshes),
      [prompt for prompt in encoded for _ in range(samples)],
      [question for question in range(len(prompts)) for _ in range(samples)],
      list(range(samples)) * len(prompts),
      randomness.key(seed, Purpose.GENERATE),
      sized.decode_spec(tokenizer, evaluation.distribution),
      experiment.meshes.decoding,
    )
  return [responses[start : start + samples] for start in range(0, len(responses), samples)]


def render(policy: Policy, text: str) -> str:
  """A user's text as the prompt that the model reads."""
  experiment = policy.experiment
  return experiment.tokenizer.render([Message('user', text)], experiment.config.prompt)
