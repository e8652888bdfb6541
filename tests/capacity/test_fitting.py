"""The configs for one GPU fit it, by the formula, and nothing else is offered."""

import dataclasses

import pytest

from exgrpo_jax.capacity import devices, fitting, memory, step
from exgrpo_jax.configs import one_gpu
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import parse_config


def opened(choice):
  return parse_config(config_files.load_config(f'one_gpu:{choice}'))


@pytest.mark.parametrize('choice', one_gpu.FITS, ids='-'.join)
def test_a_config_is_the_largest_that_fits(choice):
  config, limit = opened(','.join(choice)), devices.usable_memory(choice[1])
  assert max(fitting.peaks(config).values()) <= limit
  assert fitting.fit(config, limit) == (config.rollout.slots, config.gradient.tokens_per_microbatch)


def test_what_does_not_fit_is_refused():
  with pytest.raises(InputError, match='qwen2_5_7b does not fit 24gb with gsm8k'):
    opened('qwen2_5_7b')


def test_caches_that_are_kept_between_turns_take_the_memory_of_the_slots_once_more():
  base = opened('qwen2_5_0_5b,24gb,gsm8k')
  rollout = dataclasses.replace(base.rollout, max_response=2048)
  environment = dataclasses.replace(base.environment, name='attempts')
  kept = dataclasses.replace(base, rollout=rollout, environment=environment)
  without = dataclasses.replace(
    kept, environment=dataclasses.replace(environment, keep_caches=False)
  )
  [decode] = [one for one in step.of_config(kept).generating() if one.name == 'decode']
  slots, found = memory.size_of(decode.args[3].cache), fitting.peaks(kept)
  of_generating = 'prefill', 'resume', 'decode'
  more = {name: found[name] - size for name, size in fitting.peaks(without).items()}
  assert more == pytest.approx({name: slots * (name in of_generating) for name in more}, rel=0.001)
  limit = devices.usable_memory('24gb')
  most, fewer = (fitting.fit(config, limit) for config in (without, kept))
  assert most and fewer and (most.slots, fewer.slots) == (256, 128)


@pytest.mark.parametrize('model', ['qwen2_5_1_5b', 'qwen3_1_7b'])
def test_adapters_are_for_what_does_not_fit_in_full(model, monkeypatch):
  """Not with moments in bfloat16 either."""
  assert opened(model).lora.rank
  monkeypatch.setitem(one_gpu.FITS, (model, '24gb', 'gsm8k'), (8, 1536, 'bfloat16'))
  config = parse_config(one_gpu.get_config(model))
  assert not config.lora.rank
  assert fitting.fit(config, devices.usable_memory('24gb')) is None


def test_words_come_in_any_order_and_some_may_be_left_out():
  first, second = (opened(words) for words in ('math,qwen2_5_0_5b', 'qwen2_5_0_5b,24gb,math'))
  assert first == second != opened('')
  with pytest.raises(InputError, match="'qwen9' after the colon must be one of qwen2_5_0_5b, "):
    opened('qwen9')
