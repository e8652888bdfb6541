"""A position in a list of tokens, and the steps that every part of the parser takes there."""

from collections.abc import Sequence

from exgrpo_jax.grading.answers.tokens import Token
from exgrpo_jax.grading.answers.tree import Tree

_MAX_DEPTH = 40  # of nested brackets and sums


class UnreadableError(ValueError):
  """The text is not mathematics that the parser understands."""


_END = Token('end', '', spaced=False)


class Cursor:
  """Base of the parser: each method of a subclass reads one construct and stops after it."""

  def __init__(self, tokens: Sequence[Token]) -> None:
    self._tokens = list(tokens)
    self._at = 0
    self._depth = 0  # of nesting
    self._bars = 0  # absolute values open here, where '|' closes one instead of opening another

  def at_end(self) -> bool:
    """Whether all tokens have been read."""
    return self._at >= len(self._tokens)

  def peek(self) -> Token:
    """The next token, not yet read; of kind 'end' after the last."""
    return _END if self.at_end() else self._tokens[self._at]

  def _advance(self) -> Token:
    token = self.peek()
    self._at += 1
    return token

  def _next_is(self, *texts: str) -> bool:
    """Whether the next token is one of these marks or commands."""
    token = self.peek()
    return token.kind in ('mark', 'command') and token.text in texts

  def _accept(self, *texts: str) -> str:
    """Reads the next token if it is one of these marks or commands; '' where it is not."""
    return self._advance().text if self._next_is(*texts) else ''

  def _next_is_mark(self, text: str) -> bool:
    r"""Like `_next_is`, but '{' is only the brace that groups, not the command '\{' of a set."""
    token = self.peek()
    return token.kind == 'mark' and token.text == text

  def _integer_is_next(self) -> bool:
    return self.peek().kind == 'number' and self.peek().text.isdecimal()

  def _expect(self, kind: str, text: str) -> None:
    """Reads exactly this token; raises UnreadableError at any other."""
    token = self._advance()
    if token.kind != kind or token.text != text:
      raise UnreadableError(f'expected {text!r}, not {token.text!r}')

  def _split_digit(self) -> str:
    r"""Reads the first digit of an integer, which is all that LaTeX takes in 'x_12'."""
    digits = self.peek().text
    self._tokens[self._at] = Token('number', digits[1:], spaced=False)
    return digits[0]

  def _enter(self) -> None:
    """Counts a level of nesting, which bounds the recursion; the caller decrements `_depth`."""
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise UnreadableError('nested too deeply')

  def _put_back(self, start: int, tree: Tree) -> None:
    """Replaces the tokens read since `start` by one that holds their tree.

    Reading them again instead would take time exponential in the nesting.
    """
    self._tokens[start : self._at] = [Token('tree', '', spaced=False, tree=tree)]
    self._at = start
