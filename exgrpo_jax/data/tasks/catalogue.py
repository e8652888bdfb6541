"""Which embedded tasks there are, and which can check the steps of a response."""

from collections.abc import Callable, Mapping

from exgrpo_jax.data.tasks import arithmetic
from exgrpo_jax.data.tasks.embedded import TaskBuilder

# By the name in a data spec.
TASKS: Mapping[str, type[TaskBuilder]] = {
  'arithmetic': arithmetic.ArithmeticBuilder,
}
# By a question's source: whether each step of a response to a question is right.
STEP_CHECKERS: Mapping[str, Callable[[str, str], bool]] = {
  'arithmetic': arithmetic.valid_steps,
  'arithmetic_ood': arithmetic.valid_steps,
}
