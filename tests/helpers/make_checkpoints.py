"""Makes small checkpoints with transformers, and stores the outputs that it computes from them.

python tests/helpers/make_checkpoints.py [CASE …]   # needs torch, transformers; tests/checkpoints/

Each folder is a Hugging Face checkpoint with random weights, and an expected.npz:
  tokens_BT, length_B   prompts, padded on the right with 0
  right, left           float32 [sum of lengths, V], logits of the batch padded on that side,
                        row after row, without those at padding
  bfloat16              like `right`, with weights and activations in bfloat16
  greedy_BT             the 64 tokens that greedy decoding appends to each prompt
"""

import json
import pathlib
import sys

import numpy as np
import tokenizers
import torch
import transformers

FOLDER = pathlib.Path(__file__).resolve().parents[1] / 'checkpoints'
LENGTHS = (24, 17, 9)
NEW_TOKENS = 64
SHAPE = dict(
  vocab_size=96,
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  intermediate_size=48,
  max_position_embeddings=128,
  rms_norm_eps=1e-5,
  initializer_range=0.2,
  tie_word_embeddings=False,
  bos_token_id=None,
  eos_token_id=None,
  pad_token_id=None,
)
LLAMA3 = dict(
  rope_type='llama3',
  rope_theta=1e4,
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=32,
)
YARN = dict(rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=32)
CASES = {
  'qwen2_tied': ('Qwen2', dict(vocab_size=320, tie_word_embeddings=True)),
  'qwen2_seven_queries_a_key': (
    'Qwen2',
    dict(hidden_size=56, num_attention_heads=7, num_key_value_heads=1),
  ),
  'qwen3_wide_heads': ('Qwen3', dict(head_dim=12)),
  'qwen3_experts': (
    'Qwen3Moe',
    dict(
      head_dim=12,
      moe_intermediate_size=24,
      num_experts=6,
      num_experts_per_tok=3,
      norm_topk_prob=True,
    ),
  ),
  'llama3_scaled_rope': ('Llama', dict(rope_parameters=LLAMA3)),
  'llama_shards': (
    'Llama',
    dict(rope_parameters=dict(rope_type='linear', rope_theta=5e5, factor=2.0)),
  ),
  'mistral_window': ('Mistral', dict(sliding_window=7, head_dim=12)),
  'ministral_every_other_layer': (
    'Ministral',
    dict(sliding_window=7, head_dim=12, layer_types=['full_attention', 'sliding_attention']),
  ),
  'ministral3_growing_queries': (
    'Ministral3',
    dict(
      sliding_window=7,
      head_dim=12,
      rope_parameters=YARN | dict(original_max_position_embeddings=9, llama_4_scaling_beta=0.3),
    ),
  ),
  'smollm3_without_positions': (
    'SmolLM3',
    dict(
      num_hidden_layers=4,
      attention_bias=True,
      mlp_bias=True,
      hidden_act='relu',
      no_rope_layers=[1, 0, 1, 0],
      use_sliding_window=True,
      sliding_window=7,
      layer_types=[f'{kind}_attention' for kind in ('full', 'full', 'sliding', 'sliding')],
    ),
  ),
  'olmo2': ('Olmo2', dict(attention_bias=True, hidden_act='gelu')),
  'olmo3_yarn': (
    'Olmo3',
    dict(num_hidden_layers=4, sliding_window=7, rope_parameters=dict(full_attention=YARN)),
  ),
  'gemma2_caps': (
    'Gemma2',
    dict(
      num_hidden_layers=3,
      head_dim=12,
      sliding_window=7,
      query_pre_attn_scalar=20,
      attn_logit_softcapping=2.0,
      final_logit_softcapping=3.0,
    ),
  ),
  'gemma3_two_bases': (
    'Gemma3Text',
    dict(
      num_hidden_layers=3,
      head_dim=12,
      sliding_window=7,
      query_pre_attn_scalar=20,
      layer_types=[f'{kind}_attention' for kind in ('sliding', 'sliding', 'full')],
      rope_parameters=dict(
        sliding_attention=dict(rope_type='default', rope_theta=1e3),
        full_attention=dict(rope_type='linear', rope_theta=5e4, factor=4.0),
      ),
    ),
  ),
}

