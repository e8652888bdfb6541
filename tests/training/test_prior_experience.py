"""Prior experience from a file or another run, up to the training step that uses it."""

import dataclasses
import json
import shutil
import types

import jax
import numpy as np
import pytest

from exgrpo_jax.data import questions, tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import experiment, generation, policies
from exgrpo_jax.experiment.experiment import parse_config
from exgrpo_jax.grading import programs
from exgrpo_jax.policy import model
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import seeding, stages
from exgrpo_jax.training import prefilter, prior_experience, session
from tests.helpers import buffers, recording, tiny
from tests.helpers.chance import is_correct

SOLVABLE = range(2, 8)  # questions with right and wrong responses
TRACES = 2  # right responses per question


@pytest.fixture(autouse=True)
def chance(monkeypatch):
  monkeypatch.setattr(programs, 'COMMAND', tiny.WORKER)


def right_texts(question, count=TRACES):
  """Return responses to a question that the pseudo-random verifier accepts."""
  return [text for n in range(99) if is_correct(text := f'{n}={n}', str(question))][:count]


def rows_without_logprobs():
  return [{'question': f'{n}+0', 'response': text} for n in SOLVABLE for text in right_texts(n)]


@pytest.fixture
def seeded(recorded, config, tmp_path, jsonl):
  """Return a function that opens an experiment with prior experience and the run's tokenizer."""

  def open_seeded(rows, name='run', **changes):
    config.tokenizer.path = str(recorded.workdir / 'tokenizer.model')
    config.experience.path = rows if isinstance(rows, str) else jsonl(*rows, name='x.jsonl')
    config.warm_start.num_updates = 0
    config.optimizer.learning_rate = 0.0  # so that the policy never changes
    config.num_steps = 2
    for key, value in changes.items():
      section, _, key = key.rpartition('__')
      (config[section] if section else config)[key] = value
    return experiment.open_experiment(config, str(tmp_path / name))

  return open_seeded


@pytest.fixture
def train(recorded, monkeypatch):
  """Return a function that runs an experiment and returns {step: [(prompt, replayed), ...]}."""

  def run(opened):
    replayed, assemble = {}, stages.assemble

    def note(rollout, trained, replays, scores):
      plan = trained.plan
      replayed[plan.step] = [(p, t) for p, t in zip(plan.prompts, replays) if t]
      return assemble(rollout, trained, replays, scores)

    layout = model.shardings(opened.model, opened.meshes.training)
    params = jax.device_put(recorded.steps[1].params, layout)
    with monkeypatch.context() as patch, recorded.compiling():
      patch.setattr(stages, 'assemble', note)
      recording.run_training(opened, params)
    return replayed

  return run


def log_probabilities(recorded, prompt, tokens):
  """Return float64 [T] under the initial policy, from all logits."""
  shape, sequence = recorded.experiment.model, np.concatenate([prompt, tokens])
  logp_TV = tiny.full_log_probabilities(recorded.steps[1].params, shape, sequence)
  return logp_TV[len(prompt) - 1 :][np.arange(len(tokens)), tokens]


def tokens_of(recorded, text):
  tokenizer = recorded.experiment.tokenizer
  return [*tokenizer.encode(text), tokenizer.eos_ids[0]]


def ratio_mean(opened, step):
  record = next(r for r in metrics.read(opened.workdir) if r['step'] == step)
  assert record['replay/rows'] == 3 and record['replay/age_mean'] == step
  return record['replay/ratio_mean']


# ---- A file, through the training step ----


@pytest.mark.full
def test_the_first_step_with_replay_replays_the_traces_at_a_ratio_of_1(
  recorded, seeded, train, capsys
):
  opened = seeded(rows_without_logprobs())
  replayed = train(opened)
  assert not replayed[1] and len(replayed[2]) == 3  # replay starts after step 1
  written = {tuple(tokens_of(recorded, text)) for n in SOLVABLE for text in right_texts(n)}
  assert all(tuple(t.tokens.tolist()) in written for _, t in replayed[2])
  assert abs(ratio_mean(opened, 2) - 1) < 1e-5
  assert '12 responses in ' in (said := capsys.readouterr().out), said
  assert '; kept: 12 correct responses to 6 questions' in said


