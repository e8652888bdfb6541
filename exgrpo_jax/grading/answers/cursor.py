"""A place in a list of tokens, and the trees that more than one reader builds."""

from exgrpo_jax.grading.answers.tokens import Token

MAX_DEPTH = 40  # of brackets
_MAX_TREE_DEPTH = 120


class UnreadableError(ValueError):
  """The text is not mathematics that is understood here."""


_END = Token('end', '', False)


class Cursor:
  """Every method of its subclasses reads one thing and stands behind it."""

  def __init__(self, found: list[Token]):
    self._tokens, self._at, self._depth, self._bars = list(found), 0, 0, 0

  def ended(self) -> bool:
    return self._at >= len(self._tokens)

  def here(self) -> Token:
    return self._tokens[self._at] if self._at < len(self._tokens) else _END

  def _next(self) -> Token:
    token = self.here()
    self._at += 1
    return token

  def _is(self, *texts: str) -> bool:
    token = self.here()
    return token.kind in ('mark', 'command') and token.text in texts

  def _brace(self, text: str) -> bool:
    """Whether a brace that groups stands here; a command of the same name is one of a set."""
    return self.here()[:2] == ('mark', text)

  def _take(self, kind: str, text: str) -> None:
    token = self._next()
    if token[:2] != (kind, text):
      raise UnreadableError(f'{token.text!r} where {text!r} is due')

  def sign(self) -> bool:
    """Reads signs; whether they make a minus."""
    negative = False
    while self._is('+', '-'):
      negative ^= self._next().text == '-'
    return negative

  def deeper(self) -> None:
    """Counts a level of nesting; a tree is walked by recursion later."""
    self._depth += 1
    if self._depth > MAX_DEPTH:
      raise UnreadableError('too deep')

  def put_back(self, start: int, tree) -> None:
    """One token for all that was read since `start`, so that nothing is read twice."""
    self._tokens[start : self._at] = [Token('tree', tree, False)]
    self._at = start


def too_deep(tree) -> bool:
  """Whether walking the tree by recursion could exhaust the stack."""
  level = [tree]
  for _ in range(_MAX_TREE_DEPTH):
    level = [child for node in level for child in node if isinstance(child, tuple)]
    if not level:
      return False
  return True


def added(terms):
  return terms[0] if len(terms) == 1 else ('add', tuple(terms))


def multiplied(factors):
  return factors[0] if len(factors) == 1 else ('multiply', tuple(factors))


def symbols(tree) -> frozenset:
  """Names of the letters that stand for something unknown; calls count as 'f()'."""
  if not isinstance(tree, tuple) or not tree:
    return frozenset()
  if tree[0] == 'symbol':
    return frozenset() if tree[1] in ('pi', 'e', 'i') else frozenset({tree[1]})
  own = frozenset({f'{tree[1]}()'}) if tree[0] == 'call' else frozenset()
  return own.union(*(symbols(child) for child in tree if isinstance(child, tuple)))


def has_symbol(factors) -> bool:
  return bool(symbols(('list', tuple(factors))))
