"""Round trips: train from a Hugging Face folder, export to another, and train from the export."""

import dataclasses
import io
import json
import pathlib
import re
import shlex
import shutil
import types

import jax
import numpy as np
import pyarrow as pa
import pytest
from ml_collections import ConfigDict
from pyarrow import parquet
from safetensors.numpy import load_file

from exgrpo_jax.commands import export as command
from exgrpo_jax.config import overridden
from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment
from exgrpo_jax.huggingface import weights
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime.workdir import read_config
from exgrpo_jax.training import export, session
from tests.helpers import devices, forked, hub_server, tiny
from tests.helpers.paths import CHECKPOINTS, TINY_CONFIG

pytestmark = pytest.mark.full

STORED = CHECKPOINTS / 'qwen2_tied'


def run_command(name, *arguments, **environment):
  """Run a command, assert that it succeeds, and return its output."""
  outcome = forked.run_one([name, *arguments], **environment)
  assert outcome.status == 0, outcome.err
  return outcome.out


def write(run, out, dtype=None):
  """Run the export command in this process."""
  command.main(
    types.SimpleNamespace(
      checkpoint=str(run),
      model=None,
      step=None,
      out=str(out),
      dtype=dtype,
      adapters=False,
      push=None,
      public=False,
    )
  )


def train(checkpoint_folder, workdir, data, compiled, *flags):
  """Train from a Hugging Face checkpoint; return the output."""
  return run_command(
    'train',
    f'--config={TINY_CONFIG}',
    f'--workdir={workdir}',
    f'--config.model.path={checkpoint_folder}',
    '--config.prompt.template=chat',
    '--config.rollout.max_prompt=64',
    '--config.warm_start.num_updates=0',
    f'--config.data.train={data.train}',
    f'--config.data.validation=("{data.evaluation}",)',
    '--config.data.evaluation=()',
    f'--config.data.cache_dir={data.cache}',
    '--config.evaluation.every=1',
    '--config.export.best=True',
    '--config.export.last=True',
    *flags,
    **devices.caching(compiled),
  )


def bytes_of(folder):
  """File name -> content."""
  return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope='module')
def hub(data, tmp_path_factory):
  """A stand-in for the Hub with the stored checkpoint and the training questions."""
  with hub_server.serving() as served, served.in_use(tmp_path_factory.mktemp('huggingface')):
    licence = '---\nlicense: apache-2.0\n---\n'
    served.add('model', 'tiny/Qwen2', bytes_of(STORED) | {'README.md': licence})
    questions, packed = pathlib.Path(data.train).read_text().splitlines(), io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(list(map(json.loads, questions))), packed)
    served.add('dataset', 'tiny/sums', {'data/train-00000-of-00001.parquet': packed.getvalue()})
    yield served


@pytest.fixture(scope='module')
def run(hub, data, compiled, tmp_path_factory):
  """The workdir of a run of three steps. Its checkpoint and questions have names on the Hub."""
  workdir = tmp_path_factory.mktemp('from_hugging_face')
  named = types.SimpleNamespace(**vars(data) | {'train': 'tiny/sums:train'})
  printed = train('tiny/Qwen2', workdir, named, compiled, '--config.num_steps=3')
  parameters = sum(value.size for value in tensors(STORED).values())
  assert f'weights of tiny/Qwen2: {parameters:,} parameters' in printed
  for kind, name in hub.repositories:
    (commit,) = hub.repositories[kind, name].commits
    assert f'{kind} {name}: commit {commit}\n' in printed
  return workdir


@pytest.fixture(scope='module')
def exported(run, tmp_path_factory):
  """The folder to which the export command exported that run."""
  out = tmp_path_factory.mktemp('exported') / 'policy'
  printed = run_command('export', f'--checkpoint={run}', f'--out={out}')
  assert f'{out}: the policy after step 3' in printed
  return out


def tensors(folder):
  return load_file(folder / 'model.safetensors')


def test_training_starts_from_the_checkpoints_weights(run):
  """After three steps at a small rate, weights are close to the checkpoint's but not equal."""
  start, last = tensors(STORED), tensors(run / 'export' / 'last')
  assert start.keys() == last.keys()
  moved = {name: np.abs(last[name] - start[name]).max() for name in start}
  assert 0 < max(moved.values()) < 0.05
  assert sum(size > 0 for size in moved.values()) > len(moved) * 0.9


