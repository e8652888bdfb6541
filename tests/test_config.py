"""Settings: a ConfigDict becomes a frozen dataclass, and what it must not hold is refused."""

import dataclasses
import math
import re

import pytest
from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.algorithm.settings import ObjectiveConfig
from exgrpo_jax.config import setting
from exgrpo_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Inner:
  path: str = setting('x', None, 'where it is')


@dataclasses.dataclass(frozen=True)
class Example:
  inner: Inner
  ratio: float = setting(0.5, '[0, 1)', "the share of each step's questions")
  steps: int = setting(1, '(0, inf)', 'updates')
  clip: str = setting('never', ('always', 'never'), 'when ratios are clipped')
  shape: bool = setting(True, None, 'whether weights are shaped')
  mesh: tuple[int, ...] = setting((4, 2), None, 'devices along each axis')


def build(**changes):
  values = {**config.defaults(Example).to_dict(), **changes}
  return config.build(Example, ConfigDict(values), 'config.replay')


def test_defaults_become_a_frozen_dataclass():
  built = build()
  assert built == Example(Inner())
  assert built.mesh == (4, 2) and built.inner.path == 'x'
  with pytest.raises(dataclasses.FrozenInstanceError):
    built.ratio = 0.0


@pytest.mark.parametrize(
  ('name', 'value', 'built'),
  [
    pytest.param('ratio', 0, 0.0, id='int_for_float_at_the_closed_end'),
    pytest.param('ratio', math.nextafter(1.0, 0.0), math.nextafter(1.0, 0.0), id='open_end'),
    pytest.param('steps', 10**12, 10**12, id='unbounded'),
    pytest.param('mesh', [8, 1], (8, 1), id='list_for_tuple'),
    pytest.param('mesh', (), (), id='empty_tuple'),
  ],
)
def test_what_the_range_includes_is_accepted(name, value, built):
  found = getattr(build(**{name: value}), name)
  assert found == built and type(found) is type(built)


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    ('ratio', 1.0, r"ratio=1\.0: .* must be in \[0, 1\)\. .* the share of each step's questions"),
    ('ratio', -0.1, r'ratio=-0\.1: .* must be in \[0, 1\)'),
    ('ratio', math.nan, r'ratio=nan: .* must be in \[0, 1\)'),
    ('ratio', False, 'ratio=False: .* must be of type float, not bool'),
    ('steps', 0, r'steps=0: .* must be in \(0, inf\)\. .*: updates'),
    ('steps', 1.5, r'steps=1.5: .* must be of type int, not float\. .*: updates'),
    ('steps', True, r'steps=True: .* must be of type int, not bool\. .*: updates'),
    (
      'clip',
      'sometimes',
      r"clip='sometimes': .* must be one of always, never\. .*: when ratios are clipped",
    ),
    ('clip', 3, 'clip=3: .* must be of type str, not int'),
    ('shape', 1, 'shape=1: .* must be of type bool, not int'),
    ('mesh', (4, '2'), r"mesh='2': .* must be of type int, not str\. .*: devices along each axis"),
    ('mesh', '42', "mesh='42': .* must be of type tuple, not str"),
    ('inner', {'path': None}, r'inner\.path=None: .* must be of type str'),
    ('inner', 1, r'inner=1: this is a section, .* such as config\.replay\.inner\.path'),
  ],
)
def test_a_value_of_the_wrong_type_or_range_is_refused(name, value, message):
  with pytest.raises(InputError, match=r'^config\.replay\.' + message):
    build(**{name: value})


def test_an_unknown_name_is_answered_with_the_nearest_or_with_all():
  with pytest.raises(InputError, match=r"config\.replay has no 'ratoi'; did you mean 'ratio'\?"):
    build(ratoi=0.25)
  with pytest.raises(InputError, match="has no 'zzz'; it has: inner, ratio, steps, clip, shape"):
    build(zzz=1)


