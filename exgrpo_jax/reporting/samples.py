"""Some of a step's responses as rows that a person reads: what samples/ holds."""

from typing import Any

from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Experience


def sample_rows(tokenizer: Tokenizer, experience: Experience, count: int) -> list[dict[str, Any]]:
  """Of each group the first response and what it replays; at most `count` rows."""
  plan, rows = experience.plan, []
  for question, prompt, group, replayed, judged in zip(
    plan.questions,
    plan.prompts,
    experience.responses,
    experience.replays,
    experience.verdicts,
  ):
    if len(rows) >= count:
      break
    shared = {
      'row': question.row,
      'question': tokenizer.decode(prompt),
      'answer': question.answer,
    }
    rows.append(
      shared
      | {
        'response': tokenizer.decode(group[0].tokens),
        'reward': judged[0].reward,
        'correct': judged[0].correct,
        'outcome': judged[0].outcome,
        'truncated': group[0].truncated,
        'replayed': False,
      }
    )
    if replayed:
      rows.append(
        shared
        | {
          'response': tokenizer.decode(replayed.tokens),
          'reward': replayed.reward,
          'correct': True,
          'replayed': True,
          'written_in_step': replayed.step,
        }
      )
  return rows[:count]
