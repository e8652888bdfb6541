"""Manual evaluations."""

import copy
import dataclasses
import json
import re
import shutil
import types

import numpy as np
import pytest

from exgrpo_jax import datatypes
from exgrpo_jax.commands import evaluate, generate
from exgrpo_jax.config import overridden
from exgrpo_jax.data.questions import spec_name
from exgrpo_jax.datatypes import Response, Turn, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import preview, responses, scores
from exgrpo_jax.experiment import experiment, policies
from exgrpo_jax.experiment.experiment import load_questions, open_experiment, parse_config
from exgrpo_jax.grading import programs
from exgrpo_jax.grading.verifier import judge
from exgrpo_jax.policy import sharding
from exgrpo_jax.reporting import messages, metrics
from exgrpo_jax.rollout import stages
from exgrpo_jax.rollout.scheduler import SlotEngine
from exgrpo_jax.runtime import hub
from exgrpo_jax.training import session
from tests.helpers import decoding, recording, tiny
from tests.helpers.paths import CHECKPOINTS

VERIFIER = programs.COMMAND  # the real one; `by_hand` replaces it with tiny.py's


UNSET = dict.fromkeys(['model', 'compare', 'suite', 'name', 'data'])
UNSET |= dict.fromkeys(['samples', 'temperature', 'max_response'])


def rows_of(file):
  return [json.loads(line) for line in file.read_text().splitlines()]


def own_records(recorded, step=tiny.NUM_STEPS):
  (own,) = (recorded.workdir / 'evaluation').glob(f'step_{step:06d}_*.jsonl')
  return own.read_text()


def metric_group(recorded):
  """The prefix of the recorded run's evaluation metrics."""
  return f'eval/{spec_name(recorded.evaluations[0].spec)}'


@pytest.fixture
def by_hand(recorded, values, tmp_path, monkeypatch):
  """A function that evaluates a step of the recorded run: (the newest file's text, output)."""
  monkeypatch.setattr(programs, 'COMMAND', tiny.WORKER)

  def run(step, capsys, **changes):
    args = dict(config=copy.deepcopy(values), checkpoint=str(recorded.workdir), step=step)
    args = UNSET | args | dict(out=str(tmp_path / 'out')) | changes
    capsys.readouterr()
    with recorded.compiling():
      evaluate.main(types.SimpleNamespace(**args))
    newest = max((tmp_path / 'out').glob('step_*.jsonl'), key=lambda file: file.stat().st_mtime_ns)
    return newest.read_text(), capsys.readouterr().out

  return run


