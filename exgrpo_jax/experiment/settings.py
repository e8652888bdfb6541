"""All settings of a run, and cross-checks between them. Only this module reads a ConfigDict."""

import dataclasses
import fractions
import math
from collections.abc import Collection

from ml_collections import ConfigDict

from exgrpo_jax import config
from exgrpo_jax.algorithm import objective, replay
from exgrpo_jax.config import AUTHORS, PAPER, setting
from exgrpo_jax.data import prompt, questions, tokenizer
from exgrpo_jax.data.tasks import catalogue
from exgrpo_jax.environments import settings as environment_settings
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.grading import settings as grading_settings
from exgrpo_jax.grading import verifier
from exgrpo_jax.huggingface import architecture
from exgrpo_jax.learner import checkpoint, gradients, optimizer
from exgrpo_jax.policy import lora, model, sharding
from exgrpo_jax.reporting import metrics
from exgrpo_jax.rollout import seeding
from exgrpo_jax.rollout import settings as rollout_settings
from exgrpo_jax.rollout.token_sampling import Distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(model.ShapeConfig):
  """The policy: a checkpoint's weights, or random weights with the shape given here."""

  path: str = setting(
    '',
    None,
    'source of the weights, shape and tokenizer: a Hugging Face checkpoint folder, a GGUF file, a '
    "name on the Hub (owner/name or owner/name@revision) or shipped:chains; '' uses `repository` "
    'or, if `repository` is also empty, trains a model from scratch',
  )
  repository: str = setting(
    '',
    None,
    'Hub name of the model expected at `path`; fetched if `path` is empty. Its shape must '
    "match the shape given here; '' allows any model",
  )
  extension: architecture.Extension = dataclasses.field(default_factory=architecture.Extension)
  dtype: str = setting(
    'bfloat16',
    ('auto', 'float32', 'bfloat16'),
    'dtype of activations; trained parameters are float32. auto means bfloat16 on accelerators and '
    'on CPUs with bfloat16 instructions (AMX, AVX512_BF16), and float32 on other CPUs. A run or a '
    'reused warm start keeps its dtype on any machine',
  )


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
  """Supervised training before the first step."""

  num_updates: int = setting(0, '[0, inf)', 'supervised updates before reinforcement learning')
  data: str = setting('arithmetic:train', None, 'data spec of the worked solutions to learn from')
  batch_size: int = setting(64, '[1, inf)', 'solutions per update')
  learning_rate: float = setting(
    1e-3,
    '[0, inf)',
    'peak learning rate, after warm-up and before decay to 0; a pretrained model needs about 1e-5',
  )
  stop_at_pass_rate: float = setting(
    1.0,
    '(0, 1]',
    'early stopping: stop when this fraction of 256 responses to questions in config.data.train is '
    'correct; 1 disables early stopping',
  )
  seed: int = setting(
    -1,
    '[-1, 2^63)',
    'seed of the initial parameters and the row order; set it so that runs with different values '
    'of config.seed start from the same policy; -1 uses config.seed',
  )
  path: str = setting(
    '',
    None,
    "folder for the result; an existing result is reused; '' uses a folder in the run's workdir",
  )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
  """Settings for evaluations on config.data.validation and config.data.evaluation."""

  every: int = setting(
    10,
    '[1, inf)',
    'steps between evaluations; the policy is always evaluated at the start and at the end',
    AUTHORS,
  )
  patience: int = setting(
    0,
    '[0, inf)',
    'early stopping: end the run after this many consecutive evaluations without improvement in '
    'validation/score, the mean over the sources of config.data.validation; 0 disables early '
    'stopping',
  )
  samples: int = setting(1, '[1, inf)', 'responses per question (k in avg@k)', AUTHORS)
  temperature: float = setting(0.6, '[0, inf)', 'sampling temperature; 0 is greedy', PAPER)
  top_k: int = setting(
    0, '[0, inf)', 'sample only from the k most probable tokens; 0 uses all tokens', AUTHORS
  )
  top_p: float = setting(
    1.0,
    '(0, 1]',
    'sample only from the most probable tokens whose probabilities add up to this value',
    AUTHORS,
  )
  min_p: float = setting(
    0.0,
    '[0, 1]',
    "sample only from tokens with at least this fraction of the most probable token's probability",
  )
  require: tuple[str, ...] = setting(
    (),
    verifier.REQUIREMENTS,
    "parts that a correct response must contain: think stands for '</think>', which is required "
    "only if prompts end in '<think>'; box stands for \\boxed{...}; the paper requires both. For "
    'training, see config.verifier',
  )

  @property
  def distribution(self) -> Distribution:
    """Return the distribution that responses are sampled from."""
    return Distribution(self.temperature, self.top_k, self.top_p, self.min_p)

  def steps(self, num_steps: int) -> list[int]:
    """Return the steps after which the policy is evaluated; step 0 is not included."""
    return sorted({*range(self.every, num_steps, self.every), num_steps} - {0})


