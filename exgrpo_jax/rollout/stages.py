"""The stages of a step, in order: plan, pick_replays, generate, old_logprobs, grade, assemble.

`Rollout` holds what all of them need and never changes during a run.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import numpy as np

from exgrpo_jax.algorithm import advantages, objective, question_stream, replay
from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.config import setting
from exgrpo_jax.data.tasks.catalogue import step_checker
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import (
  Batch,
  Cursor,
  Plan,
  QuestionSet,
  ReplayScores,
  Response,
  Trajectory,
  Verdict,
)
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.padding import right_padded
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import facts, parity, scheduler, scoring, selection
from exgrpo_jax.rollout.decode_loop import DecodeSpec
from exgrpo_jax.rollout.token_sampling import Distribution
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

_WHOLE = (
  'training samples from the whole softmax, to which its importance weights refer; '
  'evaluation.{} may truncate it'
)

# Groups that are begun while so many slots as have their responses are busy: the slots hold the
# longest responses of most groups, whose others are complete.
_GROUPS_PER_SAMPLES = 3

Responses = Sequence[Sequence[Response]]  # by group
Verdicts = Sequence[Sequence[Verdict]]  # of the responses, in the same order
Replays = Sequence[Trajectory | None]  # by group; None for a fresh question


@dataclasses.dataclass(frozen=True)
class Config:
  """How many questions and responses a step has, and how responses are sampled."""

  questions: int = setting('[1, inf)', 'questions in a step (Q)')
  samples: int = setting(
    '[2, inf)', 'rollouts of a question (K); an advantage compares at least two'
  )
  max_prompt: int = setting('[1, inf)', 'longest prompt, in tokens')
  max_response: int = setting('[1, inf)', 'longest response, in tokens')
  temperature: float = setting('(0, inf)', 'of sampling, and of every log-probability in training')
  top_k: int = setting('[0, 0]', _WHOLE.format('top_k'))
  top_p: float = setting('[1, 1]', _WHOLE.format('top_p'))
  min_p: float = setting('[0, 0]', _WHOLE.format('min_p'))
  slots: int = setting('[1, inf)', 'responses that are decoded together')
  carry: bool = setting(
    None,
    'whether a step ends once as many groups are complete as it trains, and what is unfinished '
    'goes on in the next one; otherwise it waits for its longest response',
  )
  in_flight: int = setting(
    '[0, inf)',
    'with carry: groups that are unfinished or wait as a step begins, those that it will train '
    'included; with more, slots are seldom idle and responses older; 0 is as many as keep the '
    'slots busy',
  )
  max_age: int = setting(
    '[1, inf)',
    'with carry: steps from that which writes the first token of a group to that which trains it, '
    'at most; a step waits for what would be older in the next',
  )
  logit_chunk: int = setting(
    '[1, inf)', 'tokens whose logits exist at once in training, on each part of the rows'
  )

  def __post_init__(self) -> None:
    most = self.questions * (self.max_age + 1)
    if self.carry and self.in_flight and not self.questions <= self.in_flight <= most:
      raise InputError(
        f'config.rollout.in_flight={self.in_flight} must be from '
        f'config.rollout.questions={self.questions} to {most}, which is that times '
        f'config.rollout.max_age={self.max_age} + 1, or 0: a step trains {self.questions} groups, '
        'and in so many steps all have to.'
      )

  @property
  def groups_in_flight(self) -> int:
    """How many groups are in flight as a step begins to generate; a step's, without carry."""
    if not self.carry:
      return self.questions
    enough = self.questions + _GROUPS_PER_SAMPLES * math.ceil(self.slots / self.samples)
    return self.in_flight or min(enough, self.questions * (self.max_age + 1))

  @property
  def longest_row(self) -> int:
    """Tokens of the longest prompt with the longest response."""
    return self.max_prompt + self.max_response

  @property
  def prompts(self) -> int:
    """How many prompts are kept prefilled: all of a step's, or as many as there are slots."""
    return min(self.questions, self.slots)

  def decode_spec(
    self, tokenizer: Tokenizer, distribution: Distribution | None = None
  ) -> DecodeSpec:
    """How to sample: from `distribution`, by default the softmax at the training temperature."""
    return DecodeSpec(
      distribution=distribution or Distribution(self.temperature),
      slots=self.slots,
      prompts=self.prompts,
      max_prompt=self.max_prompt,
      max_response=self.max_response,
      eos_ids=tokenizer.eos_ids,
      pad_id=tokenizer.pad_id,
    )


