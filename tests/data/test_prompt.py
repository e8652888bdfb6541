"""Tests of the prompt templates; chat templates must render as in transformers."""

import importlib.util
import json
import pathlib
import re
import shutil

import pytest
import tokenizers

from exgrpo_jax.data import prompt, tokenizer
from exgrpo_jax.datatypes import Message
from exgrpo_jax.environments import tools
from exgrpo_jax.errors import InputError
from tests.helpers.paths import CHECKPOINTS

STORED = CHECKPOINTS / 'qwen2_tied'
PLAIN, CHAT, PAPER = (prompt.PromptConfig(name, system='') for name in ('plain', 'chat', 'paper'))
SYSTEM, USER = Message('system', ' Be brief.\n'), Message('user', '1 < 2 & "3"?')
ASSISTANT, MORE = Message('assistant', 'Yes: 1 < 2.'), Message('user', 'Zürich, \U0001f600?')

# In the style of Llama 3.1: a begin token, a date, headers around roles, stripped contents.
LLAMA = r"""
{{- bos_token }}
{#- Callers may give a date. #}
{%- if date is not defined %}
    {%- set date = "1 Jan 2024" %}
{%- endif %}
{%- set rest = messages %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content|trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}

{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- raise_exception("tools are not for this test") }}
{%- endif %}
{{- "Date: " + date + "\n\n" + system + "<|eot_id|>" }}
{%- for message in rest %}
    {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim }}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
MACROS = """\
{% macro line(message) %}[{{ message.role }}] {{ message.content | tojson }}{% endmacro %}
{% set ns = namespace(count=0) %}
{% for message in messages %}
  {% if message.role == 'system' %}
    {% continue %}
  {% endif %}
  {% set ns.count = ns.count + 1 %}
{{ line(message) }} {{ loop.index }}
{% endfor %}
{{ ns.count }}{{ unknown_name }}
"""
# As in SmolLM3's template and in TRL's training templates.
GENERATION = """\
{%- set today = strftime_now("%d %B %Y") -%}
{{- today -}}
{% for message in messages %}
  {% set mark = loop.index %}
  {% if message.role == 'assistant' %}
    {% generation %}
{% set mark = 'own' %}
[{{ mark }} {{ loop.index }}] {{ message.content }}
    {% endgeneration %}
  {% endif %}
