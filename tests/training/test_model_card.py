"""The model card: it contains the run's records, and nothing about the machine."""

import dataclasses
import json
import re
import shlex

import huggingface_hub
import pytest

from exgrpo_jax.config import overridden
from exgrpo_jax.data import tokenizer
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.reporting import metrics, runs
from exgrpo_jax.training import model_card
from tests.helpers import tiny
from tests.helpers.paths import CHECKPOINTS

BASE = {'eval/sums/pass@1': 0.25, 'eval/sums/pass@1_low': 0.1, 'eval/sums/pass@1_high': 0.5}


@pytest.fixture
def card(recorded, tmp_path):
  """Return a function that writes the recorded run's card, with some settings changed."""

  def card(step, changes=None, evaluated=None, adapters=False, **fields):
    values = overridden(recorded.values, changes or {})
    fields = {'workdir': str(recorded.workdir), 'config': parse_config(values)} | fields
    opened = dataclasses.replace(recorded.experiment, **fields)
    model_card.write(tmp_path, opened, step, evaluated, adapters)
    return (tmp_path / 'README.md').read_text()

  return card


def rows(text, title):
  """Return the rows of a section's table, by their first cell."""
  lines = text.partition(f'\n## {title}\n')[2].partition('\n## ')[0].splitlines()
  cells = [line.strip('| ').split(' | ') for line in lines if line.startswith('|')]
  return {first: rest for first, *rest in cells}


def interval(record, name):
  return '{:.3f} ({:.3f} to {:.3f})'.format(*(record[name + end] for end in ('', '_low', '_high')))


def test_the_card_lists_scores_before_and_after_with_intervals(recorded, card):
  records = {record['step']: record for record in metrics.read(recorded.workdir)}
  ((source, name),) = runs.score_names([list(records.values())]).items()
  number = f'{records[0][f"eval/{source}/questions"]:.0f}'
  half, last = tiny.NUM_STEPS // 2, tiny.NUM_STEPS
  for step, shown in ((last, last), (half, half), (half + 1, half)):
    text = card(step)
    table = rows(text, 'Scores')
    assert table['data'] == ['questions', 'score', 'before step 1', f'after step {shown}']
    ends = [interval(records[0], name), interval(records[shown], name)]
    assert table[source] == [number, name.rpartition('/')[2], *ends]
    assert (f'did not evaluate this policy, which is from step {step}.' in text) == (step != shown)
    assert f'| policy | after step {step} of {last} |' in text


def test_the_card_includes_unwritten_scores_and_scores_of_the_evaluate_command(card, tmp_path):
  workdir = tmp_path / 'run'
  (workdir / 'evaluation').mkdir(parents=True)
  sampling = {'temperature': 0.5, 'top_k': 0, 'top_p': 0.9}
  line = {'step': 3, **sampling, 'scores': BASE | {'eval/sums/questions': 8.0}}
  lines = [line, line | {'step': 4}]
  (workdir / 'evaluation' / 'evaluations.jsonl').write_text(
    ''.join(f'{json.dumps(x)}\n' for x in lines)
  )
  known = {'eval/new/pass@1': 0.5, 'eval/new/questions': 9.0}
  # There is no evaluation before step 1, and one after step 2 does not count.
  (workdir / 'metrics.jsonl').write_text(
    json.dumps({'step': 2, **known, 'eval/new/pass@1': 0.1}) + '\n'
  )
  text = card(3, {'data.validation': ('new',)}, known, workdir=str(workdir))
  assert rows(text, 'Scores') == {
    'data': ['questions', 'score', 'before step 1', 'after step 3'],
    '---': ['---'] * 4,
    'new (validation)': ['9', 'pass@1', '–', '0.500'],
    'sums, temperature 0.5, top_p 0.9': ['8', 'pass@1', '–', '0.250 (0.100 to 0.500)'],
  }
  assert 'this score is optimistic' in text
  assert 'The run did not evaluate this policy.' in card(1, workdir=str(workdir))


def test_the_card_lists_changed_settings_without_folders_of_the_machine(card):
  changes = {
    'data.train': '/home/me/secret/train.jsonl[:9]',
    'data.validation': ('~/secret/a.jsonl', 'gs://secret/b.jsonl'),
    'grading.rewards': ('../secret/r.py:score', 'correctness'),
    'compilation_cache': '/secret',
  }
  text = card(1, changes)
  assert 'secret' not in text and 'train.jsonl[:9]`' in text
  table = rows(text, 'Settings')
  assert table['`seed`'] == [f'`{tiny.SEED}`', '`0`']
  assert table['`replay.start_pass_rate`'] == ['`0.0`', '`0.35`']
  assert table['`data.validation`'][0] == "`['a.jsonl', 'b.jsonl']`"
  assert table['`grading.rewards`'][0] == "`['r.py:score', 'correctness']`"
  assert '`replay.ratio`' not in table and '`data.train`' not in table


