"""All settings: shipped configs are valid, and contradictory settings are rejected."""

import dataclasses
import importlib
import pathlib
import shutil

import pytest
from ml_collections import ConfigDict

from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.config import overridden
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import check_algorithm, parse_config, steps_of
from exgrpo_jax.runtime import workdir
from tests.helpers import cases
from tests.helpers.paths import REPOSITORY

CONFIGS = sorted(
  path.stem for path in (REPOSITORY / 'configs').glob('*.py') if path.stem != '__init__'
)
BACKBONES = ['qwen2_5_math_1_5b', 'qwen2_5_math_7b', 'qwen2_5_7b_instruct']
BACKBONES += ['llama3_1_8b', 'llama3_1_8b_instruct']


def module_of(name):
  return importlib.import_module(f'exgrpo_jax.configs.{name}')


@pytest.mark.parametrize('name', CONFIGS)
def test_shipped_configs_are_valid(name):
  module = module_of(name)
  values = module.get_config()
  assert parse_config(values).rollout.group_size >= 2
  assert module.get_config() == values is not module.get_config()
  assert f'--config={name}' in module.__doc__ or name == 'base'  # the command to run it


def test_the_base_config_has_the_papers_values():
  config = parse_config(module_of('base').get_config())
  assert (config.rollout.questions, config.rollout.group_size, config.num_steps) == (128, 8, 700)
  assert (config.replay.ratio, config.replay.start_pass_rate) == (0.5, 0.35)
  assert (config.objective.beta, config.optimizer.minibatches) == (0.1, 2)


@pytest.mark.parametrize(
  ('epochs', 'questions', 'per_step', 'steps'),
  [
    (1.0, 64, 8, 8),
    (1.0, 65, 8, 9),  # the last question has a step, too
    (3.0, 10, 4, 8),  # 30 / 4, not three times 3
    (0.07, 100, 1, 7),  # .07 * 100 > 7 in floating point
    (0.001, 64, 8, 1),
  ],
)
def test_epochs_are_this_many_steps(epochs, questions, per_step, steps):
  config = parse_config(
    overridden(
      module_of('smoke').get_config(),
      {
        'num_epochs': epochs,
        'rollout.questions': per_step,
        'optimizer.minibatches': 1,
        'replay.ratio': 0.0,
      },
    )
  ).with_length(questions)
  assert steps_of(epochs, questions, per_step) == config.num_steps == config.num_updates == steps
  assert config.length == f'config.num_epochs={epochs:g} ({steps} step{"s" * (steps > 1)})'
  by_steps = dataclasses.replace(config, num_epochs=0.0)
  assert by_steps.with_length(5) == by_steps and by_steps.length == f'config.num_steps={steps}'


@pytest.mark.full
def test_trl_grpo_has_the_defaults_of_trl():
  trl = pytest.importorskip('trl', '1.16')
  theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
  config = parse_config(module_of('trl_grpo').get_config())
  loss, update, rollout = config.objective, config.optimizer, config.rollout
  same = {
    'seed': config.seed,
    'num_generations': rollout.group_size,
    'per_device_train_batch_size': rollout.questions * rollout.group_size,
    'gradient_accumulation_steps': update.minibatches,
    'num_iterations': update.epochs,
    'max_completion_length': rollout.max_response,
    'temperature': rollout.temperature,
    'learning_rate': update.learning_rate,
    'lr_scheduler_type': update.schedule,
    'warmup_steps': update.warmup_updates,
    'adam_beta1': update.b1,
    'adam_beta2': update.b2,
    'adam_epsilon': update.epsilon,
    'weight_decay': update.weight_decay,
    'max_grad_norm': update.clip_norm,
    'epsilon': loss.clip_epsilon,
    'beta': loss.kl_coefficient,
    'entropy_coef': loss.entropy_bonus,
    'importance_sampling_level': loss.importance_level,
    'use_vllm': loss.tis_limit > 0,  # its correction needs use_vllm
    'save_steps': config.checkpoint.every,
  }
  assert same == {name: theirs[name] for name in same}
  # TRL's settings that are off or have other names, with their values here.
  named = {
    'loss_type': 'dapo',
    'scale_rewards': 'group',
    'eval_strategy': 'no',
  }
  named |= {'steps_per_generation': None, 'epsilon_high': None, 'delta': None}
  assert {name: theirs[name] for name in named} == named
  ours = loss.aggregation, loss.normalize_std, loss.clip_schedule
  assert ours == ('token_mean', 'sample', 'always')
  assert (loss.clip_epsilon_high, loss.dual_clip) == (loss.clip_epsilon, float('inf'))
  assert (config.replay.ratio, update.skip_above_norm) == (0, float('inf'))
  assert config.data.evaluated == ()
  assert config.num_steps == theirs['num_train_epochs'] * 200 and '[:200]' in config.data.train


