"""The protocol of a study: its arms, settings and seeds, which are fixed before its first run.

A file in studies/protocols/ defines a `get_study()` that returns a `Study`. The file's docstring is
the protocol in words. The first start writes the file to protocol.json. After that, the protocol
cannot change.
"""

import collections
import dataclasses
import datetime
import difflib
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from exgrpo_jax.config import evaluate_file
from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime.workdir import check_writable, differences, write_json
from exgrpo_jax.sweeps import trials

FILE = 'protocol.json'
PROTOCOLS = pathlib.Path(__file__).parent / 'protocols'

Overrides = Mapping[str, Any]  # dotted config key -> value


@dataclasses.dataclass(frozen=True)
class Study:
  """The arms that are compared in one or more settings, each with the same seeds."""

  config: str  # the name of a config that ships with the package, or a path
  arms: Mapping[str, Overrides]  # the compared variants, by name
  settings: Mapping[str, Overrides]  # the conditions of the comparison, by name
  seeds: Sequence[int]  # the seeds of every arm in every setting
  baseline: str  # the arm with which all other arms are compared
  # The primary measure, such as 'eval/arithmetic_test_to_1000/pass@1', or one for each setting.
  measure: str | Mapping[str, str]
  smallest_difference: float  # the smallest difference that would matter, in the measure's unit
  # Compare the measure's mean over this many generated tokens from the start; 0: its last value.
  tokens: int | Mapping[str, int] = 0  # a single value, or one for each setting
  # Setting -> arm -> overrides tuned for this arm in this setting, such as its learning rate.
  tuned: Mapping[str, Mapping[str, Overrides]] = dataclasses.field(default_factory=dict)
  # A second arm with which all other arms are compared and judged separately; '': none.
  second_baseline: str = ''
  takes_off: float = 0.0  # a run takes off when its measure reaches this value; 0: not reported
  # The data spec on which each run's last policy is evaluated with `last_samples` responses per
  # question, once all runs have ended; '': none. May differ between settings.
  last_data: str | Mapping[str, str] = ''
  last_samples: int = 32
  # Steps between two gradient comparisons (alignment.py); 0: none. May differ between settings.
  align_every: int | Mapping[str, int] = 0

  @property
  def num_comparisons(self) -> int:
    """Count the comparisons between an arm and one baseline over all settings."""
    return len(self.settings) * (len(self.arms) - 1)

  def measure_of(self, setting: str) -> str:
    """Return the primary measure in a setting."""
    return _in_setting(self.measure, setting)

  def tokens_of(self, setting: str) -> int:
    """Return how many generated tokens a setting averages over, or 0 to use the last value."""
    return _in_setting(self.tokens, setting)

  def align_every_of(self, setting: str) -> int:
    """Return the number of steps between two gradient comparisons in a setting, or 0 for none."""
    return _in_setting(self.align_every, setting)

  def last_data_of(self, setting: str) -> str:
    """Return the data spec of the last policies' evaluation in a setting, or '' for none."""
    return _in_setting(self.last_data, setting)

  def overrides_of(self, setting: str, arm: str) -> list[tuple[str, Any]]:
    """List the (config key, value) overrides, in this order: setting, arm, tuned values."""
    tuned = self.tuned.get(setting, {}).get(arm, {})
    return [*self.settings[setting].items(), *self.arms[arm].items(), *tuned.items()]


def _in_setting(value: Any, setting: str) -> Any:
  """Return a field's value in a setting: the single value, or the setting's entry."""
  return value[setting] if isinstance(value, Mapping) else value


class Cell(NamedTuple):
  """A run's place in a study."""

  setting: str
  arm: str
  seed: int


class Protocol(NamedTuple):
  """A study, and the file that defines it."""

  study: Study
  words: str  # the file's docstring
  text: str  # the whole file
  name: str  # of the file and of get_study's argument, such as 'lake_6'

  @property
  def sha256(self) -> str:
    """Return the digest of the file's text."""
    return hashlib.sha256(self.text.encode()).hexdigest()


def names() -> list[str]:
  """List the names of the studies in studies/protocols/."""
  return sorted(path.stem for path in PROTOCOLS.glob('*.py') if path.stem != '__init__')


