"""How fast, on this machine: figures to compare within one run, for machines are noisy.

python -m exgrpo_jax.benchmark rollout --slots=32 --questions=32 --samples=1
python -m exgrpo_jax.benchmark update --questions=8 --samples=8
python -m exgrpo_jax.benchmark loss --questions=8 --samples=8
python -m exgrpo_jax.benchmark grading --workers=2
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from exgrpo_jax.algorithm import objective
from exgrpo_jax.datatypes import Batch
from exgrpo_jax.experiment import run_command
from exgrpo_jax.grading import pool, verifier
from exgrpo_jax.learner import gradients, optimizer
from exgrpo_jax.padding import length_bucket
from exgrpo_jax.policy import logprobs, model, rotary, sharding
from exgrpo_jax.rollout import scheduler, token_sampling

_ROPE = rotary.Config(
  theta=1e4,
  scaling='none',
  factor=1.0,
  low_frequency_factor=1.0,
  high_frequency_factor=4.0,
  original_positions=4096,
)
SHAPES = {
  # 55.3 million parameters, 38.9 million of them in matrix products.
  'reference': model.Config(
    vocab_size=32000,
    width=512,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    head_size=64,
    mlp_width=1408,
    rope=_ROPE,
    norm_epsilon=1e-6,
    attention_bias=False,
    query_key_norm=False,
    tied_embeddings=False,
    dtype='float32',
  ),
  'qwen2_5_1_5b': model.Config(
    vocab_size=151936,
    width=1536,
    num_layers=28,
    num_heads=12,
    num_kv_heads=2,
    head_size=128,
    mlp_width=8960,
    rope=_ROPE,
    norm_epsilon=1e-6,
    attention_bias=True,
    query_key_norm=False,
    tied_embeddings=True,
    dtype='bfloat16',
  ),
}
_OBJECTIVE = objective.Config(
  clip='until_replay',
  clip_epsilon=0.2,
  clip_epsilon_high=0.2,
  dual_clip=float('inf'),
  surrogate='ppo',
  ratio='token',
  shaping=True,
  beta=0.1,
  normalize_std=False,
  aggregation='constant',
  entropy_bonus=1e-4,
  kl_coefficient=0.0,
  old_logprobs='sampler',
  tis_limit=0.0,
)
_OPTIMIZER = optimizer.Config(
  minibatches=1,
  learning_rate=1e-6,
  schedule='constant',
  warmup_updates=0,
  b1=0.9,
  b2=0.999,
  epsilon=1e-8,
  weight_decay=0.01,
  moments='float32',
  clip_norm=1.0,
  skip_norm=float('inf'),
)

_SHAPE = flags.DEFINE_enum('shape', 'reference', list(SHAPES), 'Of the model; random weights.')
_SLOTS = flags.DEFINE_integer('slots', 32, 'Rows that decode together.', lower_bound=1)
_QUESTIONS = flags.DEFINE_integer('questions', 32, 'Prompts.', lower_bound=1)
_SAMPLES = flags.DEFINE_integer('samples', 1, 'Responses to each.', lower_bound=1)
_PROMPT = flags.DEFINE_integer('prompt', 64, 'Tokens of a prompt.', lower_bound=1)
_RESPONSE = flags.DEFINE_integer(
  'response', 128, 'Tokens of a response; with lognormal lengths their median.', lower_bound=1
)
_LENGTHS = flags.DEFINE_enum(
  'lengths',
  'equal',
  ['equal', 'lognormal'],
  'Of the responses, which are forced; lognormal: the 99th percentile is 8 times the median.',
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 3, 'Of each measurement; medians are printed.', lower_bound=1
)
_MICROBATCH = flags.DEFINE_integer(
  'microbatch', 3072, 'Tokens of a forward and backward pass.', lower_bound=1
)
_REMAT = flags.DEFINE_enum(
  'remat',
  'all_but_products',
  list(model.REMAT),
  'What of a layer the backward pass computes again.',
)
_WORKERS = flags.DEFINE_integer('workers', 0, 'Grading processes; 0 is one a core.', lower_bound=0)
_CHUNK = flags.DEFINE_integer('chunk', 512, 'Tokens whose logits exist at once.', lower_bound=1)

_PERCENTILE_99 = 2.3263  # of the normal distribution
_PRODUCT_STEPS, _TOKEN_STEPS, _DRAW_STEPS = 64, 16, 16  # in one measurement
_GRADED, _GRADED_LENGTH = 1024, 8000  # responses in a batch; characters of each, 2,000 tokens
# (boxed, ground truth), numbered so that no two responses are one.
_ANSWERS = (
  ('{n}', '{n}'),
  ('{n}.50', '{n}.5'),
  (r'\frac{{{n}}}{{7}}', r'\frac{{{n}}}{{8}}'),
  (r'{n}\sqrt{{3}}', r'\sqrt{{3}}\cdot {n}'),
  (r'x^2 + {n}x + 1', r'1 + x^2 + {n}x'),
  ('({n}, 3]', '({n}, 3)'),
  (r'\{{1, {n}\}}', r'\{{{n}, 1\}}'),
  (r'\text{{no {n}}}', 'yes'),
)


def main(what: str) -> None:
  """Runs one of BENCHMARKS."""
  BENCHMARKS[what]()


def rollout() -> None:
  """Prints the throughput of the sampler, its distance to the roofline, and its shares."""
  config, mesh, stored = _placed()
  params = jax.block_until_ready(model.decode_layout(config, stored, mesh))
  slots, limits = _SLOTS.value, _limits()
  count, tokens = len(limits), int(sum(limits))
  print(
    f'{_SHAPE.value} on {jax.device_count()} {jax.devices()[0].device_kind}: {count} responses '
    f'of {min(limits)} to {max(limits)} tokens in {slots} slots, prompts of {_PROMPT.value}'
  )

  rows = min(slots, count)
  whole, first, products = _seconds(
    lambda: _generate(config, params, mesh, limits),
    lambda: _generate(config, params, mesh, [1] * count),  # prefill and one token
    _products(config, params, rows),
  )
  decoding, products = whole - first, products / _PRODUCT_STEPS
  print(f'end to end   {tokens / whole:10,.0f} tokens/s   {whole:.2f} s')
  print(f'decode only  {(tokens - count) / decoding:10,.0f} tokens/s   {decoding:.2f} s')

  steps = (tokens - count) / rows
  flops = 2 * rows * sum(matrix.size for matrix in _matrices(config, params))
  print(
    f'roofline     {100 * products * steps / decoding:9.0f}%   of the rate at which this run '
    f"streams the model's matrices: {flops / products / 1e9:.0f} GFLOP/s, "
    f'{1e3 * products:.1f} ms a step'
  )

  length = length_bucket(_PROMPT.value + int(np.mean(limits)))
  long, short = _seconds(*(_tokens(config, params, rows, size) for size in (length, 1)))
  attention = (long - short) / _TOKEN_STEPS * steps
  sampling, moving = _seconds(
    _draws(config, rows), lambda: jax.block_until_ready(model.decode_layout(config, stored, mesh))
  )
  sampling *= steps / _DRAW_STEPS
  for name, seconds in (
    ('prefill', first),
    ('sampling', sampling),
    ('attention', attention),
    ('resharding', moving),
  ):
    print(f'{name:<12} {100 * seconds / whole:9.0f}%   {seconds:.3f} s')

  refilled, static = _seconds(
    lambda: _generate(config, params, mesh, limits),
    lambda: [
      _generate(config, params, mesh, limits[start : start + slots], start)
      for start in range(0, count, slots)
    ],
  )
  print(
    f'refill       {static / refilled:9.2f}x   the throughput of running each batch of {slots} '
    'to its longest row'
  )
  eight, one = _seconds(
    *(
      lambda count=count: _generate(config, params, mesh, [1] * count, prompt=512, samples=8)
      for count in (8, 1)
    )
  )
  print(
    f'shared       {eight / one:9.2f}x   the time of one sample, for 8 of one prompt of 512 '
    'tokens, up to the first token'
  )
  low, high = _seconds(
    *(
      lambda limit=limit: _generate(
        config, params, mesh, [64] * rows, max_response=limit - _PROMPT.value
      )
      for limit in (256, 4096)
    )
  )
  print(
    f'cache limit  {high / low:9.2f}x   the time at a limit of 256, for one of 4,096, while '
    'responses have 64 tokens'
  )


def _limits() -> list[int]:
  count = _QUESTIONS.value * _SAMPLES.value
  if _LENGTHS.value == 'equal':
    return [_RESPONSE.value] * count
  normal = np.random.default_rng(0).normal(size=count)
  spread = np.log(8) / _PERCENTILE_99
  return np.maximum(1, np.round(_RESPONSE.value * np.exp(spread * normal))).astype(int).tolist()


def _generate(
  config,
  params,
  mesh,
  limits: Sequence[int],
  first: int = 0,
  prompt: int | None = None,
  samples: int | None = None,
  max_response: int | None = None,
) -> None:
  samples = samples or _SAMPLES.value
  rng = np.random.default_rng(1)
  questions = [(first + row) // samples for row in range(len(limits))]
  prompts = {
    question: rng.integers(0, config.vocab_size, prompt or _PROMPT.value).astype(np.int32)
    for question in dict.fromkeys(questions)
  }
  settings = scheduler.Settings(
    token_sampling.Config(), _SLOTS.value, max_response or max(limits), (config.vocab_size,), 0
  )
  scheduler.generate(
    config,
    params,
    [prompts[question] for question in questions],
    questions,
    [(first + row) % samples for row in range(len(limits))],
    jax.random.key(0),
    settings,
    mesh,
    limits=limits,
  )


def _seconds(*runs: Callable[[], object]) -> list[float]:
  """The median of each of several runs, which take turns, after one that compiles."""
  times = [[] for _ in runs]
  for repeat in range(1 + _REPEATS.value):
    for run, own in zip(runs, times):
      start = time.perf_counter()
      run()
      if repeat:
        own.append(time.perf_counter() - start)
  return [statistics.median(own) for own in times]


def _matrices(config, params):
  """[in, out] of every matrix product of a decode step, the attention's own aside."""
  found = [model.unembedding(config, params)]
  for layer in params['layers']:
    attention, mlp = layer['attention'], layer['mlp']
    found += [
      attention[name].reshape(config.width, -1) for name in ('query_DNH', 'key_DGH', 'value_DGH')
    ]
    found += [attention['out_NHD'].reshape(-1, config.width), *mlp.values()]
  return found


