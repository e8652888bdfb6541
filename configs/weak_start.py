"""A weak base policy for which replay helps in our studies. Stored successes get full weight.

exgrpo train --config=weak_start --workdir=/tmp/weak_start
For GRPO, add --config.replay.ratio=0 --config.optimizer.learning_rate=2e-4.
The base policy solves one in twenty chains of nine terms. This config is the arm `normalised` of
the study replay_pays_again with the start `weak`. Averaged over the first 220,000 generated tokens
and sixteen seeds, pass@1 is .486, compared with .413 for GRPO. After 40 steps, both reach .72
(docs/results.md). Training takes half a minute on two cores.
"""

from exgrpo_jax.configs import chains


def get_config():
  config = chains.get_config()
  config.num_steps = 40
  config.data.train = 'chains:train_9'
  config.data.evaluation = ('chains:test_9',)
  config.evaluation.every = 4
  config.replay.start_pass_rate = 0.0
  config.objective.update(dict(clip_schedule='always', shaping='unit_slope'))
  # Twice GRPO's rate. At this rate, GRPO fails in one of sixteen runs.
  config.optimizer.learning_rate = 4e-4
  return config
