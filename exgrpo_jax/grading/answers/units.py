"""Names of units of measurement, and which of them are the same."""

import re

_SAME = """
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
_ALL = {name: names.split()[0] for names in _SAME.strip().split('\n') for name in names.split()}
# Those that are no letters or words of their own.
UNITS = {name: same for name, same in _ALL.items() if len(name) > 1 and name != 'in'}
_SQUARE = re.compile(r'\b(square|sq|cubic)\.? (\w+)')


def same_unit(name: str) -> str:
  """One name for a unit: 'square centimeters' and 'cm^2' are 'cm^2', 'units' are ''."""
  name = name.lower().replace(' per ', '/').replace('{', '').replace('}', '')
  name = _SQUARE.sub(lambda m: f'{m[2]}^{3 if m[1] == "cubic" else 2}', name)
  words = re.findall(r'[a-z]+|[^a-z\s.]+', name)
  named = ''.join(_ALL.get(word, word.removesuffix('s')) for word in words)
  return '' if named.startswith('unit') else named
