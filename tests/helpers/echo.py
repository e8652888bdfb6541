"""The smallest program of a worker: it does what a text says, and replies with its process id."""

import os

from exgrpo_jax.workers import server, user_code
from tests.helpers import misbehaving


def load(setup, say):
  """Import a user's code, where the setup names some."""
  for key, spec in setup.items():
    with user_code.refusing(key, spec):
      say(key, spec, 'importing it')
      user_code.load(spec)

  def answer(text):
    misbehaving.act(text)
    word, _, length = text.partition(' ')
    return {'pid': os.getpid(), 'text': 'x' * int(length) if word == 'long' else ''}

  return {}, answer


if __name__ == '__main__':
  server.serve(load)
