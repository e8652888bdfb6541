"""Opening an experiment: tokenizer, model, data, warm start, and errors for invalid configs."""

import dataclasses
import fcntl
import gc
import json
import re
import shutil

import jax
import numpy as np
import pytest

from exgrpo_jax.config import overridden
from exgrpo_jax.data import tokenizer
from exgrpo_jax.environments import expressions
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import responses
from exgrpo_jax.experiment import experiment, generation, memory, policies, warm_start
from exgrpo_jax.experiment.experiment import load_weights, open_experiment
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.policy import model
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.runtime import activity
from exgrpo_jax.runtime.randomness import Purpose
from tests.helpers import cases, tiny
from tests.helpers.paths import CHECKPOINTS


@pytest.mark.parametrize(
  ('name', 'value', 'message'),
  [
    ('model.vocab_size', 100, 'every token needs an embedding'),
    ('objective.balance_coefficient', 0.1, 'a model with experts'),
    ('rollout.router_replay', True, 'a model with experts'),
  ],
)
def test_settings_that_do_not_suit_the_model_are_rejected(name, value, message, config, tmp_path):
  with pytest.raises(InputError, match=f'config.{name}={value}: .* {message}'):
    experiment.open_experiment(overridden(config, {name: value}), str(tmp_path))


def test_the_tokenizer_of_a_workdir_is_reused(config, tmp_path):
  first = experiment.open_experiment(config, str(tmp_path))
  assert first.model.vocab_size == first.tokenizer.vocab_size
  written = (tmp_path / 'tokenizer.model').read_bytes()
  experiment.open_experiment(overridden(config, {'tokenizer.vocab_size': 300}), str(tmp_path))
  assert (tmp_path / 'tokenizer.model').read_bytes() == written


# ---- Data ----


@pytest.mark.parametrize(('changes', 'message'), cases.settings('experiment', 'data.jsonl'))
def test_settings_that_do_not_suit_the_data_are_rejected(changes, message, config, tmp_path):
  opened = experiment.open_experiment(overridden(config, changes), str(tmp_path))
  with pytest.raises(InputError, match=message):
    generation.make_rollout(opened, experiment.load_questions(opened, opened.config.data.train))


def test_overlong_prompts_are_dropped_and_the_rest_renumbered(config, tmp_path):
  path = tmp_path / 'train.jsonl'
  tiny.write_questions(path)
  path.write_text(''.join(reversed(path.read_text().splitlines(keepends=True))))  # 11, 10, ...
  changes = {'rollout.max_prompt': 4, 'data.on_overlong': 'drop'}
  opened = experiment.open_experiment(overridden(config, changes), str(tmp_path))
  data = experiment.load_questions(opened, str(path))
  assert [(q.row, q.answer) for q in data.questions] == [(row, str(9 - row)) for row in range(10)]
  prompts = [opened.tokenizer.decode(prompt) for prompt in data.prompts]
  assert prompts == [f'{9 - row}+0\n' for row in range(10)]


@pytest.mark.parametrize(
  ('platform', 'has_units', 'dtype'),
  [('cpu', True, 'bfloat16'), ('cpu', False, 'float32'), ('tpu', False, 'bfloat16')],
)
def test_auto_is_bfloat16_if_bfloat16_is_fast(
  platform, has_units, dtype, config, tmp_path, monkeypatch
):
  monkeypatch.setattr(experiment.machine, 'has_fast_bfloat16', lambda: has_units)
  other = 'float32' if dtype == 'bfloat16' else 'bfloat16'
  (tmp_path / 'config.json').write_text(json.dumps({'model': {'dtype': other}}))
  monkeypatch.chdir(tmp_path)  # a run's workdir, which has no meaning without --workdir
  config.model.dtype = 'auto'
  assert experiment.with_dtype(parse_config(config), platform=platform).model.dtype == dtype


