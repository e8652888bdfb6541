r"""A small model with Qwen2.5's architecture, trained from scratch on real questions (GSM8K).

exgrpo train --config=gsm8k --workdir=/tmp/gsm8k \
    --config.data.train=gsm8k_train.jsonl --config.warm_start.data=gsm8k_train.jsonl \
    --config.data.evaluation='("gsm8k_test.jsonl",)'
Get the files from github.com/openai/grade-school-math. On two CPU cores, the warm start takes about
28 minutes and the rest 12.
This is an example of training on real data; don't expect a good score. The model has 1.5 million
parameters and is trained on nothing else. It writes English sentences with sums and solves very few
questions: in one run, test pass@1 was .015 (.010 to .023) after the warm start and .026 (.018 to
.036) at the end.
"""

from exgrpo_jax.configs import base


def get_config():
  config = base.get_config()
  config.num_steps = 20

  config.rollout.update(dict(questions=16, max_prompt=256, max_response=192, slots=128))
  config.replay.start_pass_rate = 0.0  # so that replay starts even though few answers are correct
  config.data.update(
    dict(train='gsm8k_train.jsonl', evaluation=('gsm8k_test.jsonl',), on_overlong='drop')
  )
  config.warm_start.update(
    dict(num_updates=1500, data='gsm8k_train.jsonl', batch_size=16, learning_rate=2e-3)
  )

  config.microbatch.update(dict(tokens=32768, remat='all_but_products'))
  config.optimizer.update(dict(learning_rate=1e-4, warmup_updates=4))
  config.model.update(
    dict(
      vocab_size=0,
      width=128,
      num_layers=4,
      num_heads=4,
      num_kv_heads=2,
      head_size=32,
      mlp_width=512,
      dtype='float32',
    )
  )
  config.tokenizer.vocab_size = 4096

  config.logprob_check.max = 1e-3
  config.evaluation.update(dict(every=20, temperature=1.0))
  config.checkpoint.every = 10
  return config