def test_a_resumed_run_uses_the_commits_of_its_first_start(run, hub):
  began = {name: list(found.commits) for (_, name), found in hub.repositories.items()}
  for found in hub.repositories.values():
    found.commit({'README.md': 'all else is gone'})
  asked = len(hub.requests)
  opened = experiment.open_experiment(ConfigDict(read_config(str(run))), str(run))
  assert pathlib.Path(opened.config.model.path).name in began['tiny/Qwen2']
  assert len(experiment.load_questions(opened, 'tiny/sums:train').questions) == tiny.POOL
  assert json.loads((run / 'hub.json').read_text()) == {
    f'{kind}s/{name}@main': began[name][0] for kind, name in hub.repositories
  }
  assert hub.requests[asked:] == []  # everything is in the cache


def test_an_export_is_the_checkpoint_with_its_tokenizer_and_config(run, exported):
  opened = experiment.open_experiment(ConfigDict(read_config(str(run))), str(run))
  mesh = opened.meshes.training
  params, step = checkpoint.restore_params(str(run), None, model.shapes(opened.model, mesh))
  assert step == 3
  loaded = weights.load(exported, opened.model, mesh)
  jax.tree.map(np.testing.assert_array_equal, params, loaded)
  for name in ('tokenizer.json', 'tokenizer_config.json'):
    assert (exported / name).read_bytes() == (STORED / name).read_bytes()
  start, end = (json.loads((folder / 'config.json').read_text()) for folder in (STORED, exported))
  assert end == start | {'torch_dtype': 'float32'}
  # Training exports the same files at its end.
  assert bytes_of(run / 'export' / 'last') == bytes_of(exported)


def pushed(hub, name):
  """Return {file name: content} of a repository on the Hub."""
  repository = hub.repositories['model', name]
  files = dict(repository.commits[repository.branches['main']])
  del files['.gitattributes']
  return files


def test_a_published_model_is_the_export_and_can_be_loaded(hub, run, exported, tmp_path):
  hub.user('hf_me', 'me')
  printed = run_command('export', f'--checkpoint={run}', '--push=me/policy', HF_TOKEN='hf_me')
  assert printed.endswith(f'{hub.url}/me/policy: the policy after step 3, private\n')
  local = bytes_of(exported)
  card = local['README.md'].replace(b'path/to/this/folder', b'me/policy')
  assert pushed(hub, 'me/policy') == local | {'README.md': card} and card != local['README.md']
  assert hub.repositories['model', 'me/policy'].private
  score = metrics.read(run)[-1]['eval/data_evaluation/pass@1']
  for phrase in (
    *('license: apache-2.0', 'base_model: tiny/Qwen2', 'datasets:\n- tiny/sums\n'),
    *('| data_evaluation (validation) |', f' {score:.3f} (', 'vllm serve me/policy'),
  ):
    assert phrase in card.decode(), phrase
  # A user loads the model by name. Its card is published too, and the best policy has a card.
  for source, name in (('me/policy', 'me/again'), (run / 'export' / 'best', 'me/best')):
    out = tmp_path / name
    flags = [f'--model={source}', f'--out={out}', f'--push={name}', '--public']
    assert f'{name}: {source}, in float32, public' in run_command(
      'export', *flags, HF_TOKEN='hf_me'
    )
    assert not hub.repositories['model', name].private
    assert f'vllm serve {name}' in pushed(hub, name)['README.md'].decode() or source == 'me/policy'
  again = tensors(tmp_path / 'me/again')
  assert all(np.array_equal(value, again[key]) for key, value in tensors(exported).items())


def test_a_failed_upload_keeps_the_export_and_says_how_to_continue(hub, run, tmp_path):
  hub.user('hf_me', 'me')
  hub.broken = ('/commit/',)
  out = tmp_path / 'two words'
  flags = [f'--checkpoint={run}', f'--out={out}', '--push=me/late']
  outcome = forked.run_one(['export', *flags], HF_TOKEN='hf_me')
  hub.broken = ()
  assert outcome.status == 1 and pushed(hub, 'me/late') == {}
  command = outcome.err.partition('To publish it, run: ')[2]
  words = shlex.split(command)[-3:]
  assert words == ['export', f'--model={out}', '--push=me/late']
  run_command(*words, HF_TOKEN='hf_me')
  assert b'vllm serve me/late' in pushed(hub, 'me/late')['README.md']


@pytest.mark.parametrize('flags', [['--checkpoint={run}', '--step=9'], ['--model=/no/model']])
def test_a_failed_export_creates_nothing(hub, run, flags):
  hub.user('hf_me', 'me')
  flags = [flag.format(run=run) for flag in flags]
  outcome = forked.run_one(['export', *flags, '--push=me/none'], HF_TOKEN='hf_me')
  assert outcome.status == 2 and re.search('for step 9|/no/model is not a folder', outcome.err)
  assert ('model', 'me/none') not in hub.repositories