@dataclasses.dataclass(frozen=True)
class Rollout:
  """What every stage needs; made once per run."""

  config: Config
  replay: replay.Config
  objective: objective.Config
  parity: parity.Config
  model: model.Config
  tokenizer: Tokenizer
  meshes: sharding.Meshes
  tokens_per_pass: int  # of scoring, on each part of the rows
  seed: int
  data: QuestionSet  # to train on

  def plan(self, buffer: Buffer, cursor: Cursor, step: int) -> tuple[Plan, Cursor]:
    """Replayed questions from the buffer, the rest from the stream, shuffled by group.

    Returns the plan and the cursor after this step's fresh questions. Depends on its
    arguments and the seed alone, so a resumed run makes the same plan.
    """
    num_questions = self.config.questions
    rng = randomness.generator(self.seed, Purpose.PLAN, step)
    replayed = replay.draw_questions(self.replay, buffer, num_questions, self.config.samples, rng)
    fresh, cursor = question_stream.take(
      cursor,
      num_questions - len(replayed),
      len(self.data.questions),
      self.seed,
      buffer.retired_epoch,
      taken=replayed,
      questions_per_step=num_questions,
    )
    candidates = [buffer.entries[row].trajectories for row in replayed] + [()] * len(fresh)
    order = rng.permutation(num_questions)
    rows = np.array([*replayed, *fresh])[order]
    plan = Plan(
      step=step,
      epoch=cursor.epoch,
      replay_started=buffer.started,
      questions=tuple(self.data.questions.read(rows.tolist())),
      prompts=tuple(self.data.prompts[int(row)] for row in rows),
      candidates=tuple(candidates[index] for index in order),
    )
    return plan, cursor

  def reads_retired(self, buffer: Buffer, epoch: int) -> bool:
    """Whether so few questions are left that the stream reads retired ones in `epoch`."""
    return question_stream.reads_retired(
      epoch, len(self.data.questions), buffer.retired_epoch, self.config.questions
    )

  def pick_replays(
    self, params: Params, plan: Plan
  ) -> tuple[list[Trajectory | None], list[ReplayScores | None]]:
    """The stored trajectory that each replayed question uses, and its scores; None for a fresh one.

    By default the one of lowest mean token entropy under the current policy; ties go to the
    oldest. What is picked is always scored, also where there is no choice, for the step's
    records: a forward pass over few rows. Without `objective.importance_correction` it comes with
    the log-probabilities that the current policy gives it; what the buffer stores stays as it is.
    """
    replays, scores = selection.pick(
      self.replay.trajectory_selection,
      plan.candidates,
      functools.partial(self._score_replays, params, plan),
      randomness.generator(self.seed, Purpose.TRAJECTORY, plan.step),
    )
    if not self.objective.importance_correction:
      replays = [
        dataclasses.replace(replayed, logp=of_replayed.logp) if replayed and of_replayed else None
        for replayed, of_replayed in zip(replays, scores)
      ]
    return replays, scores

  def generate(
    self,
    params: Params,
    plan: Plan,
    key: jax.Array,
    on_finish: Callable[[tuple[int, int], pool.Submission], None],
  ) -> list[list[Response]]:
    """K fresh responses for a fresh question, K - 1 for a replayed one, by group.

    Args:
      params: in the decode layout (`model.decode_layout`).
      plan: of the step.
      key: of the step.
      on_finish: called with (group, sample) and what is to be judged as responses finish:
        `Grader.submit`.
    """
    samples = self.config.samples
    rows = [
      (group, sample)
      for group, is_replay in enumerate(plan.is_replay_Q)
      for sample in range(samples - is_replay)
    ]

    def submit(index: int, response: Response) -> None:
      question = plan.questions[rows[index][0]]
      submission = pool.Submission(
        text=functools.partial(self.tokenizer.decode, response.tokens),
        answer=question.answer,
        kind=question.kind,
        check_steps=step_checker(question),
        facts=functools.partial(
          facts.of_response,
          question,
          response.tokens,
          response.truncated,
          self.config.max_response,
        ),
      )
      on_finish(rows[index], submission)

    responses = scheduler.generate(
      self.model,
      params,
      [plan.prompts[group] for group, _ in rows],
      [plan.questions[group].row for group, _ in rows],
      [sample for _, sample in rows],
      key,
      self.config.decode_spec(self.tokenizer),
      self.meshes.decoding,
      submit,
    )
    groups = [[] for _ in plan.questions]
    for (group, _), response in zip(rows, responses):
      groups[group].append(response)
    return groups

  def old_logprobs(
    self, params: Params, plan: Plan, responses: Responses
  ) -> tuple[Responses, dict[str, float]]:
    """The responses with the log-probabilities that training takes as the old policy's.

    The trainer's, with `objective.old_logprobs='recompute'`; else the sampler's, which every
    `parity.every` steps are compared with the trainer's. Returns the differences too, as
    metrics, where any were computed.

    Raises:
      InputError: they differ by more than `parity.max`.
    """
    recomputes = self.objective.old_logprobs == 'recompute'
    if not recomputes and (plan.step - 1) % self.parity.every:
      return responses, {}
    pairs = [(p, response) for p, group in zip(plan.prompts, responses) for response in group]
    if not recomputes:
      pairs = pairs[: self.parity.rows]
    logps, _ = self.score(params, [(prompt, response.tokens) for prompt, response in pairs])
    measured = parity.differences(logps, [response for _, response in pairs])
    if recomputes:
      return parity.recomputed(responses, logps, self.objective.tis_limit), measured
    parity.check(self.parity, plan.step, measured)
    return responses, measured

  def grade(self, plan: Plan, responses: Responses, grader: Grader) -> list[list[Verdict]]:
    """Verdicts by group, for responses that were submitted to `grader` by (group, sample).

    Raises InputError if grading failed for all of them.
    """
    verdicts = grader.collect()
    pool.refuse_all_failed(f'step {plan.step}', list(verdicts.values()))
    return [
      [verdicts[group, sample] for sample in range(len(responses[group]))]
      for group in range(len(plan.questions))
    ]

  def assemble(
    self, plan: Plan, responses: Responses, replays: Replays, verdicts: Verdicts
  ) -> Batch:
    """All rows of the step as NumPy arrays, group after group; the replayed row is the last.

    Rows of questions outside `replay.difficulty` keep their place with an empty mask, so the
    normaliser stays the same.
    """
    samples = self.config.samples
    rewards, rows, logps, tis_weights, trains = [], [], [], [], []
    for prompt, group, replayed, judged in zip(plan.prompts, responses, replays, verdicts):
      members = [*group, replayed] if replayed else group
      rewards.append([v.reward for v in judged] + ([replayed.reward] if replayed else []))
      correctness = replay.group_correctness(self.replay, judged, replayed is not None)
      trains += [replay.trains(self.replay, correctness)] * samples
      rows += [(prompt, member.tokens) for member in members]
      logps += [member.logp for member in members]
      # A replayed row is corrected by its importance weight alone.
      tis_weights += [response.tis_weight for response in group] + [None] * (replayed is not None)
    is_replay_B = np.array(
      [r is not None and k == samples - 1 for r in replays for k in range(samples)]
    )
    advantage_QK = advantages.group_advantages(
      np.array(rewards, np.float32),
      self.objective.normalize_std,
      ~is_replay_B.reshape(-1, samples) if self.objective.baseline == 'fresh' else None,
    )
    past_step_B = np.repeat([r.step if r else plan.step for r in replays], samples)
    tokens_BT, mask_BT = right_padded(rows, self.config.longest_row, self.tokenizer.pad_id)
    logp_BT = np.zeros_like(mask_BT)
    logp_BT[mask_BT > 0] = np.concatenate(logps)  # row after row, in the mask's order
    tis_weight_BT = np.ones_like(mask_BT)
    for b, tis_weight in enumerate(tis_weights):
      if tis_weight is not None:
        tis_weight_BT[b, mask_BT[b] > 0] = tis_weight
    return Batch(
      tokens_BT=tokens_BT,
      response_mask_BT=mask_BT * np.array(trains, np.float32)[:, None],
      behaviour_logp_BT=logp_BT,
      advantage_B=advantage_QK.reshape(-1),
      is_replay_B=is_replay_B,
      policy_step_B=np.where(is_replay_B, past_step_B, plan.step).astype(np.int32),
      tis_weight_BT=tis_weight_BT,
    )

  def score(
    self, params: Params, rows: Sequence[tuple[np.ndarray, np.ndarray]]
  ) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(log-probabilities, entropies) of (prompt, response) rows; see `scoring.score`."""
    return scoring.score(
      self.model,
      params,
      self.meshes.training,
      rows,
      limit=self.config.longest_row,
      tokens_per_pass=self.tokens_per_pass,
      pad_id=self.tokenizer.pad_id,
      temperature=self.config.temperature,
      logit_chunk=self.config.logit_chunk,
    )

  def _score_replays(
    self, params: Params, plan: Plan, candidates: Sequence[selection.Candidate]
  ) -> list[ReplayScores]:
    """Scores of some trajectories, each alone."""
    rows = [(plan.prompts[group], trajectory.tokens) for group, trajectory in candidates]
    logps, entropies = self.score(params, rows)
    past = [stored.logp for _, stored in candidates]
    if not self.objective.importance_correction:
      past = logps
    weights = selection.weights(self.objective, self.meshes.training, logps, past)
    return [
      ReplayScores(logp=logp, entropy=entropy, weight=weight)
      for logp, entropy, weight in zip(logps, entropies, weights)
    ]


def plan_apart(data: QuestionSet, rows: Sequence[int], step: int) -> Plan:
  """Questions of `data` that are asked apart from stream and buffer; none is replayed."""
  return Plan(
    step=step,
    epoch=0,
    replay_started=False,
    questions=tuple(data.questions.read(rows)),
    prompts=tuple(data.prompts[row] for row in rows),
    candidates=((),) * len(rows),
  )
