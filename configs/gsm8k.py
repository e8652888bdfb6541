"""Real questions: a small model of Qwen2.5's shape, from scratch, on GSM8K.

python -m exgrpo_jax.train --config=configs/gsm8k.py --workdir=/tmp/gsm8k \\
    --config.data.train=gsm8k_train.jsonl --config.warm_start.data=gsm8k_train.jsonl \\
    --config.data.evaluation='("gsm8k_test.jsonl",)'
The files are those of github.com/openai/grade-school-math. A model this small and
trained on nothing else solves very few of them: the point is the path that real
data takes, not the score.
"""

from configs import base


def get_config():
  config = base.get_config()
  config.num_steps = 20

  config.rollout.update(dict(
      questions=16, samples=8, max_prompt=256, max_response=192, slots=128, logit_chunk=16384))
  config.replay.start_pass_rate = 0.  # so that replay takes part although few answers are right
  config.data.update(dict(
      train='gsm8k_train.jsonl', evaluation=('gsm8k_test.jsonl',), overlong='drop'))
  config.warm_start.update(dict(
      num_updates=400, data='gsm8k_train.jsonl', batch_size=16, learning_rate=2e-3))

  config.optimizer.update(dict(learning_rate=1e-4, warmup_updates=4))
  config.model.update(dict(
      vocab_size=0, width=128, num_layers=4, num_heads=4, num_kv_heads=2, head_size=32,
      mlp_width=512, dtype='float32'))
  config.tokenizer.vocab_size = 4096

  config.evaluation.update(dict(every=20, temperature=1.))
  config.checkpoint.every = 10
  return config