@pytest.mark.full
@pytest.mark.parametrize(
  ('step', 'changes'),
  [(tiny.NUM_STEPS // 2, {}), (tiny.NUM_STEPS, {}), (tiny.NUM_STEPS, {'config': None})],
)
def test_a_manual_evaluation_repeats_the_runs_score_at_temperature_1(
  recorded, by_hand, capsys, step, changes
):
  """All responses are the same. Without a config, the run's config is used."""
  assert recorded.experiment.config.evaluation.temperature == 1
  written, printed = by_hand(step, capsys, **changes)
  assert written == own_records(recorded, step)
  (record,) = [record for record in metrics.read(recorded.workdir) if record['step'] == step]
  own_scores = {name: value for name, value in record.items() if name.startswith('eval/')}
  spec = recorded.evaluations[0].spec
  assert printed.startswith(f'{spec} at step {step}, temperature 1\n{scores.table(own_scores)}\n')


@pytest.mark.parametrize(
  ('kind', 'answers', 'probability'),
  [
    ('math', '2+ 2.0+ 3 3', 0.5),  # correct answers are the same, however they are written
    ('math', '2+ 3 3', 0.0),
    ('math', '2+ 3 4', 1 / 3),
    ('math', '2+ - - -', 1.0),  # a response without an answer has no vote
    ('math', '- -', None),
    ('reasoning_gym', '1+2+ 2+1+ 4 4', 0.0),  # a task may accept different answers
  ],
)
def test_a_majority_vote_counts_answers(kind, answers, probability):
  question = datatypes.Question(0, (), '2', kind, '', 'sums')
  verdicts = [
    Verdict(0.0, 'correct' if text.endswith('+') else 'wrong', answer=text if text != '-' else None)
    for text in answers.split()
  ]
  assert scores.majority(question, verdicts) == pytest.approx(probability)


@pytest.mark.full
def test_manual_evaluations_overwrite_nothing_and_record_their_settings(
  recorded, by_hand, capsys, tmp_path
):
  own = {file: file.read_bytes() for file in (recorded.workdir / 'evaluation').iterdir()}
  greedy, _ = by_hand(tiny.NUM_STEPS, capsys, temperature=0.0)
  assert greedy != own_records(recorded)
  _, printed = by_hand(tiny.NUM_STEPS, capsys, samples=2)
  assert 'avg@2' in printed and 'pass@2' in printed and 'maj@2' in printed
  made = rows_of(tmp_path / 'out' / 'evaluations.jsonl')
  asked = [(line['temperature'], line['samples'], line['step']) for line in made]
  assert asked == [(0.0, 1, tiny.NUM_STEPS), (1.0, 2, tiny.NUM_STEPS)]
  for line in made:
    for record in rows_of(tmp_path / 'out' / line['file']):
      assert record['sampling']['temperature'] == line['temperature']
      assert len(record['responses']) == line['samples']
    assert 0 <= line['scores'][f'{metric_group(recorded)}/pass@1'] <= 1
  assert own == {file: file.read_bytes() for file in (recorded.workdir / 'evaluation').iterdir()}


@pytest.mark.full
def test_two_data_sets_with_the_same_source_have_separate_scores_and_records(
  recorded, by_hand, capsys, tmp_path
):
  spec, group = recorded.evaluations[0].spec, metric_group(recorded)
  by_hand(tiny.NUM_STEPS, capsys, data=[f'{spec}[:1]', f'{spec}[1:4]'])
  made = rows_of(tmp_path / 'out' / 'evaluations.jsonl')
  for line, slicing, count in zip(made, ('_to_1', '_1_to_4'), (1, 3), strict=True):
    assert line['scores'][f'{group}{slicing}/questions'] == count
    assert len(rows_of(tmp_path / 'out' / line['file'])) == count


@pytest.mark.full
def test_two_policies_are_compared_question_by_question(
  recorded, by_hand, capsys, data, tmp_path, monkeypatch
):
  """A model without a run and the recorded run, compared through the records of both."""
  monkeypatch.setattr(policies, 'base_config', lambda: copy.deepcopy(recorded.values))
  pair = [str(CHECKPOINTS / 'qwen2_tied'), str(recorded.workdir)]
  unset = dict(config=None, checkpoint=None)
  given = dict(compare=pair, data=[data.train], samples=3, temperature=0.7)
  loaded = []
  load = scores.load_questions
  monkeypatch.setattr(scores, 'load_questions', lambda *of: (loaded.append(of), load(*of))[1])
  _, printed = by_hand(None, capsys, **unset, **given)
  assert len(loaded) == 2, 'once for each policy'
  made = rows_of(tmp_path / 'out' / 'evaluations.jsonl')
  assert [line.get('model') or line.get('run') for line in made] == pair
  assert [(line['temperature'], line['samples']) for line in made] == [(0.7, 3)] * 2
  records = [rows_of(tmp_path / 'out' / line['file']) for line in made]
  first, second = ([np.mean(record['correct']) for record in of_one] for of_one in records)
  difference = np.subtract(second, first)
  error = difference.std(ddof=1) / np.sqrt(len(difference))
  low, high = difference.mean() - 1.96 * error, difference.mean() + 1.96 * error
  found = re.search(
    rf'avg@3 +(\S+)  \(95%: (\S+) to (\S+), paired; of {tiny.POOL} questions '
    r'(\d+) better, (\d+) worse\)',
    printed,
  )
  assert found and len(difference) == tiny.POOL
  shown = [float(found[n]) for n in (1, 2, 3)]
  assert shown == pytest.approx([difference.mean(), low, high], abs=1e-4)
  assert (int(found[4]), int(found[5])) == ((difference > 0).sum(), (difference < 0).sum())
  assert found[4] != '0'


def test_the_second_policy_is_sampled_and_graded_like_the_first(config, monkeypatch):
  """The base of its LoRA adapters, which depends on its own seed, stays the same."""
  changes = {'seed': 3, 'rollout.max_response': 7, 'evaluation.temperature': 0.5}
  changes |= {'grading.max_length': 77}
  changes |= {'verifier.require': ('box',), 'environment.max_turns': 3, 'data.answer_field': 'key'}
  found = {'A': overridden(config, changes), 'B': config}
  limits = []

  def config_values(source, _, max_response):
    limits.append(max_response)
    return copy.deepcopy(found[source.path])

  monkeypatch.setattr(policies, 'config_values', config_values)
  args = types.SimpleNamespace(**UNSET, config=None)
  sources = (policies.Source('run', path) for path in found)
  first, second = map(parse_config, evaluate._settings_of_two(args, *sources))
  for section in ('seed', 'data', 'evaluation', 'grading', 'verifier', 'environment'):
    assert getattr(second, section) == getattr(first, section)
  assert second.rollout.max_response == first.rollout.max_response == 7
  assert limits == [None, 7]  # a model's prompts must fit next to the first policy's responses
  assert (first.warm_start_seed, second.warm_start_seed) == (3, tiny.SEED)


@pytest.mark.parametrize(('trained', 'used'), [(1, 1), (64, -1)])
def test_meshes_of_a_run_that_do_not_fit_this_machine_are_not_used(trained, used, config, tmp_path):
  config.mesh.training.fsdp = trained
  (tmp_path / 'config.json').write_text(config.to_json_best_effort())
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  values = policies.config_values(policies.at(str(tmp_path)))
  assert values.mesh.training.fsdp == used


def test_a_run_is_sampled_without_the_functions_that_only_its_config_file_has(config, tmp_path):
  own = ['objective.policy_loss', 'objective.shaping', 'objective.baseline', 'optimizer.name']
  own += ['replay.trajectory_selection', 'replay.question_selection', 'optimizer.schedule']
  changed = overridden(config, dict.fromkeys(own, 'mine'))
  (tmp_path / 'config.json').write_text(changed.to_json_best_effort())
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  values = policies.config_values(policies.at(str(tmp_path)))
  assert parse_config(values).objective.shaping == 'mine'  # as in its model card
  for refused in (changed, overridden(values, {'objective.shaping': 'theirs'})):
    with pytest.raises(InputError, match='must be one of'):
      parse_config(refused)


def test_each_compared_policy_is_evaluated_with_its_own_commits(tmp_path, monkeypatch):
  for name in 'ab':
    (tmp_path / name).mkdir()
    (tmp_path / name / 'config.json').write_text('{}')
    (tmp_path / name / 'hub.json').write_text(json.dumps({'models/me/base': name * 40}))
  hub.recall(str(tmp_path / 'b'))  # the second policy was opened last
  used = []
  monkeypatch.setattr(scores, 'evaluate', lambda *_: (used.append(dict(hub._recorded)), ()))
  mesh = sharding.make_mesh(sharding.TrainingConfig(data=1, fsdp=-1, tensor=1))
  experiment = types.SimpleNamespace(meshes=types.SimpleNamespace(training=mesh))
  for name in 'ab':
    scores.evaluate_policy(types.SimpleNamespace(path=str(tmp_path / name)), experiment, (), '')
  assert used == [{'models/me/base': name * 40} for name in 'ab']


def test_an_error_in_the_second_policy_is_found_before_the_first_is_evaluated(
  tmp_path, jsonl, monkeypatch
):
  first, second = CHECKPOINTS / 'qwen2_tied', tmp_path / 'small'
  shutil.copytree(first, second)
  values = json.loads((second / 'config.json').read_text()) | {'max_position_embeddings': 32}
  (second / 'config.json').write_text(json.dumps(values))
  monkeypatch.setattr(evaluate, 'evaluate_policy', lambda *_: pytest.fail('the first is evaluated'))
  given = dict.fromkeys(['config', 'checkpoint', 'step', 'out'])
  given |= dict(compare=[str(first), str(second)], data=[jsonl({'question': '1+1', 'answer': '2'})])
  with pytest.raises(InputError, match=f'max_position_embeddings=32 in {second}'):
    evaluate.main(types.SimpleNamespace(**UNSET | given))


@pytest.mark.parametrize(
  ('max_response', 'limits'),
  [(None, (44, 44)), (20, (44, 20)), (64, (24, 64)), (87, (1, 87))],
)
def test_a_model_without_a_config_fits_prompts_next_to_the_responses(
  max_response, limits, monkeypatch
):
  """Its context is 88 tokens."""
  opened = []

  def open_experiment(values, path):
    opened.append((values.rollout.max_prompt, values.rollout.max_response))
    raise InputError(path)

  args = UNSET | dict.fromkeys(['config', 'checkpoint', 'step', 'out', 'row', 'seed'])
  args |= dict(model='shipped:chains', data=['chains:test'], prompt='1', max_response=max_response)
  for command in (evaluate, generate):
    monkeypatch.setattr(command, 'open_experiment', open_experiment)
    with pytest.raises(InputError, match='shipped:chains'):
      command.main(types.SimpleNamespace(**args))
  assert opened == [limits] * 2


def noted_responses(monkeypatch):
  """A list that collects all responses that the slot engine generates from now on."""
  written, generate = [], SlotEngine.generate

  def noted(*args):
    found = generate(*args)
    written.extend(found[0])
    return found

  monkeypatch.setattr(SlotEngine, 'generate', noted)
  return written


@pytest.mark.full
def test_records_have_the_entropy_and_the_style_of_each_response(by_hand, capsys, monkeypatch):
  """Each style is read from the response itself, if the task defines styles."""
  written = noted_responses(monkeypatch)
  monkeypatch.setattr(scores, 'style_reader', lambda question: f'{question.row}: {{}}'.format)
  text, _ = by_hand(tiny.NUM_STEPS, capsys, samples=2)
  records = [json.loads(line) for line in text.splitlines()]
  entropies = [response.entropy.mean() for response in written]
  assert np.concatenate([r['entropies'] for r in records]) == pytest.approx(entropies, abs=1e-5)
  for record in records:
    for style, response in zip(record['styles'], record['responses'], strict=True):
      assert response.startswith(style.removeprefix(f'{record["row"]}: '))


@pytest.mark.full
def test_records_have_what_the_verifier_extracted(recorded, by_hand, capsys, monkeypatch):
  """The fake verifier extracts the whole text, but the first two answers are changed."""
  grade = scores._grade

  def changed(*args):
    first, second, *others = grade(*args)
    return [first._replace(answer=None), second._replace(answer='\ud800'), *others]

  monkeypatch.setattr(scores, '_grade', changed)
  written = noted_responses(monkeypatch)
  text, _ = by_hand(tiny.NUM_STEPS, capsys, samples=2)
  extracted = [answer for line in text.splitlines() for answer in json.loads(line)['extracted']]
  decode = recorded.experiment.tokenizer.decode
  assert extracted == [None, '\ud800', *(decode(r.tokens)[:64] for r in written[2:])]
  assert len(json.loads(text.splitlines()[0])['extracted']) == 2


@pytest.mark.full
def test_the_verifier_gets_the_facts_of_each_question(recorded, by_hand, capsys, monkeypatch):
  grade, known = scores.Grader.grade, []

  def noted(grader, texts, answers, kinds, asked):
    known.extend(one() for one in asked)
    return grade(grader, texts, answers, kinds, asked)

  monkeypatch.setattr(scores.Grader, 'grade', noted)
  by_hand(tiny.NUM_STEPS, capsys, samples=2)
  asked = [stages.question_facts(question) for question in recorded.evaluations[0].questions]
  assert known == [one for one in asked for _ in range(2)]
  assert known[0]['answer']  # a column


# ---- Required response formats ----


@pytest.mark.full
@pytest.mark.parametrize(
  ('prompt', 'require', 'right'),
  [
    ('<think>', (), 8),
    ('<think>', ('think',), 3),
    ('<think>', ('box',), 4),
    ('<think>', ('think', 'box'), 1),
    ('', ('think',), 8),  # no <think> was opened
    ('', ('think', 'box'), 4),
  ],
)
def test_evaluation_has_its_own_required_format(
  prompt, require, right, recorded, values, by_hand, capsys, monkeypatch, jsonl
):
  """Eight right answers: one with both, two with only </think>, three only boxed, two bare."""
  forms = ['so</think>\\boxed{%s}', *['so</think>%s'] * 2, *['\\boxed{%s}'] * 3, *['%s'] * 2]
  tokenizer = recorded.experiment.tokenizer
  file = jsonl(*({'question': f'{n}+0 {prompt}', 'answer': f'{n}'} for n in range(4)))

  texts = iter([form % answer for form, answer in zip(forms, np.repeat(range(4), 2), strict=True)])
  changed = copy.deepcopy(values)
  changed.rollout.update(dict(max_prompt=32, max_response=40))
  changed.evaluation.require = require
  changed.verifier.require = tuple(part for part in ('think', 'box') if part not in require)
  decoding.scripted(monkeypatch, scores, lambda _: tokenizer.encode(next(texts)))
  monkeypatch.setattr(programs, 'COMMAND', VERIFIER)
  text, _ = by_hand(tiny.NUM_STEPS, capsys, config=changed, samples=2, data=[file])
  correct = [value for line in text.splitlines() for value in json.loads(line)['correct']]
  assert (len(correct), sum(correct)) == (8, right)


# ---- The choice of the best policy ----

# Step -> share of correct responses per source. The evaluation would choose step 1.
VALIDATION = {1: {'aime': 0.2, 'minerva': 0.8}, 2: {'aime': 0.6, 'minerva': 0.0}}
VALIDATION[3] = {'aime': 0.4, 'minerva': 1.0}
EVALUATION = {1: 1.0, 2: 0.2, 3: 0.0}


@pytest.mark.full
@pytest.mark.parametrize(('without', 'step', 'score'), [((), 3, 0.7), (('minerva',), 2, 0.6)])
def test_the_best_policy_is_chosen_only_by_the_validation_set(
  without, step, score, recorded, config, data, tmp_path, monkeypatch
):
  config.num_steps = 3
  config.evaluation.every = 1
  config.warm_start.num_updates = 0
  config.data.validation = (data.train,)
  config.export.update(dict(best=True, best_without=without))

  def records(source, share):
    return [{'source': source, 'correct': [row < 5 * share]} for row in range(5)]

  def scored(_, __, questions, at):
    name = spec_name(questions.spec)
    if questions.spec == data.train:
      shares = VALIDATION.get(at, {'aime': 1.0, 'minerva': 1.0})  # before the first step: the best
    else:
      shares = {'evaluation': EVALUATION.get(at, 1.0)}
    shown = {f'eval/{name}/{source}/pass@1': share for source, share in shares.items()}
    return shown, [row for source, share in shares.items() for row in records(source, share)]

  monkeypatch.setattr(scores, 'score_policy', scored)
  monkeypatch.setattr(programs, 'COMMAND', tiny.WORKER)
  with recorded.compiling():
    recording.run_training(experiment.open_experiment(config, str(tmp_path)))
  best = json.loads((tmp_path / 'export' / 'best' / 'evaluation.json').read_text())
  assert best == {'step': step, 'score': pytest.approx(score)}
  written = {record['step']: record['validation/score'] for record in metrics.read(tmp_path)}
  assert written[step] == best['score'] == max(written[at] for at in (1, 2, 3))


@pytest.mark.parametrize('choice', ['export.best', 'evaluation.patience'])
def test_a_choice_without_any_source_is_refused(choice, config, tmp_path):
  config.data.update(dict(validation=config.data.evaluation, evaluation=()))
  config.export.best_without = ('evaluation',)
  config = overridden(config, {choice: 1 if choice == 'evaluation.patience' else True})
  opened = experiment.open_experiment(config, str(tmp_path))
  message = r"config\.export\.best_without=\('evaluation',\): this setting leaves out eve"
  with pytest.raises(InputError, match=message):
    experiment.load_evaluations(opened)


def test_a_source_that_the_choice_leaves_out_but_that_does_not_exist_is_named(
  config, tmp_path, capsys
):
  config.data.update(dict(validation=config.data.evaluation, evaluation=()))
  config.export.update(dict(best=True, best_without=('minvera',)))
  experiment.load_evaluations(experiment.open_experiment(config, str(tmp_path)))
  assert 'has the source minvera. Choose from evaluation.' in capsys.readouterr().err


@pytest.mark.full
def test_a_run_may_have_nothing_to_evaluate_on(recorded, config, tmp_path, monkeypatch, capsys):
  config.num_steps = 2
  config.evaluation.every = 1
  config.warm_start.num_updates = 0
  config.data.evaluation = ()
  monkeypatch.setattr(programs, 'COMMAND', tiny.WORKER)
  opened = experiment.open_experiment(config, str(tmp_path))
  assert 'evaluation' not in messages.banner(recorded.rollout, (), 1, 0, '2', str(tmp_path))
  with recorded.compiling():
    recording.run_training(opened, values=config, draws=True)
  records = metrics.read(tmp_path)
  assert [record['step'] for record in records] == [0, 1, 2]
  assert not any(name.startswith(('eval/', 'validation/')) for r in records for name in r)
  assert (tmp_path / 'report.html').exists() and 'step 2/2' in capsys.readouterr().out
  assert 'evaluation,' not in messages.farewell(records, str(tmp_path), ['python'])


# ---- Responses to a user's prompt ----


@pytest.fixture(scope='module')
def policy(recorded):
  with recorded.compiling():
    yield policies.open_policy(str(recorded.workdir))


@pytest.mark.full
def test_a_policy_opens_without_the_optimizer_that_only_its_config_file_has(recorded, tmp_path):
  workdir = shutil.copytree(recorded.workdir, tmp_path / 'run')
  values = json.loads((workdir / 'config.json').read_text())
  values['optimizer']['name'] = 'mine'
  (workdir / 'config.json').write_text(json.dumps(values))
  with recorded.compiling():
    assert policies.open_policy(str(workdir)).step == tiny.NUM_STEPS


def tokens(responses):
  return [[response.tokens.tolist() for response in group] for group in responses]


@pytest.mark.full
def test_log_probabilities_come_from_the_newest_checkpoint(recorded, policy):
  """Compared with the full logits; the run evaluates at temperature 1."""
  assert policy.step == tiny.NUM_STEPS
  groups = generate.sample(policy, ['3+0', '12+0'], samples=3)
  params = recorded.last_snapshot(recorded.workdir).state.params
  assert [len(group) for group in groups] == [3, 3]
  for text, group in zip(('3+0', '12+0'), groups):
    prompt = np.array(policy.experiment.tokenizer.encode(f'{text}\n'), np.int32)
    for response in group:
      logp, entropy = recorded.values_of(params, prompt, response.tokens)
      np.testing.assert_allclose(response.logp, logp, atol=1e-4)
      np.testing.assert_allclose(response.entropy, entropy, atol=1e-4)


@pytest.mark.full
def test_a_seed_repeats_the_samples_and_the_samples_differ(policy):
  first = tokens(generate.sample(policy, ['3+0'], samples=3, seed=1))
  assert first == tokens(generate.sample(policy, ['3+0'], samples=3, seed=1))
  assert first != tokens(generate.sample(policy, ['3+0'], samples=3, seed=2))
  assert len({tuple(response) for response in first[0]}) > 1


def test_an_episode_that_failed_says_why():
  nothing = np.zeros(1, np.float32)
  turns, verdict = (Turn(1, 0, 0.0),), Verdict(0.0, 'crashed', 'KeyError: 3')
  written = Response(nothing, nothing, entropy=nothing, truncated=False, turns=turns)
  shown = generate._summary(dataclasses.replace(written, verdict=verdict))
  assert shown.startswith('1 turn, reward 0, crashed (KeyError: 3); 1 token, log-probability 0.00')
  assert generate._summary(written).startswith('1 token, ')


def test_a_prompt_over_the_limit_is_refused(policy):
  with pytest.raises(InputError, match=r'config\.rollout\.max_prompt=8: a prompt is 2\d tokens'):
    generate.sample(policy, ['1234567890 + 1234567890'])


@pytest.mark.parametrize('prompts', ['3+0', [], [[{'role': 'user', 'content': '3+0'}]]])
def test_prompts_are_a_list_of_texts(policy, prompts):
  """A text is a sequence of texts too, and a chat would become the text of a Python list."""
  with pytest.raises(InputError, match=r'^prompts=.*must be a list of '):
    generate.sample(policy, prompts)


def test_a_question_has_at_least_one_response(policy):
  for ask in (lambda: generate.sample(policy, ['3+0'], 0), lambda: scores.score(policy, '', 0)):
    with pytest.raises(InputError, match=r'^samples=0: '):
      ask()


@pytest.mark.parametrize('count', [1, 9])
def test_a_policy_with_partial_rollouts_answers_any_number_of_prompts(policy, monkeypatch, count):
  config = policy.experiment.config
  partial = {'partial': True, 'questions': 2, 'max_groups_in_flight': 4, 'max_staleness': 2}
  rollout = dataclasses.replace(config.rollout, **partial)
  config = dataclasses.replace(config, rollout=rollout)
  opened = dataclasses.replace(policy.experiment, config=config)
  script = decoding.ScriptedSampler(lambda request: [request.question])
  monkeypatch.setattr(responses, 'make_sampler', lambda *_, **_options: script)
  written = generate.sample(dataclasses.replace(policy, experiment=opened), ['3+0'] * count)
  assert tokens(written) == [[[row]] for row in range(count)]


@pytest.mark.full
def test_a_model_without_a_run_uses_its_chat_template(capsys, recorded):
  policy = dict(config=None, checkpoint=None, step=None, model=str(CHECKPOINTS / 'qwen2_tied'))
  asked = dict(prompt='How?', row=None, seed=0, tokens=True)
  sampling = dict(samples=2, temperature=0.0, max_response=4)
  with recorded.compiling():
    generate.main(types.SimpleNamespace(**policy, **asked, **sampling))
  prompt, first, second = capsys.readouterr().out.split('\n---')
  assert '<|im_start|>user\nHow?<|im_end|>' in prompt
  heads, lines = zip(*(part.strip().split('\n', 1) for part in (first, second)))
  assert [head[:6] for head in heads] == ['1 of 2', '2 of 2']
  assert lines[0] == lines[1]  # the most probable tokens
  logps = [float(line.split(maxsplit=1)[0]) for line in lines[0].split('\n')]
  assert f'{len(logps)} tokens' in heads[0] and len(logps) <= 4
  total = float(heads[0].split('log-probability ')[1].split(',')[0])
  assert total == pytest.approx(sum(logps), abs=0.01)


WORKED = {
  '48+9+3+7': r'48+9=57 +3=60 +7=67 \boxed{67}',
  '31+5+2+9': r'31+5=36 +2=38 +9=47 \boxed{47}',
  '48+3-9+7': r'48+3=51 -9=42 +7=49 \boxed{49}',
  '31-5+2-9': r'31-5=26 +2=28 -9=19 \boxed{19}',
}


@pytest.mark.full
def test_a_trained_policy_answers_a_question_of_its_task(config, jsonl, tmp_path, monkeypatch):
  """The warm start memorizes a few solutions, which the tiny model is able to do."""
  tiny.leave_out_pictures(monkeypatch.setattr)
  answers = {asked: re.findall(r'\{(.*)\}', solution)[0] for asked, solution in WORKED.items()}
  config.data.train = config.warm_start.data = jsonl(
    *(dict(question=q, answer=answers[q], solution=solution) for q, solution in WORKED.items())
  )
  config.data.update(dict(evaluation=(), cache_dir=str(tmp_path / 'cache')))
  config.num_steps, config.evaluation.temperature, config.tokenizer.vocab_size = 0, 0.0, 282
  config.rollout.update(dict(questions=4, max_prompt=16, max_response=48))
  config.warm_start.update(dict(num_updates=60, batch_size=4))
  with session.open_run(config, str(tmp_path / 'run')) as run:
    responses = generate.sample(run.policy, list(WORKED))
    decode = run.policy.experiment.tokenizer.decode
  written = {asked: decode(response.tokens) for asked, (response,) in zip(WORKED, responses)}
  assert written == WORKED
  assert {judge(text, answers[asked]) for asked, text in written.items()} == {'correct'}


@pytest.mark.parametrize(
  ('template', 'system'), [('plain', ''), ('chat', ''), ('chat', 'Brief.'), ('paper', 'Brief.')]
)
def test_training_evaluation_generation_and_preview_use_the_same_prompts(
  jsonl, tmp_path, monkeypatch, template, system
):
  text = '1+1?'
  values = policies.suited_to(str(CHECKPOINTS / 'qwen2_tied'))
  values.prompt.update(dict(template=template, system=system))
  values.data.update(dict(train=jsonl({'question': text, 'answer': '2'}), cache_dir=str(tmp_path)))
  experiment = open_experiment(values, str(tmp_path))
  data = load_questions(experiment, experiment.config.data.train)
  asked = [decoding.scripted(monkeypatch, module, lambda _: [1]) for module in (responses, scores)]
  monkeypatch.setattr(scores, '_grade', lambda *_: [Verdict(0.0, 'no answer')])
  policy = policies.Policy(policies.Source('model', ''), experiment, None, 0)
  generate.sample(policy, [text])
  _, (record,) = scores.score_policy(experiment, None, data, 0)
  shown = preview.describe(data.spec, experiment.config, experiment.tokenizer)
  (prompt,) = data.prompts
  assert [request.prompt.tolist() for (request,) in asked] == [prompt.tolist()] * 2
  rendered = experiment.tokenizer.decode(prompt, special=True)
  assert (system in rendered) and generate.render(policy, text) == record['question'] == rendered
  lines = re.search(r'^  prompt   \| (.*?)^  answer ', shown, re.MULTILINE | re.DOTALL)[1]
  assert lines.replace('\n           | ', '\n') == rendered + '\n'


def test_the_prompt_of_a_record_describes_the_tools(jsonl, tmp_path, monkeypatch):
  model = shutil.copytree(CHECKPOINTS / 'qwen2_tied', tmp_path / 'model')
  shape = json.loads((model / 'config.json').read_text())
  (model / 'config.json').write_text(json.dumps(shape | {'max_position_embeddings': 1000}))
  values = policies.suited_to(str(model))
  values.prompt.template = 'chat'
  values.rollout.max_prompt = 500
  values.environment.name = 'tools'
  values.environment.tools = ('exgrpo_jax.environments.expressions:calculate',)
  path = jsonl({'question': '1+1?', 'answer': '2'})
  values.data.update(dict(train=path, cache_dir=str(tmp_path)))
  experiment = open_experiment(values, str(tmp_path))
  data = load_questions(experiment, path)
  decoding.scripted(monkeypatch, scores, lambda _: [1])
  monkeypatch.setattr(scores, '_grade', lambda *_: [Verdict(0.0, 'no answer')])
  _, (record,) = scores.score_policy(experiment, None, data, 0)
  assert '1+1?' in record['question'] and '"name": "calculate"' in record['question']