@pytest.mark.parametrize(
  ('of_run', 'of_warm_start', 'dtype'),
  [
    ('bfloat16', '', 'bfloat16'),
    ('bfloat16', 'float32', 'bfloat16'),
    ('', 'bfloat16', 'bfloat16'),
    ('auto', 'bfloat16', 'bfloat16'),  # a run of an earlier version
    ('auto', '', 'float32'),
  ],
)
def test_auto_is_the_dtype_of_the_run_or_of_its_warm_start(
  of_run, of_warm_start, dtype, config, tmp_path, monkeypatch
):
  monkeypatch.setattr(experiment.machine, 'has_fast_bfloat16', lambda: False)
  config.model.dtype, config.warm_start.path = 'auto', str(tmp_path / 'shared')
  for path, stored in (('config.json', of_run), ('shared/origin.json', of_warm_start)):
    if stored:
      (tmp_path / path).parent.mkdir(exist_ok=True)
      (tmp_path / path).write_text(json.dumps({'model': {'dtype': stored}}))
  opened = experiment.open_experiment(config, str(tmp_path))
  assert opened.model.dtype == opened.config.model.dtype == dtype


@pytest.mark.parametrize('moment_dtype', ['float32', 'bfloat16'])
def test_a_run_certainly_needs_memory_for_its_state_and_gradient(moment_dtype, config, tmp_path):
  config.optimizer.moment_dtype = moment_dtype
  opened = experiment.open_experiment(config, str(tmp_path))
  (need,) = [need for need in memory.needs(opened) if 'training state' in need.what]
  state = experiment.state_shapes(opened)
  size = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves((state, state.params)))
  assert need.is_certain and need.size <= size <= need.size + 64  # the optimizer's counters


# ---- Policies for sampling ----


FOLDER = str(CHECKPOINTS / 'qwen2_tied')


def test_only_text_with_tokens_without_embeddings_is_rejected(tmp_path, jsonl):
  """The tokenizer has one more token than the model has embeddings, as in Gemma 3 1B."""
  folder = tmp_path / 'model'
  shutil.copytree(FOLDER, folder)
  content = json.loads((folder / 'tokenizer.json').read_text())
  first, embeddings = tokenizer.load(folder).vocab_size, 320
  plain = dict.fromkeys(['single_word', 'lstrip', 'rstrip', 'normalized'], False)
  content['added_tokens'] += [
    {'id': n, 'content': f'<{n}>', 'special': True} | plain for n in range(first, embeddings + 1)
  ]
  (folder / 'tokenizer.json').write_text(json.dumps(content))
  policy = policies.open_policy(str(folder))
  assert policy.experiment.tokenizer.vocab_size == embeddings + 1
  experiment.load_questions(policy.experiment, jsonl({'question': '<319>', 'answer': '1'}))
  file = jsonl({'question': '<320>', 'answer': '1', 'solution': '1'})
  refusal = f"a prompt contains '<320>', which is token 320, but {folder} has only 320 embeddings"
  with pytest.raises(InputError, match=f'{file}: {refusal}'):
    experiment.load_questions(policy.experiment, file)
  with pytest.raises(InputError, match=f'^{refusal}'):
    responses.sample(policy, ['<320>'])


def live_bytes():
  gc.collect()
  return sum(array.nbytes for array in jax.live_arrays())


def test_the_status_line_announces_loading(monkeypatch):
  said, arrange = [], model.into_decode_layout
  monkeypatch.setattr(
    model, 'into_decode_layout', lambda *args: said.append(activity.now()) or arrange(*args)
  )
  policies.open_policy(FOLDER)
  assert said[0].startswith(f'loading {FOLDER} (')


@pytest.mark.parametrize(
  ('changes', 'expected'),
  [({}, False), ({'partial': True}, True), ({'drafts': '3'}, True)],
  ids=str,
)
def test_replies_are_processed_in_order_if_their_order_would_change_the_samples(
  changes, expected, recorded
):
  config = recorded.experiment.config
  environment = dataclasses.replace(config.environment, name='guess', workers=1)
  rollout = dataclasses.replace(config.rollout, **changes)
  config = dataclasses.replace(config, environment=environment, rollout=rollout)
  opened = dataclasses.replace(recorded.experiment, config=config)
  assert generation.make_sampler(opened, Purpose.ROLLOUT).in_order == expected


