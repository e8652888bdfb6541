import pytest

from exgrpo_jax.grading.answers.equality import equal

COLUMN = r'\begin{pmatrix}1\\2\end{pmatrix}'
ROW = r'\begin{pmatrix}3&4\end{pmatrix}'


@pytest.mark.parametrize(
  ('text', 'truth'),
  [
    (f'{COLUMN}+{COLUMN}', '(2,4)'),
    (f'-{COLUMN}', '(-1,-2)'),
    (rf'\frac{{{COLUMN}}}{{2}}', '(1/2,1)'),
    (f'2{COLUMN}', '(2,4)'),
    (f'{ROW}{COLUMN}', r'\begin{pmatrix}11\end{pmatrix}'),
    (f'{COLUMN}{ROW}', r'\begin{pmatrix}3&4\\6&8\end{pmatrix}'),
    (f'{COLUMN}{ROW}{COLUMN}', '(11,22)'),
  ],
  ids=['sum', 'negative', 'quotient', 'multiple', 'inner', 'outer', 'three'],
)
def test_matrices_are_computed(text, truth):
  assert equal(text, truth, 'math')


@pytest.mark.parametrize(
  'text',
  [f'{COLUMN}+{ROW}', f'1+{COLUMN}', f'{COLUMN}{COLUMN}', f'{COLUMN}{COLUMN}{COLUMN}'],
  ids=['sum', 'sum_with_a_number', 'product', 'three'],
)
def test_matrices_whose_shapes_do_not_match_have_no_value(text):
  assert not equal(text, COLUMN, 'math')