def _products(config, params, rows: int) -> Callable[[], object]:
  """The matrix products of _PRODUCT_STEPS decode steps alone, each matrix read once a step."""
  matrices = _matrices(config, params)
  inputs = {
    size: jnp.ones((rows, size), config.dtype) for size in {matrix.shape[0] for matrix in matrices}
  }
  products = jax.jit(
    lambda matrices, inputs, scale: [
      (inputs[matrix.shape[0]] * scale) @ matrix for matrix in matrices
    ]
  )
  scale = jnp.ones((), config.dtype)
  return lambda: [
    jax.block_until_ready(products(matrices, inputs, scale)) for _ in range(_PRODUCT_STEPS)
  ]


def _tokens(config, params, rows: int, length: int) -> Callable[[], object]:
  """_TOKEN_STEPS tokens of each row without logits, with a cache of `length`."""

  @jax.jit
  def loop(params, cache):
    def step(_, carry):
      hidden_BD, cache = carry
      token_B = (hidden_BD[:, 0] > 0).astype(jnp.int32)
      return model.decode(config, params, token_B, jnp.full(rows, length - 1), cache)

    start = jnp.zeros((rows, config.width), config.dtype), cache
    return jax.lax.fori_loop(0, _TOKEN_STEPS, step, start)

  cache = model.init_cache(config, rows, length)
  return lambda: jax.block_until_ready(loop(params, cache))