@dataclasses.dataclass(frozen=True)
class ExportConfig:
  """The policies that training exports as Hugging Face folders."""

  best: bool = setting(
    False,
    None,
    'export the best policy to workdir/export/best. The best policy is the one with the highest '
    'mean score over the sources of config.data.validation; the evaluation before the first step '
    'is ignored',
  )
  best_without: tuple[str, ...] = setting(
    (),
    None,
    'sources of config.data.validation to leave out of this mean score (validation/score), e.g. '
    "('minerva',)",
  )
  last: bool = setting(False, None, 'export the final policy to workdir/export/last')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """A complete, checked config. The field names match those in the ConfigDict."""

  seed: int = setting(
    0, '[0, 2^63)', 'runs with the same seed are bit-for-bit identical, unless verdicts time out'
  )
  num_steps: int = setting(
    700, '[0, inf)', 'steps of reinforcement learning; unused if `num_epochs` is above 0', AUTHORS
  )
  num_epochs: float = setting(
    0.0,
    '[0, inf)',
    'length in epochs: the run takes num_epochs * (number of training questions) / '
    '`rollout.questions` steps, rounded up. Replayed questions count like fresh ones; 0 uses '
    '`num_steps`',
  )
  compilation_cache: str = setting(
    '~/.cache/exgrpo_jax/compiled',
    None,
    "folder that caches compiled programs for later runs; {workdir} stands for the run's "
    "workdir; '' keeps JAX's own setting",
  )
  rollout: rollout_settings.RolloutConfig
  replay: replay.ReplayConfig
  objective: objective.ObjectiveConfig
  optimizer: optimizer.OptimizerConfig
  microbatch: gradients.MicrobatchConfig
  model: ModelConfig
  lora: lora.LoraConfig
  mesh: sharding.MeshConfig
  prompt: prompt.PromptConfig
  tokenizer: tokenizer.TokenizerConfig
  data: questions.DataConfig
  experience: seeding.ExperienceConfig
  verifier: verifier.VerifierConfig
  grading: grading_settings.GradingConfig
  environment: environment_settings.EnvironmentConfig
  warm_start: WarmStartConfig
  evaluation: EvaluationConfig
  logprob_check: rollout_settings.LogprobCheckConfig
  checkpoint: checkpoint.CheckpointConfig
  export: ExportConfig
  metrics: metrics.MetricsConfig

  def with_length(self, num_questions: int) -> 'RunConfig':
    """Return the config with `num_steps` computed from `num_epochs` and the number of questions."""
    if not self.num_epochs:
      return self
    steps = steps_of(self.num_epochs, num_questions, self.rollout.questions)
    return dataclasses.replace(self, num_steps=steps)

  @property
  def length(self) -> str:
    """Return the setting that determines the number of steps, e.g. 'config.num_steps=700'."""
    if not self.num_epochs:
      return f'config.num_steps={self.num_steps}'
    return f'config.num_epochs={self.num_epochs:g} ({counted(self.num_steps, "step")})'

  @property
  def num_updates(self) -> int:
    """Return the number of optimizer updates in the whole run."""
    return self.num_steps * self.optimizer.updates_per_step

  @property
  def keeps_initial(self) -> bool:
    """Return True if the run keeps its initial parameters, for LoRA or a KL term."""
    return bool(self.lora.rank or self.objective.kl_coefficient)

  @property
  def warm_start_seed(self) -> int:
    """Return the seed of the initial random parameters and of the warm start."""
    return self.seed if self.warm_start.seed < 0 else self.warm_start.seed


def steps_of(num_epochs: float, num_questions: int, per_step: int) -> int:
  """Return the number of steps for `num_epochs` epochs over the questions, `per_step` at a time.

  An epoch's last step may also read the next epoch's first questions. The calculation uses exact
  fractions, because in floating point, .07 * 100 exceeds 7.

  >>> steps_of(num_epochs=1.5, num_questions=10, per_step=4)
  4
  """
  return math.ceil(fractions.Fraction(str(num_epochs)) * num_questions / per_step)


