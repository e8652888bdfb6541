"""Sessions: steps by hand, divergence, early stopping, traces, and resumed runs."""

import copy
import dataclasses
import gzip
import json
import os
import shutil
import types

import jax
import numpy as np
import pytest

import exgrpo_jax as ex
from exgrpo_jax import config as config_module
from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.commands import generate
from exgrpo_jax.data import tokenizer
from exgrpo_jax.datatypes import Cursor, QuestionSet
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import scores
from exgrpo_jax.experiment import experiment, policies
from exgrpo_jax.grading import programs
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.learner.checkpoint import Snapshot
from exgrpo_jax.reporting import metrics
from exgrpo_jax.runtime import environment, machine
from exgrpo_jax.runtime.workdir import claim_workdir
from exgrpo_jax.training import checks, loop, session
from tests.helpers import recording, tiny

BEGUN = 8  # steps kept from the recorded run; the next steps replay


@pytest.fixture
def workdir(recorded, tmp_path, monkeypatch):
  """The workdir of the recorded run after BEGUN steps."""
  monkeypatch.setattr(programs, 'COMMAND', tiny.WORKER)
  folder = tmp_path / 'run'
  shutil.copytree(recorded.workdir, folder)
  for step in checkpoint.steps(str(folder)):
    if step > BEGUN:
      shutil.rmtree(folder / 'checkpoints' / str(step))
  return folder


@pytest.fixture
def opened(config, tmp_path):
  return experiment.open_experiment(config, str(tmp_path))


def untimed(record):
  apart = ('time', 'perf', 'memory', 'eval', 'compil', 'seen')
  return {name: value for name, value in record.items() if not name.startswith(apart)}


@pytest.mark.full
def test_steps_by_hand_equal_the_steps_of_the_run(recorded, config, workdir):
  """The test takes two steps, uses buffer and policy, and takes the rest in another session.

  A callback receives the later steps without affecting them.
  """

  def seen(run, params, experience):
    assert run.experiment.config.num_steps == BEGUN + 4
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    return {'seen/step': float(experience.plan.step)}

  config.num_steps = BEGUN + 4
  expected = {record['step']: untimed(record) for record in metrics.read(recorded.workdir)}
  with recorded.compiling():
    with session.open_run(copy.deepcopy(config), str(workdir)) as run:
      with pytest.raises(InputError, match=f'another run is writing there.* {os.getpid()} on '):
        session.open_run(config, str(workdir)).__enter__()
      for step in run.steps():
        number = run.snapshot.step
        assert untimed(step.metrics) | {'step': number} == expected[number]
        assert run.buffer.entries.keys() == recorded.steps[number].after.entries.keys()
        if number == BEGUN + 2:
          break
      assert any(step.experience.replays) and run.buffer.entries
      (responses,) = generate.sample(run.policy, ['3+0'], samples=2)
      assert len(responses) == 2
    assert max(checkpoint.steps(str(workdir))) == BEGUN + 2, 'saved though not due'
    overwrites = [lambda *_: {'reward': 0.0}]
    refused = pytest.raises(InputError, match=r"the run itself logs reward.* as 'mine/reward'")
    with refused, session.open_run(copy.deepcopy(config), str(workdir), overwrites) as run:
      next(run.steps())
    with session.open_run(copy.deepcopy(config), str(workdir), [seen, lambda *_: None]) as run:
      told = [(step.snapshot.step, step.metrics) for step in run.steps()]
      assert [step for step, _ in told] == [BEGUN + 3, BEGUN + 4]
      assert all(own['seen/step'] == step and own['time/callbacks'] >= 0 for step, own in told)
  written = {record['step']: untimed(record) for record in metrics.read(workdir)}
  assert written == {step: record for step, record in expected.items() if step <= BEGUN + 4}
  config.num_steps = BEGUN + 3
  claimed = (workdir / 'config.json').read_text()
  with recorded.compiling(), pytest.raises(InputError, match='the run is already finished'):
    session.open_run(config, str(workdir)).__enter__()
  assert (workdir / 'config.json').read_text() == claimed
  assert (workdir / 'report.html').exists()


