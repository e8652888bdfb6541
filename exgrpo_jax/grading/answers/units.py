"""Units of measurement: their names, synonyms and conversions.

Units are convertible if their dimensions match, like 'km/h' and 'm/s'. Temperatures are not
converted, because their scales have different zero points. Case matters only in a prefix: 5 Mm is
not 5 mm.
"""

import functools
import re
from collections import Counter
from fractions import Fraction
from typing import NamedTuple

# One unit per line: canonical name, size, dimensions, other names. Sizes are in meters, grams,
# seconds, months, dollars and so on.
_TABLE = """
m 1 length meter meters metre metres
in 127/5000 length inch inches
ft 381/1250 length foot feet
yd 1143/1250 length yard yards
mi 201168/125 length mile miles
g 1 mass gram grams
tonne 1000000 mass tonnes
lb 45359237/100000 mass lbs pound pounds
oz 45359237/1600000 mass ounce ounces
s 1 time sec secs second seconds
min 60 time mins minute minutes
h 3600 time hr hrs hour hours
day 86400 time days
week 604800 time weeks
month 1 calendar months
year 12 calendar years yr yrs
degree 1 angle degrees deg
radian 1 radian radians rad
dollar 1 money dollars usd
cent 1/100 money cents
euro 1 euro euros
yuan 1 yuan
l 1/1000 length^3 liter liters litre litres
gallon 473176473/125000000000 length^3 gallons
quart 473176473/500000000000 length^3 quarts
pint 473176473/1000000000000 length^3 pints
acre 316160658/78125 length^2 acres
hz 1 time^-1 hertz
n 1000 mass length time^-2 newton newtons
j 1000 mass length^2 time^-2 joule joules
cal 4184 mass length^2 time^-2 calorie calories
wh 3600000 mass length^2 time^-2
ev 801088317/5000000000000000000000000 mass length^2 time^-2
w 1000 mass length^2 time^-3 watt watts
pa 1000 mass length^-1 time^-2 pascal pascals
atm 101325000 mass length^-1 time^-2 atmosphere atmospheres
psi 6894757 mass length^-1 time^-2
mol 1 amount mole moles
bit 1 information bits
byte 8 information bytes
v 1 voltage volt volts
k 1 temperature kelvin kelvins
a 1 current ampere amperes
ohm 1 ohm ohms
mph 1397/3125 length time^-1
kph 5/18 length time^-1 kmh
unit 1 unit units
"""
_DIMENSION = re.compile(
  r'(length|mass|time|calendar|angle|money|voltage|temperature|current|amount|information)'
  r'(?:\^(-?[0-9]))?'
)
# Symbols that take a prefix, and the prefixes with their names and powers of ten.
_PREFIXED = 'm g s l L N J W V A Pa Hz mol eV cal Wh B'
_PREFIXES = {'n': ('nano', -9), 'u': ('micro', -6), 'm': ('milli', -3), 'c': ('centi', -2)}
_PREFIXES |= {'k': ('kilo', 3), 'M': ('mega', 6), 'G': ('giga', 9), 'T': ('tera', 12)}


class _Unit(NamedTuple):
  name: str
  size: Fraction
  dimensions: Counter[str]


def _read_table() -> dict[str, _Unit]:
  units = {}
  for line in _TABLE.strip().split('\n'):
    name, size, *words = line.split()
    dimensions = Counter[str]()
    while words and (match := _DIMENSION.fullmatch(words[0])) and words[0] != name:
      dimensions[match[1]] += int(match[2] or 1)
      del words[0]
    dimensions = dimensions or Counter({name: 1})
    units |= dict.fromkeys((name, *words), _Unit(name, Fraction(size), dimensions))
  return units


def _add_prefixes(units: dict[str, _Unit]) -> dict[str, _Unit]:
  """Return prefixed symbols such as 'kPa', and add their long names to `units`."""
  symbols = {}
  for symbol in _PREFIXED.split():
    base = units['byte' if symbol == 'B' else symbol.lower()]
    words = [name for name, unit in units.items() if unit is base and len(name) > 3]
    for prefix, (word, power) in _PREFIXES.items():
      name = (prefix if prefix.islower() else word) + base.name
      unit = _Unit(name, base.size * Fraction(10) ** power, base.dimensions)
      symbols[prefix + symbol] = unit
      units |= dict.fromkeys((name, *(word + long_name for long_name in words)), unit)
  return symbols


