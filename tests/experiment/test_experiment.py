"""Configs become experiments; what is wrong with them is refused in one line that says why."""

import importlib
import pathlib
import re

import pytest

from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment
from exgrpo_jax.training import session
from tests.helpers import tiny
from tests.helpers.paths import REPOSITORY

CONFIGS = sorted(
  path.stem for path in (REPOSITORY / 'configs').glob('*.py') if path.stem != '__init__'
)


def set_values(config, **changes):
  """Sets replay__ratio=0.5 and the like, unknown names too; returns the config."""
  for name, value in changes.items():
    *sections, key = name.split('__')
    section = config
    for name in sections:
      section = section[name]
    section.unlock()
    section[key] = value
  return config


@pytest.mark.parametrize('name', CONFIGS)
def test_a_config_file_makes_valid_settings(name):
  module = importlib.import_module(f'exgrpo_jax.configs.{name}')
  values = module.get_config()
  assert experiment.parse_config(values).rollout.samples >= 2
  assert module.get_config() == module.get_config() is not module.get_config()
  assert f'--config={name}' in module.__doc__ or name == 'base'  # its command


def test_the_base_config_has_the_papers_values():
  config = experiment.parse_config(importlib.import_module('exgrpo_jax.configs.base').get_config())
  assert (config.rollout.questions, config.rollout.samples, config.num_steps) == (128, 8, 700)
  assert (config.replay.ratio, config.replay.start_pass_rate, config.objective.beta) == (
    0.5,
    0.35,
    0.1,
  )
  assert config.optimizer.clip_norm == 1 / 64 and config.optimizer.minibatches == 2


@pytest.mark.parametrize(
  'name',
  [
    'qwen2_5_math_1_5b',
    'qwen2_5_math_7b',
    'qwen2_5_7b_instruct',
    'llama3_1_8b',
    'llama3_1_8b_instruct',
  ],
)
def test_a_backbone_at_ratio_0_is_the_authors_on_policy_baseline(name):
  """The details of docs/algorithm.md that are settings."""
  values = importlib.import_module(f'exgrpo_jax.configs.{name}').get_config()
  config = experiment.parse_config(values)
  assert config.replay.retire == 'with_replay' and config.replay.failed == 'stay'
  assert replay.retires(config.replay)
  on_policy = experiment.parse_config(set_values(values, replay__ratio=0.0))
  assert not replay.retires(on_policy.replay)
  loss = on_policy.objective
  # The switch never latches, so replay has not started in any step.
  assert objective.clips_fresh_ratios(loss, replay_started=False)
  assert (loss.clip_epsilon, loss.clip_epsilon_high, loss.surrogate) == (0.2, 0.2, 'ppo')
  assert (loss.normalize_std, loss.aggregation, loss.kl_coefficient) == ('off', 'constant', 0)
  assert (loss.dual_clip, loss.ratio, loss.tis_limit) == (float('inf'), 'token', 0)
  assert (on_policy.rollout.questions, on_policy.rollout.samples) == (128, 8)
  update = on_policy.optimizer
  assert (update.minibatches, update.learning_rate, update.schedule) == (2, 1e-6, 'constant')
  # Over 64, as their gradient is 64 times as large: docs/algorithm.md, departure 5.
  assert (update.clip_norm * 64, update.skip_norm * 64) == (1, pytest.approx(500, rel=0.002))


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'replay__ratio': 0.0, 'experience__path': 'x.jsonl'},
      'config.experience.path=x.jsonl needs config.replay.ratio above 0: with 0 nothing is '
      'replayed, wherever it comes from.',
    ),
    (
      {'replay__lower_bound': 0.5, 'replay__upper_bound': 0.5},
      'config.replay.lower_bound=0.5 must be below config.replay.upper_bound=0.5: groups whose '
      'correctness lies between them are recorded.',
    ),
    (
      {'replay__lower_bound': 0.8, 'replay__upper_bound': 0.9},
      'config.replay.lower_bound=0.8 and config.replay.upper_bound=0.9 let no group be recorded: '
      'of config.rollout.samples=4, none of 1 to 3 successes is a share above the lower and at '
      'most the upper bound, so nothing would ever be replayed.',
    ),
    (
      {'replay__ratio': 0.16},
      'config.replay.ratio=0.16 of config.rollout.questions=6 is less than one question, so '
      'nothing would ever be replayed; set config.replay.ratio to at least 0.166667, '
      'config.rollout.questions to at least 7, or config.replay.ratio=0, which is plain GRPO.',
    ),
    (
      {'objective__clip': 'until_replay', 'objective__surrogate': 'cispo'},
      "config.objective.surrogate='cispo' needs config.objective.clip='always': with "
      "'until_replay' it does nothing once replay starts.",
    ),
    (
      {'replay__ratio': 1.5},
      'config.replay.ratio=1.5 must lie in [0, 1): share of each '
      "step's questions that is drawn from the buffer; 0 is plain GRPO.",
    ),
    (
      {'rollout__samples': 1},
      'config.rollout.samples=1 must lie in [2, inf): rollouts of a '
      'question (K); an advantage compares at least two.',
    ),
    (
      {'objective__clip': 'sometimes'},
      "config.objective.clip='sometimes' must be one of "
      "until_replay, always, never: when fresh rows' ratios are clipped.",
    ),
    (
      {'rollout__carry': True, 'rollout__in_flight': 5},
      'config.rollout.in_flight=5 must be from config.rollout.questions=6 to 54, which is that '
      'times config.rollout.max_age=8 + 1, or 0: a step trains 6 groups, and in so many steps all '
      'have to.',
    ),
    (
      {'rollout__carry': True, 'rollout__in_flight': 13, 'rollout__max_age': 1},
      'config.rollout.in_flight=13 must be from config.rollout.questions=6 to 12, which is that '
      'times config.rollout.max_age=1 + 1, or 0: a step trains 6 groups, and in so many steps all '
      'have to.',
    ),
    (
      {'rollout__top_p': 0.9},
      'config.rollout.top_p=0.9 must lie in [1, 1]: training samples from '
      'the whole softmax, to which its importance weights refer; evaluation.top_p may truncate it.',
    ),
    ({'replay__ratoi': 0.25}, "config.replay has no 'ratoi'; did you mean 'ratio'?"),
    ({'repaly': 1}, "config has no 'repaly'; did you mean 'replay'?"),
    (
      {'optimizer__minibatches': 4},
      'config.optimizer.minibatches=4 must divide '
      'config.rollout.questions=6: every minibatch has the same number of whole groups.',
    ),
    (
      {'model__num_kv_heads': 3},
      'config.model.num_kv_heads=3 must divide '
      'config.model.num_heads=2: each key/value head serves equally many query heads.',
    ),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else '',
)
def test_an_impossible_value_is_refused_by_name(changes, message, config):
  with pytest.raises(InputError, match=f'^{re.escape(message)}$'):
    experiment.parse_config(set_values(config, **changes))


