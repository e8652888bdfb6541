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


LETTERS = r'\begin{pmatrix}a&b\\c&d\end{pmatrix}'
SHEAR = r'\begin{pmatrix}1&1\\0&1\end{pmatrix}'


@pytest.mark.parametrize(
  ('text', 'truth'),
  [
    (f'{LETTERS}^T', r'\begin{pmatrix}a&c\\b&d\end{pmatrix}'),
    (f'{LETTERS}^2', r'\begin{pmatrix}a^2+bc&ab+bd\\ac+cd&bc+d^2\end{pmatrix}'),
    (f'{LETTERS}^{{-1}}', r'\frac{1}{ad-bc}\begin{pmatrix}d&-b\\-c&a\end{pmatrix}'),
    (f'{SHEAR}^{{-2}}', r'\begin{pmatrix}1&-2\\0&1\end{pmatrix}'),
    (f'{SHEAR}^{{3}}{COLUMN}', '(7,2)'),
    (r'[1,2]^\top', '(1,2)'),
    (r'\begin{pmatrix}1&2\end{pmatrix}^{\mathrm{T}}', '(1,2)'),
  ],
  ids=['transposed', 'square', 'inverse', 'negative', 'product', 'vector', 'row'],
)
def test_powers_of_matrices_with_letters(text, truth):
  assert equal(text, truth, 'math') and equal(truth, text, 'math')


@pytest.mark.parametrize(
  'text',
  [
    r'\begin{pmatrix}1&2\\2&4\end{pmatrix}^{-1}',  # singular
    f'{SHEAR}^{{1/2}}',
    f'{SHEAR}^{{999999999}}',
    f'{SHEAR}^n',
    f'{COLUMN}^2',
    f'{LETTERS}^2',
  ],
)
def test_other_powers_of_matrices_are_not_computed(text):
  assert equal(text, text, 'math')
  assert not equal(text, SHEAR, 'math') and not equal(SHEAR, text, 'math')


@pytest.mark.parametrize(
  'text',
  [f'{COLUMN}+{ROW}', f'1+{COLUMN}', f'{COLUMN}{COLUMN}', f'{COLUMN}{COLUMN}{COLUMN}'],
  ids=['sum', 'sum_with_a_number', 'product', 'three'],
)
def test_matrices_whose_shapes_do_not_match_have_no_value(text):
  assert not equal(text, COLUMN, 'math')
