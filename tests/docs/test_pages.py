"""The pages of docs/ that code makes, and the examples of those that people write."""

import ast
import contextlib
import dataclasses
import http.server
import itertools
import json
import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import exgrpo_jax
from exgrpo_jax.algorithm import (
  advantages,
  losses,
  objective,
  question_rules,
  replay,
  trajectory_rules,
)
from exgrpo_jax.config import PAPER, build, defaults, setting
from exgrpo_jax.data.tasks import chains, sums
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.datatypes import ReplayScores, Response, Trajectory
from exgrpo_jax.environments.adapters import TextArena
from exgrpo_jax.environments.environment import Observation, Task
from exgrpo_jax.environments.tools import Tools, describe
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.settings import RunConfig, parse_config
from exgrpo_jax.grading import pool, reward_functions, rewards, settings, verifier
from exgrpo_jax.huggingface import families
from exgrpo_jax.learner import optimizer
from exgrpo_jax.rollout import scoring
from exgrpo_jax.rollout.sampler import requests_for
from exgrpo_jax.training.checks import check_command
from tests.docs import documents
from tests.helpers import tiny
from tests.helpers.paths import REPOSITORY

MADE = {
  'configuration': lambda page: page.page(page.RunConfig),
  'slices': lambda page: page.page(page.read(), page.read(page.PARTS_FILE)),
  'one_gpu': lambda page: page.page(),
}


def python_of(page):
  """The Python blocks of a page in docs/."""
  return documents.blocks((documents.DOCS / page).read_text(), 'python')


def run(block):
  """The names that an example defines."""
  names = {}
  exec(block, names)
  return names


@pytest.mark.full
@pytest.mark.parametrize('name', MADE)
def test_the_page_checked_in_is_the_one_that_is_made(name):
  page = documents.load(name)
  assert MADE[name](page) == page.PAGE.read_text(encoding='utf-8'), (
    f'docs/{name}.md is out of date; run: python docs/{name}.py'
  )


# ---- The page of all settings ----


@dataclasses.dataclass(frozen=True)
class Inner:
  """Where things lie; a second sentence.

  A second paragraph.
  """

  path: str = setting('', None, "the *.model of `a_b`, ended by '</think>'; '' | none")
  kinds: tuple[str, ...] = setting(('a',), None, 'all of them')


@dataclasses.dataclass(frozen=True)
class Outer:
  inner: Inner
  ratio: float = setting(0.5, '[0, 1)', 'a share', PAPER)
  clip: str = setting('never', ('always', 'never'), 'when')


@pytest.fixture(scope='module')
def configuration():
  return documents.load('configuration')


def test_a_setting_is_a_row_with_type_range_default_origin_and_meaning(configuration):
  page = configuration.page(Outer)
  rows = page.splitlines()
  assert '| `ratio` | float | `[0, 1)` | `0.5` (paper) | a share |' in rows
  assert "| `clip` | str | `'always'`, `'never'` | `'never'` | when |" in rows
  assert "| `inner.kinds` | tuple of str |  | `('a',)` | all of them |" in rows
  # What Markdown would read is escaped outside of code.
  assert r"the \*.model of `a_b`, ended by '&lt;/think>'; '' \| none" in page
  # A section begins with the first paragraph of its docstring, where there is one.
  assert '## inner\n\nWhere things lie; a second sentence. Code: [' in page
  assert 'A second paragraph' not in page and 'Outer(' not in page


def test_keys_are_the_settings_and_their_sections(configuration):
  assert configuration.keys(Outer) == {'ratio', 'clip', 'inner', 'inner.path', 'inner.kinds'}


# ---- The page of slices ----


ROW = dict(config='qwen2_5_math_7b', slice='v5e:8x8', slots='1,024', memory='12.0 of 15.8')
ROW |= dict(program='decode', seconds='90', tokens='15,000', hours='160', versions='libtpu 1')


@pytest.fixture(scope='module')
def slices():
  return documents.load('slices')


def test_a_row_has_all_configs_of_its_shape_and_a_dash_where_nothing_is_known(slices):
  made = slices.page([ROW, ROW | {'slice': 'v5e:4x4', 'seconds': ''}])
  first, second = [line for line in made.splitlines() if line.startswith('| qwen')]
  assert '| v5e:4x4 | 1,024 | 12.0 of 15.8 | decode | — | 15,000 |' in first
  assert second.startswith('| qwen2_5_math_7b, qwen2_5_7b_instruct | v5e:8x8 |')
  assert '(libtpu 1).' in made
  assert 'qwen2_5_math_7b on v6e:4x8' in made and 'qwen2_5_math_7b on v5e:8x8' not in made


