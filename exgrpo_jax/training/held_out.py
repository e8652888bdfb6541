"""Responses to held-out questions, with whose gradient a step's own is compared."""

import dataclasses
from collections.abc import Sequence

from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch, Plan, QuestionSet
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.experiment.generation import stages_of
from exgrpo_jax.learner import alignment
from exgrpo_jax.policy import model
from exgrpo_jax.rollout.stages import plan_apart
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.training.run import Run


def check(config: alignment.Config, evaluations: Sequence[QuestionSet]) -> None:
  """InputError where the first of a run's evaluations has too few questions to draw from."""
  if config.every and len(evaluations[0].questions) < config.questions:
    raise InputError(
      f'config.alignment.questions={config.questions} must be at most the '
      f'{counted(len(evaluations[0].questions), "question")} of '
      f'{evaluations[0].spec}: none is drawn twice.'
    )


def measure_alignment(run: Run, params: model.Params, plan: Plan, batch: Batch) -> dict[str, float]:
  """`alignment.measure` of a step's rows, before its update; empty where it is not due.

  Besides, 'alignment/zero_variance' is the share of held-out groups that teach nothing.
  """
  config = run.experiment.config
  if not config.alignment.is_due(plan.step):
    return {}
  with run.clock('alignment'):
    clip = objective.clips_fresh_ratios(config.objective, plan.replay_started)
    held_out = collect(run, params, plan.step)
    samples = config.rollout.samples
    advantage_QK = held_out.advantage_B.reshape(-1, config.alignment.samples)
    return {
      # Where it is 1, there is no held-out gradient, and nothing else to say.
      'alignment/zero_variance': float((advantage_QK == 0).all(axis=1).mean()),
      **alignment.measure(run.update, params, batch, samples, clip, held_out, run.initial),
    }


def collect(run: Run, params: model.Params, step: int) -> Batch:
  """Fresh responses to held-out questions, sampled, graded and assembled as a training step's.

  `params` are those that are trained. What is drawn depends on seed and step alone, so a resumed
  run draws the same.
  """
  config, data = run.experiment.config, run.evaluations[0]
  rollout = stages_of(
    run.experiment,
    data,
    Purpose.ALIGNMENT,
    rollout=dataclasses.replace(config.rollout, samples=config.alignment.samples, carry=False),
    # Held-out questions count whatever their difficulty.
    replay=dataclasses.replace(config.replay, difficulty='all'),
  )
  rng = randomness.generator(config.seed, Purpose.ALIGNMENT, step)
  rows = rng.choice(len(data.questions), config.alignment.questions, replace=False).tolist()
  plan = plan_apart(data, rows, step)
  decode_params = model.decode_layout(
    run.experiment.model, run.policy(params), run.experiment.meshes
  )
  responses, _ = rollout.generate(decode_params, plan, run.grader.submit)
  graded = rollout.grade(plan, responses, run.grader)
  return rollout.assemble(graded, [None] * len(rows), [None] * len(rows))
