"""Tests of datasets by name: the Hub files of a split, and datasets that TFDS prepares."""

import dataclasses
import io
import re
import subprocess
import sys
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import tensorflow_datasets as tfds
from huggingface_hub import constants

from exgrpo_jax.data import named_sets, questions, store
from exgrpo_jax.datatypes import Message, Question
from exgrpo_jax.errors import InputError
from tests.helpers import hub_server

# ---- The Hub ----


@pytest.fixture
def served(tmp_path):
  with hub_server.serving() as server, server.in_use(tmp_path / 'huggingface'):
    yield server


def parquet(*numbers, **columns):
  """Return a parquet file with the questions n+0."""
  rows = [{'question': f'{n}+0', 'answer': str(n), **columns} for n in numbers]
  content = io.BytesIO()
  pq.write_table(pa.Table.from_pylist(rows), content)
  return content.getvalue()


def answers(config, spec):
  return [question.answer for question in questions.load(config, spec)]


def test_the_files_of_a_split_are_read_in_order_and_sliced(served, config):
  served.add(
    'dataset',
    'me/sums',
    {
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


@pytest.mark.parametrize(
  ('path', 'split'),
  [
    ('data/train-00000-of-00001-a1b2.parquet', 'default:train'),
    ('main/train-00000-of-00001.parquet', 'main:train'),
    ('main/train/0000.parquet', 'main:train'),
    ('main/train.parquet', 'train'),  # the only config
    ('test.parquet', 'test'),
  ],
)
def test_files_are_found_at_the_usual_paths(served, config, path, split):
  others = {
    'README.md': '# Sums',
    'train.jsonl': '',
    'a/b/train.parquet': b'',
    'my-old.parquet': b'',
  }
  served.add('dataset', 'me/sums', {path: parquet(1), **others})
  assert answers(config, f'me/sums:{split}') == ['1']


@pytest.mark.parametrize(
  'own', ['train.arrow', 'train.jsonl', 'sums/2024/all.parquet', 'x.parquet']
)
def test_other_files_are_read_from_the_hubs_parquet_conversion(served, config, own):
  sums = served.add('dataset', 'me/sums', {own: ''})
  sums.branch('refs/convert/parquet', {'default/train/0000.parquet': parquet(1)})
  assert answers(config, 'me/sums:train') == ['1']
  with pytest.raises(InputError, match='the dataset me/sums@main has no'):
    questions.load(config, 'me/sums@main:train')  # the conversion is on another branch


def test_rows_without_a_source_get_the_data_sets_name(served, config):
  served.add('dataset', 'me/sums', {'train.parquet': parquet(1)})
  assert questions.load(config, 'me/sums:train')[0].source == 'me/sums'
  named = parquet(1, solution='', problem_type='', problem='1', source='mine')
  served.add('dataset', 'me/named', {'train.parquet': named})
  spec = 'me/named:train{question=question}'
  assert questions.load(config, spec)[0].source == 'mine'


def test_a_spec_can_name_a_revision(served, config):
  sums = served.add('dataset', 'me/sums', {'train.parquet': parquet(1)})
  sums.branch('v2', {'train.parquet': parquet(2)})
  assert answers(config, 'me/sums@v2:train') == ['2']
  assert answers(config, 'me/sums:train') == ['1']


SEVERAL = dict.fromkeys(
  ('main/train-0-of-1.parquet', 'main/test.parquet', 'socratic/train.parquet'), b''
)
THERE = 'main: test, train; socratic: train'


@pytest.mark.parametrize(
  ('spec', 'files', 'message'),
  [
    ('me/smus:train', SEVERAL, r'there is no folder me/smus, and http\S+ has no public dataset'),
    ('me/sums:main:trian', SEVERAL, rf"me/sums has no 'main:trian' \(has: {THERE}"),
    ('me/sums:man:train', SEVERAL, rf"me/sums has no 'man:train' \(has: {THERE}"),
    ('me/sums:train', SEVERAL, rf'several configs. Name one, as in me/sums:CONFIG:SPLIT \({THERE}'),
    (
      'me/sums:train',
      {'train.jsonl': ''},
      r'no parquet files .* not converted it to parquet \(refs/convert/parquet\)\. Only parquet is '
      r'read from the Hub, so download its files from http://\S+/datasets/me/sums, convert',
    ),
    (
      'me/sums@main:train',
      {'train.jsonl': ''},
      'me/sums@main has no parquet .* only the default branch. Remove the revision, or download',
    ),
    ('me/sums@v2:train', SEVERAL, r"me/sums has no revision 'v2'\. .* http://\S+/datasets/"),
    ('me/sums', SEVERAL, rf'Write me/sums:CONFIG:SPLIT, .*, or me/sums:SPLIT .* \({THERE}\)'),
    ('me/sums[:4]', {'train.parquet': b''}, r'me/sums:SPLIT if .* \(default: train\)'),
    ('me/sums', {'train.jsonl': ''}, r'has no parquet splits\)'),
    ('me/smus', SEVERAL, r'me/smus:CONFIG:SPLIT, .* could not be listed: there is no folder'),
  ],
)
def test_a_missing_split_is_refused_with_the_existing_ones(served, config, spec, files, message):
  served.add('dataset', 'me/sums', files)
  with pytest.raises(InputError, match=message) as refused:
    questions.load(config, spec)
  assert '\n' not in str(refused.value)


@pytest.mark.usefixtures('served')
def test_offline_errors_show_the_spec_format_and_suggest_local_files(config, monkeypatch):
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(InputError, match=r'me/sums:CONFIG:SPLIT, as in openai/gsm8k:main:train, or '):
    questions.load(config, 'me/sums')
  with pytest.raises(
    InputError, match=r'\. Unset HF_HUB_OFFLINE, use local \.jsonl or \.parquet files instead'
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
def test_hub_specs_are_parsed(base, parts):
  found = named_sets.parse(base)
  assert parts == (found and (*found.repository[1:], found.config, found.split))


def test_tfds_names_take_precedence(served, config):
  """TFDS names can have the same form as Hub names: math_dataset/algebra__linear_1d:train."""
  served.add('dataset', 'math_dataset/sums', {'train.parquet': parquet(1)})
  with pytest.raises(InputError, match=re.escape("TFDS could not prepare 'math_dataset/sums'")):
    questions.load(config, 'math_dataset/sums:train')
  with pytest.raises(
    InputError, match=re.escape('a split of a Hub dataset (owner/name:config:split) or ')
  ):
    questions.load(config, 'math_dataset/sums')
  assert served.requests == []


# ---- TFDS ----


class TinyQa(tfds.core.GeneratorBasedBuilder):
  """A dataset registered with TFDS under the name tiny_qa."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self,
      disable_shuffling=True,
      features=tfds.features.FeaturesDict(
        {'question': tfds.features.Text(), 'answer': np.int64, 'hint': tfds.features.Text()}
      ),
    )

  def _split_generators(self, dl_manager):
    del dl_manager  # nothing to download
    return {'validation': self._generate_examples()}

  def _generate_examples(self):
    for i in range(5):
      yield i, {'question': f'Was ist {i} größer?', 'answer': i, 'hint': 'x' if i else ''}


class AgainQa(TinyQa):
  """A dataset registered with TFDS in which some rows cannot be checked."""

  def _generate_examples(self):
    for i, (asked, answer) in enumerate([('1+1', 2), ('0+3', 3), ('1+1', 3)]):
      yield i, {'question': asked, 'answer': answer, 'hint': ''}


class BrokenQa(TinyQa):
  """A dataset registered with TFDS that cannot be prepared."""

  def _generate_examples(self):
    raise ImportError('Failed to import TensorFlow.\nPlease install it.')


class FarQa(TinyQa):
  """A dataset registered with TFDS whose server cannot be reached."""

  def _generate_examples(self):
    requests.get('http://127.0.0.1:9/rows.jsonl', timeout=9)


def test_a_tfds_split_is_loaded(config, tmp_path, monkeypatch):
  (tmp_path / 'temporary').mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
  assert list(questions.load(config, 'tiny_qa:validation[1:3]')) == [
    Question(
      row=row,
      messages=(Message('user', f'Was ist {number} größer?'),),
      answer=str(number),
      kind='math',
      solution='',
      source='tiny_qa',
      columns={'question': f'Was ist {number} größer?', 'answer': number, 'hint': 'x'},
    )
    for row, number in enumerate([1, 2])
  ]
  assert not list((tmp_path / 'temporary').iterdir())


def test_tfds_rows_are_prepared_once_and_checked_like_file_rows(config, monkeypatch):
  with pytest.raises(
    InputError, match=r'again_qa:validation: 2 rows .* first is at again_qa:validation: row 0 '
  ):
    questions.load(config, 'again_qa:validation')
  dropping = dataclasses.replace(config, on_unverifiable='drop')
  (left,) = questions.load(dropping, 'again_qa:validation')
  assert left.answer == '3'
  monkeypatch.setattr(store, '_records', None)
  assert len(questions.load(dropping, 'again_qa:validation')) == 1


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('tiny_qa:train', r"tiny_qa has no split 'train' \(has: validation\)"),
    ('no_such_data:train', r"'no_such_data' is neither a built-in task \(arithmetic, .*\) no"),
    ('no such name:train', r"TFDS could not prepare 'no such name' as array_record \(.*failed"),
    (
      'broken_qa:validation',
      r"prepare 'broken_qa' as array_record \(ImportError: Failed to import TensorFlow\.\)\. Its",
    ),
    ('far_qa:validation', r"prepare 'far_qa' as array_record \(ConnectionError: "),
  ],
)
def test_data_that_tfds_cannot_prepare_is_refused(config, spec, message):
  with pytest.raises(InputError, match=message) as refused:
    questions.load(config, spec)
  assert refused.value.status == (1 if spec.startswith('far') else 2)


@pytest.mark.full
def test_neither_tensorflow_nor_tfds_is_imported_for_a_file(config, jsonl):
  path = jsonl({'question': '1+1', 'answer': '2'})
  script = f"""
import sys
from exgrpo_jax.data import questions
assert questions.load(questions.{config!r}, {path!r})[0].answer == '2'
assert not {{'tensorflow', 'tensorflow_datasets'}} & set(sys.modules)
"""
  subprocess.run([sys.executable, '-c', script], check=True)
