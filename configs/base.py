"""The paper's values (arXiv:2510.02245), for every other config to start from.

Where the authors' code scales its loss otherwise, the value here is theirs
carried over. Their gradient is a sum over the 64 rows of one GPU's share of a
minibatch, divided by the response limit and averaged over 8 GPUs; ours is divided
by the minibatch's 512 rows as well, so theirs is 64 times this one.

Ranges and units stand beside the fields of each component's Config.
"""

from ml_collections import ConfigDict


def get_config():
  config = ConfigDict()
  config.seed = 0
  config.num_steps = 700
  config.compilation_cache = '~/.cache/exgrpo_jax/compiled'

  config.rollout = ConfigDict(
    dict(
      questions=128,
      samples=8,
      max_prompt=1024,
      max_response=8192,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      min_p=0.0,
      slots=256,
      carry=False,
      in_flight=0,
      max_age=8,
      logit_chunk=16384,
    )
  )

  config.replay = ConfigDict(
    dict(
      ratio=0.5,
      start_pass_rate=0.35,
      sigma=1.0,
      question_selection='gaussian',
      trajectory_selection='lowest_entropy',
      bucket_by='correctness',
      difficulty='all',
      count_replayed=True,
      lower_bound=0.0,
      upper_bound=1.0,
      # 46,000 questions x 8 x 2,000 tokens x 8 bytes: about 6 GB of host memory.
      max_trajectories=8,
      retire='with_replay',
      failed='stay',
    )
  )

  config.objective = ConfigDict(
    dict(
      clip='until_replay',
      clip_epsilon=0.2,
      clip_epsilon_high=0.2,
      dual_clip=float('inf'),
      surrogate='ppo',
      ratio='token',
      tis_limit=0.0,
      shaping='fraction',
      beta=0.1,
      shaping_exponent=0.5,
      shaping_weight=0.1,
      importance_correction=True,
      baseline='group',
      normalize_std='off',
      aggregation='constant',
      entropy_bonus=1e-4,  # theirs: 1e-3, as a mean over each microbatch of 5 to 10 rows
      kl_coefficient=0.0,
      old_logprobs='sampler',
    )
  )

  config.optimizer = ConfigDict(
    dict(
      minibatches=2,
      learning_rate=1e-6,
      schedule='constant',
      warmup_updates=0,
      b1=0.9,
      b2=0.999,
      epsilon=1.6e-10,  # theirs: 1e-8
      weight_decay=0.01,
      moments='float32',
      clip_norm=1 / 64,  # theirs: 1
      skip_norm=7.8,
    )
  )  # theirs: 500

  config.gradient = ConfigDict(
    dict(tokens_per_microbatch=9216, remat='all', drop_zero_advantage=False)
  )

  # The shape of Qwen2.5-Math-1.5B; with a path the checkpoint's is taken.
  config.model = ConfigDict(
    dict(
      path='',
      repository='',
      vocab_size=151936,
      width=1536,
      num_layers=28,
      num_heads=12,
      num_kv_heads=2,
      head_size=128,
      mlp_width=8960,
      norm_epsilon=1e-6,
      attention_bias=True,
      query_key_norm=False,
      tied_embeddings=True,
      dtype='bfloat16',
    )
  )
  config.model.extension = ConfigDict(dict(rope_theta=0.0, max_position_embeddings=0))
  config.model.rope = ConfigDict(
    dict(
      theta=1e4,
      scaling='none',
      factor=1.0,
      low_frequency_factor=1.0,
      high_frequency_factor=4.0,
      original_positions=4096,
    )
  )

  # The whole model is trained; rank=8 to 64 trains adapters on a frozen one.
  config.lora = ConfigDict(
    dict(
      rank=0,
      alpha=32.0,
      targets=('q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'),
    )
  )

  config.mesh = ConfigDict(
    dict(training=dict(data=1, fsdp=-1, tensor=1), decoding=dict(data=-1, tensor=1))
  )

  config.prompt = ConfigDict(dict(template='plain', system=''))
  config.tokenizer = ConfigDict(dict(path='', vocab_size=512))
  config.data = ConfigDict(
    dict(
      train='arithmetic:train',
      validation=(),
      evaluation=('arithmetic:validation',),
      question_field='',
      answer_field='',
      solution_field='',
      default_kind='',
      unverifiable='refuse',
      overlong='refuse',
      cache_dir='~/.cache/exgrpo_jax',
    )
  )
  config.experience = ConfigDict(dict(path='', missing_logprobs='current'))
  config.verifier = ConfigDict(dict(require_think=False, require_box=False))
  config.grading = ConfigDict(
    dict(
      workers=0,
      time_limit=5.0,
      memory_limit=1024,
      max_length=200_000,
      max_failures=0.01,
      rewards=('correctness',),
      weights=(),
      batched=(),
      batch_size=64,
      batch_timeout=60.0,
      overlong_buffer=0,
    )
  )

  config.warm_start = ConfigDict(
    dict(
      num_updates=0,  # none: reinforcement learning starts from the model as it is
      data='arithmetic:train',
      batch_size=64,
      learning_rate=1e-3,
      enough=1.0,
      seed=-1,  # config.seed
      path='',
    )
  )

  config.evaluation = ConfigDict(
    dict(
      every=10,
      patience=0,  # all steps are taken
      samples=1,
      temperature=0.6,
      top_k=0,
      top_p=1.0,
      min_p=0.0,
      require_think=False,
      require_box=False,
    )
  )
  config.alignment = ConfigDict(dict(every=0, questions=32, samples=8))
  config.parity = ConfigDict(
    dict(every=50, rows=64, max=1.0)
  )  # for bfloat16; float32 keeps within 1e-4
  config.checkpoint = ConfigDict(dict(every=50, keep=2))
  config.export = ConfigDict(dict(best=False, best_without=(), last=False))
  config.metrics = ConfigDict(
    dict(sampled_rows=16, records_every=10, recorded_groups=4, traced_steps=(), wandb_project='')
  )
  return config
