r"""GRPO with the defaults of GRPOConfig in TRL 1.16, on a model that ships with the package.

exgrpo train --config=trl_grpo --workdir=/tmp/trl_grpo
To use your own model and data, add --config.model.path=Qwen/Qwen2.5-0.5B-Instruct \
  --config.model.extension.max_position_embeddings=0 --config.prompt.template=chat \
  --config.data.train=my.parquet --config.num_steps=…
TRL's learning rate of 1e-6 barely changes the small model. To see a curve, add
--config.optimizer.learning_rate=2e-4.

Differences from TRL:
- num_train_epochs=3: here, `num_steps` is 3 times the number of questions in data.train, with one
  question per step.
- generation_batch_size: TRL generates 8 responses per device. Here, a step has one question with
  8 responses across all devices. To match TRL, set `rollout.questions` to the number of devices.
- Advantages are divided by the standard deviation plus 1e-6, not plus 1e-4.
- The importance ratio is exactly 1 because each response is used once, as in TRL without vLLM. With
  use_vllm, TRL masks sequences whose sampler and trainer probabilities differ by a factor above 3.
  Here, objective.tis_limit=3 with objective.old_logprobs=recompute bounds each token's weight.
- reward_funcs has no default in TRL. Here, the reward is the verifier's 1 or 0.
- Prompts of more than 512 tokens are rejected. TRL accepts prompts of any length.
- Activations are bfloat16 on accelerators and float32 on CPUs without bfloat16. Parameters are
  float32.
- The newest 2 checkpoints are kept. TRL keeps all checkpoints.
- With the same seed, the random numbers differ from torch's.
"""

from exgrpo_jax.configs import base


def get_config():
  config = base.get_config()
  config.seed = 42
  config.num_steps = 600  # 3 epochs
  config.model.update(dict(path='shipped:chains', dtype='auto'))
  config.model.extension.max_position_embeddings = 1024  # the model was trained with 88
  config.data.update(dict(train='chains:train[:200]', evaluation=()))
  config.rollout.update(
    dict(questions=1, group_size=8, temperature=1.0, max_prompt=512, max_response=512, slots=8)
  )
  config.replay.ratio = 0.0
  config.objective.update(
    dict(
      clip_schedule='always',
      clip_epsilon=0.2,
      clip_epsilon_high=0.2,
      aggregation='token_mean',  # loss_type=dapo
      normalize_std='sample',  # scale_rewards=group
      entropy_bonus=0.0,
      kl_coefficient=0.0,
    )
  )
  config.optimizer.update(
    dict(
      minibatches=1,
      learning_rate=1e-6,
      schedule='linear',
      warmup_updates=0,
      b1=0.9,
      b2=0.999,
      epsilon=1e-8,
      weight_decay=0.0,
      # The loss is a mean over tokens, as in TRL, so its gradients have the same scale.
      clip_norm=1.0,
      skip_above_norm=float('inf'),
    )
  )
  config.checkpoint.every = 500
  return config
