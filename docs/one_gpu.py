"""Writes docs/one_gpu.md: the memory that configs/one_gpu.py needs, estimated by a formula.

python docs/one_gpu.py
"""

import itertools
import pathlib

from exgrpo_jax.capacity import devices, fitting
from exgrpo_jax.configs import one_gpu
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import parse_config

PAGE = pathlib.Path(__file__).with_suffix('.md')

_PAGE = """\
# One GPU

<!-- Written by docs/one_gpu.py; change it there, then renew this page. -->

Train a Hugging Face checkpoint on a single GPU with the config `one_gpu`, and look up which models
fit:

```bash
exgrpo doctor
exgrpo train --config=smoke_gpu --workdir=/tmp/smoke_gpu
exgrpo train --config=one_gpu:qwen2_5_1_5b,40gb,gsm8k --workdir=/tmp/run
```

`doctor` shows the machine's hardware and software and what is missing, and suggests a config that
fits. `smoke_gpu` trains a small model to check that training works on the GPU at all. After
`one_gpu:`, pass a model, a memory size and a data set in any order. The default is Qwen2.5-0.5B on
24 GB with GSM8K. A run takes 200 steps of 32 questions, with 8 responses to each question. A
response has at most 1,024 tokens with GSM8K, and at most 3,072 tokens with MATH.

## What fits?

**None of these configs has been run yet.** The table contains estimates from a formula. This
command prints the estimates for one of the configs:

```bash
exgrpo capacity --config=one_gpu:qwen2_5_1_5b,40gb,gsm8k --device=a100-40
```

| model | memory | data | slots | tokens per pass | trained | GiB needed, of GiB usable |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

- **GiB needed** is the peak memory, with the program that reaches this peak in parentheses. The
  number includes everything else that is in memory while this program runs. JAX uses nine tenths of
  the GPU's memory unless you set `XLA_CLIENT_MEM_FRACTION`.
- **Training the whole model** takes 16 bytes per parameter: the parameter, AdamW's two moments in
  bfloat16, the gradient, and the accumulated gradient of the previous microbatches. With moments in
  float32, training takes 20 bytes per parameter.
- **[LoRA](checkpoints.md#how-do-i-train-lora-adapters)** with rank 32 is used if training the whole
  model does not fit. The frozen model and the sampling weights together take four bytes per
  parameter. A dash means that the model does not fit even with LoRA.
- **`t4`** is a T4 or a V100 with 16 GB. These GPUs do not support bfloat16, so the model computes
  in float32.

## What about other memory sizes or longer responses?

`--fit` finds the largest number of slots and the largest number of tokens per pass that fit. These
numbers affect only memory and time:

```bash
exgrpo capacity --config=one_gpu:40gb --device=h100 --fit --config.rollout.max_response=4096
```
"""


def row(model: str, memory: str, data: str) -> str:
  """Return the table row for a model, a memory size and a data set."""
  if (model, memory, data) not in one_gpu.FITS:
    return f'| {model} | {memory} | {data} | — | — | — | does not fit |'
  config = parse_config(config_files.load_config(f'one_gpu:{model},{memory},{data}'))
  peaks = fitting.peaks(config)
  fullest = max(peaks, key=lambda program: peaks[program])
  needed, usable = peaks[fullest] / devices.GIB, devices.usable_memory(memory) / devices.GIB
  values = (
    config.rollout.slots,
    f'{config.microbatch.tokens:,}',
    one_gpu.LORA if config.lora.rank else f'all, moments in {config.optimizer.moment_dtype}',
    f'{needed:.1f} of {usable:.1f} ({fullest})',
  )
  return f'| {model} | {memory} | {data} | {" | ".join(map(str, values))} |'


def page() -> str:
  """Return the page."""
  cells = itertools.product(one_gpu.MODELS, one_gpu.MEMORIES, one_gpu.DATA)
  return _PAGE.format(rows='\n'.join(row(*cell) for cell in cells))


if __name__ == '__main__':
  PAGE.write_text(page(), encoding='utf-8')