# In the style of Qwen2.5: turns between markers, and a default system message.
CHAT = """\
{%- set first = messages[0] %}
{%- if tools %}
    {{- '<|im_start|>system\\n' ~ tools | tojson ~ '<|im_end|>\\n' }}
{%- elif first['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are of help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != 'assistant' or (message.content and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- else %}
        {{- raise_exception('an empty turn') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make(name: str, folder: pathlib.Path, seed: int) -> None:
  """Writes a case's checkpoint and its expected.npz."""
  family, changes = CASES[name]
  torch.manual_seed(seed)
  config = getattr(transformers, f'{family}Config')(**SHAPE | changes)
  policy = transformers.AutoModelForCausalLM.from_config(config).eval()
  with torch.no_grad():
    for parameter, weight in policy.named_parameters():
      if 'norm' in parameter or parameter.endswith('bias'):  # ones and zeros would hide mix-ups
        weight.add_(0.2 * torch.randn_like(weight))
  limit = '40KB' if name == 'llama_shards' else '5GB'
  policy.save_pretrained(folder, max_shard_size=limit)
  if name == 'qwen2_tied':
    write_tokenizer(folder)
  prompts = [
    np.random.default_rng((seed, row)).integers(0, config.vocab_size, length)
    for row, length in enumerate(LENGTHS)
  ]
  greedy_BT = np.stack([greedy(policy, prompt) for prompt in prompts])
  right, left = logits(policy, prompts, 'right'), logits(policy, prompts, 'left')
  np.savez_compressed(
    folder / 'expected.npz',
    tokens_BT=pad(prompts, 'right')[0],
    length_B=LENGTHS,
    right=right,
    left=left,
    bfloat16=logits(policy.to(torch.bfloat16), prompts, 'right'),
    greedy_BT=greedy_BT,
  )


def pad(prompts, side):
  """Tokens and mask, padded on `side`."""
  tokens_BT = np.zeros((len(prompts), max(LENGTHS)), np.int64)
  mask_BT = np.zeros_like(tokens_BT)
  for b, prompt in enumerate(prompts):
    span = slice(0, len(prompt)) if side == 'right' else slice(-len(prompt), None)
    tokens_BT[b, span], mask_BT[b, span] = prompt, 1
  return tokens_BT, mask_BT


@torch.no_grad()
def logits(policy, prompts, side):
  tokens_BT, mask_BT = pad(prompts, side)
  position_BT = np.maximum(mask_BT.cumsum(axis=1) - 1, 0)
  output = policy(
    torch.tensor(tokens_BT),
    attention_mask=torch.tensor(mask_BT),
    position_ids=torch.tensor(position_BT),
  )
  return output.logits.float().numpy()[mask_BT > 0]


@torch.no_grad()
def greedy(policy, prompt):
  tokens_BT = torch.tensor(prompt[None])
  output_BT = policy.generate(
    tokens_BT,
    attention_mask=torch.ones_like(tokens_BT),  # by default, zeros in the prompt are padding
    do_sample=False,
    max_new_tokens=NEW_TOKENS,
    eos_token_id=None,
    pad_token_id=0,
  )
  return output_BT[0, len(prompt) :].numpy()


def write_tokenizer(folder):
  """Writes a tokenizer with Qwen's byte-level pieces, few merges and no padding token."""
  qwen = transformers.Qwen2Tokenizer().backend_tokenizer
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.normalizer, tokenizer.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
  tokenizer.decoder = qwen.decoder
  texts = ['1+2=3 3+4=7 \\boxed{7}\n#### 7\n'] * 9
  tokenizer.train_from_iterator(
    texts,
    tokenizers.trainers.BpeTrainer(
      vocab_size=300,
      special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
      show_progress=False,
    ),
  )
  tokenizer.save(str(folder / 'tokenizer.json'))
  (folder / 'tokenizer_config.json').write_text(
    json.dumps(
      {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'eos_token': '<|im_end|>',
        'chat_template': CHAT,
      },
      indent=2,
    )
  )
  (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [2, 0]}))


if __name__ == '__main__':
  for case in sys.argv[1:] or CASES:
    make(case, FOLDER / case, seed=0)