def test_training_can_start_from_its_own_export(exported, data, compiled, tmp_path):
  printed = train(exported, tmp_path, data, compiled, '--config.num_steps=1')
  assert f'weights of {exported}' in printed and 'step 1/1' in printed
  trained = tensors(tmp_path / 'export' / 'last')
  assert not np.array_equal(trained['model.norm.weight'], tensors(exported)['model.norm.weight'])


def test_transformers_reads_the_export_of_a_run(exported):
  torch, transformers = pytest.importorskip('torch'), pytest.importorskip('transformers')
  policy = transformers.AutoModelForCausalLM.from_pretrained(exported)
  their_tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
  text = their_tokenizer.apply_chat_template(
    [{'role': 'user', 'content': '1+0'}], tokenize=False, add_generation_prompt=True
  )
  tokens_T = their_tokenizer.encode(text, add_special_tokens=False)
  assert tokens_T == tokenizer.load(exported).encode(text)
  with torch.no_grad():
    expected_TV = policy(torch.tensor([tokens_T])).logits[0].numpy()
  values = tiny.values('', '')
  values.model.path = str(exported)
  values.rollout.max_prompt = 64
  opened = experiment.open_experiment(values, str(exported))
  params = weights.load(exported, opened.model, opened.meshes.training)
  hidden_BTD = model.hidden_states(opened.model, params, np.array([tokens_T], np.int32))
  logits_TV = (hidden_BTD @ model.unembedding(opened.model, params))[0]
  assert np.abs(logits_TV - expected_TV).max() < 1e-4


def test_the_best_policy_is_from_the_best_evaluation(run):
  """The earliest wins a tie. The evaluation before the first step does not count."""
  records = metrics.read(run)[1:]
  scores = {record['step']: record['eval/data_evaluation/pass@1'] for record in records}
  assert sorted(scores) == [1, 2, 3]
  best = json.loads((run / 'export' / 'best' / 'evaluation.json').read_text())
  first = max(scores, key=lambda step: (scores[step], -step))
  assert best == {'step': first, 'score': scores[first]}


def test_a_better_policy_replaces_the_best_and_a_worse_one_does_not(recorded, tmp_path):
  opened = dataclasses.replace(recorded.experiment, workdir=str(tmp_path))
  params = model.init(opened.model, jax.random.key(0), opened.meshes.training)
  best = tmp_path / 'export' / 'best'
  kept = []
  for step, score in ((1, 0.2), (2, 0.1), (3, 0.2), (4, 0.5)):
    scaled = jax.tree.map(lambda x, step=step: x * step, params)
    if step == 2:  # the run was killed during a replacement, and resumed
      best.rename(best.with_name('best.old'))
    export.keep_best(opened, scaled, step, {'validation/score': score})
    norm_weight = tensors(best)['model.norm.weight'][0]
    kept.append((json.loads((best / 'evaluation.json').read_text())['step'], norm_weight))
  assert kept == [(1, 1.0), (1, 1.0), (1, 1.0), (4, 4.0)]
  assert sorted(path.name for path in (tmp_path / 'export').iterdir()) == ['best']


def test_an_export_names_every_token_that_ends_a_response(tmp_path):
  """Some checkpoints list only the base model's end token, but not the tokenizer's."""
  folder, out = tmp_path / 'model', tmp_path / 'out'
  shutil.copytree(STORED, folder)
  name = 'generation_config.json'
  (folder / name).write_text(json.dumps({'top_k': 5, 'eos_token_id': 0}))
  command.write_model(str(folder), out)
  assert json.loads((out / name).read_text()) == {'top_k': 5, 'eos_token_id': [2, 0]}


TEXT = '1+2=3\n  4\u2581</s> so 5'


@pytest.fixture(scope='module')
def from_scratch(recorded, tmp_path_factory):
  """The folder with an export of the recorded run."""
  out = tmp_path_factory.mktemp('from_scratch') / 'policy'
  write(recorded.workdir, out, dtype='bfloat16')
  return out


def test_a_model_from_scratch_is_exported_too(recorded, from_scratch, tmp_path):
  out, values = from_scratch, tiny.values('', '')
  values.model.path = str(out)
  opened = experiment.open_experiment(values, str(tmp_path))
  assert opened.model == recorded.experiment.model
  ours = recorded.experiment.tokenizer
  assert opened.tokenizer.encode(TEXT) == ours.encode(TEXT)
  assert (opened.tokenizer.eos_ids, opened.tokenizer.pad_id) == (ours.eos_ids, ours.pad_id)
  assert json.loads((out / 'generation_config.json').read_text()) == {'eos_token_id': [1]}
  assert json.loads((out / 'config.json').read_text())['torch_dtype'] == 'bfloat16'