def test_an_iterator_continues_only_in_an_open_run_after_its_own_last_step(monkeypatch):
  def take(_, snapshot):
    for number in (1, 2, 3):
      yield loop.Step(snapshot._replace(step=snapshot.step + number), None, {})

  monkeypatch.setattr(session, 'take_steps', take)
  run = session.Session(None, Snapshot(0, None, Buffer(), Cursor()))
  first = run.steps()
  assert next(first).snapshot.step == 1
  later = run.steps()
  assert next(later).snapshot.step == 2
  with pytest.raises(InputError, match='another iterator is already ahead'):
    next(first)
  run.is_open = False
  for steps in (later, run.steps()):
    with pytest.raises(InputError, match=r'the run is closed\. Call open_run again'):
      next(steps)


# ---- Divergence ----


@pytest.mark.full
@pytest.mark.parametrize(
  ('minibatches', 'message'),
  [
    # The second update detects it in this step. With one update, only the check before saving does.
    pytest.param(2, 'step 9: entropy nan, loss nan, gradient norm nan: the policy', id='at_once'),
    pytest.param(1, 'step 9: after the update, the policy no long', id='before_it_is_saved'),
  ],
)
def test_a_diverging_run_stops_and_keeps_its_last_good_checkpoint(
  recorded, config, workdir, capsys, minibatches, message
):
  config.optimizer.update(dict(learning_rate=1e30, minibatches=minibatches))
  config.checkpoint.update(dict(every=1, keep=1))
  opened = experiment.open_experiment(config, str(workdir))
  with recorded.compiling(), pytest.raises(InputError) as stopped:
    recording.run_training(opened)
  assert str(stopped.value).startswith(message)
  assert 'config.optimizer.learning_rate=1e+30 is probably too large' in str(stopped.value)
  assert 'The newest checkpoint is from step 8' in str(stopped.value)
  assert checkpoint.steps(str(workdir)) == [4, 8]
  assert 'WARNING: step' not in capsys.readouterr().err


# ---- Early stopping ----

# Step -> share of correct validation responses.
SHARES = {0: 0.8, 1: 0.4, 2: 0.6, 3: 0.6, 4: 0.4, 5: 0.8}


@pytest.mark.full
def test_a_run_ends_when_validation_stops_improving(
  recorded, config, data, tmp_path, monkeypatch, capsys
):
  def scored(_, __, ___, at):
    rows = [{'source': 'v', 'correct': [row < int(5 * SHARES[at])]} for row in range(5)]
    return {'eval/v/pass@1': SHARES[at]}, rows

  config.num_steps = 5
  config.warm_start.num_updates = 0
  config.data.update(dict(validation=(data.train,), evaluation=()))
  config.evaluation.update(dict(every=1, patience=4))
  monkeypatch.setattr(scores, 'score_policy', scored)
  monkeypatch.setattr(programs, 'COMMAND', tiny.WORKER)

  def train():
    with recorded.compiling():
      recording.run_training(experiment.open_experiment(config, str(tmp_path)), values=config)
    return capsys.readouterr().out

  assert 'ended after step 4 of 5: validation/score has not improved in 4 evaluations' in train()
  assert [record['step'] for record in metrics.read(tmp_path)] == [0, 1, 2, 3, 4]
  assert checkpoint.steps(str(tmp_path)) == [4]
  assert 'ended after step 4 of 5' in train(), 'a restart changes nothing'
  assert metrics.read(tmp_path)[-1]['step'] == 4
  assert [start['first_step'] for start in environment.read(str(tmp_path))] == [0]
  config.evaluation.patience = 0
  assert 'ended' not in train()
  assert metrics.read(tmp_path)[-1]['step'] == 5
  train()
  assert [start['first_step'] for start in environment.read(str(tmp_path))] == [0, 5]
  config.num_steps, config.evaluation.patience = 7, 2
  assert 'ended after step 5 of 7' in train(), 'past the step at which it would have stopped'


# ---- Traces ----


@pytest.mark.full
def test_a_trace_has_the_phases_of_its_step(recorded, config, workdir, capsys, monkeypatch):
  config.num_steps = step = BEGUN + 2
  config.metrics.traced_steps = (step,)  # not the first step, which traces thousands of functions
  tiny.leave_out_pictures(monkeypatch.setattr)
  with recorded.compiling(), session.open_run(config, str(workdir)) as run:
    for _ in run.steps():
      pass
  folder = workdir / 'traces' / f'step_{step:06d}'
  assert f'trace of step {step}: {folder}' in capsys.readouterr().out
  (trace,) = folder.rglob('*.trace.json.gz')
  events = json.loads(gzip.decompress(trace.read_bytes()))['traceEvents']
  names = {event.get('name') for event in events}
  assert {'step', 'pick', 'generate', 'grade'} <= names


