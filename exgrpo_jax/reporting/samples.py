"""Some of a step's responses as rows that a person reads: what samples/ holds."""

from typing import Any

import numpy as np

from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Experience
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose


def sample_rows(
  tokenizer: Tokenizer, experience: Experience, count: int, seed: int
) -> list[dict[str, Any]]:
  """Of groups drawn at random a random response and what the group replays; at most `count` rows.

  Prompts and responses have their special tokens, so that a chat template can be checked. The draw
  depends on the seed and the step alone.
  """
  plan, rows = experience.plan, []
  rng = randomness.generator(seed, Purpose.SAMPLES, plan.step)
  for group in rng.permutation(len(plan.questions)):
    if len(rows) >= count:
      break
    question, responses = plan.questions[group], experience.responses[group]
    shared = {
      'row': question.row,
      'question': tokenizer.decode(plan.prompts[group], special=True),
      'answer': question.answer,
    }
    chosen = rng.integers(len(responses))
    verdict = experience.verdicts[group][chosen]
    rows.append(
      shared
      | _written(tokenizer, responses[chosen].tokens)
      | {
        'reward': verdict.reward,
        'correct': verdict.correct,
        'outcome': verdict.outcome,
        'replayed': False,
      }
    )
    if replayed := experience.replays[group]:
      rows.append(
        shared
        | _written(tokenizer, replayed.tokens)
        | {
          'reward': replayed.reward,
          'correct': True,  # only successes are stored
          'outcome': 'correct',
          'replayed': True,
          'written_in_step': replayed.step,
        }
      )
  return rows[:count]


def _written(tokenizer: Tokenizer, tokens: np.ndarray) -> dict[str, Any]:
  """A response's text, and whether it was cut at the limit, so lacks an end token."""
  return {
    'response': tokenizer.decode(tokens, special=True),
    'truncated': int(tokens[-1]) not in tokenizer.eos_ids,
  }
