"""Prompts: lines, the paper's, and chat templates as transformers renders them."""

import json
import pathlib
import shutil

import pytest
import tokenizers

from exgrpo_jax.data import prompt, tokenizer
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError
from tests.helpers.paths import CHECKPOINTS

STORED = CHECKPOINTS / 'qwen2_tied'
SYSTEM, USER = Message('system', ' Be brief.\n'), Message('user', '1 < 2 & "3"?')
ASSISTANT, MORE = Message('assistant', 'Yes: 1 < 2.'), Message('user', 'Zürich, \U0001f600?')

# Of Llama 3.1's form: a begin token, a date, headers around roles, contents without outer spaces.
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


@pytest.fixture
def folder(tmp_path):
  """A function that gives a checkpoint's folder with changes to its tokenizer_config.json."""

  def make(jinja=None, **changes):
    copy = pathlib.Path(shutil.copytree(STORED, tmp_path / 'copy'))
    path = copy / 'tokenizer_config.json'
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    if jinja:
      (copy / 'chat_template.jinja').write_text(jinja)
    return copy

  return make


# What apply_chat_template of transformers 5.23 gives for these templates.
CHATS = {
  'qwen_user': (
    None,
    [USER],
    (
      '<|im_start|>system\nYou are of help.<|im_end|>\n<|im_start|>user\n1 < 2 & "3"?<|im_end|>\n'
      '<|im_start|>assistant\n'
    ),
  ),
  'qwen_turns': (
    None,
    [SYSTEM, USER, ASSISTANT, MORE],
    (
      '<|im_start|>system\n Be brief.\n<|im_end|>\n<|im_start|>user\n1 < 2 & "3"?<|im_end|>\n'
      '<|im_start|>assistant\nYes: 1 < 2.<|im_end|>\n<|im_start|>user\nZürich, \U0001f600?'
      '<|im_end|>\n<|im_start|>assistant\n'
    ),
  ),
  'llama_user': (
    LLAMA,
    [USER],
    (
      '<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nDate: 1 Jan 2024\n\n<|eot_id|>'
      '<|start_header_id|>user<|end_header_id|>\n\n1 < 2 & "3"?<|eot_id|>'
      '<|start_header_id|>assistant<|end_header_id|>\n\n'
    ),
  ),
  'llama_turns': (
    LLAMA,
    [SYSTEM, USER, ASSISTANT, MORE],
    (
      '<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nDate: 1 Jan 2024\n\nBe brief.'
      '<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n1 < 2 & "3"?<|eot_id|>'
      '<|start_header_id|>assistant<|end_header_id|>\n\nYes: 1 < 2.<|eot_id|>'
      '<|start_header_id|>user<|end_header_id|>\n\nZürich, \U0001f600?<|eot_id|>'
      '<|start_header_id|>assistant<|end_header_id|>\n\n'
    ),
  ),
  'macros': (
    MACROS,
    [SYSTEM, USER, ASSISTANT, MORE],
    ('[user] "1 < 2 & \\"3\\"?" 2\n[assistant] "Yes: 1 < 2." 3\n[user] "Zürich, \U0001f600?" 4\n3'),
  ),
}


@pytest.mark.parametrize('name', CHATS)
def test_chat_templates_render_as_in_transformers(name, folder):
  template, messages, expected = CHATS[name]
  words = tokenizer.load(
    folder(**({'chat_template': template} if template else {}), bos_token='<|endoftext|>')
  )
  assert words.render(messages, 'chat') == expected


@pytest.mark.parametrize('name', CHATS)
def test_chat_templates_render_as_in_transformers_live(name, folder):
  transformers = pytest.importorskip('transformers')
  pytest.importorskip('torch')
  template, messages, _ = CHATS[name]
  path = folder(**({'chat_template': template} if template else {}), bos_token='<|endoftext|>')
  theirs = transformers.AutoTokenizer.from_pretrained(path)
  rendered = theirs.apply_chat_template(
    [message._asdict() for message in messages], tokenize=False, add_generation_prompt=True
  )
  words = tokenizer.load(path)
  assert words.render(messages, 'chat') == rendered
  assert words.encode(rendered) == theirs.encode(rendered, add_special_tokens=False)


def test_a_template_file_comes_before_the_one_in_the_settings(folder):
  assert tokenizer.load(folder(jinja='from the file')).render([USER], 'chat') == 'from the file'


def test_of_several_templates_the_default_is_taken(folder):
  several = [{'name': 'tool_use', 'template': 'no'}, {'name': 'default', 'template': 'yes'}]
  assert tokenizer.load(folder(chat_template=several)).render([USER], 'chat') == 'yes'


def test_a_checkpoint_without_a_template_refuses_chat(folder):
  words = tokenizer.load(folder(chat_template=None))
  with pytest.raises(
    InputError,
    match="config.prompt.template='chat' needs a chat template, and .*/tokenizer.json has none",
  ):
    words.render([USER], 'chat')


@pytest.mark.parametrize(
  'template, reason',
  [
    ('{{ raise_exception("roles must alternate") }}', 'roles must alternate'),
    ('{% if %}', 'Expected an expression'),
    ('{{ messages.append(1) }}', "access to attribute 'append'"),  # the sandbox
    ('{{ strftime_now("%Y") }}', "'strftime_now' is undefined"),
  ],
)
def test_a_template_that_fails_is_named(folder, template, reason):
  words = tokenizer.load(folder(chat_template=template))
  message = f'the chat template of .* fails \\(.*{reason}.*\\) on messages with the roles user;'
  with pytest.raises(InputError, match=message):
    words.render([USER], 'chat')


@pytest.mark.parametrize(
  'messages, expected',
  [
    pytest.param([Message('user', '1+2')], '1+2\n', id='question'),
    pytest.param(
      [Message('system', 'Think.'), Message('user', '1+2')], '1+2\n', id='system_left_out'
    ),
    pytest.param(
      [Message('user', '1+2'), Message('assistant', '3'), Message('user', '3+4')],
      '1+2\n3\n3+4\n',
      id='several_turns',
    ),
  ],
)
def test_plain_prompts_are_lines(messages, expected):
  assert prompt.render(messages, 'plain') == expected


def test_the_papers_prompt_asks_for_thought_and_a_box_and_begins_the_thought():
  rendered = prompt.render([USER], 'paper')
  assert rendered == f'{prompt.SYSTEM}\nUser: 1 < 2 & "3"?\nAssistant: <think>\n'
  assert all(word in prompt.SYSTEM for word in ('<think>', '</think>', r'\boxed{}'))


def test_the_papers_prompt_uses_the_chat_template_and_keeps_a_system_message(folder):
  words = tokenizer.load(folder())
  assert words.render([SYSTEM, USER], 'paper') == words.render([SYSTEM, USER], 'chat') + '<think>\n'
  own = [Message('system', prompt.SYSTEM), USER]
  assert words.render([USER], 'paper') == words.render(own, 'chat') + '<think>\n'


def test_what_is_no_chat_begins_with_the_token_that_the_tokenizer_puts_first(folder):
  """Llama 3's base models saw it before every text; their chat templates write it themselves."""
  path = folder(bos_token='<|endoftext|>')
  model = tokenizers.Tokenizer.from_file(str(path / 'tokenizer.json'))
  model.post_processor = tokenizers.processors.TemplateProcessing(
    single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)]
  )
  model.save(str(path / 'tokenizer.json'))
  words = tokenizer.load(path)
  assert words.encode(words.render([USER], 'plain'))[:2] == [0, *words.encode('1')]
  assert words.render([USER], 'chat').startswith('<|im_start|>')