def _draws(config, rows: int) -> Callable[[], object]:
  drawn = jax.jit(token_sampling.sample_token, static_argnums=0)
  logits_BV = jax.random.normal(jax.random.key(0), (rows, config.vocab_size))
  uniform_B2 = jax.random.uniform(jax.random.key(1), (rows, 2))
  return lambda: [
    jax.block_until_ready(drawn(token_sampling.Config(), logits_BV, uniform_B2))
    for _ in range(_DRAW_STEPS)
  ]


def update() -> None:
  """Prints the time of one update, and its share of the rate of its matrix products alone."""
  config, mesh, params = _placed()
  batch, _ = _batch(config)
  settings = gradients.Settings(
    gradients.Config(_MICROBATCH.value, _REMAT.value, False),
    _OBJECTIVE,
    _OPTIMIZER,
    config,
    mesh,
    1,
    1.0,
    _RESPONSE.value,
    _CHUNK.value,
  )
  states = [optimizer.init(_OPTIMIZER, 1, params)]

  def one():
    state, sums = gradients.minibatch(settings, states.pop(), batch, False, True)
    jax.block_until_ready(sums)
    states.append(state)

  products, flops = _training_products(config, mesh, params, *batch.tokens_BT.shape)
  whole, alone = _seconds(one, products)
  print(
    f'update       {whole:9.2f} s   {batch.tokens_BT.size / whole:,.0f} tokens/s, '
    f'{flops / 1e12:.2f} TFLOP in matrix products'
  )
  print(
    f'utilisation  {100 * alone / whole:9.0f}%   of the rate of these products alone in this '
    f'run: {flops / alone / 1e9:.0f} GFLOP/s'
  )


