"""The configs for one GPU fit it, by the formula, and nothing else is offered."""

import dataclasses

import jax
import pytest

from exgrpo_jax.capacity import arrays, examination, fitting, gpus
from exgrpo_jax.configs import one_gpu
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import parse_config


def opened(choice):
  """(config, spec of its updates, mesh of sampling) of --config=one_gpu:choice."""
  config = parse_config(config_files.load_config(f'one_gpu:{choice}'))
  return config, *examination.step_spec(config)


@pytest.mark.parametrize('choice', one_gpu.FITS, ids='-'.join)
def test_a_config_is_the_largest_that_fits(choice):
  config, spec, decoding = opened(','.join(choice))
  limit = gpus.usable_memory(choice[1])
  with jax.set_mesh(spec.mesh):
    peaks = fitting.peaks(config.rollout, spec, decoding)
    fitted = fitting.fit(config.rollout, spec, decoding, limit)
  assert max(peaks.values()) <= limit
  assert fitted == (config.rollout.slots, config.gradient.tokens_per_microbatch)


def test_what_does_not_fit_is_refused():
  with pytest.raises(InputError, match='qwen2_5_7b does not fit 24gb with gsm8k'):
    opened('qwen2_5_7b')


def test_caches_that_are_kept_between_turns_take_the_memory_of_the_slots_once_more():
  config, spec, decoding = opened('qwen2_5_0_5b,24gb,gsm8k')
  rollout = dataclasses.replace(config.rollout, max_response=2048)
  limit = gpus.usable_memory('24gb')
  with jax.set_mesh(spec.mesh):
    without, kept = (fitting.peaks(rollout, spec, decoding, keeps) for keeps in (False, True))
    most, fewer = (fitting.fit(rollout, spec, decoding, limit, keeps) for keeps in (False, True))
    slots = arrays.cache_bytes(rollout, spec.model, decoding)
  assert {name: kept[name] - without[name] for name in kept} == {
    name: slots * (name in ('prefill', 'resume', 'decode')) for name in kept
  }
  assert most and fewer and (most.slots, fewer.slots) == (256, 128)


@pytest.mark.parametrize('model', ['qwen2_5_1_5b', 'qwen3_1_7b'])
def test_adapters_are_for_what_does_not_fit_in_full(model, monkeypatch):
  """Not with moments in bfloat16 either."""
  assert opened(model)[0].lora.rank
  monkeypatch.setitem(one_gpu.FITS, (model, '24gb', 'gsm8k'), (8, 1536, 'bfloat16'))
  config = parse_config(one_gpu.get_config(model))
  assert not config.lora.rank
  spec, decoding = examination.step_spec(config)
  with jax.set_mesh(spec.mesh):
    assert fitting.fit(config.rollout, spec, decoding, gpus.usable_memory('24gb')) is None


def test_words_come_in_any_order_and_some_may_be_left_out():
  first, second = (opened(words)[0] for words in ('math,qwen2_5_0_5b', 'qwen2_5_0_5b,24gb,math'))
  assert first == second != opened('')[0]
  with pytest.raises(InputError, match="'qwen9' after the colon must be one of qwen2_5_0_5b, "):
    opened('qwen9')
