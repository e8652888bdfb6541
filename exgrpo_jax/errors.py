"""The one exception that is the user's to mend."""


class InputError(ValueError):
  """Something the user gave cannot be used; the message is all they need.

  Commands print it as one line and exit; it never hides a bug of ours.
  """