def test_epochs_become_steps_once_data_is_read_and_changed_data_is_rejected(config, tmp_path):
  """With 12 questions and 6 per step, 1 epoch is 2 steps, and 1.6 epochs are 3.2 steps."""
  workdir = str(tmp_path)
  with open(config.data.train) as file:
    lines = file.readlines()
  (tmp_path / 'train.jsonl').write_text(''.join(lines))
  config.data.train = str(tmp_path / 'train.jsonl')
  config.num_epochs = 1.0
  opened, *_ = session.load(config, workdir)
  assert opened.config.num_steps == 2 and opened.config.num_updates == 4
  claim_workdir(config_module.overridden(config, {'num_steps': 2}), workdir)
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
  longer = config_module.overridden(config, {'num_epochs': 1.6})
  assert session.load(longer, workdir)[0].config.num_steps == 4
  (tmp_path / 'train.jsonl').write_text(''.join(lines[:11]))
  assert session.load(config, workdir)[0].config.num_steps == 2, 'as many steps as before'
  (tmp_path / 'train.jsonl').write_text(''.join(lines[:6]))
  for epochs in (1.0, 1.6, 0.0):
    changed = config_module.overridden(config, {'num_epochs': epochs})
    with pytest.raises(
      InputError, match=r'With 6 questions, num_epochs=1 means 1 step instead of 2'
    ):
      session.load(changed, workdir)


@pytest.mark.parametrize(
  ('trained', 'evaluated', 'found'),
  [
    (['a=1', 'b=2', 'c=3'], 'dca', 2),
    (['a=1', 'b=2'], 'c', 0),
    (['a=1', 'a=2', 'b=3'], 'a', 0),  # as in a game, the prompt does not identify the question
    (['a=1', 'a=1'], 'ab', 1),
  ],
)
def test_a_run_warns_about_evaluations_with_training_prompts(trained, evaluated, found, capsys):
  def prompts_of(texts):
    return [np.array([ord(text[0])], np.int32) for text in texts]

  def read(rows):
    return [types.SimpleNamespace(answer=trained[row]) for row in rows]

  data = QuestionSet('train', types.SimpleNamespace(read=read), prompts_of(trained))
  checks.warn_of_overlap(data, [QuestionSet('test', (), prompts_of(evaluated))])
  expected = f'WARNING: test: config.data.train contains {found} of its {len(evaluated)} prompts'
  assert capsys.readouterr().err.partition(', so ')[0] == (expected if found else '')


@pytest.mark.full
def test_a_run_resumes_only_with_its_own_questions(config, workdir, tmp_path):
  """With rows in another order, stored responses would belong to the wrong questions."""
  with open(config.data.train) as file:
    lines = file.readlines()
  changed = tmp_path / 'train.jsonl'
  config.data.train = str(changed)
  changed.write_text(''.join(lines))
  claim_workdir(config, str(workdir))
  session.load(config, str(workdir))
  for other in (lines[::-1], lines[:-1]):
    changed.write_text(''.join(other))
    with pytest.raises(InputError, match=f'changed since step {BEGUN},.*path={workdir} to keep'):
      session.load(config, str(workdir))
  (workdir / 'environment.json').unlink()  # as if an earlier version had not recorded a digest
  session.load(config, str(workdir))


def test_a_run_keeps_the_dtype_that_auto_resolved_to_at_its_start(config, tmp_path, monkeypatch):
  """A run of an earlier version keeps the 'auto' in its config.json."""
  config.model.dtype, config.warm_start.num_updates = 'auto', 0
  path = tmp_path / 'config.json'

  def claimed(is_fast):
    monkeypatch.setattr(machine, 'has_fast_bfloat16', lambda: is_fast)
    opened, rollout, _ = session.load(config, str(tmp_path))
    with jax.set_mesh(opened.meshes.training):
      session.claim(config, opened, rollout)
    return opened.model.dtype, json.loads(path.read_text())['model']['dtype']

  assert claimed(is_fast=True) == ('bfloat16', 'bfloat16')
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  assert claimed(is_fast=False) == ('bfloat16', 'bfloat16')
  claim_workdir(config, str(tmp_path))
  assert claimed(is_fast=False) == ('float32', 'auto')


