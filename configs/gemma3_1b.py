"""Gemma 3 1B on GSM8K, on eight v5e chips, as available on Kaggle.

exgrpo train --config=gemma3_1b --workdir=/tmp/run
Accept the licence on the model's page, then run 'hf auth login'. examples/tpu_v5e8.ipynb starts
it in a notebook.
According to `exgrpo capacity --config=gemma3_1b --topology=v5e:2x4 --evaluated=1319`, the update
needs the most memory: 6.0 of a chip's 15.8 GiB. A step takes 5.4 s, or 3.1 s with
--config.rollout.partial=True. These are estimates; this config has not been run yet.
"""

from exgrpo_jax.configs import base


def get_config():
  config = base.get_config()
  config.num_steps = 200
  config.model.repository = 'google/gemma-3-1b-it'
  config.model.update(
    dict(
      vocab_size=262144,
      width=1152,
      num_layers=26,
      num_heads=4,
      num_kv_heads=1,
      head_size=256,
      mlp_width=6912,
      activation='gelu',
      layers='sssssf',
      window=512,
      norms='both',
      norm_offset=True,
      attention_bias=False,
      query_key_norm=True,
      query_scale=256.0,
      scaled_embeddings=True,
    )
  )
  config.model.rope.theta = 1e6
  config.prompt.update(
    dict(
      template='chat',
      system='Reason step by step, and put the final answer inside \\boxed{}.',
    )
  )
  config.data.update(
    dict(
      train='openai/gsm8k:main:train',
      evaluation=('openai/gsm8k:main:test',),
      on_overlong='drop',
      default_kind='math',
    )
  )
  config.rollout.update(
    dict(questions=32, group_size=8, max_prompt=512, max_response=1024, slots=256, logit_chunk=1024)
  )
  config.optimizer.minibatches = 1
  config.evaluation.every = 20
  config.export.last = True
  return config
