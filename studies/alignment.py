"""Gradient alignment: do the gradients of a step's parts agree with held-out questions?

Each row of a step belongs to one of three parts. 'fresh' contains the rows of groups without
replay, 'replayed' contains the stored successes, and 'fresh_in_mixed_groups' contains the fresh
rows of groups with a stored success. The policy gradients of the parts add up to the step's
gradient. Each part's gradient is compared with the on-policy gradient of held-out questions. Both
use the parameters before the update, so the step is treated as one minibatch in which fresh tokens
have ratio 1. The entropy bonus and the KL term do not belong to any part and are left out.
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
  """A callback that compares gradients in some steps without changing the run.

  The held-out questions come from the first dataset in config.data.validation or, if this setting
  is empty, in config.data.evaluation.
  """

  every: int  # steps between two comparisons
  questions: int = 32  # held-out questions, drawn again for each comparison
  samples: int = 8  # responses to each held-out question, at the training temperature

  def __call__(self, run: Run, params: model.Params, experience: Experience) -> dict[str, float]:
    """Return the metrics of `measure` and 'alignment/zero_variance', or {} if none are due.

    'alignment/zero_variance' is the share of held-out groups whose rewards are all equal. Raises
    InputError in the first step if there are too few held-out questions.
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
      # If this share is 1, there is no held-out gradient, and `measure` returns no metrics.
      'alignment/zero_variance': float((advantage_QK == 0).all(axis=1).mean()),
      **measure(run.update, params, experience.batch, samples, clip, held_out, run.initial),
    }

  def _check(self, run: Run) -> None:
    given = f'--align_every={self.every}'
    if not run.evaluations:
      raise InputError(
        f'{given} needs held-out questions. Set config.data.validation or config.data.evaluation.'
      )
    data = run.evaluations[0]
    if len(data.questions) < self.questions:
      raise InputError(
        f'{given} needs {self.questions} distinct questions for a comparison, but {data.spec} has '
        f'only {counted(len(data.questions), "question")}. Use a larger dataset.'
      )

  def collect(self, run: Run, params: model.Params, step: int) -> Batch:
    """Sample, grade and assemble fresh responses to held-out questions, as a step does.

    `params` are the trained parameters. The questions depend only on the seed and the step, so a
    resumed run draws the same questions.
    """
    config, data = run.experiment.config, run.evaluations[0]
    rollout = stages_of(
      run.experiment,
      data,
      Purpose.ALIGNMENT,
      rollout=dataclasses.replace(
        config.rollout, group_size=self.samples, partial=False, dynamic_sampling=1.0
      ),
      # Use held-out questions of any difficulty.
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
    spec: the configuration of the step's updates.
    params: the trained parameters before the step's first update.
    batch: all rows of the step as NumPy arrays; each group is `num_rollouts` consecutive rows.
    num_rollouts: K.
    clip: whether the step clips fresh ratios.
    held_out: fresh rows for other questions, sampled from the policy of `params`, with advantages.
    initial: see `gradients.minibatch_gradient`.

  Returns:
    'alignment/{part}', the cosine of the two gradients, in [-1, 1], and
    'alignment/{part}_projection', the component of the part's gradient along the held-out gradient,
    in the unit of 'gradient_norm'. The projections of all parts add up to the projection of the
    step's gradient. A part is omitted if its gradient is 0 or not finite. All parts are omitted if
    the held-out gradient is 0 or not finite.
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

  The copies keep the tokens of the other rows and the normalizers of the whole batch.
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
  """Compute the gradient of a batch's policy terms, skipping rows with advantage 0."""
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
  """Return (cosine, projection) of `gradient` along `towards`, or NaN if `towards` is 0."""

  # Products are summed in float32. An accelerator may compute a dot product in bfloat16.
  def inner(left: model.Params, right: model.Params) -> jax.Array:
    products = jax.tree.map(lambda x, y: jnp.sum(x * y, dtype=jnp.float32), left, right)
    return jax.tree.reduce(jnp.add, products)

  projection = inner(gradient, towards) / jnp.sqrt(inner(towards, towards))
  return projection / jnp.sqrt(inner(gradient, gradient)), projection