@pytest.mark.parametrize(
  ('key', 'hint'),
  [
    ('num_generations', r"TRL's num_generations is config\.rollout\.group_size here\."),
    ('inner.num_generations', r"TRL's num_generations is config\.rollout\.group_size here\."),
    ('beta', r'is config\.objective\.kl_coefficient here; objective\.beta shapes replayed'),
    (
      'top_p',
      r"TRL's top_p has no setting here; training always samples from .*evaluation\.top_p,",
    ),
    ('inner.val_kwargs.top_p', r"verl's top_p is config\.evaluation\.top_k and config\.eval"),
    ('inner.fsdp_config.fsdp_size', r'is config\.mesh\.training\.fsdp here; parameters are'),
    ('inner.fsdp_config.param_offload', r'param_offload has no setting here; .* no offloading'),
    ('actor_rollout_ref.rollout.n', r"verl's n is config\.rollout\.group_size here\."),
    ('rollout.val_kwargs.n', r"verl's n is config\.evaluation\.samples here\."),
    ('reward_model.overlong_buffer.len', r"verl's len is config\.grading\.overlong_buffer and"),
    ('custom_reward_function.path', r"verl's path is config\.grading\.rewards here"),
    ('inner.val_only', r'has no setting here; use exgrpo evaluate'),
    ('inner.kl_loss_coef', r"verl's kl_loss_coef is config\.objective\.kl_coefficient here"),
    ('num_iterations', r"TRL's num_iterations is config\.optimizer\.epochs here\."),
    ('ppo_epochs', r"verl's ppo_epochs is config\.optimizer\.epochs here\."),
    ('lora_r', r"TRL's lora_r is config\.lora\.rank here\."),
    ('lora_dropout', r"TRL's lora_dropout has no setting here; there is no dropout"),
    ('environment_factory', r"TRL's environment_factory is config\.environment\.tools here; with"),
    ('use_vllm', r"TRL's use_vllm has no setting here; sampling is a JAX program"),
  ],
)
def test_an_option_of_trl_or_verl_is_answered_with_its_counterpart(key, hint):
  with pytest.raises(InputError, match=hint):
    config.overridden(config.defaults(Example), {key: 0})


def test_a_missing_name_is_reported():
  with pytest.raises(InputError, match=r"config\.replay lacks 'steps'\. Start from configs/base"):
    config.build(Example, {'inner': {'path': ''}, 'ratio': 0.5}, 'config.replay')


def test_overrides_change_a_copy_and_name_one_value_each():
  values = config.defaults(Example)
  changed = config.overridden(values, {'inner.path': 'y', 'ratio': 'wrong'})  # left to `build`
  assert (changed.inner.path, changed.ratio) == ('y', 'wrong') and values.inner.path == 'x'
  for key, message in [
    ('inner', r"config\.inner is a section, but .* such as 'inner\.path'"),
    ('ratio.x', r"config\.ratio is a single value, so it has no 'x'"),
    ('iner.path', "did you mean 'inner'"),
  ]:
    with pytest.raises(InputError, match=message):
      config.overridden(values, {key: 0})


@pytest.mark.parametrize(
  ('key', 'hint'),
  [
    ('evaluation.n', r"verl's n is config\.evaluation\.samples here\."),
    ('rollout.n', r"verl's n is config\.rollout\.group_size here\."),
  ],
)
def test_a_counterpart_in_the_same_section_is_preferred(key, hint):
  assert re.match(hint, config.counterpart_hint(key))


@pytest.mark.parametrize(
  ('key', 'value', 'hint'),
  [
    ('policy_loss', 'gspo', "verl's loss_mode=gspo is objective.importance_level=sequence here."),
    ('baseline', 'grpo', "verl's adv_estimator=grpo is objective.baseline=group here."),
    ('aggregation', 'grpo', "TRL's loss_type=grpo is objective.aggregation=sequence_mean here."),
    (
      'aggregation',
      'token-mean',
      "verl's loss_agg_mode=token-mean is objective.aggregation=token_mean here.",
    ),
    ('normalize_std', 'True', "TRL's scale_rewards=True is objective.normalize_std=sample here."),
  ],
)
def test_a_value_of_trl_or_verl_is_answered_with_its_counterpart(key, value, hint):
  values = config.overridden(config.defaults(ObjectiveConfig), {key: value})
  with pytest.raises(InputError, match=f"{value}'.* {hint}"):
    config.build(ObjectiveConfig, values, 'config.objective')
  assert config.value_hint('prompt.template', value) == ''