@pytest.mark.full
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_sampling_holds_the_weights_once(monkeypatch, dtype):
  """Memory is at most 1.1 times the weights in the compute dtype. A second copy would make it 2."""
  before, held = live_bytes(), []

  def generate(_, params, __):
    held.append(live_bytes() - before)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    raise StopIteration(weights)

  monkeypatch.setattr(SlotEngine, 'generate', generate)
  policy = policies.open_policy(FOLDER, {'model.dtype': dtype})
  with pytest.raises(StopIteration) as caught:
    responses.sample(policy, ['1+1?'])
  assert held[0] <= 1.1 * caught.value.value


@pytest.mark.full
def test_converting_holds_one_parameter_twice():
  values = policies.suited_to(FOLDER)
  values.model.dtype = 'float32'
  experiment = open_experiment(values, FOLDER)
  params = load_weights(experiment)
  largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
  before, held = live_bytes(), []
  wait = jax.block_until_ready

  def measured(arrays):
    held.append(live_bytes() - before)
    return wait(arrays)

  expected = jax.device_get(model.decode_layout(experiment.model, params, experiment.meshes))
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(jax, 'block_until_ready', measured)
    decode_params = model.into_decode_layout(experiment.model, params, experiment.meshes)
  assert len(held) == len(jax.tree.leaves(params)) and 0 < max(held) <= largest
  assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
  jax.tree.map(np.testing.assert_array_equal, decode_params, expected)


def test_a_shipped_model_is_described_by_its_name():
  assert policies.at('shipped:chains').describe() == {'model': 'shipped:chains'}


# ---- The warm start: its training data, and when its result is reused ----


def run(config, workdir):
  """Do what `exgrpo train` does before the first step."""
  opened = experiment.open_experiment(config, str(workdir))
  data = experiment.load_questions(opened, opened.config.data.train)
  with jax.set_mesh(opened.meshes.training):
    return warm_start.initial_params(opened, data)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({}, r'row 0 has no worked solution .*config\.data\.solution_field'),
    ({'rollout.max_response': 2}, r'more than config\.rollout\.max_response=2\. .*\.on_overlong'),
    (
      {'rollout.max_response': 1, 'data.on_overlong': 'drop'},
      r'no solution fits within config\.rollout\.max_response=1',
    ),
  ],
)
def test_missing_or_overlong_solutions_are_rejected(changes, message, config, jsonl, tmp_path):
  if not changes:
    config.data.train = config.warm_start.data = jsonl({'question': '1+1', 'answer': '2'})
    config.data.cache_dir = str(tmp_path / 'cache')
  config.update_from_flattened_dict(changes)
  with pytest.raises(InputError, match=message):
    run(config, tmp_path)


@pytest.mark.parametrize(
  ('solution', 'learnt'),
  [
    ('2', '2<|im_end|>'),
    ('2<|im_end|>', '2<|im_end|>'),
    ('2<|im_end|>\n<|im_start|>user\nThanks', '2<|im_end|>'),
    ('<think>\n1+1</think>2', '1+1</think>2<|im_end|>'),  # the prompt contains <think>
  ],
)
def test_a_solution_has_the_tokens_of_a_sampled_response(solution, learnt, config, jsonl, tmp_path):
  data = jsonl({'question': '1+1', 'answer': '2', 'solution': solution})
  changes = {'tokenizer.path': str(CHECKPOINTS / 'qwen2_tied'), 'prompt.template': 'paper'}
  changes |= {'rollout.max_prompt': 999, 'rollout.max_response': 99}
  changes |= {'warm_start.data': data, 'data.cache_dir': str(tmp_path / 'cache')}
  opened = experiment.open_experiment(overridden(config, changes), str(tmp_path))
  (row,) = warm_start.load_solutions(opened)
  assert opened.tokenizer.decode(row.prompt).endswith('<think>\n')
  assert opened.tokenizer.decode(row.tokens, special=True) == learnt


