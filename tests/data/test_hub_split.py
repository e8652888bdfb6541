"""Which files of a data set's repository are a split, and that they become its questions."""

import io
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from exgrpo_jax.data import hub_split, questions, training_rows
from exgrpo_jax.errors import InputError
from tests.helpers import hub_server

README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: [main/test.parquet]
- config_name: socratic
  data_files: socratic/*.parquet
---
# Sums
"""


@pytest.fixture
def served(tmp_path):
  with hub_server.serving() as server, server.in_use(tmp_path / 'huggingface'):
    yield server


def parquet(*numbers):
  """A file in verl's columns: n+0, of source 'openai/gsm8k', so that its kind is known."""
  rows = [
    {
      'data_source': 'openai/gsm8k',
      'prompt': [{'role': 'user', 'content': f'{n}+0'}],
      'reward_model': {'ground_truth': str(n), 'style': 'rule'},
    }
    for n in numbers
  ]
  content = io.BytesIO()
  pq.write_table(pa.Table.from_pylist(rows), content)
  return content.getvalue()


def jsonl(*numbers):
  return '\n'.join(json.dumps({'question': f'{n}+0', 'answer': str(n)}) for n in numbers)


def answers(config, spec):
  return [question.answer for question in questions.load(config, spec)]


def test_a_split_of_several_files_is_read_in_their_order_and_sliced(served, config):
  served.add(
    'dataset',
    'me/sums',
    {
      'README.md': README,
      'main/train-00001-of-00002.parquet': parquet(3, 4),
      'main/train-00000-of-00002.parquet': parquet(0, 1, 2),
      'main/test.parquet': parquet(5),
      'main/train-old/00000.parquet': parquet(6),
    },
  )
  assert answers(config, 'me/sums:main:train') == ['0', '1', '2', '3', '4']
  assert not any(path.endswith('main/test.parquet') for path in served.fetched())
  assert answers(config, 'me/sums:main:train[2:4]') == ['2', '3']
  assert answers(config, 'me/sums:main:test') == ['5']


LAYOUTS = {
  'shards_in_data': ({'data/train-00000-of-00001-a1b2.parquet': parquet(1)}, 'default:train'),
  'shards_in_a_config': ({'main/train-00000-of-00001.parquet': parquet(1)}, 'main:train'),
  'folder_of_a_split': ({'main/train/0000.parquet': parquet(1)}, 'main:train'),
  'the_only_config': ({'main/train.parquet': parquet(1)}, 'train'),
  'a_file_at_the_top': ({'test.jsonl': jsonl(1), 'train.jsonl': jsonl(2)}, 'test'),
  'two_formats': ({'train.jsonl': jsonl(1), 'train.parquet': parquet(1)}, 'train'),
  'head_without_configs': ({'README.md': '---\na: 1\n---', 'train.parquet': parquet(1)}, 'train'),
  'head_of_patterns': (
    {
      'README.md': '---\nconfigs:\n- data_files: "**/*.jsonl"\n---',
      'a/b.jsonl': jsonl(1),
      'a/c.parquet': parquet(2),
    },
    'train',
  ),
  'head_that_is_no_yaml': ({'README.md': '---\n}\n---', 'train.parquet': parquet(1)}, 'train'),
}


@pytest.mark.parametrize('name', LAYOUTS)
def test_files_are_found_where_they_usually_lie(served, config, name):
  files, split = LAYOUTS[name]
  served.add('dataset', 'me/sums', files)
  assert answers(config, f'me/sums:{split}') == ['1']


def test_other_formats_are_read_as_the_hub_has_converted_them(served, config):
  sums = served.add('dataset', 'me/sums', {'train.arrow': ''})
  sums.branch('refs/convert/parquet', {'default/train/0000.parquet': parquet(1)})
  assert answers(config, 'me/sums:train') == ['1']
  with pytest.raises(InputError, match='the data set me/sums@main has no files that can be read'):
    questions.load(config, 'me/sums@main:train')  # that is another branch