def parts_of(topology, decode):
  parts = {'decode': decode, 'host': '1.00', 'sum': '9.0'}
  return [dict(slice=topology, part=part, seconds=value) for part, value in parts.items()]


def test_parts_of_a_step_have_a_column_for_each_slice_that_is_known(slices):
  parts = parts_of('v5e:8x8', '12.39') + parts_of('v6e:8x8', '5.00')
  lines = slices.page([ROW], parts).splitlines()
  assert '| part | v5e:8x8 | v6e:8x8 |' in lines
  assert '| decode | 12.39 | 5.00 |' in lines
  assert '| host | 1.00 | 1.00 |' in lines and '| sum | 9.0 | 9.0 |' in lines
  assert '| part |' not in slices.page([ROW])


def test_rows_are_kept_as_they_are(slices, monkeypatch, tmp_path):
  for name, suffix in (('FILE', '.csv'), ('PARTS_FILE', '_parts.csv'), ('PAGE', '.md')):
    monkeypatch.setattr(slices, name, tmp_path / f'slices{suffix}')
  assert slices.read() == []
  slices.write([ROW], parts_of('v5e:8x8', '12.39'))
  assert slices.read() == [ROW]
  assert slices.read(slices.PARTS_FILE) == parts_of('v5e:8x8', '12.39')


# ---- docs/running.md ----


def test_the_config_of_the_page_can_be_loaded(tmp_path):
  (block,) = python_of('running.md')
  path = tmp_path / re.match(r'"""(\w+\.py)', block)[1]
  path.write_text(block)
  config = parse_config(config_files.load_config(str(path)))
  assert (config.num_steps, config.data.train, config.replay.ratio) == (100, 'train.jsonl', 0.25)


# ---- docs/answers.md ----


ANSWERS = (documents.DOCS / 'answers.md').read_text()


def test_the_verifier_of_the_page_decides(tmp_path, monkeypatch):
  (block,) = python_of('answers.md')
  (tmp_path / 'my_verifier.py').write_text(block)
  monkeypatch.syspath_prepend(str(tmp_path))
  assert '--config.grading.verifier=my_verifier:LastLine' in ANSWERS
  config = dataclasses.replace(tiny.GRADING, workers=1, verifier='my_verifier:LastLine')
  with pool.Grader(config, verifier.ANYTHING) as running:
    verdicts = running.grade(['1\n2</think>\n3', '2'], ['3', '3'])
  assert [verdict.outcome for verdict in verdicts] == ['correct', 'wrong']
  assert [verdict.answer for verdict in verdicts] == ['3', '2']


def test_the_page_lists_every_kind_and_verifier():
  for name in (*verifier.KINDS, *verifier.NAMES):
    assert f'| `{name}` |' in ANSWERS


# ---- docs/environments.md ----


EXAMPLE, SHOP, BOARDS = python_of('environments.md')


def asked(question):
  return [{'role': 'user', 'content': question}]


def test_the_example_plays():
  names = run(EXAMPLE)
  environment, rows = names['HotAndCold'](), names['get_task']()['train']
  assert len({row['question'] for row in rows}) == len(rows)
  task = Task(39, asked(rows[39]['question']), str(rows[39]['answer']), rows[39])
  assert environment.reset(task, 0) == '1-64'
  answers = [environment.step(said) for said in ('30', '60', 'what?', '41', ' 40')]
  assert [answer.messages for answer in answers[:4]] == ['hotter', 'colder', 'colder', 'hotter']
  assert [answer.reward for answer in answers] == [0.1, 0.0, 0.0, 0.1, 1.0]
  assert answers[-1] == Observation(reward=1.0, done=True, success=True)


def test_the_shop_sells():
  names = run(SHOP)
  environment = Tools([names['Shop']])
  assert describe(names['Shop']().buy)['function']['name'] == 'buy'
  (prompt,) = environment.reset(Task(0, asked('Buy!'), '', {'money': 3}), 0)
  assert prompt['content'] == 'Buy!\nYou have 3 coins.'
  call = '<tool_call>{"name": "buy", "arguments": {"apples": 3}}</tool_call>'
  assert environment.step(call).messages[0]['content'] == '0 coins left'
  done = environment.step('Done.')
  assert (done.reward, done.done, done.success) == (1.0, True, True)


