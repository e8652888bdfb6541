"""What counts as a code block."""

import pytest

from exgrpo_jax.grading.code_blocks import has_code_block


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('```python\nprint(1)\n```', True),
    ('Let us compute it.\n\n  ```\nx = 1', True),  # indented, and cut before its end
    ('1. first\n\t```py\n', True),
    ('no code', False),
    ('', False),
    ('the function `f`, ``g`` and ```h``` in a line', False),
    ('``\n`', False),
  ],
)
def test_a_line_that_begins_with_three_backticks_is_a_code_block(text, expected):
  assert has_code_block(text) == expected
