"""Recognises which column of a data set holds what: known sets, and names in common use.

`recognize` alone decides, from the names of the columns, whatever file or data set they come from.
A public data set is one entry of KNOWN_SETS.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from exgrpo_jax.errors import InputError

# In place of an answer: in NuminaMath and sets made of it, and where a missing value became text.
NO_ANSWERS = ('proof', 'notfound', 'nan', 'null', '<na>')
# Columns in common use; of the first and of the second line a set must have no more than one.
_QUESTIONS = ('question', 'problem', 'prompt', 'messages')
_ANSWERS = ('answer', 'final_answer')
_SOLUTION = 'solution'


class Fields(NamedTuple):
  """The columns that the user names; '' leaves it to `recognize`."""

  question: str
  answer: str
  solution: str
  default_kind: str  # how answers are compared where a row does not say it
  of_spec: bool = False  # the data spec names them, so they are meant for this data alone


@dataclasses.dataclass(frozen=True)
class Layout:
  """The columns of a data set by meaning; 'a.b' is the field b of a column a of structs."""

  name: str  # of the set, for people
  question: str  # text, or chat messages
  known_by: tuple[str, ...] = ()  # columns that are all there in a known set; others may be, too
  answer: str = ''  # '' takes it from the solution, or from the assistant's last turn
  solution: str = ''  # worked; '' where there is none
  worked: bool = False  # the solution is never the answer alone: that is in a box or after ####
  source: str = ''  # '' is the file's name
  style: str = ''  # verl's reward_model.style
  proofs: tuple[str, ...] = ()  # columns that say 'proof' where there is no answer to check
  bulky: tuple[str, ...] = ()  # columns that no reward reads, and that are too large to keep
  row: str = ''  # has the other columns of the row, as JSON; '' where they stand beside these

  def describe(self) -> str:
    """One line that says how a row is read."""
    solution = f"'{self.solution}'" if self.solution else "the assistant's last turn"
    taken = f'the last box of {solution}' if self.worked else f'{solution}, or its last box'
    answer = f"'{self.answer}'" if self.answer else taken
    named = {'solution': self.solution, 'source': self.source}
    others = ''.join(f", {key} '{name}'" for key, name in named.items() if name)
    return f"{self.name}: question '{self.question}', answer {answer}{others}"


_NUMINA: Any = {
  'question': 'problem',
  'answer': 'answer',
  'solution': 'solution',
  'source': 'source',
  'proofs': ('problem_type', 'question_type'),
}
# The first of which `known_by` is there is taken, so the more special ones come first.
KNOWN_SETS = (
  PREFILTERED := Layout(
    'prefiltered',  # what `data prefilter` writes
    known_by=('prompt', 'reward_model', 'solution', 'columns', 'pass_rate'),
    question='prompt',
    answer='reward_model.ground_truth',
    solution='solution',
    source='data_source',
    style='reward_model.style',
    row='columns',
  ),
  Layout(
    'DAPO-Math-17k, processed',
    known_by=('prompt', 'solution', 'source_prompt'),
    question='prompt',
    answer='solution',
    source='data_source',
    bulky=('source_prompt',),
  ),
  Layout(
    "verl's columns",
    known_by=('prompt', 'reward_model'),
    question='prompt',
    answer='reward_model.ground_truth',
    source='data_source',
    style='reward_model.style',
    bulky=('target',),  # OpenR1-Math-46k's solutions by R1
  ),
  Layout(
    'OpenR1-Math-220k',
    known_by=('problem', 'solution', 'answer', 'generations'),
    **_NUMINA,
    bulky=('generations', 'messages'),
  ),
  Layout('NuminaMath-1.5', known_by=('problem', 'solution', 'answer', 'problem_type'), **_NUMINA),
  Layout(
    'MATH-500',
    known_by=('problem', 'solution', 'answer', 'unique_id'),
    question='problem',
    answer='answer',
    solution='solution',
  ),
  Layout(
    'DeepMath-103K',
    known_by=('question', 'final_answer', 'r1_solution_1'),
    question='question',
    answer='final_answer',
    solution='r1_solution_1',
    bulky=('r1_solution_1', 'r1_solution_2', 'r1_solution_3'),
  ),
  Layout(
    'MATH',
    known_by=('problem', 'solution', 'level', 'type'),
    question='problem',
    solution='solution',
    worked=True,
  ),
  Layout(
    'NuminaMath-CoT',
    known_by=('source', 'problem', 'solution', 'messages'),
    question='problem',
    solution='solution',
    worked=True,
    source='source',
    bulky=('messages',),
  ),
)


def recognize(columns: Sequence[str], fields: Fields, place: str) -> Layout:
  """How the rows of a set with these columns are read; what `fields` says comes first.

  Args:
    columns: the names of all columns.
    fields: what the user says of them.
    place: the file or data spec, for error messages.

  Raises:
    InputError: a column that the user names is not there, or nothing says which is the question
      or the answer.
  """
  known = next((known for known in KNOWN_SETS if set(known.known_by) <= set(columns)), None)
  if known is PREFILTERED and not fields.of_spec:
    return PREFILTERED  # `fields` are of the file that was filtered
  # Rows may lack the solutions that the settings name, which are of all data.
  named_fields = fields._asdict()
  for key in ('question', 'answer', 'solution') if fields.of_spec else ('question', 'answer'):
    named = named_fields[key]
    if named and not {named, named.partition('.')[0]} & set(columns):
      if fields.of_spec:
        raise InputError(
          f"{place}: no field '{named}', which the data spec names. It has: {quote(columns)}."
        )
      # The same settings are of benchmarks in verl's columns beside training data with its own.
      if not (known and known.style):
        raise InputError(no_field(place, named, columns, key))
      fields = fields._replace(**{key: ''})
  layout = known or _by_common_names(columns, fields, place)
  answer = fields.answer or layout.answer or ('answer' if 'answer' in columns else '')
  return dataclasses.replace(
    layout,
    question=fields.question or layout.question,
    answer=answer,
    solution=fields.solution or (layout.solution if layout.solution != answer else ''),
    worked=layout.worked and not answer,
    source=layout.source if layout.source in columns else '',
  )


def _by_common_names(columns: Sequence[str], fields: Fields, place: str) -> Layout:
  question = fields.question or _only(_QUESTIONS, columns, 'question', place)
  answer = fields.answer or _only(_ANSWERS, columns, 'answer', place)
  solution = _SOLUTION if _SOLUTION in columns else ''
  if not question:
    raise InputError(_unknown(place, columns, 'question', _QUESTIONS))
  if not (answer or solution or fields.solution or fields.question or question == 'messages'):
    raise InputError(no_answer(place, columns))
  named = [name for name in (question, answer, fields.solution or solution) if name]
  return Layout(
    f'columns {" and ".join(dict.fromkeys(named))}',
    question=question,
    answer=answer,
    solution=solution,
    # TRL's `solution`, beside a prompt, may be the answer alone; that of a problem is worked.
    worked=not answer and question in ('problem', 'messages'),
  )


def _only(names: Sequence[str], columns: Sequence[str], key: str, place: str) -> str:
  """The one of `names` that is a column, '' where none is."""
  found = [name for name in names if name in columns]
  if len(found) > 1:
    raise InputError(
      f'{place}: {quote(found)} could each be the {key} (has: {quote(columns)}); set '
      f'config.data.{key}_field to one of them, or end the data spec in {{{key}=COLUMN}}.'
    )
  return found[0] if found else ''


def _unknown(place: str, columns: Sequence[str], key: str, names: Sequence[str]) -> str:
  return (
    f'{place}: no column is known to be the {key} (has: {quote(columns)}); set '
    f'config.data.{key}_field, or end the data spec in {{{key}=COLUMN}}. Without it one of '
    f'{quote(names)} is read, or the columns of a known set: '
    f'{", ".join(known.name for known in KNOWN_SETS)}.'
  )


def check_distinct(names: Sequence[str], place: str) -> None:
  """Refuses names of which one stands for several values; columns without a name may be many."""
  for name, count in collections.Counter(names).items():
    if name and count > 1:
      raise InputError(
        f"{place}: '{name}' is there {count} times (has: {quote(names)}), and only the last would "
        'be read; rename or delete the others.'
      )


def no_field(place: str, field: str, columns: Sequence[str], key: str) -> str:
  """The error message if `field`, which config.data.<key>_field may set, is not in `columns`."""
  return (
    f"{place}: no field '{field}' (has: {quote(columns)}); set config.data.{key}_field, or end the "
    f'data spec in {{{key}=COLUMN}}.'
  )


def no_answer(place: str, columns: Sequence[str]) -> str:
  """The error message where none of `columns` has the answer."""
  return _unknown(place, columns, 'answer', (*_ANSWERS, _SOLUTION))


def quote(names: Sequence[str]) -> str:
  """The names as a list in a message."""
  return ', '.join(f"'{name}'" for name in names) or 'nothing'
