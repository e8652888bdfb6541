"""What embedded tasks have in common: records, their TFDS builder, and how responses are read."""

import abc
import collections
import hashlib
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow_datasets as tfds

Record = dict[str, Any]  # as described by `record_features`

# Not \d, which matches the digits of every script. Bounded, since int() raises over 4,300 digits.
NUMBER = '(?:0|[1-9][0-9]{0,17})'
_BOX = re.compile(rf'\\boxed\{{({NUMBER})\}}')


def record_features() -> tfds.features.FeaturesDict:
  """The TFDS features of a question on disk: the fields of datatypes.Question except `row`."""
  text = tfds.features.Text()
  return tfds.features.FeaturesDict(
    {
      'messages': tfds.features.Sequence({'role': text, 'content': text}),
      'answer': text,
      'kind': text,
      'solution': text,
      'source': text,
    }
  )


class RecordBuilder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
  """The records of `rows`, in their order; a subclass has `name` and VERSION."""

  @abc.abstractmethod
  def rows(self) -> Mapping[str, Iterable[Record]]:
    """Split name -> records, the same on every call."""

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self, features=record_features(), description=self.__doc__, disable_shuffling=True
    )  # a question's row is its position in the generator, so the order must be kept

  def _split_generators(
    self, dl_manager: tfds.download.DownloadManager
  ) -> dict[str, Iterable[tuple[int, Record]]]:
    del dl_manager  # nothing to download
    return {name: self._generate_examples(rows) for name, rows in self.rows().items()}

  def _generate_examples(self, rows: Iterable[Record]) -> Iterator[tuple[int, Record]]:
    return enumerate(rows)


def configs_of(file: str) -> list[tfds.core.BuilderConfig]:
  """A builder's only config, named after a hash of the task's file.

  So changing a constant there prepares the data again instead of silently reading the old data.
  """
  return [
    tfds.core.BuilderConfig(name=hashlib.sha256(pathlib.Path(file).read_bytes()).hexdigest()[:16])
  ]


def read_steps(response: str, step: re.Pattern[str]) -> tuple[list[re.Match[str]], int] | None:
  """The steps of a response, which white space separates, and the number in the box after them.

  None where a step does not match `step`, or no box is last.
  """
  *written, last = response.split() or ['']
  matches = [step.fullmatch(text) for text in written]
  steps = [match for match in matches if match]
  box = _BOX.fullmatch(last)
  return (steps, int(box[1])) if box and len(steps) == len(matches) else None


def guess_rate(answers: Sequence[str]) -> float:
  """The accuracy, in [0, 1], of always giving the most common of `answers`.

  That is what a model can earn without reading the question.

  Raises:
    ValueError: `answers` is empty.
  """
  return max(collections.Counter(answers).values()) / len(answers)
