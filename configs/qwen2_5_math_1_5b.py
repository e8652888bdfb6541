"""The paper's smallest backbone, and the settings that all five share.

exgrpo prepare --data=Elliott/Openr1-Math-46k-8192:train --out=openr1.parquet
exgrpo train --config=qwen2_5_math_1_5b --workdir=/tmp/run
exgrpo evaluate --suite=paper --checkpoint=/tmp/run --name=ExGRPO --out=/tmp/table
Put the authors' valid.parquet and the suite's files into the current folder (docs/data.md).
docs/slices.md estimates memory and time.
Not yet run here. The paper's scores (in / out of distribution): on-policy 30.0 / 38.9, ExGRPO
35.3 / 40.2.
"""

from exgrpo_jax.configs import base


def get_config():
  config = base.get_config()
  config.model.repository = 'Qwen/Qwen2.5-Math-1.5B'
  # The checkpoint reads 4,096 tokens. The authors extend it like this to fit prompt and response.
  config.model.extension.update(dict(rope_theta=4e4, max_position_embeddings=16384))
  config.rollout.slots = 512  # for v5e:4x4, of 16 chips; see docs/slices.md
  config.rollout.logit_chunk = 1024  # float32 logits of 0.6 GB on a chip
  config.prompt.template = 'paper'
  config.verifier.require_think = True
  config.evaluation.update(dict(require_think=True, require_box=True))
  config.data.update(
    dict(
      train='openr1.parquet',
      validation=('valid.parquet',),
      evaluation=(),  # the suite 'paper' reports; it is too large for every ten steps
      on_overlong='drop',
      default_kind='math',  # for OpenR1-Math-46k, with any name of a source
    )
  )
  # The authors' average leaves Minerva out too.
  config.export.update(dict(best=True, best_without=('minerva',), last=True))
  return config
