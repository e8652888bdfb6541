"""An experiment opened: a config with its tokenizer, model and data, or a refusal that says why."""

import pytest

from exgrpo_jax.config import overridden
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment, generation
from exgrpo_jax.experiment.settings import parse_config
from tests.helpers import tiny


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(config, tmp_path):
  with pytest.raises(InputError, match=r'config\.model\.vocab_size=100 must be at least the token'):
    experiment.open_experiment(overridden(config, {'model.vocab_size': 100}), str(tmp_path))


def test_the_tokenizer_of_a_workdir_is_used_again(config, tmp_path):
  first = experiment.open_experiment(config, str(tmp_path))
  assert first.model.vocab_size == first.tokenizer.vocab_size
  written = (tmp_path / 'tokenizer.model').read_bytes()
  experiment.open_experiment(overridden(config, {'tokenizer.vocab_size': 300}), str(tmp_path))
  assert (tmp_path / 'tokenizer.model').read_bytes() == written


# ---- Data ----


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    pytest.param(
      {'rollout.max_prompt': 4},
      r'prompt of row 10 has 5 tokens, and 2 of 12 prompts exceed the limit of 4',
      id='prompt',
    ),
    pytest.param(
      {'rollout.max_prompt': 2, 'data.overlong': 'drop'},
      r'no prompt is within the limit of 2 tokens',
      id='all_prompts',
    ),
    pytest.param(
      {'rollout.questions': 14},
      r'config\.rollout\.questions=14 must be at most the 12 questions of ',
      id='few_questions',
    ),
    pytest.param(
      {'rollout.questions': 12, 'rollout.max_prompt': 4, 'data.overlong': 'drop'},
      r'config\.rollout\.questions=12 must be at most the 10 questions of ',
      id='few_left',
    ),
    pytest.param(
      {'rollout.carry': True, 'rollout.in_flight': 13},
      r'config\.rollout\.carry=True has 13 groups in flight, and ',
      id='few_to_carry',
    ),
    pytest.param(
      {'replay.trajectory_selection': 'valid_steps'},
      r"config\.replay\.trajectory_selection='valid_steps' needs a task that can check the steps .*"
      r'\(arithmetic, .*\), and .* has no question of one\.',
      id='no_step_checker',
    ),
  ],
)
def test_what_the_data_does_not_allow_is_refused(changes, message, config, tmp_path):
  opened = experiment.open_experiment(overridden(config, changes), str(tmp_path))
  with pytest.raises(InputError, match=message):
    generation.make_rollout(opened, experiment.load_questions(opened, opened.config.data.train))


def test_overlong_prompts_are_left_out_and_the_rest_numbered_anew(config, tmp_path):
  path = tmp_path / 'train.jsonl'
  tiny.write_questions(path)
  path.write_text(''.join(reversed(path.read_text().splitlines(keepends=True))))  # 11, 10, ...
  changes = {'rollout.max_prompt': 4, 'data.overlong': 'drop'}
  opened = experiment.open_experiment(overridden(config, changes), str(tmp_path))
  data = experiment.load_questions(opened, str(path))
  assert [(q.row, q.answer) for q in data.questions] == [(row, str(9 - row)) for row in range(10)]
  assert [opened.tokenizer.decode(prompt) for prompt in data.prompts] == [
    f'{9 - row}+0\n' for row in range(10)
  ]


@pytest.mark.parametrize(
  ('platform', 'has_units', 'dtype'),
  [('cpu', True, 'bfloat16'), ('cpu', False, 'float32'), ('tpu', False, 'bfloat16')],
)
def test_auto_is_bfloat16_where_it_is_fast(platform, has_units, dtype, config, monkeypatch):
  monkeypatch.setattr(experiment.machine, 'has_bfloat16_units', lambda: has_units)
  config.model.dtype = 'auto'
  assert experiment.model_config(parse_config(config), platform).dtype == dtype


@pytest.mark.parametrize(
  ('name', 'value'), [('objective.balance_coefficient', 0.1), ('rollout.router_replay', True)]
)
def test_settings_for_experts_need_a_model_that_has_some(name, value, config, tmp_path):
  with pytest.raises(InputError, match=f'config.{name}={value} needs a model with experts'):
    experiment.open_experiment(overridden(config, {name: value}), str(tmp_path))
