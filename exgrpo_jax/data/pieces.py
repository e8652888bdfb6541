"""The text of each token of a response, for whoever shows it token by token.

Decoded alone, a token is not what it is in its place: a character may be spread over several of
them, and decoders drop a space at the start. So each is decoded after a token before it, and the
text of a character goes to the token that completes it.
"""

from collections.abc import Callable, Sequence

_UNFINISHED = '\ufffd'  # what decoders write for bytes that are no character, or not yet one
_LONGEST = 4  # bytes of a character, so tokens as well


def of(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[str]:
  """The text of each token, in time linear in the tokens; joined they are the decoded whole.

  Tokens before the last one of a character have ''. Where bytes are not UTF-8, U+FFFD may be
  more or fewer than in the whole, or be with the next character.
  """
  texts = [''] * len(ids)
  context: list[int] = []
  group: list[int] = []  # the tokens of a character that may still be completed
  for place, id_ in enumerate(ids):
    group.append(id_)
    while group:
      before, text = decode(context), decode(context + group)
      # It does not start so where bytes are no UTF-8, which may change how those before are read.
      own = text.removeprefix(before) if text.startswith(before) else decode(group)
      if not own.endswith(_UNFINISHED):
        texts[place] = own
        # After white space alone some decoders would take what follows for the start of the text.
        if own.replace(_UNFINISHED, '').strip() or not context:
          context = group
        group = []
      elif len(group) < _LONGEST and place + 1 < len(ids):
        break
      else:  # the first one is part of no character
        texts[place + 1 - len(group)] = decode(group[:1])
        group = group[1:]
  return texts
