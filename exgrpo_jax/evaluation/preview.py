"""A preview of a data spec as a model sees it, for `exgrpo data show`.

The preview shows how columns and ground truths are read, three questions as the model sees them,
the prompt lengths, and which rows are left out and why. With an environment, it also shows an
episode for each of these questions, played by the environment's player. Rows that a run can leave
out never cause an error here.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from exgrpo_jax.data import prompt, questions, store
from exgrpo_jax.data.store import Dataset
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Question
from exgrpo_jax.environments import pool as environment_pool
from exgrpo_jax.environments.environment import as_messages
from exgrpo_jax.environments.pool import Pool
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.evaluation import truths
from exgrpo_jax.experiment.experiment import RunConfig

_NUM_EXAMPLES = 3  # questions
_SOLUTION = 300  # characters
_SHARES = (50, 90, 99, 100)  # percentiles


class Prompts(NamedTuple):
  """The lengths of all prompts in a dataset, and the texts of the first few."""

  unit: str
  lengths: np.ndarray  # int [questions], in `unit`
  texts: list[str]  # the texts that are shown


def describe(spec: str, config: RunConfig, tokenizer: Tokenizer | None) -> str:
  """Return the command's output. Without a tokenizer, prompt lengths are in characters.

  Raises InputError if the data does not exist or cannot be read.
  """
  questions.settle(config.data, spec)
  data = questions.load(dataclasses.replace(config.data, on_unverifiable='drop'), spec)
  environments = (
    environment_pool.shared_pool(config.environment) if config.environment.name else None
  )
  if environments:
    examples = environment_pool.begin(list(data), data.spec, environments)
    prompts = _render(examples, config.prompt, tokenizer, environments.tools())
  elif tokenizer:
    prompt_tokens = store.tokenized(data, tokenizer, config.prompt)
    examples = data[:_NUM_EXAMPLES]
    texts = [tokenizer.decode(ids, special=True) for ids in prompt_tokens[:_NUM_EXAMPLES]]
    prompts = Prompts('tokens', prompt_tokens.lengths, texts)
  else:
    examples, prompts = data[:_NUM_EXAMPLES], _render(data, config.prompt, None)
  parts = [_summary(data, prompts, config)]
  for question, text, length in zip(examples, prompts.texts, prompts.lengths):
    parts.append(_question(question, text, f'{length} {prompts.unit}'))
    if environments:
      parts[-1] += '\n' + _indent('episode', _episode(environments, question, config))
  return '\n\n'.join(parts) + '\n'


def _render(
  rows: Iterable[Question],
  settings: prompt.PromptConfig,
  tokenizer: Tokenizer | None,
  tools: Sequence[dict[str, Any]] = (),
) -> Prompts:
  """Render questions as prompts, including the tool descriptions."""
  chat = tokenizer.chat if tokenizer else prompt.NO_CHAT
  texts = [prompt.render(question.messages, settings, chat, tools) for question in rows]
  lengths = list(map(len, tokenizer.encode_all(texts) if tokenizer else texts))
  return Prompts('tokens' if tokenizer else 'characters', np.array(lengths), texts[:_NUM_EXAMPLES])


def _episode(environments: Pool, question: Question, config: RunConfig) -> str:
  """Describe an episode played by the environment's player, with each turn's reward."""
  try:
    (turns,) = environments.demonstrations([question], [0], config.environment.max_turns)
  except InputError as error:
    return f'none: {error}'
  lines = list[str]()
  for text, observation in turns:
    reply = ' / '.join(message['content'] for message in as_messages(observation.messages))
    ending = (' (solved)' if observation.success else ' (not solved)') if observation.done else ''
    lines += [f'policy: {text}', f'environment: {reply} [reward {observation.reward:g}]{ending}']
  return '\n'.join(lines)


def _summary(data: Dataset, prompts: Prompts, config: RunConfig) -> str:
  lines = [f'{data.spec}: {counted(len(data), "question")}']
  lines += [f'  read as    {layout}' for layout in data.store.layouts]
  if data[0].columns:
    readers = 'the environment' if config.environment.name else 'rewards'
    lines.append(f'  columns    {", ".join(data[0].columns)} ({readers} can read them)')
  lengths = np.percentile(prompts.lengths, _SHARES, method='inverted_cdf')
  spread = ', '.join(
    f'{length} ({"longest" if share == 100 else f"{share}%"})'
    for share, length in zip(_SHARES, lengths)
  )
  lines.append(f'  prompts    {prompts.unit} in template {config.prompt.template!r}: {spread}')
  lines += [f'  left out   {line}' for line in _omissions(data, prompts, config)]
  if not config.environment.name:
    first, *others = truths.summary(data)
    lines += [f'  truths     {first}', *(f'           {line}' for line in others)]
  texts = {question.messages for question in data}
  if len(texts) < len(data):
    lines.append(
      f'  repeated   {len(data) - len(texts):,} with the text of an earlier question; kept, '
      'because every row counts as a question'
    )
  return '\n'.join(lines)


def _omissions(data: Dataset, prompts: Prompts, config: RunConfig) -> list[str]:
  """Return one line per reason why rows are left out or refused; ['nothing'] if there are none."""
  lines = [
    f'{counted(omission.rows, "row")} of the file: {reason}, first at {omission.first}'
    + _refusal_note(config.data.on_unverifiable, 'on_unverifiable')
    for reason, omission in data.store.left_out.items()
  ]
  limit = config.rollout.max_prompt
  if prompts.unit != 'tokens':
    lines.append(
      'prompts over the limit cannot be counted without a tokenizer; choose a model with --model'
    )
  elif count := int(np.sum(prompts.lengths > limit)):
    lines.append(
      f'{counted(count, "question")}: over config.rollout.max_prompt={limit} tokens'
      + _refusal_note(config.data.on_overlong, 'on_overlong')
    )
  return lines or ['nothing']


def _refusal_note(choice: str, key: str) -> str:
  return f"; a run refuses them unless config.data.{key}='drop'" if choice == 'refuse' else ''


def _question(question: Question, text: str, length: str) -> str:
  lines = [
    f'question {question.row}: {length}, kind {question.kind}, source {question.source}',
    _indent('prompt', text),
    _indent('answer', question.answer),
  ]
  if question.solution:
    cut = '…' if len(question.solution) > _SOLUTION else ''
    lines.append(_indent('solution', question.solution[:_SOLUTION] + cut))
  return '\n'.join(lines)


def _indent(name: str, text: str) -> str:
  first, *others = text.split('\n')
  return '\n'.join([f'  {name:<9}| {first}', *(f'  {"":<9}| {line}' for line in others)])