def test_transformers_reads_the_tokenizer_of_a_model_from_scratch(recorded, from_scratch):
  transformers = pytest.importorskip('transformers')
  ours = recorded.experiment.tokenizer
  theirs = transformers.AutoTokenizer.from_pretrained(from_scratch)
  assert theirs.encode(TEXT) == ours.encode(TEXT)
  assert theirs.decode([*ours.encode(TEXT), *ours.eos_ids], skip_special_tokens=True) == TEXT


def test_an_interrupted_export_changes_nothing(recorded, tmp_path, monkeypatch):
  """The command's new folder does not exist, and the policy of an earlier run still does."""
  opened = dataclasses.replace(recorded.experiment, workdir=str(tmp_path))
  params = model.init(opened.model, jax.random.key(0), opened.meshes.training)
  export.keep_last(opened, params, 1)
  before = bytes_of(tmp_path / 'export' / 'last')

  def cut_short(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(export.weights, 'save', cut_short)
  with pytest.raises(KeyboardInterrupt):
    export.keep_last(opened, params, 2)
  with pytest.raises(KeyboardInterrupt):
    write(recorded.workdir, tmp_path / 'policy')
  assert not (tmp_path / 'policy').exists()
  assert before == bytes_of(tmp_path / 'export' / 'last') != {}
  monkeypatch.undo()
  write(recorded.workdir, tmp_path / 'policy')
  assert not list(tmp_path.glob('*.new'))


def test_export_does_not_write_to_a_folder_with_files(run, tmp_path):
  (tmp_path / 'a').write_text('mine')
  with pytest.raises(InputError, match=f'^--out={tmp_path}: this is not an empty folder'):
    write(run, tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ['a']


# ---- Rejected checkpoints ----


def values_from_stored(**model_changes):
  """The tiny ConfigDict, starting from the stored checkpoint."""
  values = tiny.values('', '')
  values.model.path = str(STORED)
  values.rollout.max_prompt = 64
  values.model.update(model_changes)
  return values


def test_a_config_for_a_repository_rejects_a_different_shape(tmp_path):
  values = values_from_stored(repository='Qwen/Big', vocab_size=320, width=64)
  message = f'{STORED}/config.json: width is 32, but config.model.width is 64 for Qwen/Big. '
  with pytest.raises(InputError, match=re.escape(message)):
    experiment.open_experiment(values, str(tmp_path))


def test_a_context_that_is_too_short_is_rejected_but_can_be_extended(tmp_path):
  values = values_from_stored()
  values.rollout.max_response = 100
  message = (
    'config.rollout.max_prompt + config.rollout.max_response = 164 tokens exceeds '
    f'max_position_embeddings=128 in {STORED}/config.json. Lower one'
  )
  with pytest.raises(InputError, match=re.escape(message)):
    experiment.open_experiment(values, str(tmp_path))
  values.model.extension.update(dict(rope_theta=4e4, max_position_embeddings=256))
  opened = experiment.open_experiment(values, str(tmp_path))
  assert opened.model.rope.theta == 4e4
  params = weights.load(STORED, opened.model, opened.meshes.training)
  export.write(opened, params, tmp_path / 'out')
  written = json.loads((tmp_path / 'out' / 'config.json').read_text())
  assert written['max_position_embeddings'] == 256
  assert written['rope_parameters']['rope_theta'] == 4e4


def test_a_config_for_a_repository_starts_from_it_without_a_path(hub, tmp_path):
  hub.add('model', 'tiny/other', bytes_of(STORED))
  shape = experiment.model_config(experiment.parse_config(values_from_stored()))
  values = values_from_stored(path='', repository='tiny/other@main', **dataclasses.asdict(shape))
  opened = experiment.open_experiment(values, str(tmp_path))
  assert opened.config.model.path != str(STORED)
  assert (opened.model, opened.model_name) == (shape, 'tiny/other@main')


@pytest.mark.parametrize('which', ['best', 'last'])
def test_a_model_that_cannot_be_exported_is_rejected_before_training(which, config, tmp_path):
  config.data.validation, config.data.evaluation = config.data.evaluation, ()
  values = overridden(config, {f'export.{which}': True, 'model.norm_offset': True})
  with pytest.raises(InputError, match=r'config\.model has .* so it cannot be exported'):
    session.load(values, str(tmp_path))
  # An earlier run may have such a config, and its policies can be evaluated.
  experiment.open_experiment(values, str(tmp_path))