def test_the_source_of_rows_that_name_none_is_the_data_set(served, config):
  served.add('dataset', 'me/sums', {'train.jsonl': jsonl(1), 'test.parquet': parquet(1)})
  assert questions.load(config, 'me/sums:train')[0].source == 'me/sums'
  assert questions.load(config, 'me/sums:test')[0].source == 'openai/gsm8k'


def test_a_revision_is_read_where_one_is_named(served, config):
  sums = served.add('dataset', 'me/sums', {'train.jsonl': jsonl(1)})
  sums.branch('v2', {'train.jsonl': jsonl(2)})
  assert answers(config, 'me/sums@v2:train') == ['2']
  assert answers(config, 'me/sums:train') == ['1']


def test_prepare_reads_a_split_too(served):
  served.add('dataset', 'me/sums', {'data/train-0-of-1.parquet': parquet(1)})
  (shard,) = training_rows.shards(['me/sums:train'])
  assert shard.is_verl


SEVERAL = {'README.md': README, 'main/train-0-of-1.parquet': b'', 'main/test.parquet': b''}


@pytest.mark.parametrize(
  ('spec', 'files', 'message'),
  [
    ('me/smus:train', SEVERAL, r'there is no folder me/smus, and http://\S+ has no data set'),
    ('me/sums:main:trian', SEVERAL, r"no 'main:trian' \(has: main: train, test; socratic: nothing"),
    ('me/sums:man:train', SEVERAL, r"me/sums has no 'man:train' \(has: main: train, test"),
    ('me/sums:train', SEVERAL, r'several configs; name one, as in me/sums:CONFIG:SPLIT \(main: tr'),
    ('me/sums:train', {'train.arrow': ''}, r'no files that can be read \(.*\), nor has'),
    ('me/sums@v2:train', SEVERAL, r"me/sums has no revision 'v2'; http://\S+/datasets/"),
    (
      'me/sums',
      SEVERAL,
      r'write me/sums:CONFIG:SPLIT, .*, or me/sums:SPLIT .* \(main: train, test; socratic: nothing',
    ),
    ('me/sums[:4]', {'train.jsonl': b''}, r'me/sums:SPLIT where .* \(default: train\)'),
    ('me/smus', SEVERAL, r'me/smus:CONFIG:SPLIT, .* there are is not known: there is no folder'),
  ],
)
def test_what_is_not_there_is_refused_with_what_is(served, config, spec, files, message):
  served.add('dataset', 'me/sums', files)
  with pytest.raises(InputError, match=message) as refused:
    questions.load(config, spec)
  assert '\n' not in str(refused.value)


@pytest.mark.usefixtures('served')
def test_offline_the_form_of_a_spec_and_local_files_are_named(config, monkeypatch):
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(InputError, match=r'me/sums:CONFIG:SPLIT, as in openai/gsm8k:main:train, or '):
    questions.load(config, 'me/sums')
  with pytest.raises(
    InputError, match=r'; unset it, or name local \.jsonl or \.parquet files in it'
  ):
    questions.load(config, 'me/sums:main:train')


@pytest.mark.parametrize(
  ('base', 'parts'),
  [
    ('openai/gsm8k:main:train', ('openai/gsm8k', '', 'main', 'train')),
    ('me/sums@refs/pr/1:train', ('me/sums', 'refs/pr/1', '', 'train')),
    *((base, None) for base in ('arithmetic:train', 'me/sums', 'a/b/c:train', 'a/b:c:d:e', 'a/b:')),
  ],
)
def test_a_spec_has_a_name_perhaps_a_config_and_a_split(base, parts):
  found = hub_split.parse(base)
  assert parts == (found and (*found.repository[1:], found.config, found.split))


def test_what_tfds_knows_is_read_from_tfds(served, config):
  """Its names have the same form: math_dataset/algebra__linear_1d:train."""
  served.add('dataset', 'math_dataset/sums', {'train.jsonl': jsonl(1)})
  with pytest.raises(InputError, match=re.escape("TFDS could not prepare 'math_dataset/sums'")):
    questions.load(config, 'math_dataset/sums:train')
  with pytest.raises(
    InputError, match=re.escape('a split of the Hub (owner/name:config:split) or ')
  ):
    questions.load(config, 'math_dataset/sums')
  assert served.requests == []
