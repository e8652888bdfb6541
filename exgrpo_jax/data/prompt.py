"""Render a question's messages as the prompt that the model reads.

Chat templates come with checkpoints and are code, so they run in jinja2's sandbox. They can use all
globals, filters and tags that transformers provides. The only difference is that the date is fixed,
because runs with today's date in their prompts would not be reproducible: Llama 3.2's template
falls back to its default date, and templates that require strftime_now (such as SmolLM3's) get the
same date.
"""

import dataclasses
import datetime
import functools
import json
import reprlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from exgrpo_jax.config import setting
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError

THINK = '<think>\n'  # the template 'paper' ends every prompt with this

_TURN = 'the-turn-before'  # placeholder for a turn's content while a template is applied

# Arguments that every prompt passes to the chat template, in addition to the special tokens.
_PASSED = ('messages', 'tools', 'documents', 'add_generation_prompt')
_FUNCTIONS = {'raise_exception', 'strftime_now'}  # transformers provides these to templates
_TODAY = datetime.date(2024, 7, 26)  # Llama 3.2's date if strftime_now is undefined

# The paper's instructions, reworded. A system message from the data or config takes precedence.
SYSTEM = (
  'Solve the task in two sections. First think: between <think> and </think>, analyse the task, '
  'explore ways to solve it, check every step and correct what turns out wrong. Then, after '
  '</think>, give the solution in brief, with the final answer inside \\boxed{}.'
)

# For chat templates without tool support. environments/tools.py parses calls in this form.
_TOOLS = """You may call functions. These are they, one JSON schema a line:
<tools>
{}
</tools>
A call is a JSON object of name and arguments between tags; end your turn with it:
<tool_call>
{{"name": "a function", "arguments": {{"a parameter": "its value"}}}}
</tool_call>"""


@dataclasses.dataclass(frozen=True)
class PromptConfig:
  """Prompt template and system prompt."""

  template: str = setting(
    'plain',
    ('plain', 'chat', 'paper'),
    "how prompts are formatted: 'plain' writes a question's messages as lines, 'chat' applies the "
    "checkpoint's chat template, 'paper' adds a system prompt that asks for reasoning and a boxed "
    'answer',
  )
  system: str = setting(
    '',
    None,
    "a system prompt for questions whose data has no system message; '' adds none, except that the "
    "template 'paper' adds its own",
  )
  template_kwargs: str = setting(
    '',
    None,
    "keyword arguments for the checkpoint's chat template, as a JSON object such as "
    "'{\"enable_thinking\": false}'; only with the template 'chat'; '' passes none",
  )


def check(config: PromptConfig) -> None:
  """Raise InputError if the template would drop the system prompt, or ignore `template_kwargs`."""
  if config.system and config.template == 'plain':
    raise InputError(
      f'config.prompt.system={reprlib.repr(config.system)}: the model would not see this prompt '
      "because config.prompt.template='plain' drops system messages. Use 'chat' or 'paper'."
    )
  if parsed_kwargs(config.template_kwargs) and config.template != 'chat':
    raise InputError(
      f'config.prompt.template_kwargs={config.template_kwargs}: '
      f'config.prompt.template={config.template!r} would ignore these keyword arguments. Set '
      "config.prompt.template='chat'."
    )


def parsed_kwargs(text: str) -> dict[str, Any]:
  """Parse `PromptConfig.template_kwargs`. Raises InputError if it is not a JSON object."""

  def refuse_constant(name: str) -> None:
    raise ValueError(f'JSON has no {name}')

  try:
    kwargs = json.loads(text or '{}', parse_constant=refuse_constant)
    if not isinstance(kwargs, dict):
      raise ValueError(f'a JSON {type(kwargs).__name__}')
  except ValueError as error:
    raise InputError(
      f'config.prompt.template_kwargs={text}: this is not a JSON object ({error}). Write it like '
      '{"enable_thinking": false}, with double quotes and lowercase true and false.'
    ) from error
  return kwargs


