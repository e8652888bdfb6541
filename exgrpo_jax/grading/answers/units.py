"""Names of units of measurement, and which of them mean the same unit."""

import re

# One unit a line, the name it is compared by first.
_SYNONYMS = """
cm centimeter centimeters centimetre centimetres
mm millimeter millimeters millimetre millimetres
km kilometer kilometers kilometre kilometres
m meter meters metre metres
in inch inches
ft foot feet
yd yard yards
mi mile miles
kg kilogram kilograms
g gram grams
mg milligram milligrams
lb lbs pound pounds
oz ounce ounces
s sec secs second seconds
min mins minute minutes
h hr hrs hour hours
day days
week weeks
month months
year years yr yrs
degree degrees deg
radian radians rad
dollar dollars usd
cent cents
euro euros
yuan
l liter liters litre litres
ml milliliter milliliters
hz hertz
mph
kph
unit units
"""
_CANONICAL = {
  name: names.split()[0] for names in _SYNONYMS.strip().split('\n') for name in names.split()
}
# Units recognised without \text{…}: one letter is a variable there, and 'in' a word.
UNITS = frozenset(name for name in _CANONICAL if len(name) > 1 and name != 'in')
_POWER_WORD = re.compile(r'\b(square|sq|cubic)\.? (\w+)')


def normalize_unit(name: str) -> str:
  """One spelling of a unit: 'square centimeters' and 'cm^2' give 'cm^2', 'units' gives ''."""
  name = name.lower().replace(' per ', '/').replace('{', '').replace('}', '')
  name = _POWER_WORD.sub(lambda m: f'{m[2]}^{3 if m[1] == "cubic" else 2}', name)
  parts: list[str] = re.findall(r'[a-z]+|[^a-z\s.]+', name)
  unit = ''.join(_CANONICAL.get(part, part.removesuffix('s')) for part in parts)
  return '' if unit.startswith('unit') else unit