def test_the_boards_can_be_played():
  pytest.importorskip('textarena')
  rows = run(BOARDS)['get_task']()
  (first, *_), (held_out, *_) = rows['train'], rows['test']
  prompts = [
    TextArena().reset(Task(0, asked(row['question']), 'won', row), 0) for row in (first, held_out)
  ]
  assert 'Sokoban' in prompts[0] and prompts[0] != prompts[1]


# ---- docs/extending.md ----


HEADINGS = ('loss term', 'fresh loss term', 'baseline', 'batch baseline', 'question rule')
HEADINGS += ('selection rule', 'optimizer', 'model family', 'sampler', 'callback')
BLOCKS = dict(zip(HEADINGS, python_of('extending.md'), strict=True))


@pytest.fixture(autouse=True)
def tables():
  """What the examples add is gone after the test."""
  tables = (*TABLES.values(), families.FAMILIES)
  before = [dict(table) for table in tables]
  yield
  for table, entries in zip(tables, before):
    table.clear()
    table.update(entries)


def settings_with(**changes):
  """The checked config with some values changed."""
  values = defaults(RunConfig)
  for section, (name, value) in changes.items():
    values[section][name] = value
  return build(RunConfig, values, 'config')


def test_examples_have_about_ten_lines():
  assert all(len([x for x in block.splitlines() if x]) <= 12 for block in BLOCKS.values())


def test_a_loss_term():
  run(BLOCKS['loss term'])
  config = settings_with(objective=('shaping', 'truncated')).objective
  weights = objective.shaped_ratios(np.zeros(2), np.log([0.5, 3.0]), config)
  np.testing.assert_allclose(weights, [0.5, 1.0], rtol=1e-6)
  assert objective.replay_slope(config) == 0.5  # the gradient of min(w, 1) at w = 1


def test_a_loss_term_of_fresh_tokens():
  run(BLOCKS['fresh loss term'])
  config = settings_with(objective=('policy_loss', 'sapo')).objective
  ratio, advantage = np.array([[0.5, 1.0, 3.0]]), np.array([[1.0], [-1.0]])
  gate = 4 / (1 + np.exp(-(ratio - 1))), 4 / 1.05 / (1 + np.exp(-1.05 * (ratio - 1)))
  term, is_clipped = losses.POLICY_LOSSES[config.policy_loss](0, ratio, None, advantage, True)
  np.testing.assert_allclose(term, np.concatenate(gate) * advantage, rtol=1e-6)
  assert not is_clipped.any()


def test_a_selection_rule():
  run(BLOCKS['selection rule'])
  kind = settings_with(replay=('trajectory_selection', 'shortest')).replay.trajectory_selection
  stored = [
    Trajectory(np.zeros(length, np.int32), np.zeros(length, np.float32), 1.0, step=1)
    for length in (3, 2)
  ]
  scored = [ReplayScores(row, *np.zeros((4, len(row.logp)), np.float32)) for row in stored]
  picked, _ = scoring.pick(kind, [stored], lambda _: scored, np.random.default_rng(0))
  assert picked == [stored[1]]


def test_a_baseline():
  run(BLOCKS['baseline'])
  baseline = settings_with(objective=('baseline', 'leave_one_out')).objective.baseline
  rewards = np.float32([[1, 0, 0, 0], [1, 1, 1, 1]])
  found = advantages.group_advantages(rewards, baseline=baseline)
  np.testing.assert_allclose(found, [[1, -1 / 3, -1 / 3, -1 / 3], [0, 0, 0, 0]], rtol=1e-6)
  equal = advantages.group_advantages(np.full((1, 8), 0.1, np.float32), 'sample', baseline=baseline)
  np.testing.assert_allclose(equal, 0, atol=1e-6)


def test_a_baseline_that_normalizes_over_the_batch():
  run(BLOCKS['batch baseline'])
  rewards = np.float32([[1, 0], [1, 1]])
  found = advantages.group_advantages(rewards, baseline='batch_std')
  np.testing.assert_allclose(found, [[1, -1], [0, 0]], atol=1e-3)