def loss() -> None:
  """Prints time and temporary memory of the fused loss beside the naive and a rematerialised one.

  Each with its gradient by the hidden states and the unembedding.
  """
  config, _, params = _placed()
  batch, tokens = _batch(config)
  kernel_DV = model.unembedding(config, params)
  target_BW = batch.tokens_BT[:, _PROMPT.value :]
  token_loss = functools.partial(objective.token_loss, config=_OBJECTIVE, clip=False, is_first=True)

  def fused(hidden_BWD, kernel_DV):
    return logprobs.fused_loss(
      hidden_BWD, kernel_DV, target_BW, tokens, token_loss, temperature=1.0, chunk=_CHUNK.value
    )[0]

  def by_autodiff(chunk, hidden_BWD, kernel_DV):
    return token_loss(
      *logprobs.target_logprobs(hidden_BWD, kernel_DV, target_BW, 1.0, chunk), tokens
    )[0]

  forms = {
    'fused': fused,
    'rematerialised': functools.partial(by_autodiff, _CHUNK.value),
    'naive': functools.partial(by_autodiff, target_BW.size),
  }
  hidden_BWD = jax.random.normal(jax.random.key(0), (*target_BW.shape, config.width), config.dtype)
  compiled = {
    name: jax.jit(jax.value_and_grad(form, (0, 1))).lower(hidden_BWD, kernel_DV).compile()
    for name, form in forms.items()
  }
  times = _seconds(
    *(
      lambda own=own: jax.block_until_ready(own(hidden_BWD, kernel_DV)) for own in compiled.values()
    )
  )
  for (name, own), seconds in zip(compiled.items(), times):
    memory = own.memory_analysis().temp_size_in_bytes
    print(
      f'{name:<15}{seconds:9.2f} s   {seconds / times[0]:.2f}x   temporary memory '
      f'{memory / 2**20:,.0f} MiB'
    )


