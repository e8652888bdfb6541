"""The one exception that a user can mend."""

import re


class InputError(ValueError):
  """Something the user gave cannot be used; the message says all they need.

  Commands print it and exit with status 2; it never hides a bug of ours. It is one line, also where
  it quotes an error of several.
  """

  def __init__(self, message: str) -> None:
    super().__init__(re.sub(r'\s*\n\s*', ' ', message.strip()))