def test_a_warm_start_of_the_same_config_is_reused(recorded, capsys):
  opened = recorded.experiment
  params = warm_start.run(opened, model.shapes(opened.model, opened.meshes.training), recorded.data)
  assert 'warm start: reused from' in capsys.readouterr().out
  jax.tree.map(np.testing.assert_array_equal, params, recorded.steps[1].params)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'seed': 6}, f'config.warm_start.seed was {tiny.SEED} and is now 6'),
    ({'warm_start.seed': 6}, f'config.warm_start.seed was {tiny.SEED} and is now 6'),
    ({'data.solution_field': 'answer'}, "config.data.solution_field was None and is now 'answer'"),
    (
      {'optimizer.moment_dtype': 'bfloat16'},
      "config.optimizer.moment_dtype was None and is now 'bfloat16'",
    ),
    (
      {'data.on_overlong': 'drop'},
      "config.data.on_overlong was None and is now 'drop'; config.rollout.max_prompt was None and "
      f'is now {tiny.PROMPT}; config.rollout.max_response was None and is now {tiny.RESPONSE}',
    ),
    (
      {'environment.name': 'tools', 'environment.tools': (expressions.__name__ + ':calculate',)},
      f"config.environment.tools was None and is now ['{expressions.__name__}:calculate']",
    ),
    (
      {'warm_start.path': '~/warm_start', 'model.norm_epsilon': 0.5, 'warm_start.batch_size': 3},
      'config.model.norm_epsilon was 1e-06 and is now 0.5; config.warm_start.batch_size was 8 '
      'and is now 3',
    ),
  ],
)
def test_a_warm_start_of_another_config_is_not_reused(
  changes, message, recorded, config, tmp_path, monkeypatch
):
  monkeypatch.setenv('HOME', str(recorded.workdir))
  folder = str(recorded.workdir / 'warm_start')
  config.update_from_flattened_dict({'warm_start.path': folder} | changes)
  opened = experiment.open_experiment(config, str(tmp_path))
  with pytest.raises(InputError, match=re.escape(message)):
    warm_start.run(opened, params=None, data=recorded.data)


@pytest.mark.parametrize(
  ('section', 'names'),
  [
    ('warm_start', {'enough': 'stop_at_pass_rate'}),
    ('model', dict.fromkeys(('local_rope', 'window', 'num_experts'))),
    ('', {'other_settings': None}),
  ],
)
@pytest.mark.parametrize('is_shared', [True, False])
def test_a_warm_start_of_an_earlier_version_is_reused(section, names, is_shared, config, tmp_path):
  """`names` maps old names to current names, or a current name to None if the setting is new."""
  folder = tmp_path / 'warm_start'
  config.warm_start.path = str(folder) if is_shared else ''
  config.data.solution_field = 'answer'
  opened = experiment.open_experiment(config, str(tmp_path))
  origin = warm_start.origin(opened.config, opened.model)
  for old, new in names.items():
    settings = origin[section] if section else origin
    value = settings.pop(new or old)
    settings |= {old: value} if new else {}
  params = model.init(opened.model, jax.random.key(0), opened.meshes.training)
  checkpoint.save_params(str(folder / 'params'), params)
  (folder / 'origin.json').write_text(json.dumps(origin))
  found = warm_start.run(opened, params, None)
  jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize(
  'path', ['huggingface/shipped/chains', 'models--me--base/snapshots/c0ffee']
)
def test_a_warm_start_is_reused_after_its_model_has_moved(path, config, tmp_path):
  folder = tmp_path / 'warm_start'
  config.warm_start.path = str(folder)
  opened = experiment.open_experiment(config, str(tmp_path))

  def with_model(path):
    settings = dataclasses.replace(opened.config.model, path=path)
    return dataclasses.replace(opened, config=dataclasses.replace(opened.config, model=settings))

  params = model.init(opened.model, jax.random.key(0), opened.meshes.training)
  checkpoint.save_params(str(folder / 'params'), params)
  origin = warm_start.origin(with_model(f'/old/root/{path}').config, opened.model)
  (folder / 'origin.json').write_text(json.dumps(origin))
  found = warm_start.run(with_model(f'/new/{path}'), params, None)
  jax.tree.map(np.testing.assert_array_equal, found, params)
  with pytest.raises(InputError, match=rf"config\.model\.path was '{path}' and is now '{path}2'"):
    warm_start.run(with_model(f'/new/{path}2'), params, None)


