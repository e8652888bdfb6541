"""What a real run measures of the alignment of its gradients, and that it changes nothing else."""

import copy
import types

import jax
import numpy as np
import pytest

from exgrpo_jax.experiment import experiment
from exgrpo_jax.grading import workers
from exgrpo_jax.learner import alignment, gradients
from exgrpo_jax.reporting import metrics
from tests.helpers import recording, tiny

PARTS = ('fresh', 'replayed', 'fresh_in_mixed_groups')
NUM_STEPS, EVERY = 8, 2
QUESTIONS, SAMPLES = 7, 5  # held out


def changed(values, every):
  """One minibatch a step, and a loss that is the policy's objective alone."""
  config = copy.deepcopy(values)
  config.num_steps = config.evaluation.every = NUM_STEPS
  config.warm_start.num_updates = 0
  config.optimizer.minibatches = 1
  config.objective.entropy_bonus = 0.0
  config.checkpoint.update(dict(every=EVERY, keep=NUM_STEPS))
  # The evaluation set has too few questions to draw from.
  config.data.validation = (config.data.train,)
  config.alignment.update(dict(every=every, questions=QUESTIONS, samples=SAMPLES))
  return config


def flat(gradient):
  """All entries of a gradient, float64."""
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)]).astype(np.float64)


def train(values, workdir, compiled):
  """Trains in this process; returns the gradients compared and applied, by step from 1 on."""
  opened = experiment.open_experiment(values, str(workdir))
  run = recording.Recording(workdir, compiled, values, steps={})
  compared, applied = [], []
  with pytest.MonkeyPatch.context() as patch, run.compiling():
    patch.setattr(workers, 'COMMAND', tiny.WORKER)
    policy_gradient, apply_gradient = alignment.policy_gradient, gradients.apply_gradient

    def note_compared(spec, params, batch, clip, initial):
      gradient = policy_gradient(spec, params, batch, clip, initial)
      compared.append((len(applied) + 1, batch, flat(gradient)))
      return gradient

    def note_applied(spec, state, gradient):
      applied.append(flat(gradient))
      return apply_gradient(spec, state, gradient)

    patch.setattr(alignment, 'policy_gradient', note_compared)
    patch.setattr(gradients, 'apply_gradient', note_applied)
    recording.run_training(opened, values=values)
  return compared, applied


@pytest.fixture(scope='module')
def run(values, compiled, tmp_path_factory):
  """A run that compares every other step."""
  config, workdir = changed(values, EVERY), tmp_path_factory.mktemp('held_out') / 'run'
  compared, applied = train(config, workdir, compiled)
  return types.SimpleNamespace(
    config=config,
    workdir=workdir,
    compared=compared,
    applied=applied,
    records={record['step']: record for record in metrics.read(workdir)},
  )


def test_every_other_step_says_how_its_parts_lie_to_the_held_out_gradient(run):
  all_parts = 0
  for step in range(1, NUM_STEPS + 1):
    names = {name for name in run.records[step] if name.startswith('alignment/')}
    names -= {'alignment/zero_variance'}
    of_step = [(batch, gradient) for number, batch, gradient in run.compared if number == step]
    assert bool(of_step) == ('time/alignment' in run.records[step] and step % EVERY == 0)
    if of_step:
      (held_out, towards), *parts = of_step
      assert len(held_out.advantage_B) == QUESTIONS * SAMPLES and not held_out.is_replay_B.any()
      assert len(names) == 2 * len(parts)
      silent = [not any(group) for group in np.split(held_out.advantage_B, QUESTIONS)]
      assert run.records[step]['alignment/zero_variance'] == pytest.approx(np.mean(silent))
      cosines = [part @ towards / np.sqrt(part @ part * (towards @ towards)) for _, part in parts]
      projections = [part @ towards / np.sqrt(towards @ towards) for _, part in parts]
      for ending, expected in (('', cosines), ('_projection', projections)):
        found = [run.records[step].get(f'alignment/{name}{ending}') for name in PARTS]
        np.testing.assert_allclose([x for x in found if x is not None], expected, rtol=1e-3)
      all_parts += len(parts) == 3
  assert all_parts > 1


def test_the_parts_add_up_to_the_steps_gradient(run):
  """To the one that the optimiser got."""
  steps = 0
  for step in range(EVERY, NUM_STEPS + 1, EVERY):
    (_, *parts) = [gradient for number, _, gradient in run.compared if number == step]
    step_gradient = run.applied[step - 1]
    np.testing.assert_allclose(sum(parts), step_gradient, atol=1e-5 * np.abs(step_gradient).max())
    norm = run.records[step]['gradient_norm']
    assert np.linalg.norm(sum(parts)) == pytest.approx(norm, rel=1e-4)
    steps += len(parts) == 3
  assert steps > 1


def test_each_row_of_a_step_is_in_one_part(run):
  for step in range(EVERY, NUM_STEPS + 1, EVERY):
    (_, *parts) = [batch for number, batch, _ in run.compared if number == step]
    is_replay_B = parts[0].is_replay_B
    is_mixed_B = np.repeat(is_replay_B.reshape(-1, tiny.ROLLOUTS).any(axis=1), tiny.ROLLOUTS)
    for part in parts:
      inside_B = part.advantage_B != 0
      kinds = np.unique(np.stack([is_mixed_B, is_replay_B])[:, inside_B], axis=1)
      assert kinds.shape == (2, 1)
      # All rows count in the normaliser.
      np.testing.assert_array_equal(part.response_mask_BT, parts[0].response_mask_BT)


def test_measuring_changes_nothing_else(run, values, compiled, tmp_path):
  compared, _ = train(changed(values, 0), tmp_path / 'off', compiled)
  assert compared == []
  without = [
    {name: value for name, value in record.items() if not name.startswith('alignment/')}
    for record in tiny.untimed_records(run.workdir)
  ]
  assert tiny.untimed_records(tmp_path / 'off') == without
