"""Rewards of a run in tests: what they are made of is known of every response, and simple."""


def weighed_length(length, level, scale=0.01, unknown=None):
  """Of the response's tokens and a column of its row."""
  assert unknown is None  # what no row has keeps its default
  return scale * length * level


def of_question(question, messages, tokens, truncated, max_response):
  """Takes a batch; the first number of the question, the tokens and the limit."""
  assert [turns[-1]['content'] for turns in messages] == question
  numbers = zip(question, tokens, truncated, max_response)
  return [
    int(asked.split('+')[0]) + sum(ids) / 1000 + is_cut / limit
    for asked, ids, is_cut, limit in numbers
  ]


def of_first_token(tokens):
  """Five rewards, so far apart that what is added to their deviation makes no difference."""
  return 1000 * (tokens[0] % 5)