def test_a_section_that_is_missing_is_named(config):
  del config['replay']
  with pytest.raises(InputError, match=r"config lacks 'replay'; start from configs/base\.py"):
    experiment.parse_config(config)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(config, tmp_path):
  with pytest.raises(
    InputError,
    match=(
      r"config\.model\.vocab_size=100 must be at least the tokenizer's \d+: every token needs an "
      r"embedding\. 0 takes the tokenizer's\."
    ),
  ):
    experiment.open_experiment(set_values(config, model__vocab_size=100), str(tmp_path))


def test_the_tokenizer_of_a_workdir_is_used_again(config, tmp_path):
  first = experiment.open_experiment(config, str(tmp_path))
  assert first.model.vocab_size == first.tokenizer.vocab_size
  written = (tmp_path / 'tokenizer.model').read_bytes()
  experiment.open_experiment(set_values(config, tokenizer__vocab_size=300), str(tmp_path))
  assert (tmp_path / 'tokenizer.model').read_bytes() == written


def test_a_run_keeps_its_tokenizer(config, tmp_path):
  opened = experiment.open_experiment(config, str(tmp_path))
  unfinished = tmp_path / 'tokenizer.new'
  unfinished.mkdir()
  (unfinished / 'half').write_text('')  # by a kill
  session.keep_tokenizer(opened)
  kept = tokenizer.load(tmp_path / 'tokenizer')
  assert kept.encode('12+7\n') == opened.tokenizer.encode('12+7\n')
  assert not unfinished.exists() and not (tmp_path / 'tokenizer' / 'half').exists()


def test_a_tokenizer_that_was_kept_stays(config, tmp_path):
  opened = experiment.open_experiment(config, str(tmp_path))
  (tmp_path / 'tokenizer').mkdir()
  session.keep_tokenizer(opened)
  assert list((tmp_path / 'tokenizer').iterdir()) == []