def test_an_added_baseline_is_not_divided_by_the_deviation_of_equal_rewards():
  advantages.BASELINES['half'] = lambda reward_QK, _: np.full_like(reward_QK, 0.5)
  found = advantages.group_advantages(np.ones((1, 4), np.float32), 'sample', baseline='half')
  assert found.tolist() == [[0.5] * 4]


def test_a_rule_for_questions():
  run(BLOCKS['question rule'])
  config = settings_with(replay=('question_selection', 'least_recent')).replay
  stored = {
    row: Trajectory(np.zeros(2, np.int32), np.zeros(2, np.float32), 1.0, step=step)
    for row, step in enumerate((5, 5, 0, 5))
  }
  entries = {row: replay.Entry(0.5, 3, (one,)) for row, one in stored.items()}
  buffer, rng = replay.Buffer(entries, started=True), np.random.default_rng(0)
  rows = [replay.draw_questions(config, buffer, 2, 8, 6, rng)[0] for _ in range(300)]
  # The ages are 1, 1, 6 and 1, so row 2 has log(7) of 3 log(2) + log(7), or 48%.
  share = np.log(7) / np.log(56)
  assert abs(rows.count(2) / 300 - share) < 3.3 * np.sqrt(share * (1 - share) / 300)


def test_a_rule_for_questions_is_not_called_while_none_are_stored():
  question_rules.RULES['oldest'] = lambda questions: questions.age_N / questions.age_N.max()
  config = settings_with(replay=('question_selection', 'oldest')).replay
  empty, rng = replay.Buffer({}, started=True), np.random.default_rng(0)
  assert replay.draw_questions(config, empty, 2, 8, 6, rng) == []


def test_the_library_exports_the_error_that_users_can_fix():
  assert exgrpo_jax.InputError is InputError


def test_a_config_file_may_import_a_module_from_the_current_folder(tmp_path, monkeypatch):
  (tmp_path / 'mine_to_import.py').write_text('SEED = 5\n')
  file = tmp_path / 'mine.py'
  file.write_text(
    'from mine_to_import import SEED\nfrom exgrpo_jax.configs import smoke\n'
    'def get_config():\n  config = smoke.get_config()\n  config.seed = SEED\n  return config\n'
  )
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr('sys.path', [*sys.path])
  assert config_files.load_config(file).seed == 5


def test_an_optimizer_and_a_schedule(tmp_path):
  run(BLOCKS['optimizer'])
  values = config_files.load_config('chains', {})
  values.optimizer.update(
    name='lion', schedule='late_decay', learning_rate=0.1, weight_decay=0.0, warmup_updates=0
  )
  config = check_command(values, str(tmp_path / 'run')).optimizer
  rates = [float(optimizer.learning_rate(config, 10)(count)) for count in (0, 8, 9, 10)]
  np.testing.assert_allclose(rates, [0.1, 0.1, 0.05, 0.0], rtol=1e-6)
  params = {'kernel': jnp.zeros(2)}
  state = optimizer.TrainState(params, optimizer.make(config, 10).init(params))
  gradient = {'kernel': jnp.float32([3e-3, -1e-4])}  # Lion uses only the signs
  updated, _ = optimizer.apply_gradient(config, 10, state, gradient)
  np.testing.assert_allclose(updated.params['kernel'], [-0.1, 0.1], rtol=1e-6)


def stateless(function):
  """The optimizer that applies a function to each gradient."""
  return optax.stateless(lambda updates, _: jax.tree.map(function, updates))


def by_part(names):
  """The optimizer that treats the policy's parts, named in a config file, differently."""
  parts = {name: optax.scale_by_rms() for name in names}
  return optax.partition(parts, {name: name for name in names})


def by_size(of_matrices):
  """The optimizer that treats stacked matrices differently from all other parameters."""
  parts = {'stacked': of_matrices, 'others': optax.scale_by_adam()}
  return optax.partition(
    parts, lambda params: jax.tree.map(lambda x: ('others', 'stacked')[x.ndim > 2], params)
  )


def counting(step):
  """An optimizer whose only state is a number, to which it applies `step`."""
  return optax.GradientTransformation(
    lambda _: jnp.int32(0), lambda updates, count, _=None: (updates, step(count))
  )


TABLES = {
  'objective.shaping': losses.SHAPINGS,
  'objective.policy_loss': losses.POLICY_LOSSES,
  'replay.trajectory_selection': trajectory_rules.RULES,
  'replay.question_selection': question_rules.RULES,
  'objective.baseline': advantages.BASELINES,
  'optimizer.schedule': optimizer.SCHEDULES,
  'optimizer.name': optimizer.OPTIMIZERS,
}


