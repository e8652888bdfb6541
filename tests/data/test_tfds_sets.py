"""Data sets by their names in TFDS."""

import dataclasses
import subprocess
import sys
import tempfile

import numpy as np
import pytest
import tensorflow_datasets as tfds

from exgrpo_jax.data import questions
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import InputError


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


class BrokenQa(TinyQa):
  """A dataset registered with TFDS that cannot be prepared."""

  def _generate_examples(self):
    raise ImportError('Failed to import TensorFlow.\nPlease install it.')


def test_a_tfds_name(config, tmp_path, monkeypatch):
  (tmp_path / 'temporary').mkdir()
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path / 'temporary'))
  assert list(questions.load(config, 'tiny_qa:validation[1:3]')) == [
    questions.Question(
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


def test_error_names_a_missing_feature_and_an_invalid_row(config):
  missing = dataclasses.replace(config, answer_field='label')
  with pytest.raises(
    InputError, match=r"tiny_qa:validation: no field 'label' \(has: 'question', 'answer', 'hint'\)"
  ):
    questions.load(missing, 'tiny_qa:validation')
  invalid = dataclasses.replace(config, question_field='hint')
  with pytest.raises(InputError, match="tiny_qa:validation: row 0: field 'hint' is ''"):
    questions.load(invalid, 'tiny_qa:validation')[0]


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    ('tiny_qa:train', r"tiny_qa has no split 'train' \(has: validation\)"),
    ('no_such_data:train', r"'no_such_data' is neither an embedded task \(arithmetic, .*\) no"),
    ('no such name:train', r"TFDS could not prepare 'no such name' as array_record \(.*failed"),
    (
      'broken_qa:validation',
      r"prepare 'broken_qa' as array_record \(ImportError: Failed to import TensorFlow\.\)\. Its",
    ),
  ],
)
def test_what_tfds_cannot_prepare_is_refused(config, spec, message):
  with pytest.raises(InputError, match=message):
    questions.load(config, spec)


def test_neither_tensorflow_nor_tfds_is_imported_for_a_file(config, jsonl):
  path = jsonl({'question': '1+1', 'answer': '2'})
  script = f"""
import sys
from exgrpo_jax.data import questions
assert questions.load(questions.{config!r}, {path!r})[0].answer == '2'
assert not {{'tensorflow', 'tensorflow_datasets'}} & set(sys.modules)
"""
  subprocess.run([sys.executable, '-c', script], check=True)
