"""The sampler's log-probabilities compared with the trainer's, on random weights."""

from benchmarks.frame import Bench, Figure
from exgrpo_jax.rollout import scoring

# Limits of the largest and the mean difference, in nats. bfloat16 keeps 8 bits of hidden states.
_LIMITS = {'bfloat16': (1.0, 0.1), 'float32': (1e-3, 1e-4)}


def measure(bench: Bench) -> list[Figure]:
  """Compare the log-probabilities that sampler and trainer compute for sampled responses."""
  rollout = bench.config.rollout
  responses = bench.generate(bench.lengths.tolist())
  prompts = [bench.prompt(row // rollout.group_size) for row in range(bench.rows)]
  logps, _ = scoring.score(
    rollout.score_spec(bench.model, bench.meshes.training, bench.config.microbatch.tokens),
    bench.params,
    [(prompt, response.tokens) for prompt, response in zip(prompts, responses)],
  )
  found = scoring.differences(logps, responses)
  largest, mean = _LIMITS[bench.model.dtype]
  meaning = f'{bench.lengths.sum():,} tokens'
  return [
    Figure('largest gap', found['rollout_mismatch/logprob_max'], 'nats', meaning, limit=largest),
    Figure('mean gap', found['rollout_mismatch/logprob_mean'], 'nats', meaning, limit=mean),
  ]
