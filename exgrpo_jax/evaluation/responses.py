"""Responses of a policy to prompts of a user."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from exgrpo_jax.datatypes import Message, Response
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment.generation import make_sampler
from exgrpo_jax.experiment.policies import Policy
from exgrpo_jax.policy import model
from exgrpo_jax.rollout.sampler import requests_for
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
  config = dataclasses.replace(experiment.config, rollout=sized)
  sampler = make_sampler(
    dataclasses.replace(experiment, config=config),
    Purpose.GENERATE,
    seed=seed,
    distribution=evaluation.distribution,
  )
  requests = requests_for(encoded, range(len(prompts)), samples, 0, sized.max_response)
  with jax.set_mesh(experiment.meshes.training):
    decode_params = model.decode_layout(experiment.model, policy.params, experiment.meshes)
    responses, _ = sampler.generate(decode_params, requests)
  return [responses[start : start + samples] for start in range(0, len(responses), samples)]


def render(policy: Policy, text: str) -> str:
  """A user's text as the prompt that the model reads."""
  experiment = policy.experiment
  return experiment.tokenizer.render([Message('user', text)], experiment.config.prompt)
