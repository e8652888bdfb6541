"""Constructors for an experiment's sampler and for the stages of its steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from exgrpo_jax.data.tasks.catalogue import STEP_CHECKERS, step_checker
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.environments import pool
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.experiment.experiment import Experiment
from exgrpo_jax.rollout import stages
from exgrpo_jax.rollout.episodes import EpisodeSampler
from exgrpo_jax.rollout.sampler import Sampler
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.rollout.token_sampling import Distribution
from exgrpo_jax.runtime import hosts, randomness
from exgrpo_jax.runtime.randomness import Purpose


def make_rollout(experiment: Experiment, data: QuestionSet) -> stages.RolloutSetup:
  """Make a run's rollout setup. Raises InputError if there are too few suitable questions."""
  config, size = experiment.config, len(data.questions)
  if size < config.rollout.questions:
    raise InputError(
      f'config.rollout.questions={config.rollout.questions}: {data.spec} has only '
      f'{counted(size, "question")}, and a step cannot draw a question twice. '
      f'Set config.rollout.questions to at most {size}.'
    )
  if size < (in_flight := config.rollout.groups_in_flight):
    raise InputError(
      f'config.rollout.partial=True: {counted(in_flight, "group")} would be in flight, but '
      f'{data.spec} has only {counted(size, "question")}, and a question cannot be in flight '
      'twice. Set config.rollout.max_groups_in_flight to at most the number of questions.'
    )
  if size < (at_once := config.rollout.questions_at_once):
    raise InputError(
      f'config.rollout.dynamic_sampling={config.rollout.dynamic_sampling}: a step may draw up to '
      f'{counted(at_once, "question")}, but {data.spec} has only {counted(size, "question")}, and '
      'a step cannot draw a question twice. Lower the value, or add questions.'
    )
  if config.replay.trajectory_selection == 'valid_steps' and not any(
    step_checker(data.questions.read([row])[0]) for row in range(size)
  ):
    raise InputError(
      "config.replay.trajectory_selection='valid_steps': this selection needs a task that can "
      f'check the steps of a response ({", ".join(STEP_CHECKERS)}), but {data.spec} contains no '
      'questions from such a task. Choose another selection.'
    )
  return stages_of(experiment, data, Purpose.ROLLOUT)


def stages_of(
  experiment: Experiment, data: QuestionSet, purpose: Purpose, **sections: Any
) -> stages.RolloutSetup:
  """Make the rollout setup for `data`; `sections` override sections of the config."""
  config = dataclasses.replace(experiment.config, **sections)
  experiment = dataclasses.replace(experiment, config=config)
  return stages.RolloutSetup(
    config=config.rollout,
    replay_config=config.replay,
    objective_config=config.objective,
    logprob_check=config.logprob_check,
    tokenizer=experiment.tokenizer,
    meshes=experiment.meshes,
    score_spec=config.rollout.score_spec(
      experiment.model, experiment.meshes.training, config.microbatch.tokens
    ),
    seed=config.seed,
    data=data,
    sampler=make_sampler(experiment, purpose, resumes=config.rollout.partial),
  )


def make_sampler(
  experiment: Experiment,
  purpose: Purpose,
  *,
  seed: int | None = None,
  distribution: Distribution | None = None,
  resumes: bool = False,
) -> Sampler:
  """Make a slot engine for an experiment's model; with an environment, make an `EpisodeSampler`.

  `config.rollout` sets the number of slots and the limits. `purpose` and `seed` (default: the run's
  seed) determine the random numbers. `distribution` defaults to the softmax at the training
  temperature. For `resumes`, see `SlotEngine`.
  """
  config = experiment.config
  seed = config.seed if seed is None else seed
  step_key = functools.partial(randomness.key, seed, purpose)
  engine = make_engine(experiment, distribution, resumes, step_key)
  if not config.environment.name:
    return engine
  return EpisodeSampler(
    engine=engine,
    environments=pool.shared_pool(config.environment),
    config=config.environment,
    tokenizer=experiment.tokenizer,
    prompts=config.prompt,
    seed=seed,
    purpose=purpose,
    # Drafts are copied from existing texts, so the order of replies would affect rounding.
    in_order=config.rollout.partial or config.rollout.drafts != '0' or hosts.are_several(),
  )


def make_engine(
  experiment: Experiment,
  distribution: Distribution | None = None,
  resumes: bool = False,
  step_key: Callable[[int], jax.Array] = jax.random.key,
) -> SlotEngine:
  """Make the slot engine for `make_sampler`. With an environment, `resumes` is always on."""
  config, has_turns = experiment.config, bool(experiment.config.environment.name)
  spec = config.rollout.decode_spec(experiment.tokenizer, distribution)
  return SlotEngine(
    model=experiment.model,
    spec=dataclasses.replace(spec, parked=spec.slots) if config.environment.keeps_caches else spec,
    mesh=experiment.meshes.decoding,
    step_key=step_key,
    resumes=resumes or has_turns,
    packs_resumed=not has_turns,
  )
