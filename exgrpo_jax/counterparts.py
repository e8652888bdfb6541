"""The settings here that correspond to options of TRL 1.16 and verl 0.9.1.

The hint for an unknown key reads this table; a test holds docs/coming_from.md to it.
"""

# (names in TRL, names in verl, the settings here, what else to know); verl's may be shortened to
# their last words. A name in two rows gets the first one as its hint.
ROWS: tuple[tuple[str, str, str, str], ...] = (
  ('model', 'actor_rollout_ref.model.path', 'model.path', ''),
  ('train_dataset', 'data.train_files', 'data.train', ''),
  ('eval_dataset', 'data.val_files', 'data.evaluation', ''),
  (
    'generation_batch_size',
    'data.train_batch_size',
    'rollout.questions',
    'it counts questions, all devices together; TRL counts responses',
  ),
  ('num_generations', 'actor_rollout_ref.rollout.n', 'rollout.samples', ''),
  ('', 'data.max_prompt_length', 'rollout.max_prompt', ''),
  ('max_completion_length', 'data.max_response_length', 'rollout.max_response', ''),
  ('temperature', 'actor_rollout_ref.rollout.temperature', 'rollout.temperature', ''),
  ('learning_rate', 'actor.optim.lr', 'optimizer.learning_rate', ''),
  ('lr_scheduler_type', 'optim.lr_scheduler_type', 'optimizer.schedule', ''),
  ('warmup_steps', 'optim.lr_warmup_steps', 'optimizer.warmup_updates', ''),
  ('weight_decay', 'optim.weight_decay', 'optimizer.weight_decay', ''),
  ('adam_beta1 adam_beta2', 'optim.betas', 'optimizer.b1 optimizer.b2', ''),
  ('adam_epsilon', '', 'optimizer.epsilon', "it is in the gradient's units"),
  ('max_grad_norm', 'actor.grad_clip', 'optimizer.clip_norm', "it is in the gradient's units"),
  (
    'steps_per_generation gradient_accumulation_steps',
    'actor.ppo_mini_batch_size',
    'optimizer.minibatches',
    'it is the updates of a step, the first over the second in TRL',
  ),
  ('num_iterations', 'actor.ppo_epochs', '', 'a batch is used once, as with 1'),
  (
    'per_device_train_batch_size',
    'actor.ppo_max_token_len_per_gpu actor.use_dynamic_bsz',
    'gradient.tokens_per_microbatch',
    'it decides memory only, never the gradient',
  ),
  (
    'epsilon epsilon_high',
    'actor.clip_ratio actor.clip_ratio_low actor.clip_ratio_high',
    'objective.clip_epsilon objective.clip_epsilon_high',
    "with config.objective.clip='always'",
  ),
  ('delta', 'actor.clip_ratio_c', 'objective.dual_clip', 'TRL bounds the ratio instead'),
  (
    'beta',
    'actor.use_kl_loss actor.kl_loss_coef algorithm.use_kl_in_reward',
    'objective.kl_coefficient',
    'config.objective.beta shapes the replayed tokens of ExGRPO and is no KL weight',
  ),
  ('entropy_coef', 'actor.entropy_coeff', 'objective.entropy_bonus', ''),
  ('scale_rewards', 'algorithm.norm_adv_by_std_in_grpo', 'objective.normalize_std', ''),
  (
    'loss_type',
    'actor.loss_agg_mode',
    'objective.aggregation',
    "'constant' is dr_grpo, 'token_mean' dapo, 'sequence_mean' grpo; cispo is "
    "config.objective.surrogate='cispo'",
  ),
  (
    'importance_sampling_level',
    'actor.policy_loss.loss_mode',
    'objective.ratio',
    "GSPO is 'sequence'",
  ),
  (
    'vllm_importance_sampling_correction vllm_importance_sampling_clip_max',
    'algorithm.rollout_correction',
    'objective.tis_limit',
    "with config.objective.old_logprobs='recompute'",
  ),
  ('use_vllm', 'actor_rollout_ref.rollout.name', '', 'sampling is a JAX program of its own'),
  ('reward_funcs', 'reward.custom_reward_function', 'grading.rewards', ''),
  ('reward_weights', '', 'grading.weights', ''),
  ('eval_strategy eval_steps', 'trainer.test_freq', 'evaluation.every', ''),
  ('num_generations_eval', 'rollout.val_kwargs.n', 'evaluation.samples', ''),
  ('', 'rollout.val_kwargs.temperature', 'evaluation.temperature', ''),
  ('save_steps', 'trainer.save_freq', 'checkpoint.every', ''),
  ('save_total_limit', 'trainer.max_actor_ckpt_to_keep', 'checkpoint.keep', ''),
  (
    'max_steps num_train_epochs',
    'trainer.total_training_steps trainer.total_epochs',
    'num_steps',
    'an epoch has as many steps as questions / config.rollout.questions',
  ),
  ('output_dir', 'trainer.default_local_dir', '', 'it is the flag --workdir'),
  (
    'peft_config',
    'model.lora_rank model.lora_alpha',
    'lora.rank lora.alpha lora.targets',
    '',
  ),
)


def hint(key: str) -> str:
  """Return a sentence on the counterpart of a dotted key of TRL or verl, '' if it has none.

  `hint('num_generations')` is the sentence "num_generations of TRL is config.rollout.samples here."
  """
  typed = key.split('.')
  for depth in range(len(typed), 0, -1):  # the longest end of the key that is a name
    for trl, verl, ours, note in ROWS:
      for system, names in (('TRL', trl), ('verl', verl)):
        if any(_ends_alike(typed[-depth:], name.split('.')) for name in names.split()):
          return f'{typed[-1]} of {system} {_described(ours, note)}.'
  return ''


def _ends_alike(typed: list[str], name: list[str]) -> bool:
  """Return True if `typed` is the end of `name`, or all that tells it from others."""
  return name[-len(typed) :] == typed and (len(typed) > 1 or typed[0] not in ('path', 'name'))


def _described(ours: str, note: str) -> str:
  settings = ' and '.join(f'config.{name}' for name in ours.split())
  called = f'is {settings} here' if settings else 'has no setting here'
  return f'{called}; {note}' if note else called
