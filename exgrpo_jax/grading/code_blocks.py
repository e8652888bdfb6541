"""Code blocks in what a model writes.

Models write code that they cannot run and take their own word for what it prints; the paper calls
what follows from replaying that a snowball (arXiv:2510.02245).
"""

import re

_FENCE = re.compile(r'^[^\S\n]*```', re.MULTILINE)


def has_code_block(text: str) -> bool:
  """Whether some line begins with ```, after white space at most; closed or not."""
  return _FENCE.search(text) is not None
