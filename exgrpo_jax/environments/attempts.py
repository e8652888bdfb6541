"""Several attempts at a question: a wrong answer is told, and may be given anew."""

from exgrpo_jax.environments.environment import Messages, Observation, Task
from exgrpo_jax.grading import verifier

WRONG = 'That is not right. Try again.'
MISSING = 'I find no answer in that. Try again.'


class Attempts:
  """Judges each turn as a single one would be, tasks of reasoning_gym by their own score_answer."""

  def reset(self, task: Task, seed: int) -> Messages:
    """The prompt is that of the task."""
    del seed  # nothing is left to chance
    self._truth = verifier.Truth(task.answer, task.kind, task.columns)
    return task.messages

  def step(self, response: str) -> Observation:
    """The reward is 1 for the right answer; environment.discount makes late ones worth less."""
    outcome = verifier.judge_with(verifier.BuiltIn(), response, self._truth).outcome
    if outcome == 'correct':
      return Observation(reward=1.0, done=True, success=True)
    return Observation(WRONG if outcome == 'wrong' else MISSING)