def grading() -> None:
  """Prints how fast a batch of responses is graded, and how long one alone takes."""
  config = pool.Config(
    workers=_WORKERS.value,
    time_limit=5.0,
    memory_limit=1024,
    max_length=200_000,
    max_failures=0.0,
    reward='',
  )
  thought = 'So we find that $x_1 + 3 = 7$, whence 12 of them are left. '
  thought *= _GRADED_LENGTH // len(thought)
  pairs = [[text.format(n=n) for text in _ANSWERS[n % len(_ANSWERS)]] for n in range(_GRADED)]
  responses = [rf'{thought}</think>{thought[:200]}\boxed{{{given}}}.' for given, _ in pairs]
  answers = [truth for _, truth in pairs]
  alone = []
  with pool.Grader(config, verifier.Config(True, False)) as grader:
    (whole,) = _seconds(lambda: grader.grade(responses, answers))
    for response, answer in zip(responses, answers):
      start = time.perf_counter()
      grader.grade([response], [answer])
      alone.append(1e3 * (time.perf_counter() - start))
  print(
    f'grading      {_GRADED / whole:9,.0f} responses/s   {whole:.2f} s for {_GRADED:,} of '
    f'{_GRADED_LENGTH:,} characters'
  )
  print(
    f'one alone    {statistics.median(alone):9.2f} ms   the median; the 95th percentile '
    f'{np.percentile(alone, 95):.2f} ms'
  )


def _placed():
  """(config, mesh, params): the chosen shape with random weights, on all devices."""
  config = SHAPES[_SHAPE.value]
  mesh = sharding.make_mesh(sharding.Config(data=1, fsdp=-1, tensor=1))
  jax.set_mesh(mesh)
  return config, mesh, model.init(config, jax.random.key(0), mesh)


def _batch(config):
  """Random rows of equal length, every eighth replayed, and the tokens of their responses."""
  rows, prompt, response = _QUESTIONS.value * _SAMPLES.value, _PROMPT.value, _RESPONSE.value
  rng = np.random.default_rng(0)
  mask_BT = np.zeros((rows, prompt + response), np.float32)
  mask_BT[:, prompt:] = 1
  batch = Batch(
    rng.integers(0, config.vocab_size, mask_BT.shape).astype(np.int32),
    mask_BT,
    -np.log(config.vocab_size).astype(np.float32) * mask_BT,
    rng.normal(size=rows).astype(np.float32),
    np.arange(rows) % 8 == 7,
    np.zeros(rows, np.int32),
    np.ones_like(mask_BT),
  )
  tokens = objective.loss_inputs(batch, _OBJECTIVE, response)
  return batch, jax.tree.map(lambda x: x[:, prompt:] if x.shape[1] > 1 else x, tokens)


def _training_products(config, mesh, params, rows, length) -> tuple[Callable[[], object], int]:
  """The products of a forward and backward pass alone, and their FLOPs.

  Every layer takes the matrices of the first; responses alone meet the unembedding.
  """
  first = model.decode_layout(config, params, mesh)
  head, *layer = _matrices(config, first | {'layers': first['layers'][:1]})

  @jax.jit
  def products(x, w, y):
    return x @ w, y @ w.T, x.T @ y

  @functools.cache  # made while compiling, not while the clock runs
  def ones(*shape):
    return jnp.ones(shape, config.dtype)

  def of(matrix, tokens):
    x, y = (ones(tokens, size) for size in matrix.shape)
    jax.block_until_ready(products(x, matrix, y))

  room = max(1, _MICROBATCH.value // length)

  def run():
    for start in range(0, rows, room):
      some = min(room, rows - start)
      for matrix in layer * config.num_layers:
        of(matrix, some * length)
      responses = some * _RESPONSE.value
      for first in range(0, responses, _CHUNK.value):
        of(head, min(_CHUNK.value, responses - first))

  return run, 6 * rows * (
    config.num_layers * length * sum(matrix.size for matrix in layer) + _RESPONSE.value * head.size
  )


BENCHMARKS = {'rollout': rollout, 'update': update, 'loss': loss, 'grading': grading}

if __name__ == '__main__':
  run_command(main, choices=list(BENCHMARKS))
