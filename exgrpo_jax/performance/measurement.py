"""What a benchmark measures: named values, and the limits that some of them are held to."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Measurement(NamedTuple):
  """One value of a benchmark."""

  name: str
  value: float
  unit: str
  meaning: str = ''  # what the name and the unit do not say
  limit: float | None = None  # of a check, in the value's unit

  @property
  def passes(self) -> bool | None:
    """Whether the value is at most its limit, which NaN is not; None without a limit."""
    return None if self.limit is None else self.value <= self.limit


def write(path: str, measurements: Sequence[Measurement]) -> None:
  """Writes measurements to a JSON file."""
  with open(path, 'w') as file:
    json.dump([measurement._asdict() for measurement in measurements], file)


def read(path: str) -> list[Measurement]:
  """What `write` wrote; none where there is no such file."""
  if not os.path.exists(path):
    return []
  with open(path) as file:
    return [Measurement(**fields) for fields in json.load(file)]


def print_lines(measurements: Sequence[Measurement]) -> None:
  """Prints a line for each measurement."""
  for name, value, unit, meaning, _ in measurements:
    print(f'{name:<20}{rounded(value):>10} {unit:<9} {meaning}'.rstrip(), flush=True)


def failures(measurements: Sequence[Measurement]) -> list[str]:
  """What does not pass its check, in words."""
  return [
    f'{measured.name} {rounded(measured.value)} {measured.unit} must be at most {measured.limit:g}'
    for measured in measurements
    if measured.passes is False
  ]


def rounded(value: float) -> str:
  """A value as it is printed, to three digits or whole."""
  return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'


def write_facts(path: str, facts: Mapping[str, Any]) -> None:
  """Writes what a benchmark ran on to a JSON file."""
  with open(path, 'w') as file:
    json.dump(facts, file)


def read_facts(path: str) -> dict[str, Any]:
  """What `write_facts` wrote; empty where there is no such file."""
  if not os.path.exists(path):
    return {}
  with open(path) as file:
    return json.load(file)


def print_facts(facts: Mapping[str, Any]) -> None:
  """Prints a line for each."""
  for name, value in facts.items():
    print(f'{name:<20} {value}', flush=True)