@pytest.mark.parametrize('name', BACKBONES)
def test_a_backbone_at_ratio_0_is_the_authors_on_policy_baseline(name):
  """Check the details in docs/authors.md that are settings."""
  values = module_of(name).get_config()
  config = parse_config(values)
  assert config.replay.on_all_failed == 'stay' and replay.retires(config.replay)
  on_policy = parse_config(overridden(values, {'replay.ratio': 0.0}))
  assert not replay.retires(on_policy.replay)
  loss = on_policy.objective
  # At ratio 0, replay never starts.
  assert objective.clips_fresh_ratios(loss, replay_started=False)
  assert (loss.clip_epsilon, loss.clip_epsilon_high, loss.policy_loss) == (0.2, 0.2, 'ppo')
  assert (loss.normalize_std, loss.aggregation, loss.kl_coefficient) == ('off', 'constant', 0)
  assert (loss.dual_clip, loss.importance_level, loss.tis_limit) == (float('inf'), 'token', 0)
  assert (on_policy.rollout.questions, on_policy.rollout.group_size) == (128, 8)
  update = on_policy.optimizer
  assert (update.minibatches, update.learning_rate, update.schedule) == (2, 1e-6, 'constant')
  # The authors' limits divided by 64, because their gradient is 64 times as large: departure 5.
  assert (update.clip_norm * 64, update.skip_above_norm * 64) == (1, pytest.approx(500, rel=0.002))


@pytest.mark.parametrize(('changes', 'message'), cases.settings('experiment', 'settings.jsonl'))
def test_contradictory_settings_are_rejected_by_name(changes, message, config):
  with pytest.raises(InputError, match=message):
    parse_config(overridden(config, changes))


def test_the_stored_config_of_an_earlier_version_opens_and_resumes(tmp_path):
  """The `config.json` is from smoke in version 0.1.0. Newer settings reproduce its behavior."""
  shutil.copy(pathlib.Path(__file__).with_name('earlier_config.json'), tmp_path / 'config.json')
  stored = parse_config(ConfigDict(workdir.read_config(str(tmp_path))))
  changes = {'num_steps': 2, 'warm_start.num_updates': 5}
  given = overridden(module_of('smoke').get_config(), changes)
  assert stored == parse_config(given)
  workdir.check_workdir(given, str(tmp_path))


# ---- Config files: by name or path, and with an argument ----