# ---- The tokenizer that a run keeps in its workdir ----


def test_a_run_keeps_its_tokenizer_once(opened, tmp_path):
  session.keep_tokenizer(opened)
  kept = tokenizer.load(tmp_path / 'tokenizer')
  assert kept.encode('12+7\n') == opened.tokenizer.encode('12+7\n')
  (tmp_path / 'tokenizer' / 'tokenizer.model').write_text('kept')
  session.keep_tokenizer(opened)
  assert (tmp_path / 'tokenizer' / 'tokenizer.model').read_text() == 'kept'


def test_a_kill_never_leaves_part_of_a_tokenizer(opened, tmp_path, monkeypatch):
  def killed(folder):
    folder.mkdir()
    (folder / 'half').write_text('')
    raise KeyboardInterrupt

  monkeypatch.setattr(opened.tokenizer, 'save', killed)
  with pytest.raises(KeyboardInterrupt):
    session.keep_tokenizer(opened)
  monkeypatch.undo()
  assert not (tmp_path / 'tokenizer').exists()
  session.keep_tokenizer(opened)
  assert tokenizer.load(tmp_path / 'tokenizer').vocab_size == opened.tokenizer.vocab_size
  assert not (tmp_path / 'tokenizer' / 'half').exists()


# ---- What can be checked before a run starts ----


@pytest.mark.parametrize(
  ('call', 'named'),
  [
    (lambda _, __: ex.load_config(None), "name=None: .* a config's name or path"),
    (lambda _, __: ex.load_config('smoke', ['seed=3']), r"overrides=\['seed=3'\]: .* a dict"),
    (lambda _, __: ex.load_config('smoke', {3: 1}), "a key of overrides=3: .* a setting's name"),
    (lambda _, __: ex.open_run('mine.py', '').__enter__(), "config='mine.py': .* a ConfigDict"),
    (lambda _, values: ex.open_run(values, 3).__enter__(), 'workdir=3: .* the path'),
    (lambda _, values: ex.open_run(values, '', len).__enter__(), 'callbacks=.* a list of f'),
    (
      lambda _, values: ex.open_run(values, '', 'mine').__enter__(),
      "callbacks='mine': .* a list of f",
    ),
    (lambda _, __: ex.open_policy(None), "path=None: .* a run's workdir"),
    (lambda _, __: ex.open_policy('/tmp/run', step='2'), "step='2': .* a step's number"),
    (lambda _, __: ex.sample('/tmp/run', ['3+0']), "policy='/tmp/run': .* a Policy, which open_p"),
    (lambda policy, _: ex.sample(policy, 3), 'prompts=3: .* a list of strings'),
    (lambda policy, _: ex.sample(policy, '3+0'), "prompts='3\\+0': .* a list of strings"),
    (lambda policy, _: ex.sample(policy, np.array(['3+0']), '2'), "samples='2': .* an integer"),
    (lambda policy, _: ex.sample(policy, ['3+0'], seed=None), 'seed=None: .* an integer'),
    (lambda _, __: ex.score(None, 'chains:test'), 'policy=None: .* a Policy'),
    (lambda policy, _: ex.score(policy, ['x.jsonl']), r"spec=\['x.jsonl'\]: .* a data spec"),
    (lambda policy, _: ex.score(policy, 'chains:test', 1.5), 'samples=1.5: .* an integer'),
  ],
)
def test_an_argument_of_the_wrong_type_is_rejected_by_name(recorded, config, call, named):
  policy = policies.Policy(policies.at('/tmp/run'), recorded.experiment, {}, 0)
  with pytest.raises(InputError, match=f'^{named}'):
    call(policy, config)


def test_a_tasks_score_cannot_reward_data_without_its_entries(recorded):
  grading = dataclasses.replace(tiny.GRADING, rewards=('score_answer',))
  config = dataclasses.replace(recorded.experiment.config, grading=grading)
  message = r"'score_answer' .* it asks for 'entry', which is neither a col"
  with pytest.raises(InputError, match=message):
    checks.check_rewards(config, recorded.evaluations[0])
