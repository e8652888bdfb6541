"""Writes docs/configuration.md from the dataclasses that check a configuration.

python docs/configuration.py

It also copies the tables of exgrpo_jax/counterparts.md into docs/coming_from.md. The pages are
checked in, so you can read them in the repository. Tests compare them with the output of this file.
"""

import dataclasses
import inspect
import pathlib
import re
import typing
from collections.abc import Iterator
from typing import Any

from exgrpo_jax.config import OURS
from exgrpo_jax.experiment.settings import RunConfig

PAGE = pathlib.Path(__file__).with_name('configuration.md')
COMING_FROM = PAGE.with_name('coming_from.md')
COUNTERPARTS = PAGE.parents[1] / 'exgrpo_jax' / 'counterparts.md'

_HEAD = """\
# Configuration

<!-- Written by docs/configuration.py from the code; change it there, then renew this page. -->

Look up any setting: its type, range, default and meaning.
[Running](running.md#how-do-i-write-my-own-config) shows how to write your own config.

A config file describes a run. Pass its path (`--config=configs/arithmetic.py`) or just its name
(`--config=arithmetic`). Override any setting on the command line:

```bash
exgrpo train --config=configs/smoke.py --workdir=/tmp/smoke \\
    --config.replay.ratio=0.25 --config.seed=3
```

- **Defaults** are in [configs/base.py](../configs/base.py), from which every other config
  starts. They are the paper's values where it gives them.
- **Origin.** Parentheses after a default say where it comes from: the paper, or
  [the authors' code](authors.md): their script, or verl's defaults where the script sets nothing.
  A default without parentheses is ours.
- **Allowed.** Square brackets include the endpoint of an interval, and parentheses exclude it. Text
  is shown in quotes, which you don't need on the command line.
- **Checks.** An unknown name, a value of the wrong type and a value outside its range are refused
  before anything is computed. The message names the key and what is allowed. Constraints
  between settings are checked too. For example, `optimizer.minibatches` must divide
  `rollout.questions`.
"""


@dataclasses.dataclass(frozen=True)
class Section:
  """The settings of one dataclass, without nested dataclasses."""

  path: str  # dotted, '' for the top
  cls: type

  def fields(self) -> Iterator[tuple[dataclasses.Field, Any]]:
    """Yield (field, type) of each setting."""
    types = typing.get_type_hints(self.cls)
    for field in dataclasses.fields(self.cls):
      if not dataclasses.is_dataclass(types[field.name]):
        yield field, types[field.name]


def sections(cls: type, path: str = '') -> Iterator[Section]:
  """Yield the section of `cls` and of every dataclass in it, in the order of the fields."""
  yield Section(path, cls)
  types = typing.get_type_hints(cls)
  for field in dataclasses.fields(cls):
    if dataclasses.is_dataclass(types[field.name]):
      yield from sections(types[field.name], f'{path}.{field.name}'.lstrip('.'))


def keys(cls: type = RunConfig) -> set[str]:
  """Return the dotted name of every setting and of every section."""
  names = set()
  for section in sections(cls):
    prefix = f'{section.path}.' if section.path else ''
    names |= {section.path, *(f'{prefix}{field.name}' for field, _ in section.fields())}
  return names - {''}


def page(cls: type) -> str:
  """Return the page of a whole configuration as Markdown."""
  return '\n'.join([_HEAD, *(_section(section) for section in sections(cls))])


def _section(section: Section) -> str:
  prefix = section.path and f'{section.path}.'
  lines = [f'## {section.path or "The run"}', '', _introduction(section.cls), '']
  lines += ['| setting | type | allowed | default | meaning |', '| --- | --- | --- | --- | --- |']
  for field, kind in section.fields():
    origin = field.metadata['origin']
    cells = [
      f'`{prefix}{field.name}`',
      _type_name(kind),
      _allowed(field.metadata['allowed']),
      f'`{field.default!r}`' + (f' ({_escape(origin)})' if origin != OURS else ''),
      _escape(field.metadata['meaning']),
    ]
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join([*lines, ''])


def _introduction(cls: type) -> str:
  """Return the first sentence of the docstring, if any, and a link to the file."""
  doc = inspect.getdoc(cls) or ''
  if doc.startswith(f'{cls.__name__}('):  # dataclass's default for a missing one
    doc = ''
  file = '/'.join(cls.__module__.split('.')) + '.py'
  link = f'Code: [{file}](../{file}).'
  summary = _escape(' '.join(doc.partition('\n\n')[0].split()))
  return f'{summary} {link}'.strip()


def _type_name(kind: Any) -> str:
  if typing.get_origin(kind) is tuple:
    return f'tuple of {typing.get_args(kind)[0].__name__}'
  return kind.__name__


def _allowed(allowed: Any) -> str:
  if allowed is None:
    return ''
  if isinstance(allowed, str):
    return f'`{allowed}`'
  return ', '.join(f'`{choice!r}`' for choice in allowed)


def _escape(text: str) -> str:
  """Escape text so that Markdown shows it literally, also in a table; `code` stays code."""
  parts = re.split(r'(`[^`]*`)', text)
  return ''.join(
    part if part.startswith('`') else re.sub(r'([\\*_|\[\]])', r'\\\1', part).replace('<', '&lt;')
    for part in parts
  )


def coming_from() -> str:
  """Return docs/coming_from.md with the current tables of counterparts.md."""
  before, first, _, last, after = re.split(
    r'(<!-- Written .* -->\n|<!-- The end .* -->\n)', COMING_FROM.read_text(encoding='utf-8')
  )
  return f'{before}{first}\n{COUNTERPARTS.read_text(encoding="utf-8")}\n{last}{after}'


def main() -> None:
  """Write both pages again."""
  PAGE.write_text(page(RunConfig), encoding='utf-8')
  COMING_FROM.write_text(coming_from(), encoding='utf-8')
  print(f'wrote {PAGE} and {COMING_FROM}')


if __name__ == '__main__':
  main()