[{{ mark }}]
{% endfor %}
"""


@pytest.fixture
def folder(tmp_path):
  """A function that copies a checkpoint, with `changes` to its tokenizer_config.json.

  None removes a field.
  """

  def make(**changes):
    copy = pathlib.Path(shutil.copytree(STORED, tmp_path / 'copy'))
    path = copy / 'tokenizer_config.json'
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return copy

  return make


TURNS = [SYSTEM, USER, ASSISTANT, MORE]
# The output of apply_chat_template in transformers 5.23 for these templates.
CHATS = {
  'qwen_user': (
    None,
    [USER],
    '<|im_start|>system\nYou are of help.<|im_end|>\n<|im_start|>user\n1 < 2 & "3"?<|im_end|>\n'
    '<|im_start|>assistant\n',
  ),
  'qwen_turns': (
    None,
    TURNS,
    '<|im_start|>system\n Be brief.\n<|im_end|>\n<|im_start|>user\n1 < 2 & "3"?<|im_end|>\n'
    '<|im_start|>assistant\nYes: 1 < 2.<|im_end|>\n<|im_start|>user\nZürich, \U0001f600?'
    '<|im_end|>\n<|im_start|>assistant\n',
  ),
  'llama_user': (
    LLAMA,
    [USER],
    '<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nDate: 1 Jan 2024\n\n<|eot_id|>'
    '<|start_header_id|>user<|end_header_id|>\n\n1 < 2 & "3"?<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n',
  ),
  'llama_turns': (
    LLAMA,
    TURNS,
    '<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nDate: 1 Jan 2024\n\nBe brief.'
    '<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n1 < 2 & "3"?<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\nYes: 1 < 2.<|eot_id|>'
    '<|start_header_id|>user<|end_header_id|>\n\nZürich, \U0001f600?<|eot_id|>'
    '<|start_header_id|>assistant<|end_header_id|>\n\n',
  ),
  'macros': (
    MACROS,
    TURNS,
    '[user] "1 < 2 & \\"3\\"?" 2\n[assistant] "Yes: 1 < 2." 3\n[user] "Zürich, \U0001f600?" 4\n3',
  ),
  'generation': (GENERATION, TURNS, '26 July 2024[1]\n[2]\n[own 3] Yes: 1 < 2.\n[3]\n[4]\n'),
}


@pytest.mark.parametrize('name', CHATS)
def test_chat_templates_render_as_in_transformers(name, folder):
  template, messages, expected = CHATS[name]
  changes = {'chat_template': template} if template else {}
  loaded = tokenizer.load(folder(**changes, bos_token='<|endoftext|>'))
  assert loaded.render(messages, CHAT) == expected


# The end is copied from Qwen3's template.
THINKING = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""
NO_THOUGHT = '<think>\n\n</think>\n\n'


def with_keywords(text):
  return prompt.PromptConfig('chat', template_kwargs=text)


def test_a_chat_template_gets_the_keyword_arguments_in_every_turn(folder):
  loaded = tokenizer.load(folder(chat_template=THINKING))
  plain = loaded.render(TURNS, CHAT)
  assert plain.endswith(f'{MORE.content}<|im_end|>\n<|im_start|>assistant\n')
  for text in ('{}', '{"enable_thinking": true}'):
    assert loaded.render(TURNS, with_keywords(text)) == plain
  off = with_keywords('{"enable_thinking": false}')
  assert loaded.render(TURNS, off) == plain + NO_THOUGHT
  before, following = loaded.render(TURNS[:2], off), prompt.following([MORE], off, loaded.chat)
  whole = before.removesuffix(NO_THOUGHT) + ASSISTANT.content + following
  assert whole == loaded.render(TURNS, off)


@pytest.mark.full
@pytest.mark.parametrize('keywords', [{}, {'enable_thinking': True}, {'enable_thinking': False}])
def test_qwen3_prompts_have_the_same_tokens_as_in_transformers(keywords, folder):
  """With the published template, which TRL contains."""
  transformers = pytest.importorskip('transformers')
  trl = importlib.util.find_spec('trl')
  published = trl and trl.origin and pathlib.Path(trl.origin).parent / 'chat_templates/qwen3.jinja'
  path = folder(chat_template=published.read_text() if published else THINKING)
  ours, theirs = tokenizer.load(path), transformers.AutoTokenizer.from_pretrained(path)
  thought = Message('assistant', '<think>\nEasy.\n</think>\n\nYes.')
  for messages in ([USER], TURNS, [USER, thought, MORE]):
    expected = theirs.apply_chat_template(
      [message._asdict() for message in messages],
      add_generation_prompt=True,
      return_dict=False,
      **keywords,
    )
    rendered = ours.render(messages, with_keywords(json.dumps(keywords)))
    assert ours.encode(rendered) == expected
    assert rendered.endswith(NO_THOUGHT) == (keywords.get('enable_thinking') is False)


@pytest.mark.parametrize(
  ('template', 'name', 'message'),
  [
    (THINKING, 'thinking', r'does not use it\. Remove .* the template uses \(enable_thinking\)'),
    (LLAMA, 'system', r'does not use it\. .* uses \(date\)'),  # it sets `system` itself
    (LLAMA, 'raise_exception', 'does not use it'),
    (LLAMA, 'messages', r'this argument is already set for every prompt\. .* uses \(date\)'),
    (LLAMA, 'bos_token', 'this argument is already set for every prompt'),
    (None, 'system', r"does not use it\. Remove 'system'\.$"),
  ],
)
def test_a_keyword_argument_that_the_template_does_not_use_is_refused(
  template, name, message, folder
):
  changes = {'chat_template': template} if template else {}
  loaded = tokenizer.load(folder(**changes, bos_token='<|endoftext|>'))
  for render in (loaded.render, lambda *args: prompt.following(*args, loaded.chat)):
    with pytest.raises(InputError, match=rf'template_kwargs=.*: \'{name}\': .*{message}'):
      render([USER], with_keywords(json.dumps({name: 1})))


def test_a_template_file_or_one_of_several_templates_is_used(folder):
  named = {'tool_use': '{{ tools }}', 'default': 'yes'}
  made = folder(chat_template=[{'name': name, 'template': named[name]} for name in named])
  loaded, functions = tokenizer.load(made), [{'name': 'add'}]
  assert loaded.render([USER], CHAT) == 'yes'
  assert loaded.render([USER], CHAT, functions) == str(functions)
  (made / 'chat_template.jinja').write_text('from the file')
  assert tokenizer.load(made).render([USER], CHAT) == 'from the file'


def test_chat_is_refused_without_a_chat_template(folder):
  loaded = tokenizer.load(folder(chat_template=None))
  with pytest.raises(
    InputError,
    match=r"config\.prompt\.template='chat' needs a chat template, but .*/tokenizer\.json has none",
  ):
    loaded.render([USER], CHAT)


@pytest.mark.parametrize(
  ('template', 'reason'),
  [
    ('{{ raise_exception("roles must alternate") }}', 'roles must alternate'),
    ('{% if %}', 'Expected an expression'),
    ('{{ messages.append(1) }}', "access to attribute 'append'"),  # the sandbox
  ],
)
def test_error_names_a_failing_template(folder, template, reason):
  loaded = tokenizer.load(folder(chat_template=template))
  message = f'the chat template of .* fails \\(.*{reason}.*\\) on messages with the roles user\\.'
  with pytest.raises(InputError, match=message):
    loaded.render([USER], CHAT)


def test_plain_prompts_are_lines_without_system_messages():
  messages = [SYSTEM, Message('user', '1+2'), Message('assistant', '3'), Message('user', '3+4')]
  assert prompt.render(messages, PLAIN) == '1+2\n3\n3+4\n'


def test_the_paper_prompt_asks_for_reasoning_and_a_box_and_opens_the_think_section():
  rendered = prompt.render([USER], PAPER)
  assert rendered == f'{prompt.SYSTEM}\nUser: 1 < 2 & "3"?\nAssistant: <think>\n'
  assert all(tag in prompt.SYSTEM for tag in ('<think>', '</think>', r'\boxed{}'))


def test_the_configs_system_prompt_is_added_if_the_data_has_none():
  config = prompt.PromptConfig('paper', system='Yours.')
  assert prompt.render([USER], config).startswith('Yours.\nUser: ')
  assert prompt.render([SYSTEM, USER], config).startswith(' Be brief.\n\nUser: ')


def test_the_paper_prompt_uses_the_chat_template_and_keeps_a_system_message(folder):
  loaded = tokenizer.load(folder())
  assert loaded.render([SYSTEM, USER], PAPER) == loaded.render([SYSTEM, USER], CHAT) + '<think>\n'
  with_system = [Message('system', prompt.SYSTEM), USER]
  assert loaded.render([USER], PAPER) == loaded.render(with_system, CHAT) + '<think>\n'


def test_a_think_section_is_not_opened_twice(folder):
  loaded = tokenizer.load(folder(chat_template="{{ messages[1].content + '<think>\n' }}"))
  assert loaded.render([USER], PAPER) == '1 < 2 & "3"?<think>\n'


def test_prompts_without_a_chat_template_start_with_the_begin_token(folder):
  """Llama 3's base models were trained with it. Its chat templates add it themselves."""
  path = folder(bos_token='<|endoftext|>')
  model = tokenizers.Tokenizer.from_file(str(path / 'tokenizer.json'))
  model.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)]
  )
  model.save(str(path / 'tokenizer.json'))
  loaded = tokenizer.load(path)
  assert loaded.encode(loaded.render([USER], PLAIN))[:2] == [0, *loaded.encode('1')]
  assert loaded.render([USER], CHAT).startswith('<|im_start|>')