def check_length(values: ConfigDict, overrides: Collection[str]) -> None:
  """Raise InputError if the `overrides` (dotted keys) set a num_steps that has no effect."""
  if 'num_steps' in overrides and values.num_epochs:
    raise InputError(
      f'config.num_steps={values.num_steps}: config.num_epochs={values.num_epochs:g} determines '
      'the length of the run. Remove one of them, or set config.num_epochs=0.'
    )


def check_dropping(config: RunConfig) -> None:
  """Raise InputError if the config would drop equal-reward groups that still have a gradient."""
  if config.rollout.is_dynamic:
    baseline, sampling = config.objective.baseline, config.rollout.dynamic_sampling
    raise InputError(
      f'config.rollout.dynamic_sampling={sampling}: dynamic sampling drops groups with equal '
      f'rewards, but with config.objective.baseline={baseline!r} such groups still have a '
      'gradient. Set config.rollout.dynamic_sampling=1, or choose another baseline.'
    )


def parse_config(values: ConfigDict) -> RunConfig:
  """Return the checked config. An InputError names the first invalid key."""
  run_config = config.build(RunConfig, values, 'config')
  num_questions, minibatches = run_config.rollout.questions, run_config.optimizer.minibatches
  if num_questions % minibatches:
    raise InputError(
      f'config.optimizer.minibatches={minibatches}: the value must divide '
      f'config.rollout.questions={num_questions}, because every minibatch contains the same number '
      'of whole groups.'
    )
  check_algorithm(
    run_config.replay, run_config.objective, num_questions, run_config.rollout.group_size
  )
  prompt.check(run_config.prompt)
  rewards_correctness = (
    run_config.grading.weight_of == {'correctness': 1.0} and not run_config.environment.name
  )
  if run_config.objective.baseline == 'history' and not rewards_correctness:
    raise InputError(
      "config.objective.baseline='history': this baseline needs rewards of 0 or 1. Set "
      "config.grading.rewards=('correctness',), config.grading.weights=() and "
      "config.environment.name='', or choose another baseline."
    )
  if run_config.objective.baseline == 'history':
    check_dropping(run_config)
  grading_settings.check_rewards(run_config.grading, run_config.rollout.max_response)
  _check_environment(run_config)
  choices = {
    'export.best': run_config.export.best,
    'evaluation.patience': run_config.evaluation.patience,
  }
  for key, value in choices.items():
    if value and not run_config.data.validation:
      raise InputError(
        f'config.{key}={value}: config.data.validation is empty. Set it to questions that are '
        'not in config.data.evaluation, so that selecting a policy does not bias its final score.'
      )
  if run_config.experience.path and not run_config.replay.ratio:
    raise InputError(
      f'config.experience.path={run_config.experience.path}: config.replay.ratio=0, so nothing '
      'would be replayed. Set config.replay.ratio above 0.'
    )
  questions.check_apart(run_config.data.validation, run_config.data.evaluation)
  if run_config.microbatch.drop_zero_advantage:
    terms = ('entropy_bonus', 'kl_coefficient', 'balance_coefficient')
    uses = {f'objective.{name}': getattr(run_config.objective, name) for name in terms}
    if run_config.optimizer.max_kl < math.inf:
      uses['optimizer.max_kl'] = run_config.optimizer.max_kl
    for name in filter(uses.get, uses):
      raise InputError(
        f'config.microbatch.drop_zero_advantage=True: this setting is not allowed with '
        f'config.{name}={uses[name]}, which also depends on rows with advantage 0. Set one of the '
        'two settings to its default.'
      )
  return run_config


