"""From a Hugging Face folder to training to a Hugging Face folder to training."""

import dataclasses
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from exgrpo_jax import experiment, export
from exgrpo_jax.configs import (
  llama3_1_8b,
  llama3_1_8b_instruct,
  qwen2_5_7b_instruct,
  qwen2_5_math_1_5b,
  qwen2_5_math_7b,
)
from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.huggingface import weights
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.runtime.workdir import read_config
from tests.helpers import tiny
from tests.helpers.paths import CHECKPOINTS, REPOSITORY, TINY_CONFIG

STORED = CHECKPOINTS / 'qwen2_tied'
COPIED = ('tokenizer.json', 'tokenizer_config.json', 'generation_config.json')


def command(name, *arguments):
  done = subprocess.run(
    [sys.executable, '-m', f'exgrpo_jax.{name}', *map(str, arguments)],
    cwd=REPOSITORY,
    text=True,
    capture_output=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


def train(start, workdir, data, *more):
  return command(
    'train',
    f'--config={TINY_CONFIG}',
    f'--workdir={workdir}',
    f'--config.model.path={start}',
    '--config.prompt.template=chat',
    '--config.rollout.max_prompt=64',
    '--config.warm_start.num_updates=0',
    f'--config.data.train={data.train}',
    f'--config.data.evaluation=("{data.evaluation}",)',
    f'--config.data.cache_dir={data.cache}',
    '--config.evaluation.every=1',
    '--config.export.best=True',
    '--config.export.last=True',
    *more,
  )


@pytest.fixture(scope='module')
def run(data, tmp_path_factory):
  """The workdir of a run of three steps that started from the stored checkpoint."""
  workdir = tmp_path_factory.mktemp('from_hugging_face')
  shown = train(STORED, workdir, data, '--config.num_steps=3')
  parameters = sum(value.size for value in tensors(STORED).values())
  assert f'weights of {STORED}: {parameters:,} parameters' in shown
  return workdir


@pytest.fixture(scope='module')
def exported(run, tmp_path_factory):
  out = tmp_path_factory.mktemp('exported') / 'policy'
  assert f'{out}: the policy after step 3' in command(
    'export', f'--checkpoint={run}', f'--out={out}'
  )
  return out


def tensors(folder):
  return load_file(folder / 'model.safetensors')


def opened(run):
  return experiment.open_experiment(ConfigDict(read_config(str(run))), str(run))


def test_training_starts_from_the_checkpoints_weights(run):
  """After three steps at a small rate the weights are near those of the start, and not these."""
  start, last = tensors(STORED), tensors(run / 'export' / 'last')
  assert start.keys() == last.keys()
  moved = {name: np.abs(last[name] - start[name]).max() for name in start}
  assert 0 < max(moved.values()) < 0.05
  assert sum(size > 0 for size in moved.values()) > len(moved) * 0.9


def test_an_export_is_the_checkpoint_to_the_bit(run, exported):
  setup = opened(run)
  params, step = checkpoint.restore_params(str(run), None, model.shapes(setup.model, setup.mesh))
  assert step == 3
  jax.tree.map(
    np.testing.assert_array_equal, params, weights.load(exported, setup.model, setup.mesh)
  )


def test_the_last_policy_is_what_the_command_exports(run, exported):
  last = run / 'export' / 'last'
  assert sorted(path.name for path in last.iterdir()) == sorted(
    path.name for path in exported.iterdir()
  )
  for path in last.iterdir():
    assert path.read_bytes() == (exported / path.name).read_bytes(), path.name


def test_an_export_keeps_the_files_of_the_tokenizer_and_of_the_start(exported):
  for name in COPIED:
    assert (exported / name).read_bytes() == (STORED / name).read_bytes()
  start, end = (json.loads((folder / 'config.json').read_text()) for folder in (STORED, exported))
  assert end == start | {'torch_dtype': 'float32'}
  assert tokenizer.load(exported).eos_ids == tokenizer.load(STORED).eos_ids


def test_training_goes_on_from_its_own_export(exported, data, tmp_path):
  shown = train(exported, tmp_path, data, '--config.num_steps=1')
  assert f'weights of {exported}' in shown and 'step 1/1' in shown
  again = tensors(tmp_path / 'export' / 'last')
  assert not np.array_equal(again['model.norm.weight'], tensors(exported)['model.norm.weight'])


def test_transformers_reads_the_export_of_a_run(exported):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  policy = transformers.AutoModelForCausalLM.from_pretrained(exported)
  words = transformers.AutoTokenizer.from_pretrained(exported)
  text = words.apply_chat_template(
    [{'role': 'user', 'content': '1+0'}], tokenize=False, add_generation_prompt=True
  )
  ours = tokenizer.load(exported)
  tokens_T = words.encode(text, add_special_tokens=False)
  assert tokens_T == ours.encode(text)
  with torch.no_grad():
    expected_TV = policy(torch.tensor([tokens_T])).logits[0].numpy()
  values = tiny.values('', '')
  values.model.path = str(exported)
  values.rollout.max_prompt = 64
  setup = experiment.open_experiment(values, str(exported))
  params = weights.load(exported, setup.model, setup.mesh)
  hidden_BTD = model.hidden_states(setup.model, params, np.array([tokens_T], np.int32))
  logits_TV = (hidden_BTD @ model.unembedding(setup.model, params))[0]
  assert np.abs(logits_TV - expected_TV).max() < 1e-4


def test_the_best_policy_is_the_one_of_the_best_evaluation(run):
  """Ties go to the first; the evaluation before the first step does not count."""
  records = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
  scores = {
    record['step']: record['eval/evaluation/pass@1']
    for record in records
    if 'eval/evaluation/pass@1' in record and record['step'] > 0
  }
  assert sorted(scores) == [1, 2, 3]
  best = json.loads((run / 'export' / 'best' / 'evaluation.json').read_text())
  assert best == {
    'step': max(scores, key=lambda step: (scores[step], -step)),
    'score': max(scores.values()),
  }


def test_a_better_policy_takes_the_place_of_the_best_and_a_worse_one_does_not(recorded, tmp_path):
  setup = dataclasses.replace(recorded.experiment, workdir=str(tmp_path))
  params = model.init(setup.model, jax.random.key(0), setup.mesh)
  found = []
  for step, score in ((1, 0.2), (2, 0.1), (3, 0.2), (4, 0.5)):
    export.keep_best(setup, jax.tree.map(lambda x, step=step: x * step, params), step, score)
    norm = tensors(tmp_path / 'export' / 'best')['model.norm.weight'][0]
    found.append(
      (json.loads((tmp_path / 'export' / 'best' / 'evaluation.json').read_text())['step'], norm)
    )
  assert found == [(1, 1.0), (1, 1.0), (1, 1.0), (4, 4.0)]
  assert sorted(path.name for path in (tmp_path / 'export').iterdir()) == ['best']


def test_a_model_from_scratch_is_exported_too(recorded, tmp_path):
  out = tmp_path / 'policy'
  command('export', f'--checkpoint={recorded.workdir}', f'--out={out}', '--dtype=bfloat16')
  values = tiny.values('', '')
  values.model.path = str(out)
  setup = experiment.open_experiment(values, str(tmp_path))
  assert setup.model == recorded.experiment.model
  assert setup.tokenizer.encode('1+2=3') and setup.tokenizer.eos_ids == (1,)
  assert json.loads((out / 'generation_config.json').read_text()) == {'eos_token_id': [1]}
  assert json.loads((out / 'config.json').read_text())['torch_dtype'] == 'bfloat16'


def test_a_folder_that_holds_something_is_not_written_to(run, tmp_path):
  (tmp_path / 'a').write_text('mine')
  done = subprocess.run(
    [sys.executable, '-m', 'exgrpo_jax.export', f'--checkpoint={run}', f'--out={tmp_path}'],
    cwd=REPOSITORY,
    text=True,
    capture_output=True,
    check=False,
  )
  assert done.returncode == 2
  assert f'error: --out={tmp_path} is not empty; name a new folder' in done.stderr
  assert [path.name for path in tmp_path.iterdir()] == ['a']


# What the door says of checkpoints.


def values_of(**model_changes):
  values = tiny.values('', '')
  values.model.path = str(STORED)
  values.rollout.max_prompt = 64
  values.model.update(model_changes)
  return values


def test_a_config_for_a_repository_refuses_another_shape(tmp_path):
  with pytest.raises(
    InputError,
    match=re.escape(
      f'{STORED}/config.json: width is 32, where config.model.width of Qwen/Big is 64; name the '
      "folder of that model, or set config.model.repository='' to train another."
    ),
  ):
    experiment.open_experiment(
      values_of(repository='Qwen/Big', vocab_size=320, width=64), str(tmp_path)
    )


def test_a_context_too_short_for_prompt_and_response_is_refused_and_may_be_extended(tmp_path):
  values = values_of()
  values.rollout.max_response = 100
  with pytest.raises(
    InputError,
    match=re.escape(
      'config.rollout.max_prompt + config.rollout.max_response = 164 tokens exceed '
      f'max_position_embeddings=128 of {STORED}/config.json; lower them'
    ),
  ):
    experiment.open_experiment(values, str(tmp_path))
  values.model.extension.update(dict(rope_theta=4e4, max_position_embeddings=256))
  setup = experiment.open_experiment(values, str(tmp_path))
  assert setup.model.rope.theta == 4e4
  params = weights.load(STORED, setup.model, setup.mesh)
  export.write(setup, params, tmp_path / 'out')
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written['max_position_embeddings'] == 256
  assert written['rope_parameters']['rope_theta'] == 4e4


def test_the_backbones_stop_without_a_path_and_say_what_to_fetch(tmp_path):
  for config, name in (
    (qwen2_5_math_1_5b, 'Qwen/Qwen2.5-Math-1.5B'),
    (qwen2_5_math_7b, 'Qwen/Qwen2.5-Math-7B'),
    (qwen2_5_7b_instruct, 'Qwen/Qwen2.5-7B-Instruct'),
    (llama3_1_8b, 'meta-llama/Llama-3.1-8B'),
    (llama3_1_8b_instruct, 'meta-llama/Llama-3.1-8B-Instruct'),
  ):
    with pytest.raises(
      InputError,
      match=re.escape(
        f'config.model.path is not set, and this config starts from {name}. Fetch it with '
      ),
    ):
      experiment.open_experiment(config.get_config(), str(tmp_path))
