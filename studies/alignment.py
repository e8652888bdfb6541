"""Gradient alignment: do the gradients of a step's parts agree with held-out questions?

Each row of a step belongs to one part: 'fresh', in groups without replay; 'replayed', the stored
successes; 'fresh_in_mixed_groups', the fresh rows in groups with a stored success. The policy
gradients of the parts add up to the step's. Each is compared with the on-policy gradient of
held-out questions, at the parameters before the update. So the step counts as one minibatch, in
which fresh tokens have ratio 1. Entropy bonus and KL term belong to no part and are left out.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch, Experience
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.experiment.generation import stages_of
from exgrpo_jax.learner import gradients
from exgrpo_jax.learner.gradients import UpdateSpec
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import stages
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose
from exgrpo_jax.training.run import Run


@dataclasses.dataclass(frozen=True)
class Alignment:
  """A callback of the loop that compares gradients in some steps, without changing any.

  The held-out questions come from the first set of config.data.validation or, without one, of
  config.data.evaluation.
  """

  every: int  # steps between two comparisons
  questions: int = 32  # held-out ones, drawn again for each comparison
  samples: int = 8  # responses to each of them, at the training temperature

  def __call__(self, run: Run, params: model.Params, experience: Experience) -> dict[str, float]:
    """Return `measure` of the step, and 'alignment/zero_variance'; nothing if it is not due.

    'alignment/zero_variance' is the share of held-out groups that teach nothing. Raises InputError
    in the first step if there are too few held-out questions.
    """
    self._check(run)
    plan, config = experience.plan, run.experiment.config
    if plan.step % self.every:
      return {}
    clip = objective.clips_fresh_ratios(config.objective, plan.replay_started)
    held_out = self.collect(run, params, plan.step)
    advantage_QK = held_out.advantage_B.reshape(-1, self.samples)
    samples = config.rollout.group_size
    return {
      # If it is 1, there is no held-out gradient, and `measure` returns nothing.
      'alignment/zero_variance': float((advantage_QK == 0).all(axis=1).mean()),
      **measure(run.update, params, experience.batch, samples, clip, held_out, run.initial),
    }

  def _check(self, run: Run) -> None:
    given = f'--align_every={self.every}'
    if not run.evaluations:
      raise InputError(
        f'{given} needs config.data.validation or config.data.evaluation: their questions are the '
        'held-out ones.'
      )
    data = run.evaluations[0]
    if len(data.questions) < self.questions:
      raise InputError(
        f'{given} draws {self.questions} questions for a comparison, none twice, and {data.spec} '
        f'has {counted(len(data.questions), "question")}.'
      )

  def collect(self, run: Run, params: model.Params, step: int) -> Batch:
    """Sample, grade and assemble fresh responses to held-out questions, as a step does.

    `params` are the trained parameters. The questions depend only on seed and step, so a resumed
    run draws the same.
    """
    config, data = run.experiment.config, run.evaluations[0]
    rollout = stages_of(
      run.experiment,
      data,
      Purpose.ALIGNMENT,
      rollout=dataclasses.replace(config.rollout, group_size=self.samples, partial=False),
      # Held-out questions count at any difficulty.
      replay=dataclasses.replace(config.replay, difficulty='all'),
    )
    rng = randomness.generator(config.seed, Purpose.ALIGNMENT, step)
    rows = rng.choice(len(data.questions), self.questions, replace=False).tolist()
    plan = stages.plan_apart(data, rows, step)
    decode_params = model.decode_layout(
      run.experiment.model, run.policy(params), run.experiment.meshes
    )
    responses, _ = stages.generate(rollout, decode_params, plan, run.grader.submit)
    graded = stages.collect_verdicts(rollout, plan, responses, run.grader)
    return stages.assemble(rollout, graded, [None] * len(rows), [None] * len(rows))


def measure(
  spec: UpdateSpec,
  params: model.Params,
  batch: Batch,
  num_rollouts: int,
  clip: bool,
  held_out: Batch,
  initial: model.Params | None = None,
) -> dict[str, float]:
  """Compare the gradient of each part of a step with the held-out gradient.

  Args:
    spec: the step's updates.
    params: the trained parameters before the step's first update.
    batch: all rows of the step, NumPy; groups of `num_rollouts` consecutive rows.
    num_rollouts: K.
    clip: whether the step clips fresh ratios.
    held_out: fresh rows of other questions, written by the policy of `params`, with advantages.
    initial: see `gradients.minibatch_gradient`.

  Returns:
    'alignment/{part}', the cosine of the two gradients, in [-1, 1], and
    'alignment/{part}_projection', the part's gradient along the held-out direction, in the unit of
    'gradient_norm'. The projections of all parts add up to the step's. A part is absent if its
    gradient is 0 or not finite. All parts are absent if the held-out gradient is.
  """
  metrics = {}
  if not _has_signal(held_out):
    return metrics
  towards = policy_gradient(spec, params, held_out, clip, initial)
  for name, part in parts(batch, num_rollouts).items():
    if _has_signal(part):
      compared = _compare(policy_gradient(spec, params, part, clip, initial), towards)
      cosine, projection = (float(value) for value in jax.device_get(compared))
      if math.isfinite(cosine):
        metrics |= {f'alignment/{name}': cosine, f'alignment/{name}_projection': projection}
  return metrics


def parts(batch: Batch, num_rollouts: int) -> dict[str, Batch]:
  """Copy the batch once for each part, with advantage 0 for all other rows.

  The tokens of the other rows stay, and so do the normalisers of the whole batch.
  """
  is_replay_B = np.asarray(batch.is_replay_B)
  is_mixed_B = np.repeat(is_replay_B.reshape(-1, num_rollouts).any(axis=1), num_rollouts)
  rows = {
    'fresh': ~is_mixed_B,
    'replayed': is_replay_B,
    'fresh_in_mixed_groups': is_mixed_B & ~is_replay_B,
  }
  return {
    name: dataclasses.replace(batch, advantage_B=np.where(part_B, batch.advantage_B, np.float32(0)))
    for name, part_B in rows.items()
  }


def policy_gradient(
  spec: UpdateSpec,
  params: model.Params,
  batch: Batch,
  clip: bool,
  initial: model.Params | None = None,
) -> model.Params:
  """Compute the gradient of a batch's policy terms only; rows of advantage 0 cost nothing."""
  alone = dataclasses.replace(
    spec,
    microbatch=dataclasses.replace(spec.microbatch, drop_zero_advantage=True),
    objective=dataclasses.replace(
      spec.objective, entropy_bonus=0.0, kl_coefficient=0.0, balance_coefficient=0.0
    ),
  )
  gradient, _ = gradients.minibatch_gradient(alone, params, batch, clip, True, initial)
  return gradient


def _has_signal(batch: Batch) -> bool:
  """Return True if any response token has a nonzero advantage."""
  return bool((np.any(batch.response_mask_BT, axis=1) & (np.asarray(batch.advantage_B) != 0)).any())


@jax.jit
def _compare(gradient: model.Params, towards: model.Params) -> tuple[jax.Array, jax.Array]:
  """Return (cosine, projection) of `gradient` with respect to `towards`; NaN if that is 0."""

  # Sums are in float32. There is no dot because an accelerator may compute it in bfloat16.
  def inner(left: model.Params, right: model.Params) -> jax.Array:
    products = jax.tree.map(lambda x, y: jnp.sum(x * y, dtype=jnp.float32), left, right)
    return jax.tree.reduce(jnp.add, products)

  projection = inner(gradient, towards) / jnp.sqrt(inner(towards, towards))
  return projection / jnp.sqrt(inner(gradient, gradient)), projection
