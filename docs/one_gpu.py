"""Writes docs/one_gpu.md: configs/one_gpu.py on GPUs, by the formula of `exgrpo capacity`.

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

Train a checkpoint of the Hugging Face Hub on one GPU with `one_gpu`, and look up what fits:

```bash
exgrpo doctor
exgrpo train --config=smoke_gpu --workdir=/tmp/smoke_gpu
exgrpo train --config=one_gpu:qwen2_5_1_5b,40gb,gsm8k --workdir=/tmp/run
```

`doctor` says what the machine has, what is missing, and which of these configs fits it. `smoke_gpu`
trains a small model, to see if training runs on the GPU at all. After `one_gpu:` comes a model, a
memory and a data set, in any order; the default is Qwen2.5-0.5B on 24 GB with GSM8K. A step has 32
questions x 8 responses, of at most 1,024 tokens with GSM8K and 3,072 with MATH, and a run has 200
steps.

## What fits?

**No run of the table has been made yet.** The memory is computed by formula:

```bash
exgrpo capacity --config=one_gpu:qwen2_5_1_5b,40gb,gsm8k --device=a100-40
```

| model | memory | data | slots | tokens a pass | trained | GiB needed |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

- **GiB needed** is for the program that needs most, with everything resident next to it. JAX takes
  nine tenths of the GPU's memory (`XLA_CLIENT_MEM_FRACTION` changes it).
- **Training the whole model** takes 16 bytes a parameter: the parameter, AdamW's two moments in
  bfloat16, the gradient, and the sum of the gradients of the microbatches so far. With moments in
  float32 it takes 20.
- **[LoRA](checkpoints.md#how-do-i-train-lora-adapters)** of rank 32 is used if that does not fit.
  The frozen model and the weights for sampling take four bytes a parameter. A dash marks a
  model that is too large even so.
- **`t4`** is a T4 or a V100 of 16 GB. They have no bfloat16, so the model computes in float32.

## What about another memory, or longer responses?

`--fit` finds slots and tokens a pass, the two settings that change only memory and time:

```bash
exgrpo capacity --config=one_gpu:40gb --device=h100 --fit --config.rollout.max_response=4096
```
"""


def row(model: str, memory: str, data: str) -> str:
  """Return a line of the table."""
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