@pytest.mark.parametrize(
  ('key', 'function', 'why'),
  [
    ('objective.shaping', lambda _, log_ratio, __: log_ratio, None),
    ('objective.shaping', lambda _, log_ratio, __: log_ratio.astype('bfloat16'), None),
    ('objective.shaping', lambda _, log_ratio, __: log_ratio[:1], r'returned float\[1, 3\], not'),
    ('objective.shaping', lambda _, log_ratio, __: log_ratio.mean(), r'returned float\[\], not'),
    ('objective.shaping', lambda _, log_ratio, __: log_ratio > 0, r'returned bool\[2, 3\], not'),
    ('objective.shaping', lambda _, __, config: config.gamma, "no attribute 'gamma'"),
    ('objective.shaping', lambda _, ratio, __: jnp.log(ratio), 'ratios from .* returned NaN'),
    (
      'objective.shaping',
      lambda _, r, __: jnp.where(r > 0, r, abs(r) ** 0.5 * 0),
      'gradient is NaN',
    ),
    ('objective.policy_loss', lambda _, r, __, a, ___: (a**0.5 * r, r > 2), 'returned NaN'),
    ('objective.policy_loss', lambda _, r, __, a, clip: (r * a, clip & (r > 2)), None),
    ('objective.policy_loss', lambda _, r, __, a, clip: [r * a, clip & (r > 2)], None),
    ('objective.policy_loss', lambda _, r, __, a, ___: r * a, r"not \('float\[2, 3\]', 'bool"),
    ('objective.policy_loss', lambda _, ratio: ratio, 'takes 2 positional arguments'),
    ('replay.trajectory_selection', lambda scores: scores.logp.mean(), None),
    ('replay.trajectory_selection', lambda scores: scores.logp[9], None),
    ('replay.trajectory_selection', lambda scores: scores.logp, r'returned array\(.*not a number'),
    ('replay.trajectory_selection', lambda _: None, 'returned None, not a number'),
    ('replay.trajectory_selection', lambda _: float('nan'), 'returned nan, not a number'),
    ('replay.trajectory_selection', lambda scores: scores.length, "no attribute 'length'"),
    ('replay.question_selection', lambda questions: questions.correctness_N, None),
    ('replay.question_selection', lambda questions: [-np.inf] * len(questions.row_N), None),
    ('replay.question_selection', lambda _: 1.0, r'returned 1.0, not .* shape \[7\]'),
    ('replay.question_selection', lambda q: 1 / (q.correctness_N - 0.125), r'inf at index \[0\]'),
    ('replay.question_selection', lambda q: q.age_N * np.nan, r'returned nan at index \[0\], not'),
    ('objective.baseline', lambda reward_QK, _: reward_QK.mean(1, keepdims=True), None),
    ('objective.baseline', lambda reward_QK, _: reward_QK.mean(1), r'shape \[9, 8\] or \[9, 1\]'),
    ('objective.baseline', lambda reward_QK: reward_QK, 'takes 1 positional argument'),
    ('objective.baseline', lambda reward_QK, _: np.log(reward_QK), r'-inf at index \[0, 0\]'),
    ('objective.baseline', lambda r, _: 0 / r.sum(1, keepdims=True), r'nan at index \[0, 0\]'),
    ('optimizer.schedule', lambda peak, _: lambda count: peak / (count + 1), None),
    ('optimizer.schedule', lambda peak, _: peak, 'callable'),
    ('optimizer.schedule', lambda peak, _: lambda count: peak if count < 5 else 0, 'Tracer'),
    ('optimizer.schedule', lambda _, __: lambda ___: np.inf, r'inf at index \[0\]'),
    ('optimizer.schedule', lambda _, __: lambda ___: -1.0, 'returned -1 .* not a number from 0'),
    ('optimizer.name', lambda _: optax.scale_by_rms(), None),
    ('optimizer.name', lambda _: optax.adam(1e-3), 'and the gradient have opposite signs'),
    ('optimizer.name', lambda _: contrib.muon(-1.0), None),
    ('optimizer.name', lambda _: contrib.scale_by_muon(), 'pytree structure error'),
    ('optimizer.name', lambda _: by_part({'embedding_VD', 'final_norm', 'layers'}), None),
    ('optimizer.name', lambda _: by_part({'embedding_VD', 'layers'}), 'final_norm'),
    ('optimizer.name', lambda _: by_size(stateless(jnp.mean)), r"'up_DF': 'float32\[\]'"),
    ('optimizer.name', lambda _: optax.identity, "no attribute 'init'"),
    ('optimizer.name', lambda _: optax.scale_by_factored_rms(min_dim_size_to_factor=2), None),
    ('optimizer.name', lambda _: optax.apply_if_finite(optax.identity(), 2), None),
    ('optimizer.name', lambda _: optax.add_noise(0.1, 0.5, 0), 'dtype=key'),
    ('optimizer.name', lambda _: stateless(jnp.mean), r"'embedding_VD': 'float32\[\]'"),
    ('optimizer.name', lambda _: counting(lambda count: jnp.stack([count] * 3)), r'int32\[3\]'),
    ('optimizer.name', lambda _: counting(lambda count: count + 0.5), r"'float32\[\]'\)"),
    ('optimizer.name', lambda config: optax.scale_by_rms(config.decay), "no attribute 'decay'"),
  ],
)
def test_a_function_of_a_config_file_is_tried_before_training(key, function, why, tmp_path):
  TABLES[key]['mine'] = function
  values = config_files.load_config('chains', {key: 'mine'})
  refused = pytest.raises(InputError, match=f"^config.{key}: 'mine' cannot be used .*{why}")
  with refused if why else contextlib.nullcontext():
    check_command(values, str(tmp_path / 'run'))