def load(given: str) -> Protocol:
  """Load a study by name or path, with get_study's argument after a colon, as in `lake:6`.

  Raises InputError if the study does not exist or cannot be run.
  """
  file, *argument = given.split(':', 1)
  path = file if file.endswith('.py') else os.fspath(PROTOCOLS / f'{file}.py')
  if not os.path.isfile(path) or file == '__init__':
    raise InputError(
      f'{given}: there is no such study. Pass a file that ends in .py, or one of these names: '
      f'{", ".join(names())}.'
    )
  returned = 'a protocol.Study, as studies/protocols/smoke.py does'
  study, words = evaluate_file(path, 'study', returned, arguments=argument, is_flag=False)
  try:
    if not isinstance(study, Study):
      raise InputError(f'get_study() must return a protocol.Study, not {study!r}.')
    if not words:
      raise InputError(
        'the study file has no docstring. Write one that states the question, the arms, the '
        'primary measure, the number of seeds and the reason for it, how the learning rate is '
        'chosen, and the stopping rule.'
      )
    _check(study)
  except InputError as error:
    raise InputError(f'{given}: {error}') from error
  text = pathlib.Path(path).read_text(encoding='utf-8')
  name = '_'.join([pathlib.Path(path).stem, *argument])
  return Protocol(study=study, words=words, text=text, name=name)


def cells(study: Study) -> dict[Cell, tuple[str, dict[str, Any]]]:
  """Return cell -> (trial name, overrides) for every run. Seeds vary fastest."""
  return {
    Cell(setting, arm, seed): (
      f'{setting},{arm},seed={seed}',
      {**dict(study.overrides_of(setting, arm)), 'seed': seed},
    )
    for setting in study.settings
    for arm in study.arms
    for seed in study.seeds
  }


def fix(protocol: Protocol, config: Mapping[str, Any], workdir: str) -> None:
  """Write protocol.json at the first start. Later, raise InputError if the protocol has changed.

  `config` contains the config file's nested values before arms and settings override them.
  """
  path = os.path.join(workdir, FILE)
  fields = dataclasses.asdict(protocol.study) | {'seeds': list(protocol.study.seeds)}
  wanted = json.loads(json.dumps({**fields, 'values': config}))
  if not os.path.exists(path):
    for name, _ in cells(protocol.study).values():
      if os.path.exists(os.path.join(workdir, name, 'config.json')):
        raise InputError(
          f"--workdir={workdir} contains the run '{name}' but no {FILE}. A protocol must be "
          'written before its runs start, so use another --workdir.'
        )
    check_writable(workdir)
    written = datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds')
    entry = {'written': written, 'sha256': protocol.sha256, 'text': protocol.text, 'study': wanted}
    write_json(path, entry)
    return
  saved = read(workdir)
  # Files from earlier versions lack newer fields, which had their default values at the time.
  defaults = dataclasses.asdict(Study('', {}, {}, (), '', '', 0.0))
  changes = [
    f'{name} was {old}, is {new}'
    for name, old, new in differences({**defaults, **saved['study']}, wanted)
  ]
  if not changes and saved['sha256'] != protocol.sha256:
    changes = [_first_difference(saved['text'], protocol.text)]
  if changes:
    raise InputError(
      f'{path} was written at {saved["written"]}, and the protocol has changed since: '
      f'{"; ".join(changes)}. A study keeps the protocol that it began with. Restore this '
      'protocol, or use another --workdir for a new study.'
    )


def read(workdir: str) -> dict[str, Any]:
  """Read 'written', 'sha256', 'text' and 'study' from protocol.json, or raise InputError."""
  path = os.path.join(workdir, FILE)
  try:
    with open(path, encoding='utf-8') as file:
      saved = json.load(file)
    if not isinstance(saved, dict) or not {'written', 'sha256', 'text', 'study'} <= set(saved):
      raise ValueError('a field is missing')
  except (OSError, ValueError) as error:
    raise InputError(
      f'{path} cannot be read as a study protocol ({error}). Restore a copy of this file, or use '
      'another --workdir.'
    ) from error
  return saved


def _check(study: Study) -> None:
  """Raise an InputError that names the field if the study cannot be run or evaluated."""
  _check_named('arms', study.arms)
  _check_named('settings', study.settings)
  _check_comparison(study)
  _check_tuned(study)
  for setting in study.settings:
    for arm in study.arms:
      count = collections.Counter(['seed', *(key for key, _ in study.overrides_of(setting, arm))])
      if twice := sorted(key for key, times in count.items() if times > 1):
        raise InputError(
          f"'{twice[0]}' is set more than once by setting '{setting}', arm '{arm}', their tuned "
          'values and the seeds. Set it only once. Except for tuned values, arms must differ in '
          'the same way in every setting.'
        )
  trials.check_names('get_study()', dict(cells(study).values()))


