"""The smallest program of a worker: it does what a text says, and replies with its process id."""

import os

from exgrpo_jax.workers import server
from tests.helpers import misbehaving


def load(setup, say):
  del setup, say  # it runs no user's code

  def answer(text):
    misbehaving.act(text)
    word, _, length = text.partition(' ')
    return {'pid': os.getpid(), 'text': 'x' * int(length) if word == 'long' else ''}

  return {}, answer


if __name__ == '__main__':
  server.serve(load)
