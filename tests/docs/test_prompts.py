"""Documents ask a policy what its task asks: it knows nothing else."""

import itertools
import json
import re

import pytest

from exgrpo_jax.data.tasks import chains, sums
from exgrpo_jax.data.tasks.catalogue import TASKS
from exgrpo_jax.experiment import config_files
from tests.docs import documents
from tests.helpers.paths import REPOSITORY

_NOTEBOOK = REPOSITORY / 'examples' / 'library.ipynb'
# A run is in a folder of its config's name, as after the README's first command.
_COMMAND = re.compile(r"generate[^`]*--checkpoint=/tmp/(\w+)[^`]*--prompt='([^']*)'")
_CONFIG = re.compile(r"load_config\('(\w+)'")
_SAMPLED = re.compile(r"sample\(\w+, \['([^']*)'\]")
_JUDGED = re.compile(r"""judge\(.*, ['"](\d+)['"]\)""")


def terms(text):
  """'48+3-9' -> [48, 3, -9]; none where there is anything else between them."""
  found = re.findall(r'[+-]?\d+', text)
  return list(map(int, found)) if ''.join(found) == text else []


def is_question(task, text):
  """Whether the questions that the task trains on could have this one among them."""
  start, *others = terms(text) or [0]
  if task == 'arithmetic':
    low, high = sums.ARITHMETIC_START_RANGE
    split, digits = sums.ARITHMETIC_SPLITS['train'], others
    fits = low <= start <= high and split.min_digits <= len(others) <= split.max_digits
  else:
    split, digits = chains.SPLITS['train'], list(map(abs, others))
    totals = itertools.accumulate(others, initial=start)
    fits = split.min_terms <= len(others) <= split.max_terms and set(totals) <= set(chains.TOTALS)
    fits &= len(set(digits)) == len(digits)
  return fits and all(1 <= digit <= 9 for digit in digits)


def task_of(name):
  """Which task a config that ships trains on; '' for data of other origin."""
  task = config_files.load_config(name).data.train.partition(':')[0]
  return task if task in TASKS else ''


def code():
  """(place, text) of everything that could hold an example."""
  for path in [*documents.DOCUMENTS, *documents.PACKAGE.rglob('*.py')]:
    yield documents.place(path), path.read_text().replace('\\\n', ' ')
  cells = json.loads(_NOTEBOOK.read_text())['cells']
  yield documents.place(_NOTEBOOK), '\n'.join(''.join(cell['source']) for cell in cells)


def examples():
  """(place, config, prompt, answers) of the commands, and of the Python, that ask a run."""
  for place, text in code():
    for command in text.splitlines():
      for name, prompt in _COMMAND.findall(command):
        yield place, name, prompt, []
    for config in _CONFIG.findall(text)[:1]:
      for prompt in _SAMPLED.findall(text):
        yield place, config, prompt, _JUDGED.findall(text)


def test_what_a_policy_of_a_task_is_asked_is_a_question_of_that_task():
  found = list(examples())
  pages = {'README.md', 'docs/evaluating.md', 'docs/library.md'}
  places = {place for place, *_ in found}
  assert {*pages, 'exgrpo_jax/commands/generate.py'} < places
  assert documents.place(_NOTEBOOK) in places
  wrong = [
    (place, prompt)
    for place, config, prompt, answers in found
    if not is_question(task_of(config), prompt)
    or any(int(answer) != sum(terms(prompt)) for answer in answers)
  ]
  assert wrong == []


@pytest.mark.parametrize(
  ('task', 'text'),
  [
    ('chains', 'What is 3 + 4 - 2?'),
    ('chains', '48 + 3 - 9 + 7'),
    ('chains', '48+3-9+3'),
    ('arithmetic', '12 + 30 - 5'),
    ('arithmetic', '48+9'),
  ],
)
def test_other_forms_are_found(task, text):
  assert not is_question(task, text)