@dataclasses.dataclass(frozen=True)
class Chat:
  """A checkpoint's chat template and special tokens."""

  source: str  # the file it was read from, for error messages
  template: str | None  # in jinja2
  special_tokens: Mapping[str, str]  # e.g. bos_token -> '<|begin_of_text|>'
  begin: str  # special tokens to put before text that isn't rendered as a chat; often ''
  tool_template: str | None = None  # used instead of `template` for prompts with tools


NO_CHAT = Chat(source='a SentencePiece model', template=None, special_tokens={}, begin='')


def render(
  messages: Sequence[Message],
  config: PromptConfig,
  chat: Chat = NO_CHAT,
  tools: Sequence[Mapping[str, Any]] = (),
) -> str:
  r"""Render `messages` as a policy's prompt, in training and everywhere else.

  Adds `config.system` if there is no system message. The rest depends on the template:

  'plain': the contents of the user and assistant messages, each followed by a newline. System
  messages are dropped because a base model was never trained to follow them.
  'chat': the output of transformers' apply_chat_template with a generation prompt and the
  keyword arguments in `config.template_kwargs`.
  'paper': the prompt ends with '<think>\n'. If neither the messages nor the config has a system
  message, one is added that asks for '<think> ... </think>' and \boxed{}. The messages are rendered
  by the chat template or, if the checkpoint has none, as lines that begin with the role.

  A chat template receives `tools` as JSON schemas, as in transformers. If the template ignores
  them, the system message describes them and asks for calls in Qwen2.5's format.

  Raises InputError if the template fails on these messages or does not use a keyword argument, or
  if 'chat' or `tools` require a chat template and there is none.
  """
  template = config.template
  if tools and chat.tool_template:
    chat = dataclasses.replace(chat, template=chat.tool_template)
  if tools and (template == 'plain' or chat.template is None):
    raise InputError(
      'config.environment.tools: only a chat template can tell the model about tools, but '
      f'config.prompt.template={template!r} with {chat.source} does not use one. Use a checkpoint '
      "with a chat template and config.prompt.template='chat' or 'paper'."
    )
  if template == 'plain':
    return chat.begin + ''.join(f'{m.content}\n' for m in messages if m.role != 'system')
  system = config.system or (SYSTEM if template == 'paper' else '')
  if system and all(message.role != 'system' for message in messages):
    messages = [Message('system', system), *messages]
  if tools and 'tools' not in (_variables(chat.template or '') or ()):
    messages, tools = _with_descriptions(tools, messages), ()
  if template == 'chat':
    if chat.template is None:
      raise InputError(
        f"config.prompt.template='chat' needs a chat template, but {chat.source} has none. "
        'Neither tokenizer_config.json nor chat_template.jinja in the same folder defines one. '
        "Use 'plain' or 'paper', which do not need a chat template."
      )
    return _apply_template(chat.template, messages, chat, tools, _template_keywords(config, chat))
  if chat.template is None:
    return _role_lines(messages, chat) + THINK
  return _apply_template(chat.template, messages, chat, tools).removesuffix(THINK) + THINK


def following(messages: Sequence[Message], config: PromptConfig, chat: Chat = NO_CHAT) -> str:
  """Render `messages` that follow a model turn, up to the beginning of the model's next turn.

  The result starts right after the turn's content, with the template's end-of-turn text. Templates
  work as in `render`. Raises InputError in the same cases as `render`, and also if a chat template
  omits the turn.
  """
  if config.template == 'plain':
    return ''.join(f'{m.content}\n' for m in messages if m.role != 'system')
  think = THINK if config.template == 'paper' else ''
  if chat.template is None:
    return '\n' + _role_lines(messages, dataclasses.replace(chat, begin='')) + think
  turn = [Message('user', 'and now?'), Message('assistant', _TURN)]
  keywords = _template_keywords(config, chat)
  text = _apply_template(chat.template, [*turn, *messages], chat, keywords=keywords)
  if text.count(_TURN) != 1:
    raise InputError(
      f'the chat template of {chat.source} omits earlier assistant turns, so it cannot be used '
      'for multi-turn episodes. Fix the template, or choose a different config.prompt.template.'
    )
  return text.partition(_TURN)[2].removesuffix(think) + think