@pytest.mark.full
@pytest.mark.parametrize('given', [False, True])
def test_log_probabilities_come_from_the_file_or_are_zero(recorded, seeded, train, given):
  """They are next to the tokens. With 'zero', missing ones become 0."""
  rows = rows_without_logprobs()
  if given:
    for row in rows:
      row['tokens'] = tokens_of(recorded, row.pop('response'))
      row['logp'] = [-0.25 * (1 + place % 3) for place in range(len(row['tokens']))]
  opened = seeded(rows, experience__missing_logprobs='zero')
  ratios = []
  for prompt, one in train(opened)[2]:
    past = -0.25 * (1 + np.arange(len(one.tokens)) % 3) * given
    ratios.append(np.exp(log_probabilities(recorded, prompt, one.tokens) - past))
  np.testing.assert_allclose(ratio_mean(opened, 2), np.concatenate(ratios).mean(), rtol=1e-4)


@pytest.mark.full
def test_a_resumed_seeded_run_is_the_uninterrupted_run(recorded, seeded, train, tmp_path):
  """The resumed run does not read the experience again."""
  learns = {'optimizer__learning_rate': 3e-3, 'checkpoint__every': 2, 'evaluation__every': 2}
  whole = seeded(rows_without_logprobs(), 'whole', num_steps=4, **learns)
  replayed = train(whole)
  assert any(
    t.step == 0 for step in (3, 4) for _, t in replayed[step]
  )  # from the experience, after the resume
  train(seeded(rows_without_logprobs(), 'halves', num_steps=2, **learns))
  (tmp_path / 'x.jsonl').unlink()
  halves = seeded(str(tmp_path / 'x.jsonl'), 'halves', num_steps=4, **learns)
  prior_experience.check(halves.config.experience, halves.workdir)
  train(halves)
  one, other = (recorded.last_snapshot(run.workdir) for run in (whole, halves))
  jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
  buffers.assert_same(one.buffer, other.buffer)
  assert one.step == other.step == 4
  assert tiny.untimed_records(whole.workdir) == tiny.untimed_records(halves.workdir)


# ---- Another run's workdir ----


@pytest.fixture
def other_run(recorded, tmp_path):
  """A copy of the recorded run, up to a step with several questions in its buffer."""
  step = next(
    number
    for number in range(tiny.SAVED_EVERY, tiny.NUM_STEPS, tiny.SAVED_EVERY)
    if len(recorded.steps[number].after.entries) > 2
  )
  folder = tmp_path / 'other'
  (folder / 'checkpoints').mkdir(parents=True)
  for name in ('config.json', 'tokenizer.model'):
    shutil.copy(recorded.workdir / name, folder)
  shutil.copytree(recorded.workdir / 'checkpoints' / str(step), folder / 'checkpoints' / str(step))
  return folder, recorded.steps[step].after


def test_truncated_responses_are_left_out_if_their_tokens_would_be_masked(recorded, seeded, capsys):
  rows = rows_without_logprobs()
  for number, row in enumerate(rows):
    row['tokens'] = tokens_of(recorded, row.pop('response'))[: -1 if number % 3 else None]

  def load(rows, mask):
    opened = seeded(rows, objective__mask_truncated=mask)
    return prior_experience.load(
      opened, experiment.load_questions(opened, opened.config.data.train)
    )

  end, whole = recorded.experiment.tokenizer.eos_ids[0], len(rows[::3])
  assert [one.tokens[-1] for one in load(rows, mask=True)] == [end] * whole
  assert f'left out: {len(rows) - whole} truncated; kept: {whole} ' in capsys.readouterr().out
  assert len(load(rows, mask=False)) == len(rows)
  with pytest.raises(InputError, match=r'mask_truncated=True: no response in .* ends with an end'):
    load([row for number, row in enumerate(rows) if number % 3], mask=True)


def test_another_runs_buffer_is_loaded_without_retired_questions(seeded, other_run, monkeypatch):
  folder, theirs = other_run
  monkeypatch.setenv('HOME', str(folder.parent))
  opened = seeded(f'~/{folder.name}')
  prior_experience.check(opened.config.experience, str(folder.parent / 'new'))
  data = experiment.load_questions(opened, opened.config.data.train)
  right = prior_experience.load(opened, data)
  buffer = seeding.seeded(generation.make_rollout(opened, data), {}, right, 'zero')
  assert theirs.started and theirs.retired_epoch
  assert not buffer.started and not buffer.retired_epoch
  assert set(buffer.entries) == set(theirs.entries)
  for row, entry in buffer.entries.items():
    expected = theirs.entries[row]
    assert entry.correctness == expected.correctness
    assert entry.prompt_length == expected.prompt_length == len(data.prompts[row])
    for ours, stored in zip(entry.trajectories, expected.trajectories, strict=True):
      np.testing.assert_array_equal(ours.tokens, stored.tokens)
      np.testing.assert_array_equal(ours.logp, stored.logp)
      assert (ours.step, ours.reward) == (0, 1.0)