def _check_tuned(study: Study) -> None:
  if not isinstance(study.tuned, Mapping):
    raise InputError(f'tuned must map setting -> arm -> overrides, not {study.tuned!r}.')
  for setting, of_arms in study.tuned.items():
    if setting not in study.settings:
      raise InputError(
        f"tuned names the unknown setting '{setting}'. Use one of: {', '.join(study.settings)}."
      )
    _check_named(f"tuned['{setting}']", of_arms)
    if unknown := sorted({*of_arms} - {*study.arms}):
      raise InputError(
        f"tuned['{setting}'] names the unknown arm '{unknown[0]}'. Use one of: "
        f'{", ".join(study.arms)}.'
      )


def _check_named(field: str, named: Any) -> None:
  """Raise InputError unless `named` maps names to overrides."""
  if not isinstance(named, Mapping) or not all(isinstance(o, Mapping) for o in named.values()):
    raise InputError(f'{field} must map name -> {{dotted config key: value}}, not {named!r}.')
  if not named:
    raise InputError(f'{field} is empty. Add at least one entry.')
  for name in named:
    if not isinstance(name, str) or not name or ',' in name:
      raise InputError(
        f'{field} has the name {name!r}. Names must be non-empty text without commas.'
      )


def _check_comparison(study: Study) -> None:
  seeds = list(study.seeds) if isinstance(study.seeds, Sequence) else []
  if len(set(seeds)) < len(seeds) or len(seeds) < 2 or not all(type(s) is int for s in seeds):
    raise InputError(
      f'seeds={study.seeds!r} must be two or more distinct whole numbers, because intervals are '
      'computed over seeds.'
    )
  if study.baseline not in study.arms or len(study.arms) < 2:
    raise InputError(
      f"baseline='{study.baseline}' must be one of two or more arms: {', '.join(study.arms)}."
    )
  if study.second_baseline and study.second_baseline not in {*study.arms} - {study.baseline}:
    raise InputError(
      f"second_baseline='{study.second_baseline}' must be an arm other than the baseline: "
      f"{', '.join(arm for arm in study.arms if arm != study.baseline)}. '' means none."
    )
  for field in ('measure', 'tokens', 'align_every', 'last_data'):
    value = getattr(study, field)
    if isinstance(value, Mapping) and set(value) != set(study.settings):
      raise InputError(
        f'{field}={value!r} must have one value for each setting: {", ".join(study.settings)}.'
      )
  for setting in study.settings:
    _check_measured(study, setting)
  if type(study.last_samples) is not int or study.last_samples < 1:
    raise InputError(
      f'last_samples={study.last_samples!r} must be a whole number of at least 1, the responses '
      'per question in the evaluation on last_data.'
    )
  if not 0 <= study.takes_off < math.inf:
    raise InputError(f'takes_off={study.takes_off!r} must be a finite number of at least 0.')
  if not 0 < study.smallest_difference < math.inf:
    raise InputError(
      f'smallest_difference={study.smallest_difference!r} must be a finite number above 0, the '
      'smallest difference in the measure that would matter.'
    )


def _check_measured(study: Study, setting: str) -> None:
  """Raise InputError if a setting's measure, data spec or counts are invalid."""
  measure = study.measure_of(setting)
  if not isinstance(measure, str) or not measure.startswith('eval/'):
    raise InputError(
      f'measure={measure!r} must be the name of an evaluation, such as '
      "'eval/arithmetic_test_to_1000/pass@1'."
    )
  if not isinstance(study.last_data_of(setting), str):
    raise InputError(f"last_data={study.last_data!r} must be a data spec, or '' for none.")
  counts = {'tokens': study.tokens_of(setting), 'align_every': study.align_every_of(setting)}
  for field, count in counts.items():
    if type(count) is not int or count < 0:
      raise InputError(f'{field}={count!r} must be a whole number of at least 0.')


def _first_difference(old: str, new: str) -> str:
  lines = difflib.ndiff(old.splitlines(), new.splitlines())
  return 'its file, at ' + repr(next((line for line in lines if line[0] in '+-'), 'its line ends'))
