"""The stages of a step: plan, generate, old_logprobs, grade, pick_replays, assemble.

`Rollout` holds everything that the stages need and never changes during a run. Partial rollouts are
a layer on it: partial.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from exgrpo_jax.algorithm import (
  advantages,
  losses,
  objective,
  question_stream,
  replay,
  trajectory_rules,
)
from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.data.prompt import last_user_message
from exgrpo_jax.data.tasks.catalogue import step_checker
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import (
  Batch,
  Cursor,
  GradedGroups,
  PartialGroup,
  Plan,
  Question,
  QuestionSet,
  ReplayScores,
  Response,
  Trajectory,
  at_own,
)
from exgrpo_jax.grading import pool
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.packing import right_padded
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import mismatch, routes, scoring, selection
from exgrpo_jax.rollout.sampler import Request, Sampler
from exgrpo_jax.rollout.settings import RolloutConfig
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

Responses = Sequence[Sequence[Response]]  # by group
Submit = Callable[[tuple[int, int], pool.Submission], None]  # (group, sample): `Grader.submit`


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The stages of a step, with everything they need. Made once per run."""

  config: RolloutConfig
  replay: replay.ReplayConfig
  objective: objective.ObjectiveConfig
  logprob_check: mismatch.LogprobCheckConfig
  model: model.ShapeConfig
  tokenizer: Tokenizer
  meshes: sharding.Meshes
  tokens_per_pass: int  # of scoring, on each part of the rows
  seed: int
  data: QuestionSet  # to train on
  sampler: Sampler

  def plan(
    self, buffer: Buffer, cursor: Cursor, step: int, left: Sequence[PartialGroup] = ()
  ) -> Plan:
    """Plan replayed questions from the buffer and the rest from the stream, shuffled by group.

    The plan depends only on the arguments and the seed, so a resumed run makes the same one. `left`
    is for partial rollouts (partial.py) and must be empty here.
    """
    assert not left, 'only partial rollouts leave groups to the next step'
    return self._draw(buffer, cursor, step, self.config.questions)

  def _draw(
    self,
    buffer: Buffer,
    cursor: Cursor,
    step: int,
    count: int,
    taken: Collection[int] = (),
  ) -> Plan:
    """Plan `count` questions, none of them in `taken`."""
    rng = randomness.generator(self.seed, Purpose.PLAN, step)
    replayed = replay.draw_questions(self.replay, buffer, count, self.config.group_size, step, rng)
    fresh, cursor = question_stream.take(
      cursor,
      count - len(replayed),
      len(self.data.questions),
      self.seed,
      buffer.retired_epoch,
      taken=[*taken, *replayed],
      at_once=self.config.groups_in_flight,
    )
    rows = rng.permutation(np.array([*replayed, *fresh], int)).tolist()
    return Plan(
      step=step,
      cursor=cursor,
      replay_started=buffer.started,
      questions=tuple(self.data.questions.read(rows)),
      prompts=tuple(self.data.prompts[row] for row in rows),
      candidates=tuple(
        replay.candidates(self.replay, buffer.entries[row], step)
        if row in replayed and self.replay.include_trajectory
        else ()
        for row in rows
      ),
      is_drawn=tuple(row in replayed for row in rows),
    )

  def reads_retired(self, buffer: Buffer, epoch: int) -> bool:
    """Return True if `epoch` also reads retired questions because too few others are left."""
    return question_stream.reads_retired(
      epoch, len(self.data.questions), buffer.retired_epoch, self.config.groups_in_flight
    )

  def generate(
    self, params: Params, plan: Plan, submit: Submit
  ) -> tuple[list[list[Response]], dict[str, float]]:
    """Generate each group's fresh responses: K, or K - 1 next to a stored one. Returns metrics too.

    `params` are in the decode layout (`model.decode_layout`). `submit` gets each response to judge
    as it finishes.
    """
    counts = self.config.group_size - plan.is_replay_Q
    places = [(group, sample) for group, count in enumerate(counts) for sample in range(count)]

    def finish(index: int, response: Response) -> None:
      self._submit(plan, places[index], response, submit)

    requests = [self._request(plan, place, plan.step) for place in places]
    responses, metrics = self.sampler.generate(params, requests, finish)
    following = iter(responses)
    return [[next(following) for _ in range(count)] for count in counts], metrics

  def old_logprobs(
    self, params: Params, plan: Plan, responses: Responses
  ) -> tuple[Responses, dict[str, float]]:
    """Return the responses with the log-probabilities that training uses as the old policy's.

    With `objective.old_logprobs='recompute'` they are the trainer's. Otherwise they are the
    sampler's, and every `logprob_check.every` steps they are compared with the trainer's. Only the
    tokens that this step wrote are concerned. Returns the differences too, as metrics, if any were
    computed.

    Raises:
      InputError: they differ by more than `logprob_check.max`.
    """
    recomputes = self.objective.old_logprobs == 'recompute'
    if not recomputes and (plan.step - 1) % self.logprob_check.every:
      return responses, {}
    pairs = [
      (prompt, response)
      for prompt, group in zip(plan.prompts, responses)
      for response in group
      if response.tokens_before(plan.step) < len(response.tokens)
    ]
    if not recomputes:
      pairs = pairs[: self.logprob_check.rows]
    if not pairs:
      return responses, {}
    rows = [(prompt, response.tokens) for prompt, response in pairs]
    logps, _ = self.score(params, rows, [response.routes for _, response in pairs])
    measured = mismatch.differences(logps, [response for _, response in pairs], plan.step)
    if recomputes:
      return mismatch.recomputed(responses, logps, self.objective.tis_limit, plan.step), measured
    mismatch.check(self.logprob_check, plan.step, measured)
    return responses, measured

  def grade(self, plan: Plan, responses: Responses, grader: Grader) -> GradedGroups:
    """Return the groups that the step trains, with the verdicts of `grader`.

    `generate` submitted the responses. Raises InputError if grading failed for all of them.
    """
    verdicts = grader.collect()
    by_group = [
      [one.verdict or verdicts[group, sample] for sample, one in enumerate(own)]
      for group, own in enumerate(responses)
    ]
    pool.refuse_all_failed(f'step {plan.step}', [v for judged in by_group for v in judged])
    return GradedGroups(plan, responses, by_group)

  def pick_replays(
    self, params: Params, plan: Plan
  ) -> tuple[list[Trajectory | None], list[ReplayScores | None]]:
    """Pick the stored trajectory of each replayed question, with its scores; None for a fresh one.

    By default it has the lowest mean token entropy under the current policy; ties go to the oldest.
    The picked one is always scored for the step's records, even without a choice: a forward pass
    over few rows. Without `objective.importance_correction` it gets the current policy's
    log-probabilities. The buffer stays unchanged.
    """
    rule, stored = self.replay.trajectory_selection, plan.candidates
    if rule == 'valid_steps':
      checks = [step_checker(question) for question in plan.questions]
      stored = selection.with_valid_steps(stored, checks, self.tokenizer.decode)
    replays, scores = selection.pick(
      rule,
      stored,
      functools.partial(self._score_replays, params, plan),
      randomness.generator(self.seed, Purpose.TRAJECTORY, plan.step),
      self._released_costs(params, plan) if rule == 'released' else None,
    )
    if not self.objective.importance_correction:
      replays = [
        dataclasses.replace(replayed, logp=at_own(replayed, of_replayed.logp))
        if replayed and of_replayed
        else None
        for replayed, of_replayed in zip(replays, scores)
      ]
    return replays, scores

  def assemble(
    self,
    trained: GradedGroups,
    replays: Sequence[Trajectory | None],
    scores: Sequence[ReplayScores | None],
  ) -> Batch:
    """Assemble all rows of the step; see `make_batch`."""
    return make_batch(
      self.replay,
      self.objective,
      trained,
      replays,
      scores,
      longest_row=self.config.longest_row,
      pad_id=self.tokenizer.pad_id,
      spans_steps=self.config.partial,
      keeps_routes=self.model if self.config.router_replay else None,
    )

  def score(
    self,
    params: Params,
    rows: Sequence[tuple[np.ndarray, np.ndarray]],
    known: Sequence[np.ndarray | None] | None = None,
  ) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Compute (log-probabilities, entropies) of (prompt, response) rows; see `scoring.score`."""
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
      # One program, whether routes are known or not.
      known=(known or [None] * len(rows)) if self.config.router_replay else None,
    )

  def _request(self, plan: Plan, place: tuple[int, int], step: int) -> Request:
    """Request sample `place[1]` of group `place[0]`, which began in `step`."""
    group, sample = place
    return Request(
      prompt=plan.prompts[group],
      question=plan.questions[group].row,
      sample=sample,
      step=step,
      limit=self.config.max_response,
      asked=plan.questions[group],
    )

  def _submit(self, plan: Plan, place: tuple[int, int], response: Response, submit: Submit) -> None:
    """Submit a complete response for grading, unless its environment has judged it."""
    if response.verdict is None:
      submit(place, self._submission(plan, place, response))

  def _submission(self, plan: Plan, place: tuple[int, int], response: Response) -> pool.Submission:
    question, limit = plan.questions[place[0]], self.config.max_response
    tokens, truncated = response.tokens, response.truncated
    return pool.Submission(
      text=functools.partial(self.tokenizer.decode, tokens),
      answer=question.answer,
      kind=question.kind,
      check_steps=step_checker(question),
      facts=functools.partial(response_facts, question, tokens, truncated, limit),
    )

  def _released_costs(self, params: Params, plan: Plan) -> list[float]:
    """Compute `trajectory_rules.released_costs` of all candidates."""
    candidates = [
      (prompt, stored) for prompt, own in zip(plan.prompts, plan.candidates) for stored in own
    ]
    # Everything except a prompt's first token, as if it were the response.
    rows = [(prompt[:1], np.concatenate([prompt[1:], one.tokens])) for prompt, one in candidates]
    _, entropies = self.score(params, rows, [one.routes for _, one in candidates])
    lengths = [int(np.sum(one.tokens != self.tokenizer.pad_id)) for _, one in candidates]
    return trajectory_rules.released_costs(entropies, lengths, self.config.max_response)

  def _score_replays(
    self, params: Params, plan: Plan, candidates: Sequence[selection.Candidate]
  ) -> list[ReplayScores]:
    rows = [(plan.prompts[group], trajectory.tokens) for group, trajectory in candidates]
    own, known = [stored.own for _, stored in candidates], [one.routes for _, one in candidates]
    logps, entropies = (
      [x_T[own_T] for x_T, own_T in zip(found, own)] for found in self.score(params, rows, known)
    )
    past = [stored.logp[own_T] for (_, stored), own_T in zip(candidates, own)]
    corrected = past if self.objective.importance_correction else logps
    weights = selection.weights(self.objective, self.meshes.training, logps, corrected)
    return [
      ReplayScores(logp=logp, entropy=entropy, weight=weight, log_ratio=logp - of_past)
      for logp, entropy, weight, of_past in zip(logps, entropies, weights, past)
    ]


def plan_apart(data: QuestionSet, rows: Sequence[int], step: int) -> Plan:
  """Plan some questions of `data`, apart from stream and buffer; none is replayed."""
  return Plan(
    step=step,
    cursor=Cursor(),
    replay_started=False,
    questions=tuple(data.questions.read(rows)),
    prompts=tuple(data.prompts[row] for row in rows),
    candidates=((),) * len(rows),
    is_drawn=(False,) * len(rows),
  )


# ---- The batch ----


def make_batch(
  replay_config: replay.ReplayConfig,
  objective_config: objective.ObjectiveConfig,
  trained: GradedGroups,
  replays: Sequence[Trajectory | None],
  scores: Sequence[ReplayScores | None],
  *,
  longest_row: int,
  pad_id: int,
  spans_steps: bool,
  keeps_routes: model.ShapeConfig | None = None,
) -> Batch:
  """Assemble all rows of the step, group after group; the replayed row is the last of its group.

  Rows of questions outside `replay.difficulty` keep their place with an empty mask, so the
  normaliser stays the same. Rows have room for `longest_row` tokens. `spans_steps` says whether
  responses may span steps. `keeps_routes` is the model whose routes they have, if any.
  """
  step, rewards, rows, trains = trained.plan.step, [], [], []
  members: list[Response | Trajectory] = []
  groups = zip(trained.plan.prompts, trained.responses, replays, trained.verdicts, strict=True)
  for prompt, group, replayed, judged in groups:
    own = [*group, replayed] if replayed else group
    rewards.append([v.reward for v in judged] + ([replayed.reward] if replayed else []))
    correctness = replay.group_correctness(replay_config, judged, replayed)
    trains += [replay.trains(replay_config, correctness)] * len(own)
    rows += [(prompt, member.tokens) for member in own]
    members += own
  is_replay_B = np.array([isinstance(member, Trajectory) for member in members])
  advantage_B = _advantages(objective_config, np.array(rewards, np.float32), is_replay_B)
  tokens_BT, mask_BT = right_padded(rows, longest_row, pad_id)
  is_token_BT = mask_BT > 0
  # Tokens of an environment are context: they are not trained and have no weight.
  mask_BT[is_token_BT] = np.concatenate([member.own for member in members])
  logp_BT, term_weight_BT = np.zeros_like(mask_BT), np.ones_like(mask_BT)
  is_carried_BT = np.zeros(mask_BT.shape, bool)
  # Row after row, in the mask's order.
  logp_BT[is_token_BT] = np.concatenate([member.logp for member in members])
  for b, member in enumerate(members):
    if isinstance(member, Response):  # only its importance weight corrects a replayed row
      if member.tis_weight is not None:
        term_weight_BT[b, is_token_BT[b]] = member.tis_weight
      is_carried_BT[b, is_token_BT[b]] = np.arange(len(member.tokens)) < member.tokens_before(step)
  if objective_config.m2po_threshold < float('inf') and is_replay_B.any():
    stays = _within_second_moment(objective_config, replays, scores, advantage_B[is_replay_B])
    term_weight_BT[(mask_BT > 0) & is_replay_B[:, None]] = stays
  return Batch(
    tokens_BT=tokens_BT,
    response_mask_BT=mask_BT * np.array(trains, np.float32)[:, None],
    behaviour_logp_BT=logp_BT,
    advantage_B=advantage_B,
    is_replay_B=is_replay_B,
    policy_step_B=np.array([_first_step(member, step) for member in members], np.int32),
    term_weight_BT=term_weight_BT,
    is_carried_BT=is_carried_BT if spans_steps else None,
    routes_BTLC=routes.padded(keeps_routes, [one.routes for one in members], tokens_BT.shape[1])
    if keeps_routes
    else None,
  )


def _advantages(
  config: objective.ObjectiveConfig, reward_QK: np.ndarray, is_replay_B: np.ndarray
) -> np.ndarray:
  advantage_QK = advantages.group_advantages(
    reward_QK,
    config.normalize_std,
    is_replay_B.reshape(reward_QK.shape),
    config.baseline,
    config.replay_advantage,
    objective.replay_slope(config) if config.replay_advantage == 'balanced' else 1.0,
  )
  return np.asarray(advantage_QK).reshape(-1)


def _within_second_moment(
  config: objective.ObjectiveConfig,
  replays: Sequence[Trajectory | None],
  scores: Sequence[ReplayScores | None],
  advantage_R: np.ndarray,
) -> np.ndarray:
  """Mark the tokens of the R replayed rows that stay, row after row: bool."""
  log_ratios = [own.logp - row.logp[row.own] for row, own in zip(replays, scores) if row and own]
  advantage_N = np.repeat(advantage_R, [len(log_ratio) for log_ratio in log_ratios])
  return losses.within_second_moment(np.concatenate(log_ratios), advantage_N, config.m2po_threshold)


def _first_step(member: Response | Trajectory, step: int) -> int:
  """Return the step that wrote the first token; `step` trains the member."""
  return member.step if isinstance(member, Trajectory) else member.first_step(step)


# ---- Facts for rewards ----


def question_facts(question: Question) -> dict[str, Any]:
  """Return facts from a question's row; `question` and `messages` hide columns of these names."""
  return {
    **question.columns,
    'question': last_user_message(question.messages),
    'messages': [message._asdict() for message in question.messages],
  }


def response_facts(
  question: Question, tokens: np.ndarray, truncated: bool, max_response: int
) -> dict[str, Any]:
  """Return all facts about a response, except facts from its text or from the verifier.

  `tokens` are [T] int32, with the end token if there is one. `truncated` is True if the response
  was cut at the limit of `max_response` tokens, without an end token.
  """
  return {
    **question_facts(question),
    'tokens': tokens,
    'length': len(tokens),
    'truncated': truncated,
    'max_response': max_response,
  }