_UNITS = _read_table()
# Units recognized without \text{…}. There, a single letter is a variable, and 'in' is a word.
_COMMON = ('mm', 'cm', 'km', 'mg', 'kg', 'ml', 'sq')
UNITS = frozenset(name for name in _UNITS if len(name) > 1 and name != 'in').union(_COMMON)
_WITH_PREFIX = _add_prefixes(_UNITS)
# Units that look like variables. They are recognized only after a number and a space: '5 m', but
# not '5m'.
LETTERS = frozenset('mgshlLNJWVKAB').union(_WITH_PREFIX, ('in', 'Pa', 'Hz', 'eV', 'Wh'))
# Units that can be combined in one quantity, largest first: '1 hour 30 minutes'.
_SYSTEMS = ('week day h min s', 'year month', 'mi yd ft in', 'lb oz', 'km m cm mm', 'kg g mg')
# Words that multiply the number before them.
_SCALES = {'dozen': 12, 'hundred': 100, 'gross': 144, 'thousand': 10**3, 'lakh': 10**5}
_SCALES |= {'million': 10**6, 'crore': 10**7, 'billion': 10**9, 'trillion': 10**12}
_SCALES |= {'quadrillion': 10**15}
MULTIPLIERS = {name + end: Fraction(scale) for name, scale in _SCALES.items() for end in ('', 's')}

# Words that change the number before them: '5 squared' is not 5 of some unit.
_OPERATIONS = """squared cubed factorial halves thirds fourths quarters fifths sixths sevenths
eighths ninths tenths hundredths thousandths less more above below times plus minus mod except or
to of"""
_NUMBERS = """zero one two three four five six seven eight nine ten eleven twelve fifteen twenty
thirty forty fifty"""
NUMBER_WORDS = frozenset(_NUMBERS.split())
OPERATION_WORDS = NUMBER_WORDS.union(_OPERATIONS.split())
_PER = re.compile('(?:^| )per ', re.IGNORECASE)
_POWER_WORD = re.compile(r'\b(square|sq|cubic)\.? (\w+)', re.IGNORECASE)
_DENOMINATOR = re.compile(r'/ ?\(([^()/]*)\)')
_PART = re.compile(r'([a-z]+)(?:\^(-?[0-9]))?|[ /*]')


def normalize_unit(name: str) -> str:
  """Normalize a unit: 'square centimeters' and 'cm^2' become 'cm^2', and 'units' becomes ''."""
  name = _PER.sub('/', name).replace('{', '').replace('}', '')
  name = _DENOMINATOR.sub(lambda m: '/' + re.sub(r'[ *]+', '/', m[1].strip()), name)
  name = _POWER_WORD.sub(lambda m: f'{m[2]}^{3 if m[1].lower() == "cubic" else 2}', name)
  unit = ''
  for part in re.findall(r'[A-Za-z]+|[^A-Za-z\s.]+', name):
    entry = _WITH_PREFIX.get(part) or _UNITS.get(part.lower())
    word = entry.name if entry else part.lower().removesuffix('s')
    unit += ' ' * (part.isalpha() and unit[-1:].isalnum()) + word
  return '' if unit.startswith('unit') else unit


@functools.lru_cache(maxsize=256)
def measure(unit: str) -> tuple[Fraction, dict[str, int]] | None:
  """Return a normalized unit's size and nonzero dimension exponents; None for an unknown unit."""
  size, dimensions, sign, at = Fraction(1), Counter[str](), 1, 0
  while at < len(unit):
    match = _PART.match(unit, at)
    if not match or (match[1] and match[1] not in _UNITS):
      return None
    at = match.end()
    if not match[1]:
      sign = -1 if match[0] == '/' else 1
      continue
    part, exponent = _UNITS[match[1]], sign * int(match[2] or 1)
    size *= part.size**exponent
    for dimension, power in part.dimensions.items():
      dimensions[dimension] += power * exponent
  return size, {name: power for name, power in dimensions.items() if power}


def conversion(unit: str, other: str) -> Fraction | None:
  """Return the size of one `unit`, measured in `other`; None if their dimensions differ."""
  x, y = measure(unit), measure(other)
  return x[0] / y[0] if x and y and x[1] == y[1] else None


def joined(larger: str, smaller: str, is_list: bool) -> Fraction | None:
  """Return the smaller unit's size in the larger unit; None if they do not form one quantity.

  The larger unit comes first, as in '1 hour 30 minutes'. `is_list` is True if a comma or 'and'
  separates the units, which makes '5 m, 3 cm' two answers.
  """
  units = normalize_unit(larger), normalize_unit(smaller)
  for system in _SYSTEMS[:4] if is_list else _SYSTEMS:
    names = list[str](system.split())
    if set(units) <= set(names) and names.index(units[0]) < names.index(units[1]):
      return conversion(units[1], units[0])
  return None
