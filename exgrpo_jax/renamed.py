"""Old names of settings and metrics, and their current names.

A config that uses an old name is rejected with a hint that gives the new name. An old workdir's
config.json and metrics.jsonl are read as if they used the new names.
"""

from collections.abc import Callable, Mapping
from typing import Any

# Old dotted key -> new key. A key without a dot is a section.
SETTINGS = {
  'gradient': 'microbatch',
  'gradient.tokens_per_microbatch': 'microbatch.tokens',
  'parity': 'logprob_check',
  'data.overlong': 'data.on_overlong',
  'data.unverifiable': 'data.on_unverifiable',
  'objective.clip': 'objective.clip_schedule',
  'objective.ratio': 'objective.importance_level',
  'objective.second_moment': 'objective.m2po_threshold',
  'objective.surrogate': 'objective.policy_loss',
  'optimizer.moments': 'optimizer.moment_dtype',
  'optimizer.skip_norm': 'optimizer.skip_above_norm',
  'replay.failed': 'replay.on_all_failed',
  'replay.keep': 'replay.store',
  'replay.row': 'replay.include_trajectory',
  'rollout.carry': 'rollout.partial',
  'rollout.in_flight': 'rollout.max_groups_in_flight',
  'rollout.max_age': 'rollout.max_staleness',
  'rollout.samples': 'rollout.group_size',
  'warm_start.enough': 'warm_start.stop_at_pass_rate',
}
# New dotted key -> its old keys in the same section, an example of its value, and the function that
# computes the value from the old values.
MERGED: dict[str, tuple[tuple[str, ...], Any, Callable[..., Any]]] = {
  f'{section}.require': (
    ('require_think', 'require_box'),
    ('think', 'box'),
    lambda think, box: ['think'] * think + ['box'] * box,
  )
  for section in ('verifier', 'evaluation')
}
MERGED['replay.correctness_range'] = (
  ('lower_bound', 'upper_bound'),
  (0.0, 1.0),
  lambda low, high: [low, high],
)
# Removed dotted key -> why it is not needed. A key without a dot is a section.
REMOVED = {
  'alignment': 'it moved to studies/. In a clone of the repository, run '
  'python -m studies train --align_every=N to compare gradients.',
  'grading.max_failures': 'a run warns if more than 1% of gradings fail. Remove this key.',
  'logprob_check.rows': 'each check compares 64 responses. Remove this key.',
  'metrics.records_every': 'each file in records/ covers 10 steps. Remove this key.',
  **dict.fromkeys(
    ('rollout.top_k', 'rollout.top_p', 'rollout.min_p'),
    'training samples from the full softmax. Remove this key.',
  ),
}
# Removed dotted key -> the value that is equivalent to today's behavior. A workdir with another
# value keeps the key, so that resuming it is refused.
NEUTRAL = {'rollout.top_k': 0, 'rollout.top_p': 1.0, 'rollout.min_p': 0.0}
# New dotted key -> {old value: current value}.
VALUES = {
  'objective.old_logprobs': {'sampler': 'rollout'},
  'objective.shaping': {'fraction': 'policy_shaping', 'normalised': 'unit_slope'},
}
METRICS = {
  'carry/age_max': 'staleness/max',
  'carry/age_mean': 'staleness/mean',
  'carry/groups_left': 'staleness/groups_left',
  'carry/outside_clip_range': 'staleness/outside_clip_range',
  'carry/ratio_max': 'staleness/ratio_max',
  'carry/ratio_mean': 'staleness/ratio_mean',
  'carry/token_share': 'staleness/token_share',
  'clip_share': 'policy/clip_fraction',
  'outside_clip_range': 'policy/outside_clip_range',
  'parity/max': 'rollout_mismatch/logprob_max',
  'parity/mean': 'rollout_mismatch/logprob_mean',
  'skipped_updates': 'optimizer/skipped',
  'speed/compilations': 'perf/compilations',
  'speed/tokens_per_second': 'perf/tokens_per_second',
  'zero_variance': 'groups/zero_advantage',
}


def setting_hint(key: str, value: Any = None) -> str:
  """Return a hint if a dotted key was renamed or removed, or if its value was renamed; else ''."""
  if key in REMOVED:
    return REMOVED[key]
  if key in SETTINGS:
    return f'it is now called config.{SETTINGS[key]}.'
  section, _, name = key.rpartition('.')
  for new, (old, example, _) in MERGED.items():
    if new.startswith(f'{section}.') and name in old:
      return f'it is now part of config.{new}, for example config.{new}={example}.'
  if isinstance(value, str) and value in VALUES.get(key, {}):
    return f'{value!r} is now called {VALUES[key][value]!r}.'
  return ''


def current_settings(values: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Replace old names and values in nested settings, and drop settings that were removed."""
  settings: dict[str, Any] = {}
  for name, value in values.items():
    new = SETTINGS.get(prefix + name, prefix + name)
    if isinstance(value, Mapping):
      value = current_settings(value, f'{prefix}{name}.')
    elif isinstance(value, str):
      value = VALUES.get(new, {}).get(value, value)
    settings[new.rpartition('.')[2]] = value
  place = SETTINGS.get(prefix[:-1], prefix[:-1])
  for key, (old, _, merge) in MERGED.items():
    section, _, name = key.rpartition('.')
    if section == place and set(old) <= set(settings):
      settings[name] = merge(*map(settings.pop, old))

  def is_removed(name: str, value: Any) -> bool:
    key = f'{place}.{name}'.lstrip('.')
    return key in REMOVED and value == NEUTRAL.get(key, value)

  return {name: value for name, value in settings.items() if not is_removed(name, value)}