# ---- Text after a model turn ----

SAID = 'Two.'


@pytest.mark.parametrize('name', ['plain', 'chat', 'paper', 'paper_without_template'])
def test_the_text_after_a_turn_is_the_same_as_in_the_whole_conversation(name, folder):
  """Plain prompts differ by a newline after the turn, because an end token ends the turn."""
  config = prompt.PromptConfig(name.partition('_')[0])
  loaded = tokenizer.load(folder(chat_template=None) if 'without' in name else folder())
  begin, answer, more = [SYSTEM, USER], Message('assistant', SAID), [MORE, USER]
  whole = loaded.render([*begin, answer, *more], config)
  following = prompt.following(more, config, loaded.chat)
  before = loaded.render(begin, config)
  if name == 'plain':
    assert before + f'{SAID}\n' + following == whole
  else:
    # Later prompts do not repeat the think tag at the beginning of the turn.
    assert before.removesuffix(prompt.THINK) + SAID + following == whole


def test_a_template_that_omits_earlier_turns_is_refused(folder):
  loaded = tokenizer.load(folder(chat_template='{{ messages[-1].content }}'))
  with pytest.raises(InputError, match='omits earlier assistant turns'):
    prompt.following([MORE], CHAT, loaded.chat)


def test_tools_are_in_the_system_message_if_the_template_ignores_them(folder):
  template = '{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}'
  loaded = tokenizer.load(folder(chat_template=template))
  tool = {'type': 'function', 'function': {'name': 'add'}}
  config = prompt.PromptConfig(template='chat', system='Be brief.')
  text = loaded.render([USER], config, [tool])
  assert (
    text.startswith('system: Be brief.\n\nYou may call functions.') and json.dumps(tool) in text
  )
  assert text.endswith(f'|user: {USER.content}|') and text.count('system:') == 1
  *_, example = re.findall(r'<tool_call>.*?</tool_call>', text, re.DOTALL)
  assert tools.calls_of(example)[0].name == 'a function'


def test_a_chat_template_receives_the_tools(folder):
  loaded = tokenizer.load(folder(chat_template='{{ tools | length if tools else "none" }}'))
  assert loaded.render([USER], CHAT) == 'none'
  assert loaded.render([USER], CHAT, [{'type': 'function'}]) == '1'
  assert loaded.render([USER], PAPER, [{'type': 'function'}]) == '1<think>\n'


@pytest.mark.parametrize('config', [PLAIN, CHAT, PAPER])
def test_tools_without_a_chat_template_are_refused(config):
  with pytest.raises(InputError, match=r"environment\.tools: .*\.template='\w+' with .* does not"):
    prompt.render([USER], config, tools=[{'type': 'function'}])
