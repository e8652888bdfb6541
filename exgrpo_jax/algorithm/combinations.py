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
  ratio, lower, upper = replay_config.ratio, replay_config.lower_bound, replay_config.upper_bound
  # The most successes of a group that is recorded.
  most = num_rollouts - replay.retires(replay_config)
  recorded = [replay.is_recorded(replay_config, k / num_rollouts) for k in range(1, most + 1)]
  if ratio > 0 and not any(recorded):
    raise InputError(
      f'config.replay.lower_bound={lower} and config.replay.upper_bound={upper} exclude every '
      f'group, so nothing would ever be replayed. With config.rollout.group_size={num_rollouts}, '
      f'no number of successes from 1 to {most} gives a pass rate above the lower bound and at '
      'most the upper bound. Lower the lower bound or raise the upper bound.'
    )
  if ratio > 0 and not replay.most_replayed(replay_config, num_questions):
    enough = math.ceil(1e6 / num_questions) / 1e6  # rounded up, so the printed value is enough
    advice = f'config.replay.ratio to at least {enough:g} or ' if num_questions > 1 else ''
    raise InputError(
      f'config.replay.ratio={ratio} of config.rollout.questions={num_questions} is less than one '
      f'question, so nothing would ever be replayed. Set {advice}config.rollout.questions to at '
      f'least {math.ceil((1 - replay.ROUNDING) / ratio)}. For plain GRPO, set '
      'config.replay.ratio=0.'
    )
  _check_clipping(objective_config, replays=ratio > 0)


def _check_clipping(config: objective.ObjectiveConfig, replays: bool) -> None:
  variants = {
    'dual_clip': config.dual_clip < float('inf'),
    'clip_epsilon_high': config.clip_epsilon_high > max(config.clip_epsilon, _PPO_EPSILON),
    # Without clipping, CISPO has the same gradient as PPO: A r grad(log pi) = A grad(r).
    'policy_loss': config.policy_loss == 'cispo',
  }
  for name, is_set in variants.items():
    if is_set and not objective.clips_fresh_ratios(config, replay_started=replays):
      when = ' once replay starts' if config.clip_schedule == 'until_replay' else ''
      raise InputError(
        f'config.objective.{name}={getattr(config, name)!r} has no effect, because '
        f"config.objective.clip_schedule='{config.clip_schedule}' clips no ratios{when}. Set "
        "config.objective.clip_schedule='always'."
      )