def test_questions_of_another_run_are_matched_by_their_text(seeded, other_run, data):
  folder, theirs = other_run
  opened = seeded(str(folder), data__train=f'{data.train}[2:]')
  questions = experiment.load_questions(opened, opened.config.data.train)
  right = prior_experience.load(opened, questions)
  assert {candidate.row + 2 for candidate in right} == {row for row in theirs.entries if row >= 2}


def trained_on(folder, file):
  path = folder / 'config.json'
  values = json.loads(path.read_text())
  values['data']['train'] = file
  path.write_text(json.dumps(values))


def with_longer_prompts(folder):
  rows = [{'question': f'{n} + 0', 'answer': str(n)} for n in range(tiny.POOL)]
  (folder / 'longer.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  trained_on(folder, str(folder / 'longer.jsonl'))


def damaged(folder):
  for path in folder.glob('checkpoints/*/buffer/index.npz'):
    path.write_bytes(b'')


@pytest.mark.parametrize(
  ('break_it', 'message'),
  [
    (lambda folder: trained_on(folder, 'gone.jsonl'), r'cannot be loaded\. gone\.jsonl: there is'),
    (with_longer_prompts, r'the prompt in row \d+ used to be \d+ tok'),
    (
      lambda folder: tokenizer.train(['1+1=2 abc'], 300, folder / 'tokenizer.model'),
      r'that run has a different tokenizer, .* Set config\.tokenizer\.path=',
    ),
    (damaged, r'checkpoints/\d+ is damaged'),
  ],
  ids=['questions', 'prompts', 'tokenizer', 'damaged'],
)
def test_another_run_with_different_tokens_or_questions_is_rejected(
  seeded, other_run, break_it, message
):
  folder, _ = other_run
  opened = seeded(str(folder))
  data = experiment.load_questions(opened, opened.config.data.train)
  break_it(folder)
  with pytest.raises(InputError, match=message):
    prior_experience.load(opened, data)


# ---- Errors before anything is written ----


def test_experience_must_be_a_file_or_a_run_with_a_checkpoint(seeded, tmp_path, jsonl):
  empty, claimed = tmp_path / 'empty', tmp_path / 'claimed'
  empty.mkdir()
  claimed.mkdir()
  (claimed / 'config.json').write_text('{}')
  for path, message in (
    (tmp_path / 'nowhere.jsonl', r'nowhere\.jsonl: there is no such file\. Pass a \.jsonl or'),
    (tmp_path / 'nowhere', r'nowhere: experience must be a \.jsonl file, a \.parquet file or '),
    (empty, r'empty: experience must be a \.jsonl file, a \.parquet file or a run'),
    (claimed, r'claimed: the run has no checkpoint yet, .*\. Wait for its first checkpoint'),
    (
      jsonl({'question': 'a', 'answer': 'b'}),
      r":1: no field 'response' or 'target' or 'tokens' \(has: ",
    ),
  ):
    opened = seeded(str(path))
    with pytest.raises(InputError, match=message):
      prior_experience.check(opened.config.experience, str(tmp_path / 'new'))


# ---- Filtered questions, and a run that starts from their successes ----


SAMPLES = 4


@pytest.fixture
def filter_by(recorded, config, tmp_path, monkeypatch):
  """Return a function that filters the run's questions with its first policy, into a folder."""
  tiny.leave_out_pictures(monkeypatch.setattr)

  def call(**changes):
    settings = {'values': config, 'source': None, 'samples': SAMPLES, 'above': 0.0, 'below': 1.0}
    with recorded.compiling():
      prefilter.filter_questions(out=str(tmp_path / 'filtered'), **settings | changes)
    return tmp_path / 'filtered'

  return call


def lines_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.full
def test_a_run_starts_with_the_pass_rates_of_the_kept_questions(
  filter_by, recorded, config, tmp_path, capsys
):
  """The file and the buffer agree on row, prompt, answer and pass rate of each question."""
  out = filter_by()
  rates = {row['row']: row['pass_rate'] for row in lines_of(out / 'pass_rates.jsonl')}
  assert list(rates) == list(range(tiny.POOL))
  assert {rate * SAMPLES % 1 for rate in rates.values()} == {0}
  kept = [row for row, rate in rates.items() if 0 < rate < 1]
  assert 0 < len(kept) < tiny.POOL
  printed = capsys.readouterr().out
  assert f'kept {len(kept)} of {tiny.POOL} questions\nquestions by pass rate: 0: ' in printed

  data = str(out / 'questions.jsonl')
  before = recorded.data.questions.read(kept)
  after = list(questions.load(parse_config(config).data, data))
  asked, kept_ones = ([(q.messages, q.answer, q.kind) for q in qs] for qs in (before, after))
  assert asked == kept_ones
  assert [q.columns['pass_rate'] for q in after] == [rates[row] for row in kept]

  config.num_steps = 1
  config.rollout.questions = 2
  config.data.train = data
  config.experience.path = str(out / 'successes.parquet')
  with recorded.compiling(), session.open_run(config, str(tmp_path / 'run')) as begun:
    entries = begun.buffer.entries
    found = {row: entry.correctness for row, entry in entries.items()}
    assert found == pytest.approx({number: rates[row] for number, row in enumerate(kept)})
    stored = [entry.trajectories for entry in entries.values()]
    assert all(1 <= len(own) <= tiny.STORED and (own[0].logp <= 0).all() for own in stored)


MATH = {'problem': '1+1?', 'solution': r'So \boxed{2}.', 'level': 'Level 1', 'type': 'Algebra'}
ASKED = [{'role': 'user', 'content': '1+1?'}]


@pytest.mark.parametrize(
  ('row', 'fields'),
  [
    pytest.param({'question': '1+1?', 'answer': '<<1+1=2>>2\n#### 2'}, {}, id='gsm8k'),
    pytest.param(MATH, {}, id='math'),
    pytest.param({'prompt': '1+1?', 'solution': '2'}, {'answer_field': 'solution'}, id='trl'),
    pytest.param(
      {'prompt': ASKED, 'solution': '2', 'source_prompt': ASKED, 'data_source': 'd'}, {}, id='dapo'
    ),
    pytest.param(
      {
        'data_source': 'math',
        'prompt': ASKED,
        'reward_model': {'ground_truth': '0.50', 'style': 'rule'},
        'target': 'So 2.',
        'extra_info': {'index': 7, 'rate': float('nan')},
      },
      {'solution_field': 'target'},
      id='verl',
    ),
  ],
)
def test_kept_questions_read_back_unchanged(config, jsonl, tmp_path, row, fields):
  """This holds for any column names, with the settings that the original was read with."""
  reading = dataclasses.replace(parse_config(config).data, **fields, cache_dir=str(tmp_path))
  (before,) = questions.load(reading, jsonl(row))
  tried = prefilter.Attempt(before, [], [types.SimpleNamespace(correct=False)] * 4)
  prefilter.write(str(tmp_path), [tried], [tried])
  (after,) = questions.load(reading, str(tmp_path / 'questions.jsonl'))
  expected = dataclasses.replace(before, columns={**before.columns, 'pass_rate': 0.0})
  assert repr(after) == repr(expected)  # NaN is not equal to itself


@pytest.mark.full
def test_bounds_that_keep_nothing_are_rejected_with_the_pass_rates(filter_by, tmp_path):
  message = r'--below=1\.0: no question .* Questions by pass rate: 0: \d+,'
  with pytest.raises(InputError, match=message):
    filter_by(above=0.99, below=1.0)
  assert not (tmp_path / 'filtered' / 'questions.jsonl').exists()


def test_a_runs_policy_can_filter(filter_by, recorded):
  source = policies.Source('run', str(recorded.workdir), None)
  out = filter_by(values=policies.config_values(source, None), source=source, samples=2)
  assert {row['samples'] for row in lines_of(out / 'pass_rates.jsonl')} == {2}


def test_an_environment_is_rejected(filter_by, config):
  config.environment.name = 'guess'
  with pytest.raises(InputError, match=r"environment\.name='guess': only single-turn questions"):
    filter_by()