def _check_environment(run_config: RunConfig) -> None:
  """Raise InputError if the environment is missing, invalid or incompatible with other settings."""
  environment, data = run_config.environment, run_config.data
  specs = {'train': (data.train,), 'validation': data.validation, 'evaluation': data.evaluation}
  for key, spec in ((key, spec) for key, key_specs in specs.items() for spec in key_specs):
    task = spec.partition(':')[0]
    if task in catalogue.IN_TURNS and not environment.name:
      raise InputError(
        f'config.data.{key}={spec}: these questions take several turns to answer. Set '
        f'config.environment.name={task!r}.'
      )
  environment_settings.check(environment)
  if not environment.name:
    return
  environment_setting = f'config.environment.name={environment.name!r}'
  # Settings that have no effect with an environment: (name, value, required value).
  unused_settings = (
    ('grading.rewards', run_config.grading.rewards, ('correctness',)),
    ('grading.weights', run_config.grading.weights or (1.0,), (1.0,)),
    ('grading.verifier', run_config.grading.verifier, 'built_in'),
    ('verifier.require', run_config.verifier.require, ()),
  )
  for key, value, required_value in unused_settings:
    if value != required_value:
      raise InputError(
        f'config.{key}={value!r}: this setting has no effect with {environment_setting}, because '
        f'an environment grades its own episodes. Set it to {required_value!r}.'
      )
  if run_config.experience.path:
    raise InputError(
      f"{environment_setting}: prior experience must be single-turn. Set config.experience.path=''."
    )


# ---- Contradictory settings of the algorithm ----

_PPO_EPSILON = 0.2  # arXiv:1707.06347; an upper bound above it is clip-higher


def check_algorithm(
  replay_config: replay.ReplayConfig,
  objective_config: objective.ObjectiveConfig,
  num_questions: int,
  num_rollouts: int,
) -> None:
  """Raise InputError if nothing could ever be replayed or a setting would have no effect.

  Called before training. `num_questions` (Q) is per step; `num_rollouts` (K) is per question.
  """
  ratio = replay_config.ratio
  # The highest number of successes in a group that can be recorded.
  max_successes = num_rollouts - replay.retires(replay_config)
  shares = [k / num_rollouts for k in range(1, max_successes + 1)]
  recorded_shares = [share for share in shares if replay.is_recorded(replay_config, share)]
  if recorded_shares and replay.is_recorded(replay_config, 0.0):  # stored questions may fail later
    recorded_shares.append(0.0)
  if ratio > 0 and not any(replay.trains(replay_config, share) for share in recorded_shares):
    raise InputError(
      f'config.replay.correctness_range={replay_config.correctness_range} excludes every group '
      f'that config.replay.difficulty={replay_config.difficulty!r} allows, so nothing would ever '
      f'be replayed. With config.rollout.group_size={num_rollouts}, no pass rate from '
      f'1/{num_rollouts} to {max_successes}/{num_rollouts} satisfies both (the range excludes '
      'its lower bound). Widen the range, choose another difficulty, or raise '
      'config.rollout.group_size.'
    )
  if ratio > 0 and not replay.most_replayed(replay_config, num_questions):
    min_ratio = math.ceil(1e6 / num_questions) / 1e6  # rounded up, so the printed value is enough
    advice = f'config.replay.ratio to at least {min_ratio:g} or ' if num_questions > 1 else ''
    raise InputError(
      f'config.replay.ratio={ratio} of config.rollout.questions={num_questions} is less than one '
      f'question, so nothing would ever be replayed. Set {advice}config.rollout.questions to at '
      f'least {math.ceil((1 - replay.ROUNDING) / ratio)}. For plain GRPO, set '
      'config.replay.ratio=0.'
    )
  if objective_config.m2po_threshold < math.inf and not objective_config.importance_correction:
    raise InputError(
      f'config.objective.m2po_threshold={objective_config.m2po_threshold} has no effect, because '
      'with config.objective.importance_correction=False every ratio is 1 before the update. '
      'Reset one of the two settings to its default.'
    )
  _check_clipping(objective_config, replays=ratio > 0)


def _check_clipping(config: objective.ObjectiveConfig, replays: bool) -> None:
  variants = {
    'dual_clip': config.dual_clip < float('inf'),
    'clip_epsilon_high': config.clip_epsilon_high > max(config.clip_epsilon, _PPO_EPSILON),
    # Without clipping, CISPO has the same gradient as PPO: A r grad(log pi) = A grad(r).
    'policy_loss': config.policy_loss == 'cispo',
  }
  for name, is_set in variants.items():
    if is_set and not objective.clips_fresh_ratios(config, replay_started=replays):
      when = ' once replay starts' if config.clip_schedule == 'until_replay' else ''
      raise InputError(
        f'config.objective.{name}={getattr(config, name)!r} has no effect, because '
        f"config.objective.clip_schedule='{config.clip_schedule}' clips no ratios{when}. Set "
        "config.objective.clip_schedule='always'."
      )
