"""Full fine-tuning or LoRA of a checkpoint on GSM8K or MATH, on one GPU (T4, 24, 40 or 80 GB).

exgrpo train --config=one_gpu:qwen2_5_1_5b,40gb,gsm8k --workdir=/tmp/run
After the colon, pass a model, a memory size and a dataset, in any order. The defaults are
qwen2_5_0_5b, 24gb and gsm8k. `exgrpo doctor` suggests a choice for your machine.
docs/one_gpu.md lists the combinations that should fit. None of these configs has been run yet.
"""

from exgrpo_jax.configs import base
from exgrpo_jax.errors import InputError

# Hugging Face name, and the shape settings that differ from the base config.
MODELS = {
  'qwen2_5_0_5b': (
    'Qwen/Qwen2.5-0.5B-Instruct',
    dict(width=896, num_layers=24, num_heads=14, head_size=64, mlp_width=4864),
  ),
  'qwen2_5_1_5b': ('Qwen/Qwen2.5-1.5B-Instruct', dict()),
  'qwen3_1_7b': (
    'Qwen/Qwen3-1.7B',
    dict(
      width=2048,
      num_heads=16,
      num_kv_heads=8,
      mlp_width=6144,
      attention_bias=False,
      query_key_norm=True,
    ),
  ),
  'qwen2_5_7b': (
    'Qwen/Qwen2.5-7B-Instruct',
    dict(
      vocab_size=152064,
      width=3584,
      num_heads=28,
      num_kv_heads=4,
      mlp_width=18944,
      tied_embeddings=False,
    ),
  ),
}
MEMORIES = ('t4', '24gb', '40gb', '80gb')  # a T4 has 16 GB and does not support bfloat16
DATA = {
  'gsm8k': dict(train='openai/gsm8k:main:train', evaluation=('openai/gsm8k:main:test',)),
  'math': dict(
    train='DigitalLearningGmbH/MATH-lighteval:default:train',
    evaluation=('HuggingFaceH4/MATH-500:default:test',),
  ),
}
MAX_RESPONSE = {'gsm8k': 1024, 'math': 3072}  # tokens

SYSTEM = 'Reason step by step, and put the final answer inside \\boxed{}.'

LORA = 'LoRA'
# (slots, tokens per microbatch, training). `capacity --device=… --fit` computes slots and tokens.
# Training covers the whole model, with AdamW's moments in float32, or in bfloat16 if float32 does
# not fit. If neither fits, it covers only LoRA adapters.
FITS = {
  ('qwen2_5_0_5b', 't4', 'gsm8k'): (64, 12288, 'float32'),
  ('qwen2_5_0_5b', 't4', 'math'): (32, 7168, 'float32'),
  ('qwen2_5_0_5b', '24gb', 'gsm8k'): (256, 24576, 'float32'),
  ('qwen2_5_0_5b', '24gb', 'math'): (256, 28672, 'float32'),
  ('qwen2_5_0_5b', '40gb', 'gsm8k'): (256, 24576, 'float32'),
  ('qwen2_5_0_5b', '40gb', 'math'): (256, 28672, 'float32'),
  ('qwen2_5_0_5b', '80gb', 'gsm8k'): (256, 24576, 'float32'),
  ('qwen2_5_0_5b', '80gb', 'math'): (256, 28672, 'float32'),
  ('qwen2_5_1_5b', '24gb', 'gsm8k'): (256, 24576, LORA),
  ('qwen2_5_1_5b', '24gb', 'math'): (64, 28672, LORA),
  ('qwen2_5_1_5b', '40gb', 'gsm8k'): (256, 6144, 'float32'),
  ('qwen2_5_1_5b', '40gb', 'math'): (64, 7168, 'float32'),
  ('qwen2_5_1_5b', '80gb', 'gsm8k'): (256, 24576, 'float32'),
  ('qwen2_5_1_5b', '80gb', 'math'): (256, 28672, 'float32'),
  ('qwen3_1_7b', '24gb', 'gsm8k'): (32, 24576, LORA),
  ('qwen3_1_7b', '24gb', 'math'): (16, 28672, LORA),
  ('qwen3_1_7b', '40gb', 'gsm8k'): (64, 24576, 'bfloat16'),
  ('qwen3_1_7b', '40gb', 'math'): (32, 14336, 'bfloat16'),
  ('qwen3_1_7b', '80gb', 'gsm8k'): (128, 24576, 'float32'),
  ('qwen3_1_7b', '80gb', 'math'): (64, 28672, 'float32'),
  ('qwen2_5_7b', '40gb', 'gsm8k'): (16, 24576, LORA),
  ('qwen2_5_7b', '40gb', 'math'): (8, 28672, LORA),
  ('qwen2_5_7b', '80gb', 'gsm8k'): (256, 24576, LORA),
  ('qwen2_5_7b', '80gb', 'math'): (128, 28672, LORA),
}


def get_config(choice=''):
  name, memory, data = _parse(choice)
  repository, shape = MODELS[name]
  slots, tokens, trained = FITS[name, memory, data]
  config = base.get_config()
  config.num_steps = 200
  config.model.repository = repository
  config.model.update(shape)
  config.model.rope.theta = 1e6
  config.model.dtype = 'float32' if memory == 't4' else 'bfloat16'
  config.prompt.update(dict(template='chat', system=SYSTEM))
  config.data.update(DATA[data])
  config.data.update(dict(on_overlong='drop', default_kind='math'))
  config.rollout.update(
    dict(
      questions=32,
      group_size=8,
      max_prompt=512,
      max_response=MAX_RESPONSE[data],
      slots=slots,
      logit_chunk=1024,
    )
  )
  config.microbatch.tokens = tokens
  config.optimizer.minibatches = 1
  if trained == LORA:
    config.lora.rank = 32
    config.optimizer.learning_rate = 1e-5  # ten times the rate for full fine-tuning
  else:
    config.optimizer.moment_dtype = trained
  config.evaluation.every = 20
  config.export.last = True
  return config


def _parse(choice):
  """Parse the words after the colon into (model, memory, data). Raises InputError if invalid."""
  chosen = dict(model='qwen2_5_0_5b', memory='24gb', data='gsm8k')
  allowed = dict(model=MODELS, memory=MEMORIES, data=DATA)
  for word in filter(None, choice.split(',')):
    part = next((part for part, words in allowed.items() if word in words), None)
    if part is None:
      words = ', '.join(word for words in allowed.values() for word in words)
      raise InputError(f"'{word}' after the colon must be one of {words}")
    chosen[part] = word
  if tuple(chosen.values()) not in FITS:
    raise InputError(
      f'{chosen["model"]} does not fit {chosen["memory"]} with {chosen["data"]}: choose more '
      'memory or a smaller model'
    )
  return tuple(chosen.values())