def _template_keywords(config: PromptConfig, chat: Chat) -> dict[str, Any]:
  """Return the keyword arguments for the chat template.

  Raises InputError for an argument that the template does not use, or that is already set for
  every prompt, such as `messages`.
  """
  keywords, variables = parsed_kwargs(config.template_kwargs), _variables(chat.template or '')
  if not keywords or variables is None:
    return keywords
  preset_names = {*_PASSED, *chat.special_tokens}
  usable = ', '.join(sorted(variables - preset_names))
  remedy = f', or use a keyword argument that the template uses ({usable})' * bool(usable)
  for name in keywords:
    problem = (
      'this argument is already set for every prompt'
      if name in preset_names
      else f'the chat template of {chat.source} does not use it'
    )
    if name in preset_names or name not in variables:
      raise InputError(
        f'config.prompt.template_kwargs={config.template_kwargs}: {name!r}: {problem}. '
        f'Remove {name!r}{remedy}.'
      )
  return keywords


def last_user_message(messages: Sequence[Message]) -> str:
  """Return the last user message, stripped.

  External responses are matched to questions by this text.
  """
  return next((m.content.strip() for m in reversed(messages) if m.role == 'user'), '')


def _with_descriptions(
  tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]
) -> list[Message]:
  """Return the messages with the tool descriptions in a leading system message."""
  descriptions = '\n'.join(json.dumps(tool, ensure_ascii=False) for tool in tools)
  system_texts = [message.content for message in messages if message.role == 'system']
  text = '\n\n'.join([*system_texts, _TOOLS.format(descriptions)])
  return [Message('system', text), *(message for message in messages if message.role != 'system')]


def _role_lines(messages: Sequence[Message], chat: Chat) -> str:
  lines = [
    m.content if m.role == 'system' else f'{m.role.capitalize()}: {m.content}' for m in messages
  ]
  return chat.begin + '\n'.join([*lines, 'Assistant: '])


def _apply_template(
  template: str,
  messages: Sequence[Message],
  chat: Chat,
  tools: Sequence[Mapping[str, Any]] = (),
  keywords: Mapping[str, Any] = MappingProxyType({}),
) -> str:
  try:
    return _compile(template).render(
      messages=[message._asdict() for message in messages],
      add_generation_prompt=True,
      tools=list(tools) or None,
      documents=None,
      **chat.special_tokens,
      **keywords,
    )
  except Exception as error:  # the template is third-party code and can raise anything
    roles = ', '.join(message.role for message in messages)
    raise InputError(
      f'the chat template of {chat.source} fails ({error}) on messages with the '
      f'roles {roles}. Fix the template or the data.'
    ) from error


@functools.lru_cache
def _compile(template: str) -> jinja2.Template:
  def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)

  environment = _environment()
  environment.globals['raise_exception'] = raise_exception
  if 'strftime_now is' not in template:  # other templates have a fallback date
    environment.globals['strftime_now'] = _TODAY.strftime
  environment.filters['tojson'] = functools.partial(json.dumps, ensure_ascii=False)
  return environment.from_string(template)


@functools.lru_cache
def _variables(template: str) -> frozenset[str] | None:
  """Return the names of the variables that a caller may pass to the template.

  Variables that the template sets itself are included only if it checks whether they are defined,
  as in `{% if date is not defined %}`. Returns None for a template with a syntax error, which
  rendering will report.
  """
  environment = _environment()
  try:
    tree = environment.parse(template)
  except jinja2.TemplateSyntaxError:
    return None
  name_type = jinja2.nodes.Name
  own_names = {name.name for name in tree.find_all(name_type) if name.ctx != 'load'} - {*_PASSED}
  for check in tree.find_all((jinja2.nodes.Test, jinja2.nodes.Filter)):
    if check.name in ('defined', 'undefined', 'default', 'd') and isinstance(check.node, name_type):
      own_names.discard(check.node.name)
  undeclared = jinja2.meta.find_undeclared_variables(tree)
  return frozenset(undeclared - own_names - environment.globals.keys() - _FUNCTIONS)


class _Generation(jinja2.ext.Extension):
  """The `{% generation %}` tag, which marks generated text but does not change it."""

  tags: ClassVar = {'generation'}

  def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
  """Build the same jinja2 environment as transformers, because templates are written for it."""
  return jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
  )
