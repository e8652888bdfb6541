"""The settings of the commands themselves; those of a component stand beside its code."""

import dataclasses

from exgrpo_jax.config import AUTHORS, PAPER, section, setting
from exgrpo_jax.huggingface import architecture
from exgrpo_jax.policy import model
from exgrpo_jax.rollout.token_sampling import Distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(model.Config):
  """The policy: a checkpoint's weights, or random ones of the shape given here."""

  path: str = setting(
    '',
    None,
    "a Hugging Face checkpoint's folder, or its name on the Hub (owner/name or "
    'owner/name@revision), whose weights, shape and tokenizer are taken; '
    "'' is `repository` or, without that, a model from scratch",
  )
  repository: str = setting(
    '',
    None,
    'the name of what must be at `path`, and is fetched where that is empty: its shape is compared '
    "with the one given here; '' allows any",
  )
  extension: architecture.Extension = section(architecture.Extension)


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
  """Supervised training before the first step."""

  num_updates: int = setting(0, '[0, inf)', 'supervised updates before reinforcement learning')
  data: str = setting('arithmetic:train', None, 'the questions whose worked solutions are learnt')
  batch_size: int = setting(64, '[1, inf)', 'solutions in an update')
  learning_rate: float = setting(1e-3, '[0, inf)', 'peak of a rate that warms up, then falls to 0')
  enough: float = setting(
    1.0,
    '(0, 1]',
    'it ends early once this share of 256 responses to config.data.train is right; 1 trains to '
    'the end',
  )
  seed: int = setting(
    -1,
    '[-1, 2^63)',
    'of its random parameters and the order of its rows, where runs of several seeds are to begin '
    'with the same policy; -1 is config.seed',
  )
  path: str = setting(
    '', None, "the folder where the result is kept, and reused if found; '' is in the run's workdir"
  )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """When and how a policy is evaluated on config.data.validation and config.data.evaluation."""

  every: int = setting(
    10,
    '[1, inf)',
    'steps between evaluations; there is always one at the start and one at the end',
    AUTHORS,
  )
  patience: int = setting(
    0,
    '[0, inf)',
    'evaluations in a row without a higher validation/score, the mean over the sources of '
    'config.data.validation, after which the run ends early; 0 takes all steps',
  )
  samples: int = setting(1, '[1, inf)', 'responses to each question (k of avg@k)', AUTHORS)
  temperature: float = setting(0.6, '[0, inf)', 'of sampling; 0 is greedy', PAPER)
  top_k: int = setting(0, '[0, inf)', 'only the k most probable tokens; 0 is all', AUTHORS)
  top_p: float = setting(
    1.0, '(0, 1]', 'only the most probable tokens that together have this share', AUTHORS
  )
  min_p: float = setting(
    0.0, '[0, 1]', "only tokens of at least this share of the most probable one's probability"
  )
  require_think: bool = setting(
    False,
    None,
    "where prompts end in '<think>', a response without '</think>' is wrong, as in the paper; "
    'config.verifier is for training',
  )
  require_box: bool = setting(
    False, None, r'only \boxed{...} is an answer, as in the paper; config.verifier is for training'
  )

  @property
  def distribution(self) -> Distribution:
    """What its responses are sampled from."""
    return Distribution(self.temperature, self.top_k, self.top_p, self.min_p)

  def steps(self, num_steps: int) -> list[int]:
    """After which of so many steps there is one; the one at the start is not among them."""
    return sorted({*range(self.every, num_steps, self.every), num_steps} - {0})


@dataclasses.dataclass(frozen=True)
class ExportConfig:
  """Which policies training exports as Hugging Face folders."""

  best: bool = setting(
    False,
    None,
    'workdir/export/best: of the policies evaluated after the first step, the one with the highest '
    'mean over the sources of config.data.validation',
  )
  best_without: tuple[str, ...] = setting(
    (), None, "sources of config.data.validation that this mean leaves out, such as ('minerva',)"
  )
  last: bool = setting(False, None, 'workdir/export/last: the policy after the last step')