@pytest.mark.parametrize(
  ('key', 'result', 'why'),
  [
    ('replay.question_selection', [np.nan], r'nan at index \[0\], not a number from -inf to 1.8'),
    ('replay.question_selection', [np.inf], r'inf at index \[0\], not'),
    ('replay.question_selection', [1.0, 2.0], r'\[1.0, 2.0\], not numbers of shape \[1\]'),
    ('replay.question_selection', [-np.inf], None),
    ('objective.baseline', [[0.0], [np.nan]], r'nan at index \[1, 0\], not a number from -1.8'),
    ('objective.baseline', [0.0, 1.0], r'not numbers of shape \[2, 4\] or \[2, 1\]'),
    ('objective.baseline', [['a'], ['b']], 'not numbers of shape'),
    ('objective.baseline', [[0.0], [0.0, 1.0]], 'not numbers of shape'),
    ('replay.trajectory_selection', np.nan, r'nan at index \[0\], not a number from -inf to inf'),
    ('replay.trajectory_selection', np.inf, None),
  ],
)
def test_an_added_function_that_returns_something_invalid_during_training_is_named(
  key, result, why
):
  TABLES[key]['mine'] = lambda *_: result
  stored = Trajectory(np.zeros(2, np.int32), np.zeros(2, np.float32), 1.0, step=1)
  config = replay.ReplayConfig(question_selection='mine')
  rng = np.random.default_rng(0)
  refused = pytest.raises(InputError, match=f"^config.{key}: 'mine' cannot be used .*{why}")
  with refused if why else contextlib.nullcontext():
    if key == 'replay.question_selection':
      buffer = replay.Buffer({0: replay.Entry(0.5, 3, (stored,))}, started=True)
      replay.draw_questions(config, buffer, 2, 8, 6, rng)
    elif key == 'objective.baseline':
      advantages.group_advantages(np.eye(2, 4, dtype=np.float32), baseline='mine')
    else:
      scores = [ReplayScores(stored, *np.zeros((4, 2), np.float32))]
      scoring.pick('mine', [[stored]], lambda _: scores, rng)


def test_without_a_device_an_added_loss_term_is_not_computed(tmp_path, monkeypatch):
  losses.SHAPINGS['mine'] = lambda _, log_ratio, __: jnp.log(log_ratio)
  values = config_files.load_config('chains', {'objective.shaping': 'mine'})
  monkeypatch.setattr(jax, 'jit', None)
  check_command(values, str(tmp_path / 'run'), has_device=False)