def test_a_run_waits_for_another_run_that_trains_the_same_warm_start(
  recorded, tmp_path, capsys, monkeypatch
):
  """The other run holds the lock. When it releases the lock, it has stored the result."""
  kept, folder = recorded.workdir / 'warm_start', tmp_path / 'shared'
  config = recorded.experiment.config
  shared = dataclasses.replace(config.warm_start, path=str(folder))
  config = dataclasses.replace(config, warm_start=shared)
  opened = dataclasses.replace(recorded.experiment, config=config)

  def held_by_another(_, operation):
    if operation & fcntl.LOCK_NB:
      raise BlockingIOError
    shutil.copytree(kept, folder, dirs_exist_ok=True)

  monkeypatch.setattr(fcntl, 'flock', held_by_another)
  params = warm_start.run(opened, model.shapes(opened.model, opened.meshes.training), recorded.data)
  printed = capsys.readouterr().out
  assert (
    f'another run is training this warm start in {folder}' in printed and 'reused from' in printed
  )
  jax.tree.map(np.testing.assert_array_equal, params, recorded.steps[1].params)


@pytest.mark.full
def test_a_warm_start_that_diverges_is_an_error_and_is_not_stored(recorded, config, tmp_path):
  config.warm_start.update(dict(num_updates=3, learning_rate=1e30))
  message = r'^warm start: the loss at update \d is nan, .*config\.warm_start\.learning_rate=1e\+30'
  with recorded.compiling(), pytest.raises(InputError, match=message):
    run(config, tmp_path)
  assert not (tmp_path / 'warm_start' / 'params').exists()


def test_the_training_questions_do_not_change_a_warm_start(config, jsonl, tmp_path):
  """They change neither the tokenizer nor, unless `stop_at_pass_rate` samples them, the origin."""
  before = experiment.open_experiment(config, str(tmp_path / 'before'))
  config.data.train = jsonl({'question': '3 plus 4?', 'answer': '7'})
  config.data.cache_dir = str(tmp_path / 'cache')
  after = experiment.open_experiment(config, str(tmp_path / 'after'))
  assert after.tokenizer.files == before.tokenizer.files
  origins = [warm_start.origin(one.config, one.model) for one in (before, after)]
  assert origins[0] == origins[1]
  assert origins[0]['prompt'] == {'template': 'plain', 'system': ''}  # as in earlier versions
  config.warm_start.stop_at_pass_rate = 0.5
  checked = experiment.parse_config(config)
  assert warm_start.origin(checked, after.model)['train'] == config.data.train


def test_the_optimizer_of_the_run_does_not_change_a_warm_start(config):
  """Only the dtype of the moments does, because it determines the memory."""
  config.optimizer.update(dict(b1=0.5, b2=0.5, weight_decay=9.0, epochs=2, max_kl=1.0))
  changed = warm_start._optimizer(parse_config(config))
  assert (changed.b1, changed.b2, changed.weight_decay) == (0.9, 0.999, 0.01)
  assert changed.learning_rate == config.warm_start.learning_rate
  config.optimizer.moment_dtype = 'bfloat16'
  assert warm_start._optimizer(parse_config(config)).moment_dtype == 'bfloat16'


def test_runs_with_two_seeds_can_start_from_the_same_policy(config, tmp_path):
  """config.warm_start.seed or else config.seed determines the random parameters and the origin."""
  config.warm_start.num_updates = 0
  found = {}
  for warm_start_seed, seed in ((3, 5), (3, 6), (-1, 5), (-1, 3)):
    config.warm_start.seed, config.seed = warm_start_seed, seed
    workdir = tmp_path / f'{warm_start_seed} {seed}'
    leaf = jax.tree.leaves(run(config, workdir))[0]
    parsed = experiment.parse_config(config)
    origin = warm_start.origin(parsed, experiment.model_config(parsed))
    found[warm_start_seed, seed] = origin['seed'], np.asarray(leaf).tobytes()
  assert found[3, 5] == found[3, 6] == found[-1, 3] != found[-1, 5]
