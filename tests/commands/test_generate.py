"""Responses to a prompt that is typed."""

import re
import types

import numpy as np
import pytest

from exgrpo_jax.commands import generate
from exgrpo_jax.datatypes import Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import preview, responses, scores
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import load_questions, open_experiment
from exgrpo_jax.grading.verifier import judge
from exgrpo_jax.training import session
from tests.helpers import decoding, tiny
from tests.helpers.paths import CHECKPOINTS


@pytest.fixture(scope='module')
def policy(recorded):
  with recorded.compiling():
    yield policies.open_policy(str(recorded.workdir))


def tokens(responses):
  return [[response.tokens.tolist() for response in group] for group in responses]


def test_log_probabilities_are_those_of_the_newest_checkpoint(recorded, policy):
  """Against all logits at once; the run evaluates at temperature 1."""
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


def test_a_seed_writes_the_same_and_each_sample_something_else(policy):
  first = tokens(generate.sample(policy, ['3+0'], samples=3, seed=1))
  assert first == tokens(generate.sample(policy, ['3+0'], samples=3, seed=1))
  assert first != tokens(generate.sample(policy, ['3+0'], samples=3, seed=2))
  assert len({tuple(response) for response in first[0]}) > 1


def test_a_prompt_over_the_limit_is_refused(policy):
  with pytest.raises(
    InputError, match=r'a prompt has 2\d tokens, .* config\.rollout\.max_prompt=8'
  ):
    generate.sample(policy, ['1234567890 + 1234567890'])


def test_a_model_without_a_run_is_asked_by_its_chat_template(capsys, recorded):
  args = types.SimpleNamespace(
    config=None,
    checkpoint=None,
    step=None,
    model=str(CHECKPOINTS / 'qwen2_tied'),
    prompt='How?',
    row=None,
    samples=2,
    temperature=0.0,
    max_response=4,
    seed=0,
    tokens=True,
  )
  with recorded.compiling():
    generate.main(args)
  prompt, first, second = capsys.readouterr().out.split('\n---')
  assert '<|im_start|>user\nHow?<|im_end|>' in prompt
  heads, lines = zip(*(part.strip().split('\n', 1) for part in (first, second)))
  assert [head[:6] for head in heads] == ['1 of 2', '2 of 2']
  assert lines[0] == lines[1]  # the most probable tokens
  logps = [float(line.split(maxsplit=1)[0]) for line in lines[0].split('\n')]
  assert f'{len(logps)} tokens' in heads[0] and len(logps) <= 4
  assert float(heads[0].split('log-probability ')[1].split(',')[0]) == pytest.approx(
    sum(logps), abs=0.01
  )


WORKED = {
  '48+9+3+7': r'48+9=57 +3=60 +7=67 \boxed{67}',
  '31+5+2+9': r'31+5=36 +2=38 +9=47 \boxed{47}',
  '48+3-9+7': r'48+3=51 -9=42 +7=49 \boxed{49}',
  '31-5+2-9': r'31-5=26 +2=28 -9=19 \boxed{19}',
}


def test_a_trained_policy_answers_a_question_of_its_task(config, jsonl, tmp_path, monkeypatch):
  """The warm start learns a handful of solutions by heart, within the tiny model's reach."""
  tiny.leave_out_pictures(monkeypatch.setattr)
  answers = {asked: re.findall(r'\{(.*)\}', solution)[0] for asked, solution in WORKED.items()}
  config.data.train = config.warm_start.data = jsonl(
    *(
      {'question': asked, 'answer': answers[asked], 'solution': solution}
      for asked, solution in WORKED.items()
    )
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
  ('template', 'system'),
  [('plain', ''), ('chat', ''), ('chat', 'Brief.'), ('paper', 'Brief.')],
)
def test_training_evaluation_generation_and_preview_ask_the_same(
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
