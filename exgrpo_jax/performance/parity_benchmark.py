"""The sampler's log-probabilities beside the trainer's, on random weights."""

import jax
import numpy as np

from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.workload import Workload, decode_spec, random_params, random_prompts
from exgrpo_jax.policy import model
from exgrpo_jax.policy.sharding import Meshes
from exgrpo_jax.rollout import parity, scheduler, scoring

# The largest difference of any token, in nats: config.parity.max of configs/base.py, and of its
# float32 configs.
LIMITS = {'bfloat16': 1.0, 'float32': 1e-3}
# The mean over tokens; bfloat16 keeps 8 bits of hidden states.
MEAN_LIMITS = {'bfloat16': 0.1, 'float32': 1e-4}


def measure(workload: Workload, meshes: Meshes) -> list[Measurement]:
  """Checks that both say the same of sampled responses.

  Call it inside `jax.set_mesh(meshes.training)`.
  """
  config, spec = workload.model, decode_spec(workload, workload.prompt, workload.response)
  params = random_params(workload, meshes.training)
  prompts = random_prompts(config.vocab_size, workload.num_rows, workload.prompt)
  decode_params = model.decode_layout(config, params, meshes)
  with jax.set_mesh(meshes.decoding):
    responses = scheduler.generate(
      config,
      decode_params,
      prompts,
      range(len(prompts)),
      [0] * len(prompts),
      jax.random.key(0),
      spec,
      meshes.decoding,
    )
  logps, _ = scoring.score(
    config,
    params,
    meshes.training,
    [(prompt, response.tokens) for prompt, response in zip(prompts, responses)],
    limit=spec.longest_row,
    tokens_per_pass=workload.microbatch,
    pad_id=0,
    temperature=1.0,
    logit_chunk=workload.chunk,
  )
  found = parity.differences(logps, responses)
  tokens = int(np.sum([len(response.tokens) for response in responses]))
  meaning = f"between the sampler's and the trainer's log-probability of {tokens:,} tokens"
  return [
    Measurement('largest gap', found['parity/max'], 'nats', meaning, limit=LIMITS[config.dtype]),
    Measurement('mean gap', found['parity/mean'], 'nats', meaning, limit=MEAN_LIMITS[config.dtype]),
  ]
