"""Checks for contradictory algorithm settings. Pure functions."""

import math

from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.errors import InputError

_PPO_EPSILON = 0.2  # arXiv:1707.06347; an upper bound above it is clip-higher


def check(
  replay_config: replay.ReplayConfig,
  objective_config: objective.ObjectiveConfig,
  num_questions: int,
  num_rollouts: int,
) -> None:
  """Raise InputError if nothing could ever be replayed or a setting would have no effect.

  Called before training starts. `num_questions` (Q) is per step, `num_rollouts` (K) per question.
  """
  _check_bounds(replay_config, num_rollouts)
  _check_ratio(replay_config, num_questions)
  _check_clipping(objective_config, replays=replay_config.ratio > 0)


def _check_bounds(config: replay.ReplayConfig, num_rollouts: int) -> None:
  """Check that the bounds allow at least one group to be recorded."""
  most = num_rollouts - replay.retires(config)  # the most successes of a group that is recorded
  recorded = [replay.is_recorded(config, k / num_rollouts) for k in range(1, most + 1)]
  if config.ratio > 0 and not any(recorded):
    raise InputError(
      f'config.replay.lower_bound={config.lower_bound} and '
      f'config.replay.upper_bound={config.upper_bound} exclude every group, so nothing would '
      f'ever be replayed. With config.rollout.group_size={num_rollouts}, no number of successes '
      f'from 1 to {most} gives a pass rate above the lower bound and at most the upper bound. '
      'Lower the lower bound or raise the upper bound.'
    )


def _check_ratio(config: replay.ReplayConfig, num_questions: int) -> None:
  """Check that a ratio above 0 amounts to at least one question per step."""
  if config.ratio == 0 or replay.most_replayed(config, num_questions):
    return
  ratio = math.ceil(1e6 / num_questions) / 1e6  # rounded up so that the printed value is enough
  questions = math.ceil((1 - replay.ROUNDING) / config.ratio)
  enough = f'config.replay.ratio to at least {ratio:g} or ' if num_questions > 1 else ''
  raise InputError(
    f'config.replay.ratio={config.ratio} of config.rollout.questions={num_questions} is less than '
    f'one question, so nothing would ever be replayed. Set {enough}config.rollout.questions to at '
    f'least {questions}. For plain GRPO, set config.replay.ratio=0.'
  )


def _check_clipping(config: objective.ObjectiveConfig, replays: bool) -> None:
  """Check that clipping variants are set only if ratios are clipped in every step."""
  if objective.clips_fresh_ratios(config, replay_started=replays):
    return
  variants = {
    'dual_clip': config.dual_clip < float('inf'),
    'clip_epsilon_high': config.clip_epsilon_high > max(config.clip_epsilon, _PPO_EPSILON),
    # Without clipping, CISPO has the same gradient as PPO: A r grad(log pi) = A grad(r).
    'policy_loss': config.policy_loss == 'cispo',
  }
  for name, is_set in variants.items():
    if is_set:
      when = ' once replay starts' if config.clip_schedule == 'until_replay' else ''
      raise InputError(
        f'config.objective.{name}={getattr(config, name)!r} has no effect, because '
        f"config.objective.clip_schedule='{config.clip_schedule}' clips no ratios{when}. Set "
        "config.objective.clip_schedule='always'."
      )