@pytest.mark.parametrize(
  ('baseline', 'why'),
  [
    (lambda reward_QK, _: reward_QK.mean(axis=1, keepdims=True), None),
    (lambda reward_QK, _: np.full_like(reward_QK, 0.5), 'groups with equal rewards'),
  ],
)
def test_dynamic_sampling_needs_a_baseline_that_gives_equal_rewards_no_advantage(
  baseline, why, tmp_path
):
  advantages.BASELINES['mine'] = baseline
  changes = {'objective.baseline': 'mine', 'rollout.dynamic_sampling': 2.0}
  refused = pytest.raises(InputError, match=f'^config.rollout.dynamic_sampling=2.0: .*{why}')
  with refused if why else contextlib.nullcontext():
    check_command(config_files.load_config('chains', changes), str(tmp_path / 'run'))


def test_a_bucket_rule_may_return_a_list_for_the_configs_group_size(tmp_path):
  question_rules.BUCKET_RULES['mine'] = lambda _, __, ___: [-np.inf, 1, 2, 3, 4, 5, 6, 7]
  values = config_files.load_config('chains', {'replay.question_selection': 'mine'})
  config = check_command(values, str(tmp_path / 'run')).replay
  probability_K = replay.bucket_probabilities(config, np.arange(8) > 5)
  np.testing.assert_allclose(probability_K[6:], [1 / (1 + np.e), np.e / (1 + np.e)])


def test_a_model_family():
  described = families.FAMILIES['Olmo2ForCausalLM']
  families.FAMILIES['Olmo2ForCausalLM'] = None
  run(BLOCKS['model family'])
  assert families.FAMILIES['Olmo2ForCausalLM'] == described


def test_a_sampler():
  finished = []
  requests = requests_for([np.int32([7, 8, 9])], [0], samples=2, step=1, limit=2)
  sampler = run(BLOCKS['sampler'])['Parrot']()
  responses, _ = sampler.generate(None, requests, lambda index, _: finished.append(index))
  assert finished == [0, 1] and [r.tokens.tolist() for r in responses] == [[7, 8]] * 2


def test_a_callback():
  told = [[Response(np.zeros(length), *np.zeros((2, length)), False)] for length in (3, 5)]
  experience = type('Experience', (), {'responses': told})
  longest = run(BLOCKS['callback'])['longest']
  assert longest(None, None, experience) == {'length/longest': 5}


# ---- docs/algorithm.md ----


def test_a_config_can_have_the_settings_of_each_variant():
  text = (documents.DOCS / 'algorithm.md').read_text()
  rows = re.findall(r'^\| .*arxiv.* \|$', text.partition('| variant |')[2], re.MULTILINE)
  assert len(rows) >= 7
  for row in rows:
    values = {}
    for key, text in re.findall(r'`(\w+\.\w+)=([^`]+)`', row):
      values[key] = ast.literal_eval(text) if re.match(r'[\d(]', text) else text
    config_files.load_config('base', values)


# ---- docs/rewards.md ----


REWARDS = documents.DOCS / 'rewards.md'
VERIFIER = verifier.VerifierConfig(('box',))


class Judge(http.server.BaseHTTPRequestHandler):
  """The service of the page: a response scores its length and its question's."""

  def do_POST(self):
    asked = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    scores = [len(q) + len(r) for q, r in zip(asked['questions'], asked['responses'], strict=True)]
    self.send_response(200)
    self.end_headers()
    self.wfile.write(json.dumps({'scores': scores}).encode())

  def log_message(self, *_):
    """Prints nothing."""


@pytest.fixture
def port():
  """That of a running Judge."""
  with http.server.ThreadingHTTPServer(('localhost', 0), Judge) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()


@pytest.fixture
def configs(tmp_path, monkeypatch, port):
  """The grading of each of the page's commands; what they import can be imported."""
  for block in documents.blocks(REWARDS.read_text(), 'python'):
    name = re.match(r'"""(\w+\.py)', block)[1]
    (tmp_path / name).write_text(block.replace(':8000', f':{port}'))
  monkeypatch.syspath_prepend(str(tmp_path))
  found = []
  for command in documents.commands(REWARDS):
    flags = dict(re.findall(r'config\.grading\.(\w+)="?([^"\s]*)"?', command))
    if 'exgrpo train' in command:
      changes = {name: ast.literal_eval(flags[name]) for name in ('rewards', 'weights')}
      changes['batched'] = (flags['batched'],) if 'batched' in flags else ()
      found.append(dataclasses.replace(tiny.GRADING, workers=1, **changes))
  return found


