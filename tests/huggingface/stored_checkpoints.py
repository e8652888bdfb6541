"""The checkpoints that make_checkpoints.py has written, and what tests do with them."""

from safetensors.numpy import load_file, save_file

from exgrpo_jax.huggingface import architecture
from tests.helpers.paths import CHECKPOINTS

NAMES = sorted(path.name for path in CHECKPOINTS.iterdir())
SHARDED, SINGLE = 'llama_shards', 'qwen2_seven_queries_a_key'  # in three files, and in one
INDEX = 'model.safetensors.index.json'


def read_config(folder, dtype='float32'):
  """The model.Config of a checkpoint."""
  return architecture.parse(architecture.read_json(folder), str(folder), dtype)


def rewrite(file, change):
  """Applies `change` to the dict of a safetensors file's tensors."""
  content = load_file(file)
  change(content)
  save_file(content, file, {'format': 'pt'})
