"""Writes LoRA's adapters as PEFT reads them: adapter_model.safetensors and adapter_config.json.

https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json

from etils import epath

from exgrpo_jax.huggingface import safetensors_files, tensor_names, weights
from exgrpo_jax.huggingface.tensor_names import Index, ParamPath, Tensor
from exgrpo_jax.policy import lora, model
from exgrpo_jax.runtime import hosts


def save(
  directory: epath.PathLike,
  config: lora.Config,
  shape: model.Config,
  adapters: model.Params,
  base: str,
) -> None:
  """Writes adapters in float32; every host must call it, and the first one writes.

  Args:
    directory: local or remote.
    config: of the adapters.
    shape: the decoder's.
    adapters: what LoRA trains.
    base: the folder or name of the model they belong to.
  """
  folder = epath.Path(directory).expanduser()
  arrays = {
    tensor.name: weights.gathered(adapters, path, index, tensor, 'float32')
    for (path, index), tensor in tensors(config, shape).items()
  }
  if not hosts.is_first():
    return
  folder.mkdir(parents=True, exist_ok=True)
  safetensors_files.write(folder / 'adapter_model.safetensors', arrays)
  values = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base,
    'r': config.rank,
    'lora_alpha': config.alpha,
    'lora_dropout': 0.0,
    'target_modules': list(config.targets),
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
  }
  (folder / 'adapter_config.json').write_text(json.dumps(values, indent=2))


def tensors(config: lora.Config, shape: model.Config) -> dict[tuple[ParamPath, Index], Tensor]:
  """A and B of each target, as `tensor_names.of`, with paths in the adapters' tree."""
  layout = {}
  for (path, index), kernel in tensor_names.of(shape).items():
    module = kernel.name.removesuffix('.weight')
    if module.split('.')[-1] in config.targets:
      prefix, (num_outputs, num_inputs) = f'base_model.model.{module}', kernel.shape
      layout[(*path, 'a'), index] = Tensor(
        f'{prefix}.lora_A.weight', (config.rank, num_inputs), kernel.num_inputs
      )
      layout[(*path, 'b'), index] = Tensor(
        f'{prefix}.lora_B.weight', (num_outputs, config.rank), num_inputs=1
      )
  return layout