@pytest.mark.full
def test_the_rewards_of_the_page_can_be_used(configs):
  facts = {'question': 'four', 'length': 16, 'max_response': 64, 'level': 3}
  expected = [1.0, 1 + 0.2 * 0.75 + 0.1 * 3, 1 + 0.3 * (4 + len(r'\boxed{1}'))]
  for config, reward in zip(configs, expected, strict=True):
    settings.check_rewards(config, 64)
    pool.check(config, VERIFIER)
    pool.check(config, VERIFIER, {'question': 'four', 'messages': []})
    with pool.Grader(config, VERIFIER) as running:
      (verdict,) = running.grade([r'\boxed{1}'], ['1'], facts=[lambda: facts])
    assert verdict.reward == pytest.approx(reward)


def test_the_page_lists_every_reward_and_parameter():
  tables = [line.split('|')[1] for line in REWARDS.read_text().splitlines() if line[:3] == '| `']
  named = re.findall(r'`(\w+)`', ' '.join(tables))
  assert named == [*rewards.BUILT_IN, *reward_functions.PARAMETERS]


# ---- What documents ask a policy is a question of its task ----


_NOTEBOOK = REPOSITORY / 'examples' / 'library.ipynb'
# A run is in a folder of its config's name, as after the README's first command.
_COMMAND = re.compile(r"generate[^`]*--checkpoint=/tmp/(\w+)[^`]*--prompt='([^']*)'")
_CONFIG = re.compile(r"load_config\('(\w+)'")
_SAMPLED = re.compile(r"sample\(\w+, \['([^']*)'\]")
_JUDGED = re.compile(r"""judge\(.*, ['"](\d+)['"]\)""")


def summands(text):
  """'48+3-9' -> [48, 3, -9]; none where there is anything else between them."""
  found = re.findall(r'[+-]?\d+', text)
  return list(map(int, found)) if ''.join(found) == text else []


def is_question(task, text):
  """Whether the questions that the task trains on could have this one among them."""
  start, *others = summands(text) or [0]
  if task == 'arithmetic':
    low, high = sums.ARITHMETIC_START_RANGE
    split, digits = sums.ARITHMETIC_SPLITS['train'], others
    fits = low <= start <= high and split.min_digits <= len(others) <= split.max_digits
  else:
    split, digits = chains.SPLITS['train'], list(map(abs, others))
    totals = itertools.accumulate(others, initial=start)
    fits = split.min_terms <= len(others) <= split.max_terms and set(totals) <= set(chains.TOTALS)
    fits &= len(set(digits)) == len(digits)
  return fits and all(1 <= digit <= 9 for digit in digits)


def task_of(name):
  """Which task a config that ships trains on; '' for data of other origin."""
  task = config_files.load_config(name).data.train.partition(':')[0]
  return task if task in TASKS else ''


def code():
  """(place, text) of everything that could hold an example."""
  for path in [*documents.DOCUMENTS, *documents.PACKAGE.rglob('*.py')]:
    yield documents.place(path), path.read_text().replace('\\\n', ' ')
  cells = json.loads(_NOTEBOOK.read_text())['cells']
  yield documents.place(_NOTEBOOK), '\n'.join(''.join(cell['source']) for cell in cells)


def examples():
  """(place, config, prompt, answers) of the commands, and of the Python, that ask a run."""
  for place, text in code():
    for command in text.splitlines():
      for name, prompt in _COMMAND.findall(command):
        yield place, name, prompt, []
    for config in _CONFIG.findall(text)[:1]:
      for prompt in _SAMPLED.findall(text):
        yield place, config, prompt, _JUDGED.findall(text)


def test_what_a_policy_of_a_task_is_asked_is_a_question_of_that_task():
  found = list(examples())
  pages = {'README.md', 'docs/evaluating.md', 'docs/library.md'}
  places = {place for place, *_ in found}
  assert {*pages, 'exgrpo_jax/commands/generate.py'} < places
  assert documents.place(_NOTEBOOK) in places
  wrong = [
    (place, prompt)
    for place, config, prompt, answers in found
    if not is_question(task_of(config), prompt)
    or any(int(answer) != sum(summands(prompt)) for answer in answers)
  ]
  assert wrong == []


def test_other_forms_are_found():
  for text in ('What is 3 + 4 - 2?', '48 + 3 - 9 + 7', '48+3-9+3'):
    assert not is_question('chains', text), text
  for text in ('12 + 30 - 5', '48+9'):
    assert not is_question('arithmetic', text), text
