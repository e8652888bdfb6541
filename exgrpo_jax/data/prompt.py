"""Messages to the text that a model reads, before tokens.

Chat templates come with checkpoints and are code: they run in jinja2's sandbox,
with the names and filters that transformers gives them. One name they do not get:
strftime_now, for a prompt that changes with the day would make two runs of one.
Templates that know of it (Llama 3.2's) then write the date they were made with.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.sandbox

from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError

THINK = '<think>\n'  # what a prompt of the template 'paper' ends with

# In content the paper's; a data source with a system message of its own keeps that.
SYSTEM = (
  'Solve the task in two sections. First think: between <think> and </think>, analyse the task, '
  'explore ways to solve it, check every step and correct what turns out wrong. Then, after '
  '</think>, give the solution in brief, with the final answer inside \\boxed{}.'
)


@dataclasses.dataclass(frozen=True)
class Config:
  template: str = setting(
    ('plain', 'chat', 'paper'),
    'how the messages of a question become text: as lines, by the '
    "checkpoint's chat template, or so with a system prompt that asks for thought and a boxed "
    'answer',
  )


@dataclasses.dataclass(frozen=True)
class Chat:
  """What a checkpoint says of its prompts."""

  place: str  # where it is from, for messages
  template: str | None  # in jinja2
  special_tokens: Mapping[str, str]  # e.g. bos_token -> '<|begin_of_text|>'
  begin: str  # special tokens before any text that is no chat; often ''


NO_CHAT = Chat('a SentencePiece model', None, {}, '')


def render(messages: Sequence[Message], template: str, chat: Chat = NO_CHAT) -> str:
  r"""The prompt of `messages`.

  'plain': the contents of user and assistant messages, each ended by a newline;
  system messages are left out, for a model that was never taught to read one.
  'chat': what transformers' apply_chat_template gives with a generation prompt.
  'paper': a system message that asks for '<think> ... </think>' and \boxed{} where
  there is none, then the chat template, or lines that begin with the role where the
  checkpoint has no template, then '<think>\n'.

  Raises:
    InputError: 'chat' without a chat template, or one that fails on these messages.
  """
  if template == 'plain':
    return chat.begin + ''.join(f'{m.content}\n' for m in messages if m.role != 'system')
  if template == 'chat':
    if chat.template is None:
      raise InputError(
        f"config.prompt.template='chat' needs a chat template, and {chat.place} has "
        'none: it would be in tokenizer_config.json or chat_template.jinja beside '
        "it. 'plain' and 'paper' need none."
      )
    return _chat(messages, chat)
  if all(message.role != 'system' for message in messages):
    messages = [Message('system', SYSTEM), *messages]
  return (_chat(messages, chat) if chat.template is not None else _lines(messages, chat)) + THINK


def _lines(messages, chat):
  lines = [
    m.content if m.role == 'system' else f'{m.role.capitalize()}: {m.content}' for m in messages
  ]
  return chat.begin + '\n'.join([*lines, 'Assistant: '])


def _chat(messages, chat):
  try:
    return _compiled(chat.template).render(
      messages=[message._asdict() for message in messages],
      add_generation_prompt=True,
      tools=None,
      documents=None,
      **chat.special_tokens,
    )
  except Exception as error:  # the template is foreign code
    roles = ', '.join(message.role for message in messages)
    raise InputError(
      f'the chat template of {chat.place} fails ({error}) on messages with the '
      f'roles {roles}; mend the one or the other.'
    ) from error


@functools.lru_cache
def _compiled(template: str) -> jinja2.Template:
  def raise_exception(message):
    raise jinja2.TemplateError(message)

  # As transformers sets it up: templates are written for these.
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
  )
  environment.globals['raise_exception'] = raise_exception
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  return environment.from_string(template)
