from fractions import Fraction

import pytest

from exgrpo_jax.grading.answers import latex, quantity
from exgrpo_jax.grading.answers.grammar import UnreadableError
from exgrpo_jax.grading.answers.tokens import normalize_spelling, tokenize


def tree(text):
  return latex.parse(tokenize(normalize_spelling(text)))


@pytest.mark.parametrize(
  'text',
  r'9^9^9^9 10^{99999} 1/0 0^0 5!!!! \sqrt{2} \pi x \infty 9^{99999}/2'.split(),  # noqa: SIM905
)
def test_an_irrational_undefined_or_huge_number_has_no_exact_value(text):
  assert quantity.exact(tree(text)) is None


@pytest.mark.parametrize(
  'text', ['2 3', '', ')', '(1', r'\foo', '1 +', r'\frac{1}', '|', '^2', '5_']
)
def test_text_that_cannot_be_parsed_is_unreadable(text):
  with pytest.raises(UnreadableError):
    tree(text)


def test_a_difference_in_the_eightieth_digit_is_seen():
  root = '1.4142135623730950488016887242096980785696718753769480731766797379907324784621'
  assert not quantity.same(tree(r'\sqrt{2}'), tree(root))
  assert not quantity.same(tree(r'10^{100}+\sqrt{2}'), tree(r'10^{100}+\sqrt{3}'))
  assert quantity.same(tree(r'10^{100}+\sqrt{8}'), tree(r'10^{100}+2\sqrt{2}'))


def test_unknowns_may_be_negative_except_those_with_a_subscript():
  assert not quantity.same(tree('|x|'), tree('x'))
  assert not quantity.same(tree(r'\sqrt{x^2}'), tree('x'))
  assert quantity.same(tree(r'\sqrt{r_0^2}'), tree('r_0'))


def test_functions_that_count_are_compared_at_integers():
  assert quantity.same(tree(r'\lceil n/2 \rceil'), tree(r'\lfloor (n+1)/2 \rfloor'))
  assert not quantity.same(tree(r'\lfloor x \rfloor'), tree('x'))


def test_proportional_means_up_to_a_constant_factor():
  line = tree('2x - y + 1')
  assert quantity.proportional(line, tree('y - 2x - 1'), positive=False)
  assert not quantity.proportional(line, tree('y - 2x - 1'), positive=True)
  assert not quantity.proportional(line, tree('x(2x - y + 1)'), positive=False)


def test_a_line_gives_its_slope_and_intercept():
  assert quantity.linear(tree('3 - x/2'), 'x') == (Fraction(-1, 2), 3)
  assert quantity.linear(tree('x^2'), 'x') is None