@pytest.mark.parametrize(
  ('model', 'changes', 'metadata', 'phrases'),
  [
    (
      '',
      {},
      {'tags': ['exgrpo_jax', 'grpo', 'exgrpo']},
      ['# A model from scratch, trained with Ex'],
    ),
    (
      'Qwen/Qwen2.5@main',
      {'replay.ratio': 0.0, 'data.train': 'openai/gsm8k:main:train'},
      {'base_model': 'Qwen/Qwen2.5', 'datasets': ['openai/gsm8k'], 'tags': ['exgrpo_jax', 'grpo']},
      ['# Qwen/Qwen2.5, trained with GRPO', '2402.03300', '](https://huggingface.co/Qwen/Qwen2.5)'],
    ),
    (
      '/home/me/Qwen2.5/',
      {'model.repository': 'Qwen/Qwen2.5'},
      {'base_model': 'Qwen/Qwen2.5'},
      ['arXiv:2510.02245'],
    ),
    ('/home/me/mine', {}, {}, ['# mine, trained with ExGRPO', '| base model | mine |']),
  ],
)
def test_the_hub_can_read_the_metadata(card, tmp_path, model, changes, metadata, phrases):
  text = card(1, changes, model_name=model)
  found = huggingface_hub.metadata_load(tmp_path / 'README.md')
  assert found is not None
  always = {'library_name': 'transformers', 'pipeline_tag': 'text-generation'}
  assert found == {'tags': found['tags'], **always, **metadata}
  assert all(phrase in text for phrase in phrases) and '/home' not in text


@pytest.mark.parametrize(
  ('template', 'system', 'top_k', 'begins'),
  [
    ('chat', '', 0, '<|im_start|>'),
    ('chat', "Don't guess; \\boxed{x}", 5, '<|im_start|>system\nDon'),
    ('paper', '', 0, '<|im_start|>system\nSolve the task'),
    ('plain', '', 0, 'What is 12 * 13?\n'),
  ],
)
def test_the_code_prompts_like_training_and_samples_like_evaluation(
  card, monkeypatch, template, system, top_k, begins
):
  """The test runs both blocks as a user would, with a stand-in for the policy."""
  transformers = pytest.importorskip('transformers')
  stored = CHECKPOINTS / 'qwen2_tied'
  temperature = 0.0 if template == 'plain' else 0.5
  wanted = {'temperature': temperature, 'top_k': top_k, 'top_p': 0.9, 'min_p': 0.0}
  changes = {'prompt.template': template, 'prompt.system': system}
  changes |= {f'evaluation.{name}': value for name, value in wanted.items()}
  changes |= {'prompt.template_kwargs': '{"think": false}'} if system else {}
  text = card(1, changes, tokenizer=tokenizer.load(stored))
  python, shell = re.findall(r'```(?:python|bash)\n(.*?)```', text, re.DOTALL)
  given = {}

  class Policy:
    def generate(self, input_ids, **sampling):
      given.update(ids=input_ids[0].tolist(), sampling=sampling)
      return input_ids

  monkeypatch.setattr(
    transformers.AutoModelForCausalLM, 'from_pretrained', staticmethod(lambda *_: Policy())
  )
  exec(python.replace('path/to/this/folder', str(stored)), {})
  tokens = tokenizer.load(stored)
  prompt = tokens.decode(given['ids'], special=True)
  assert prompt.startswith(begins) and prompt.endswith('<think>\n') == (template == 'paper')
  serve, curl = shlex.split(shell.partition('\n')[0]), shlex.split(shell.partition('\n')[2])
  assert serve == ['vllm', 'serve', 'path/to/this/folder']
  body, sampled = json.loads(curl[-1]), given['sampling']
  # The base's generation_config.json and top_k=50 in transformers have no effect.
  penalty, limit = {'repetition_penalty': 1.0}, sampled.pop('max_new_tokens')
  del sampled['attention_mask']
  assert sampled == {'do_sample': bool(temperature)} | (wanted if temperature else {}) | penalty
  assert body.items() >= (wanted | {'top_k': top_k or -1, 'max_tokens': limit} | penalty).items()
  if template == 'chat':
    assert body['messages'][0]['content'] == (system or 'What is 12 * 13?')
    assert body.get('chat_template_kwargs') == ({'think': False} if system else None)
    assert ("add_generation_prompt=True, **{'think': False})" in python) == bool(system)
  else:
    assert body['prompt'] == prompt and body['add_special_tokens'] is False


def test_adapters_with_a_local_base_are_used_with_peft(card):
  text = card(1, {'lora.rank': 4}, adapters=True)
  assert 'AutoPeftModelForCausalLM.from_pretrained' in text
  assert 'vllm serve path/to/the/base/model --enable-lora' in text


@pytest.mark.parametrize(
  ('model', 'changes', 'base'),
  [
    ('Qwen/Qwen2.5', {}, 'Qwen/Qwen2.5'),
    ('Qwen/Qwen2.5@c0ffee', {}, 'Qwen/Qwen2.5 --revision=c0ffee'),
    ('/my', {'model.repository': 'Qwen/Qwen2.5@v2'}, 'Qwen/Qwen2.5 --revision=v2'),
  ],
)
def test_adapters_are_served_with_their_base(card, tmp_path, model, changes, base):
  text = card(1, {'lora.rank': 4, **changes}, adapters=True, model_name=model)
  assert f'vllm serve {base} --enable-lora --max-lora-rank=4 --lora-modules=policy=' in text
  assert 'from peft import AutoPeftModelForCausalLM' in text
  assert huggingface_hub.metadata_load(tmp_path / 'README.md')['library_name'] == 'peft'
