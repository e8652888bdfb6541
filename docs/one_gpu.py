"""Writes docs/one_gpu.md: configs/one_gpu.py on GPUs, by the formulas of exgrpo_jax.capacity.

python docs/one_gpu.py
"""

import contextlib
import io
import itertools
import pathlib

from exgrpo_jax.commands import (capacity)
from exgrpo_jax.experiment import (config_files)
from exgrpo_jax.configs import one_gpu
from exgrpo_jax.experiment.experiment import (parse_config)
from exgrpo_jax.performance import chips, gpus

PAGE = pathlib.Path(__file__).with_suffix('.md')
GPUS = {'24gb': ('l4', 'rtx4090'), '40gb': ('a100-40',), '80gb': ('a100-80', 'h100')}
# Medians assumed of responses' lengths, in tokens, and the questions of an evaluation.
LENGTHS = {'gsm8k': 'lognormal:250', 'math': 'lognormal:600'}
EVALUATED = {'gsm8k': 1319, 'math': 500}

_PAGE = """\
# One GPU

<!-- Written by docs/one_gpu.py; change it there, then renew this page. -->

`one_gpu` trains a checkpoint of the Hugging Face Hub on one GPU. What follows the colon is a model,
a memory and a data set, in any order; without them it is Qwen2.5-0.5B on 24 GB with GSM8K:

```bash
exgrpo doctor
exgrpo train --config=smoke_gpu --workdir=/tmp/smoke_gpu
exgrpo train --config=one_gpu:qwen2_5_1_5b,40gb,gsm8k --workdir=/tmp/run
```

The first says what the machine has, what is missing, and which of these configs fits it; the second
tries in five minutes whether training runs on the GPU at all. A step has 32 questions x 8
responses, of at most 1,024 tokens with GSM8K and 3,072 with MATH, and a run 200 steps.

**No run of the table has been made yet, and nothing in it was measured.** `capacity` computes both
the memory and the hours:

```bash
exgrpo capacity --config=one_gpu:qwen2_5_1_5b,40gb,gsm8k --device=a100-40 \\
    --lengths=lognormal:250 --evaluated=1319
```

| model | memory | data | slots | tokens a pass | trained | GiB needed | estimated hours |
| --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

- GiB are those of the program that needs most, with all that is resident beside it, of the nine
  tenths of the GPU's memory that JAX takes (`XLA_CLIENT_MEM_FRACTION` changes it).
- Hours are for the GPUs named, by published peaks and assumed shares of them, with responses of
  250 tokens (GSM8K) or 600 (MATH) in the median. `python -m benchmarks all` measures
  what a GPU reaches of its peaks, and `--lengths` takes the responses of a run.
- All of a model takes 16 bytes a parameter: the parameter, AdamW's two moments in bfloat16, the
  gradient, and that of the microbatches so far; 20 with moments in float32. Where that leaves no
  room, [LoRA](checkpoints.md#lora) of rank 32 does: four bytes a parameter, for the frozen model
  and the weights for sampling. Where there is a dash, these alone are too many.
- Another memory, or other lengths: `--fit` finds slots and tokens a pass, the two settings that
  change nothing but memory and time.

```bash
exgrpo capacity --config=one_gpu:40gb --device=h100 --fit \\
    --config.rollout.max_response=4096
```
"""


def row(model: str, memory: str, data: str) -> str:
  """A line of the table."""
  if (model, memory, data) not in one_gpu.FITS:
    return f'| {model} | {memory} | {data} | — | — | — | does not fit | — |'
  config = parse_config(config_files.load_config(f'one_gpu:{model},{memory},{data}'))
  hours, needed = [], ''
  for device in GPUS[memory]:
    with contextlib.redirect_stdout(io.StringIO()):
      found = capacity.examine_gpu(config, device, LENGTHS[data], EVALUATED[data])
    fullest = max(found.peaks, key=lambda program: found.peaks[program])
    usable = gpus.gpu_named(device).usable / chips.GIB
    needed = f'{found.peaks[fullest] / chips.GIB:.1f} of {usable:.1f} ({fullest})'
    hours.append(f'{device} {config.num_steps * found.speed.seconds / 3600:.1f}')
  settings = (config.rollout.slots, f'{config.gradient.tokens_per_microbatch:,}')
  trained = one_gpu.LORA if config.lora.rank else f'all, moments in {config.optimizer.moments}'
  values = (*settings, trained, needed, ', '.join(hours))
  return f'| {model} | {memory} | {data} | {" | ".join(map(str, values))} |'


def page() -> str:
  """The page."""
  cells = itertools.product(one_gpu.MODELS, one_gpu.MEMORIES, one_gpu.DATA)
  return _PAGE.format(rows='\n'.join(row(*cell) for cell in cells))


if __name__ == '__main__':
  PAGE.write_text(page(), encoding='utf-8')