def test_a_config_is_found_by_name_from_anywhere(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for argv in (['x', '--config=smoke', '--workdir=w'], ['x', '--config', 'smoke', '--workdir=w']):
    resolved = ' '.join(config_files.resolved(argv))
    assert resolved.endswith('configs/smoke.py --workdir=w'), resolved


def test_a_config_by_path_stays_as_it_is(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.py').write_text('from exgrpo_jax.configs.smoke import get_config')
  assert config_files.resolved(['x', '--config=mine.py']) == ['x', '--config=mine.py']
  with pytest.raises(InputError, match=r'--config=other\.py: there is no such file\. .* names'):
    config_files.resolved(['x', '--config=other.py'])


def test_a_shipped_config_is_passed_on_by_name_and_any_other_by_path():
  path = config_files.shipped_path('smoke', 'exgrpo_jax.configs', 'config')
  assert config_files.portable_config(path) == 'smoke'
  assert config_files.portable_config('configs/smoke.py') == 'configs/smoke.py'


def test_the_text_after_a_colon_is_the_argument_of_get_config(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'mine.py').write_text(
    'from exgrpo_jax.configs import smoke\n\n\ndef get_config(seed):\n'
    '  config = smoke.get_config()\n  config.seed = int(seed)\n  return config\n'
  )
  argv = ['x', '--config=mine.py:7', '--config.num_steps=2']
  assert config_files.resolved(argv) == argv
  assert config_files.load('mine.py:7').seed == 7
  with pytest.raises(InputError, match=r"mine\.py:6: ValueError: invalid literal .* 'x'"):
    config_files.load('mine.py:x')
  path = config_files.config_path('one_gpu:math,24gb')
  with pytest.raises(InputError) as raised:
    config_files.load(config_files.config_path('one_gpu:foo'))
  assert 'A config is a Python file' not in str(raised.value)  # it is; only the choice is wrong
  assert path.endswith('configs/one_gpu.py:math,24gb')
  assert config_files.portable_config(path) == 'one_gpu:math,24gb'


# ---- Settings of the algorithm that would have no effect are rejected; all others pass ----


def check_values(num_questions=128, ratio=0.5, replay_values=(), **of_objective):
  config = replay.ReplayConfig(ratio=ratio, **dict(replay_values))
  check_algorithm(config, objective.ObjectiveConfig(**of_objective), num_questions, 8)


@pytest.mark.parametrize(
  ('num_questions', 'ratio', 'enough'),
  [
    (8, 0.1, 'ratio to at least 0.125 or config.rollout.questions to at least 10. '),
    (3, 0.25, 'ratio to at least 0.333334 or config.rollout.questions to at least 4. '),
    (1, 0.5, 'Set config.rollout.questions to at least 2. '),  # no ratio below 1 is enough
  ],
)
def test_a_ratio_that_replays_no_question_is_rejected_with_a_remedy(num_questions, ratio, enough):
  with pytest.raises(InputError) as refused:
    check_values(num_questions, ratio)
  values = f'config.replay.ratio={ratio} of config.rollout.questions={num_questions} '
  assert str(refused.value).startswith(values) and enough in str(refused.value)


def test_a_ratio_of_0_or_one_that_replays_a_question_passes():
  for values in [(8, 0.125), (10, 0.1), (3, 0.333334), (3, 1 / 3), (2, 0.5), (1, 0.0)]:
    check_values(*values)


def test_bounds_that_exclude_every_group_are_rejected():
  bounds = dict(correctness_range=(0.9, 0.95))
  with pytest.raises(InputError, match=r'correctness_range=\(0\.9, 0\.95\) excludes every'):
    check_values(replay_values=bounds)
  check_values(ratio=0.0, replay_values=bounds)
  hard = dict(difficulty='hard', correctness_range=(0.3, 1.0))
  with pytest.raises(
    InputError, match=r"excludes every group that config\.replay\.difficulty='hard'"
  ):
    check_values(replay_values=hard)
  check_values(replay_values=hard | dict(store='all'))  # a question may fail entirely later


@pytest.mark.parametrize(
  ('name', 'value'), [('dual_clip', 3.0), ('clip_epsilon_high', 0.28), ('policy_loss', 'cispo')]
)
def test_a_variant_of_clipping_needs_clipping_in_every_step(name, value):
  variant = {name: value}
  for clip, ratio in (('until_replay', 0.5), ('never', 0.5), ('never', 0.0)):
    message = rf"{name}=.*clip_schedule='{clip}' clips no .*clip_schedule='always'"
    with pytest.raises(InputError, match=message):
      check_values(ratio=ratio, clip_schedule=clip, **variant)
  check_values(clip_schedule='always', **variant)
  check_values(ratio=0.0, clip_schedule='until_replay', **variant)


def test_plain_clipping_may_stop_when_replay_starts():
  for plain in ({}, dict(clip_epsilon=0.1), dict(clip_epsilon=0.3, clip_epsilon_high=0.3)):
    for clip in ('until_replay', 'never'):
      check_values(clip_schedule=clip, **plain)