def test_a_kill_leaves_no_part_of_a_tokenizer(config, tmp_path, monkeypatch):
  opened = experiment.open_experiment(config, str(tmp_path))

  def killed(folder):
    (folder_path := pathlib.Path(folder)).mkdir()
    (folder_path / 'tokenizer.model').write_text('half')
    raise KeyboardInterrupt

  monkeypatch.setattr(opened.tokenizer, 'save', killed)
  with pytest.raises(KeyboardInterrupt):
    session.keep_tokenizer(opened)
  assert not (tmp_path / 'tokenizer').exists()
  monkeypatch.undo()
  session.keep_tokenizer(opened)
  assert tokenizer.load(tmp_path / 'tokenizer').vocab_size == opened.tokenizer.vocab_size


# ---- Data ----


def prepare(config, workdir):
  """What `exgrpo train` does with the training questions before it trains."""
  opened = experiment.open_experiment(config, str(workdir))
  data = experiment.load_questions(opened, opened.config.data.train)
  experiment.make_rollout(opened, data)


@pytest.mark.parametrize(
  ('lines', 'message'),
  [
    (
      ['{"question": "1+1", "answer": "2"}', '{"question": "1+2", "answer": '],
      r'train\.jsonl:2: not valid JSON \(.*\); every line must hold one object, in UTF-8\.',
    ),
    (
      ['{"question": "1+1", "reply": "2"}'],
      r'train\.jsonl: no column is known to be the answer \(has: '
      r"'question', 'reply'\); set config\.data\.answer_field\.",
    ),
    ([], r'train\.jsonl: the file holds no question; at least one is needed\.'),
  ],
  ids=['malformed', 'field', 'empty'],
)
def test_bad_data_is_refused_with_its_place(lines, message, config, jsonl, tmp_path):
  path = jsonl(*lines)
  set_values(
    config, data__train=path, warm_start__data=path, data__cache_dir=str(tmp_path / 'cache')
  )
  with pytest.raises(InputError, match=message):
    prepare(config, tmp_path)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    (
      {'data__train': 'nowhere.jsonl', 'warm_start__data': 'nowhere.jsonl'},
      'nowhere.jsonl: there is no such file; a data spec that ends in .jsonl must be the path of',
    ),
    (
      {'data__train': 'nonsense', 'warm_start__data': 'nonsense'},
      "the data spec 'nonsense' must be an embedded task's split (arithmetic:train, chains:train)",
    ),
    (
      {'rollout__max_prompt': 4},
      'the prompt of row 10 has 5 tokens, and 2 of 12 prompts exceed '
      "the limit of 4; raise the limit, or set config.data.overlong='drop' to leave them out.",
    ),
    (
      {'rollout__max_prompt': 2, 'data__overlong': 'drop'},
      'all of its 12 prompts exceed the limit of 2 tokens',
    ),
    (
      {'rollout__questions': 14},
      'config.rollout.questions=14 must be at most the 12 questions of ',
    ),
    (
      {'rollout__questions': 12, 'rollout__max_prompt': 4, 'data__overlong': 'drop'},
      'config.rollout.questions=12 must be at most the 10 questions of ',
    ),
    (
      {'rollout__carry': True, 'rollout__in_flight': 13},
      'config.rollout.carry=True has 13 groups in flight, and ',
    ),
  ],
  ids=['no_file', 'no_spec', 'prompt', 'all_prompts', 'few_questions', 'few_left', 'few_to_carry'],
)
def test_what_the_data_does_not_allow_is_refused(changes, message, config, tmp_path):
  set_values(config, **changes)
  with pytest.raises(InputError, match=re.escape(message)):
    prepare(config, tmp_path)


def test_overlong_prompts_are_left_out_and_the_rest_numbered_anew(config, tmp_path):
  path = tmp_path / 'train.jsonl'
  tiny.write_questions(path)
  path.write_text(''.join(reversed(path.read_text().splitlines(keepends=True))))  # 11, 10, ...
  opened = experiment.open_experiment(
    set_values(config, rollout__max_prompt=4, data__overlong='drop'), str(tmp_path)
  )
  data = experiment.load_questions(opened, str(path))
  assert [(q.row, q.answer) for q in data.questions] == [(row, str(9 - row)) for row in range(10)]
  assert [opened.tokenizer.decode(prompt) for prompt in data.prompts] == [
    f'{9 - row}+0\n' for row in range(10)
  ]
