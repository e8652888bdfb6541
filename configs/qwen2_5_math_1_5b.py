"""Qwen2.5-Math 1.5B: the paper's smallest backbone, with the settings shared by all five backbones.

exgrpo train --config=qwen2_5_math_1_5b --workdir=/tmp/run
exgrpo evaluate --suite=paper --checkpoint=/tmp/run --name=ExGRPO --out=/tmp/table
First put the authors' valid.parquet and the suite's files into the current folder (docs/data.md).
The training questions are read from the Hugging Face Hub.
docs/slices.md estimates memory and time.
We have not run this config yet.
The paper's scores (in / out of distribution): on-policy 30.0 / 38.9, ExGRPO 35.3 / 40.2.
"""

from exgrpo_jax.configs import base


def get_config():
  config = base.get_config()
  config.model.repository = 'Qwen/Qwen2.5-Math-1.5B'
  # The checkpoint supports 4,096 tokens. The authors extend it to fit prompt and response.
  config.model.extension.update(dict(rope_theta=4e4, max_position_embeddings=16384))
  config.rollout.slots = 512  # for v5e:4x4 (16 chips); see docs/slices.md
  config.rollout.logit_chunk = 1024  # 0.6 GB of float32 logits per chip
  config.prompt.template = 'paper'
  config.verifier.require = ('think',)
  config.evaluation.require = ('think', 'box')
  config.data.update(
    dict(
      train='Elliott/Openr1-Math-46k-8192:train',
      validation=('valid.parquet',),
      evaluation=(),  # use the suite 'paper', which is too large to run every ten steps
      on_unverifiable='drop',
      on_overlong='drop',
      default_kind='math',  # for OpenR1-Math-46k, regardless of the rows' sources
    )
  )
  # The authors' average leaves out Minerva, too.
  config.export.update(dict(best=True, best_without=('minerva',), last=True))
  return config
