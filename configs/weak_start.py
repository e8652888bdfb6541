"""A weak base policy for comparing replay with GRPO. Stored successes get full weight.

exgrpo train --config=weak_start --workdir=/tmp/weak_start
For GRPO, add --config.replay.ratio=0, and for two epochs, add --config.optimizer.epochs=2
--config.optimizer.learning_rate=2e-4.
The base policy solves one in twenty chains of nine terms. This config is the arm `unit_slope` of
the study reuse_parts. Averaged over the first 220,000 generated tokens and eight seeds, pass@1 is
.524. GRPO reaches .528 at the same learning rate and .451 at half of it, and GRPO with two epochs
reaches .596 (studies/README.md). Training takes half a minute on two cores.
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
  # Twice the rate at which studies ran GRPO. At this rate, 1 of 24 runs of GRPO never learned.
  config.optimizer.learning_rate = 4e-4
  return config
