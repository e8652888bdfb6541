"""The stages of a step, in the order in which training/loop.py calls them.

Where each stage does its work, with default settings:

  plan_step         replay.draw_questions, question_stream.take -> Plan (prompts: data/store.py)
  admit             nothing; with `headroom_drift`, drops stored responses that have drifted
  generate          scheduler.SlotEngine.generate, per token: decode_loop.decode ->
                    token_sampling.sample_token, model.decode; then slots.Row.response -> Response
  old_logprobs      scoring.score, to check some of the sampler's log-probabilities
  collect_verdicts  pool.Grader -> grading/worker.py, where _grade calls verifier.judge_with and
                    rewards.correctness; the pool sets Verdict.reward: 1 if correct, otherwise 0
  pick_replays      scoring.pick -> stages._score_replays -> scoring.score; the rule is the lowest
                    mean entropy (trajectory_rules.RULES) -> Trajectory
  assemble          advantages.group_advantages, packing.right_padded -> Batch

Responses are submitted for grading as they finish, while others are still being decoded. SlotEngine
only schedules, and the functions of partial.py do nothing without partial rollouts. dynamic.sample
calls generate once, or several times with dynamic sampling. loop.learn then calls
objective.clips_fresh_ratios and gradients.minibatches, and computes the loss of each:

  gradients.minibatch_gradient -> objective.loss_inputs (all normalizers), packing.pack
  gradients.accumulate (differentiates) -> model.hidden_states_and_balance, logprobs.fused_loss
  objective.token_loss -> losses; then gradients.apply_gradient -> optimizer.apply_gradient

loop.remember calls replay.record_step, which stores successes only after a step's pass rate has
exceeded `replay.start_pass_rate`.

Defaults: Q=128, K=8 (rollout/settings.py); ppo, policy_shaping, until_replay, constant aggregation
(algorithm/settings.py); 2 minibatches (learner/optimizer.py). docs/configuration.md lists them all.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
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
  Verdict,
  at_own,
)
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading import pool
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.packing import right_padded
from exgrpo_jax.policy.model import Params
from exgrpo_jax.policy.sharding import Meshes
from exgrpo_jax.rollout import partial, routes, scoring
from exgrpo_jax.rollout.sampler import EMPTY_RESPONSE, Request, Sampler
from exgrpo_jax.rollout.settings import LogprobCheckConfig, RolloutConfig
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

Responses = Sequence[Sequence[Response]]  # by group
# Responses per check of the sampler. A decoder bug shows up in almost every response.
_COMPARED_ROWS = 64
Submit = Callable[[tuple[int, int], pool.Submission], None]  # (group, sample): see `Grader.submit`


@dataclasses.dataclass(frozen=True)
class RolloutSetup:
  """Everything that the stages need and that never changes during a run."""

  config: RolloutConfig
  replay_config: replay.ReplayConfig
  objective_config: objective.ObjectiveConfig
  logprob_check: LogprobCheckConfig
  tokenizer: Tokenizer
  meshes: Meshes
  score_spec: scoring.ScoreSpec
  seed: int
  data: QuestionSet  # the training questions
  sampler: Sampler  # a SlotEngine, or an EpisodeSampler with an environment


# ---- Plan ----


def plan_step(
  rollout: RolloutSetup,
  buffer: Buffer,
  cursor: Cursor,
  step: int,
  partial_groups: Sequence[PartialGroup] = (),
) -> Plan:
  """Plan a step's groups: replayed questions from the buffer, the rest from the stream, shuffled.

  `partial_groups`, left over from the last step, come first. The plan depends only on the
  arguments and the seed, so a resumed run makes the same plan.
  """
  config, replay_config, data = rollout.config, rollout.replay_config, rollout.data
  partial_rows = [group.question_row for group in partial_groups]
  count = max(0, config.groups_in_flight - len(partial_rows))
  rng = randomness.generator(rollout.seed, Purpose.PLAN, step)
  num_questions = count
  if config.is_dynamic:  # dropped groups free places, but a step trains on Q groups
    num_questions = min(count, config.questions) if config.partial else config.questions
  replayed_rows = replay.draw_questions(
    replay_config, buffer, num_questions, config.group_size, step, rng, partial_rows
  )
  fresh_rows, cursor = question_stream.take(
    cursor,
    max(0, count - len(replayed_rows)),
    len(data.questions),
    rollout.seed,
    buffer.retired_epoch,
    taken=[*partial_rows, *replayed_rows],
    at_once=config.questions_at_once,
  )
  rows = rng.permutation(np.array([*replayed_rows, *fresh_rows], int)).tolist()
  plan = Plan(
    step=step,
    cursor=cursor,
    replay_started=buffer.started,
    questions=tuple(data.questions.read(rows)),
    prompts=tuple(data.prompts[row] for row in rows),
    candidates=tuple(
      replay.candidates(replay_config, buffer.entries[row], step)
      if row in replayed_rows and replay_config.include_trajectory
      else ()
      for row in rows
    ),
    is_drawn=tuple(row in replayed_rows for row in rows),
    history={row: buffer.history[row] for row in [*partial_rows, *rows] if row in buffer.history},
    retired_epoch=buffer.retired_epoch,
  )
  return partial.continuing(replay_config, config.group_size, plan, partial_groups, data, buffer)


def admit(rollout: RolloutSetup, params: Params, plan: Plan) -> Plan:
  """Return the plan without the stored trajectories that have drifted from the policy `params`.

  Only `question_selection='headroom_drift'` drops trajectories (see `replay.drift`); with other
  settings, the plan is returned unchanged. If a drawn question has no trajectories left, it gets K
  fresh responses. But if an earlier step already began the question's group with K - 1 fresh
  responses, the group keeps the trajectory that has drifted least.
  """
  config, num_partial = rollout.replay_config, len(plan.partial_groups)
  if config.question_selection != 'headroom_drift':
    return plan
  pairs = [(group, row) for group, rows in enumerate(plan.candidates) for row in rows]
  scores = iter(_score_replays(rollout, params, plan, pairs))
  candidates = []
  for group, trajectories in enumerate(plan.candidates):
    drifts = [replay.drift(next(scores).log_ratio) for _ in trajectories]
    near = tuple(row for row, drift in zip(trajectories, drifts) if drift <= config.max_drift)
    if group < num_partial and trajectories and not near:
      near = (trajectories[int(np.argmin(drifts))],)
    candidates.append(near)
  return dataclasses.replace(plan, candidates=tuple(candidates))


# ---- Generate ----


def generate(
  rollout: RolloutSetup,
  params: Params,
  plan: Plan,
  submit: Submit,
  aim: partial.Round = partial.WHOLE_STEP,
) -> tuple[list[list[Response]], dict[str, float]]:
  """Generate each group's fresh responses: K, or K - 1 with replay. Also returns metrics.

  With partial rollouts, generation stops as soon as the step can train, so some responses may be
  incomplete or still empty. `params` are in the decode layout (`model.decode_layout`).
  `submit` is called with each finished response that needs grading. `aim` decides when a round of
  dynamic sampling ends; groups without a verdict are assumed to be informative.
  """
  config = rollout.config
  groups = [[EMPTY_RESPONSE] * (config.group_size - replays) for replays in plan.is_replay_Q]
  groups[: len(plan.partial_groups)] = [list(group.responses) for group in plan.partial_groups]
  num_complete = sum(map(partial.are_complete, groups))

  def can_train() -> bool:
    if not config.partial or sum(map(partial.are_complete, groups)) < num_complete + aim.finish:
      return False
    return partial.ready(config, groups, plan.step, aim.dropped, aim.fillers) is not None

  if can_train():
    return groups, {}
  places = [
    (group, sample)
    for group, members in enumerate(groups)
    for sample, response in enumerate(members)
    if not response.is_complete
  ]
  assert places, 'a step must be able to train or to generate more'
  requests = _requests(config, plan, groups, places)

  def keep(index: int, response: Response) -> None:
    group, sample = places[index]
    before = requests[index].prefix
    groups[group][sample] = partial.continued(config, before, response, plan.step)

  def finish(index: int, response: Response) -> bool:
    keep(index, response)
    group, _ = place = places[index]
    if response.verdict is None:  # otherwise the environment has already judged the response
      submit(place, _submission(rollout, plan.questions[group], response))
    # Only a complete group can change the answer of `can_train`.
    return partial.are_complete(groups[group]) and can_train()

  responses, metrics = rollout.sampler.generate(params, requests, finish)
  for index, response in enumerate(responses):
    keep(index, response)
  return groups, metrics


def _requests(
  config: RolloutConfig, plan: Plan, groups: Responses, places: Sequence[tuple[int, int]]
) -> list[Request]:
  """Request the responses at `places`, which are (group, sample) pairs."""
  draw_steps = partial.drawn_in(plan)
  return [
    Request(
      prompt=plan.prompts[group],
      question=plan.questions[group].row,
      sample=sample,
      step=draw_steps[group],
      limit=config.max_response,
      prefix=groups[group][sample],
      episode_question=plan.questions[group],
      # These are all in checkpoints, so a resumed run drafts the same tokens.
      past=(
        *(trajectory.tokens for trajectory in plan.candidates[group]),
        *(response.tokens for response in groups[group] if response.is_complete),
      ),
    )
    for group, sample in places
  ]


def _submission(rollout: RolloutSetup, question: Question, response: Response) -> pool.Submission:
  tokens, truncated, limit = response.tokens, response.truncated, rollout.config.max_response
  return pool.Submission(
    text=functools.partial(rollout.tokenizer.decode, tokens),
    answer=question.answer,
    kind=question.kind,
    check_steps=step_checker(question),
    facts=functools.partial(response_facts, question, tokens, truncated, limit),
  )


def question_facts(question: Question) -> dict[str, Any]:
  """Return a question's columns, with `question` and `messages` added or replaced."""
  return {
    **question.columns,
    'question': last_user_message(question.messages),
    'messages': [message._asdict() for message in question.messages],
  }


def response_facts(
  question: Question, tokens: np.ndarray, truncated: bool, max_response: int
) -> dict[str, Any]:
  """Return all facts about a response except its text and the verifier's results.

  `tokens` are int32 [T], including any end token. `truncated` is True if the response was cut off
  at `max_response` tokens, without an end token.
  """
  return {
    **question_facts(question),
    'tokens': tokens,
    'length': len(tokens),
    'truncated': truncated,
    'max_response': max_response,
  }


# ---- Old log-probabilities ----


def old_logprobs(
  rollout: RolloutSetup, params: Params, plan: Plan, responses: Responses
) -> tuple[Responses, dict[str, float]]:
  """Return the responses with the old policy's log-probabilities, and metrics.

  With `objective.old_logprobs='recompute'`, these come from the trainer. Otherwise, they come from
  the sampler and are compared with the trainer's every `logprob_check.every` steps. Only tokens
  from this step are recomputed or compared. The metrics are the measured differences, if any.
  Raises InputError if sampler and trainer differ by more than `logprob_check.max`.
  """
  check, recomputes = rollout.logprob_check, rollout.objective_config.old_logprobs == 'recompute'
  if not recomputes and (plan.step - 1) % check.every:
    return responses, {}
  pairs = [
    (prompt, response)
    for prompt, group in zip(plan.prompts, responses)
    for response in group
    if response.tokens_before(plan.step) < len(response.tokens)
  ]
  if not recomputes:
    pairs = pairs[:_COMPARED_ROWS]
  if not pairs:
    return responses, {}
  rows = [(prompt, response.tokens) for prompt, response in pairs]
  row_routes = [response.routes for _, response in pairs]
  logps, _ = scoring.score(rollout.score_spec, params, rows, row_routes)
  differences = scoring.differences(logps, [response for _, response in pairs], plan.step)
  if recomputes:
    return recomputed(responses, logps, rollout.objective_config.tis_limit, plan.step), differences
  largest = differences['rollout_mismatch/logprob_max']
  if not largest <= check.max:  # nor NaN
    raise InputError(
      f'config.logprob_check.max={check.max}: at step {plan.step} the log-probabilities of the '
      f'sampler and the trainer differ by up to {largest:.2g} nats (mean '
      f'{differences["rollout_mismatch/logprob_mean"]:.2g}), so importance weights would be wrong. '
      'Raise the limit if the cause is only bfloat16 rounding, or set '
      "config.objective.old_logprobs='recompute'."
    )
  return responses, differences


def recomputed(
  responses: Responses, trainer_logps: Iterable[np.ndarray], tis_limit: float, step: int
) -> list[list[Response]]:
  """Replace the log-probabilities of the tokens sampled in `step` with the trainer's.

  If `tis_limit` is positive, also add the weights for truncated importance sampling.
  `trainer_logps` yields the log-probabilities [T] of each response that has such tokens, in order.
  """
  logps = iter(trainer_logps)

  def with_trainers(response: Response) -> Response:
    start = response.tokens_before(step)
    if start == len(response.tokens):
      return response
    logp, weight = (next(logps) * response.own)[start:], None
    if tis_limit:
      earlier_weights = [] if response.tis_weight is None else [response.tis_weight]
      new_weight = losses.tis_weight(logp, response.logp[start:], tis_limit)
      weight = np.concatenate([*earlier_weights, new_weight])
    full_logp = np.concatenate([response.logp[:start], logp])
    return dataclasses.replace(response, logp=full_logp, tis_weight=weight)

  return [[with_trainers(response) for response in group] for group in responses]


# ---- Collect verdicts ----


def collect_verdicts(
  rollout: RolloutSetup, plan: Plan, responses: Responses, grader: Grader
) -> GradedGroups:
  """Return the groups to train on, with the grader's verdicts.

  The responses were submitted during `generate`. With partial rollouts, some groups are left for
  the next step. The others are shuffled (seeded by run and step), so that each minibatch mixes old
  and new groups. With dynamic sampling, dropped groups come last, and `dynamic.sample` has already
  collected the verdicts. Raises InputError if grading failed for all responses.
  """
  groups, new_verdicts = graded(plan, responses, grader)
  ordered = [new_verdicts[place] for place in sorted(new_verdicts)]
  pool.refuse_all_failed(f'step {plan.step}', ordered)
  dropped_groups = dropped(rollout, groups) if rollout.config.is_dynamic else ()
  return partial.split(rollout.config, groups, rollout.seed, dropped_groups)


def dropped(rollout: RolloutSetup, graded: GradedGroups) -> list[int]:
  """Return the groups that dynamic sampling drops; see `partial.dropped`."""
  return partial.dropped(rollout.replay_config, graded, rollout.objective_config.mask_truncated)


def graded(
  plan: Plan, responses: Responses, grader: Grader
) -> tuple[GradedGroups, dict[Any, Verdict]]:
  """Collect verdicts; return the groups with all their verdicts, and a dict of the collected ones.

  Verdicts are collected from the grader and the environment. The plan already contains the others.
  """
  environment_verdicts = {
    (group, sample): response.verdict
    for group, members in enumerate(responses)
    for sample, response in enumerate(members)
    if response.verdict
  }
  new_verdicts: dict[Any, Verdict] = {**grader.collect(), **environment_verdicts}
  verdicts = {**partial.verdicts(plan), **new_verdicts}
  by_group = [
    [verdicts[group, sample] for sample, response in enumerate(members) if response.is_complete]
    for group, members in enumerate(responses)
  ]
  return GradedGroups(plan, responses, by_group), new_verdicts


# ---- Pick replays ----


def pick_replays(
  rollout: RolloutSetup, params: Params, plan: Plan
) -> tuple[list[Trajectory | None], list[ReplayScores | None]]:
  """Pick and score a trajectory for each replayed question.

  Returns the trajectories and their scores; both are None for a fresh question. By default, the
  trajectory with the lowest mean token entropy under the current policy is picked; ties go to the
  oldest. A lone candidate is scored too, because the step records its scores. Without
  `objective.importance_correction`, the returned trajectories have current log-probabilities.
  """
  rule, stored = rollout.replay_config.trajectory_selection, plan.candidates
  if rule == 'valid_steps':
    checks = [step_checker(question) for question in plan.questions]
    stored = scoring.with_valid_steps(stored, checks, rollout.tokenizer.decode)
  replays, scores = scoring.pick(
    rule,
    stored,
    functools.partial(_score_replays, rollout, params, plan),
    randomness.generator(rollout.seed, Purpose.TRAJECTORY, plan.step),
    _released_costs(rollout, params, plan) if rule == 'released' else None,
  )
  if not rollout.objective_config.importance_correction:
    replays = [
      dataclasses.replace(trajectory, logp=at_own(trajectory, replay_scores.logp))
      if trajectory and replay_scores
      else None
      for trajectory, replay_scores in zip(replays, scores)
    ]
  return replays, scores


def _score_replays(
  rollout: RolloutSetup, params: Params, plan: Plan, candidates: Sequence[scoring.Candidate]
) -> list[ReplayScores]:
  rows = [(plan.prompts[group], trajectory.tokens) for group, trajectory in candidates]
  own_masks = [trajectory.own for _, trajectory in candidates]
  row_routes = [trajectory.routes for _, trajectory in candidates]
  logps, entropies = (
    [x_T[own_T] for x_T, own_T in zip(values, own_masks)]
    for values in scoring.score(rollout.score_spec, params, rows, row_routes)
  )
  past_logps = [trajectory.logp[own_T] for (_, trajectory), own_T in zip(candidates, own_masks)]
  config, mesh = rollout.objective_config, rollout.meshes.training
  denominators = past_logps if config.importance_correction else logps
  shaped_ratios = scoring.shaped_ratios(config, mesh, logps, denominators)
  columns = zip(candidates, logps, entropies, shaped_ratios, past_logps)
  return [
    ReplayScores(trajectory, logp, entropy, shaped, log_ratio=logp - past_logp)
    for (_, trajectory), logp, entropy, shaped, past_logp in columns
  ]


def _released_costs(rollout: RolloutSetup, params: Params, plan: Plan) -> list[float]:
  """Compute `trajectory_rules.released_costs` for all candidates."""
  candidates = [
    (prompt, trajectory)
    for prompt, trajectories in zip(plan.prompts, plan.candidates)
    for trajectory in trajectories
  ]
  # Score everything except the prompt's first token, as if it were the response.
  rows = [(prompt[:1], np.concatenate([prompt[1:], row.tokens])) for prompt, row in candidates]
  row_routes = [trajectory.routes for _, trajectory in candidates]
  _, entropies = scoring.score(rollout.score_spec, params, rows, row_routes)
  lengths = [int(np.sum(row.tokens != rollout.tokenizer.pad_id)) for _, row in candidates]
  return trajectory_rules.released_costs(entropies, lengths, rollout.config.max_response)


# ---- Assemble ----


def assemble(
  rollout: RolloutSetup,
  trained: GradedGroups,
  replays: Sequence[Trajectory | None],
  scores: Sequence[ReplayScores | None],
) -> Batch:
  """Assemble the step's rows into a batch, group by group, with a replayed row last in its group.

  Rows outside `replay.difficulty` get an empty mask, and so do truncated rows with
  `objective.mask_truncated`. They stay in the batch, so the number of rows never changes.
  """
  config, step = rollout.objective_config, trained.plan.step
  rewards, rows, trains, first_steps = [], [], [], []
  members: list[Response | Trajectory] = []
  groups = zip(trained.plan.prompts, trained.responses, replays, trained.verdicts, strict=True)
  num_trained = len(trained.plan.questions) - trained.num_dropped
  for prompt, responses, trajectory, verdicts in itertools.islice(groups, num_trained):
    group = [*responses, trajectory] if trajectory else responses
    rewards.append([v.reward for v in verdicts] + ([trajectory.reward] if trajectory else []))
    correctness = replay.group_correctness(rollout.replay_config, verdicts, trajectory)
    is_trained = replay.trains(rollout.replay_config, correctness)
    trains += [is_trained and not (config.mask_truncated and row.truncated) for row in group]
    rows += [(prompt, row.tokens) for row in group]
    members += group
  is_replay_B = np.array([isinstance(member, Trajectory) for member in members])
  trains_B = np.array(trains, np.float32)
  advantage_B = _advantages(config, np.array(rewards, np.float32), is_replay_B, trained)
  tokens_BT, mask_BT = right_padded(rows, rollout.config.longest_row, rollout.tokenizer.pad_id)
  is_token_BT = mask_BT > 0  # includes environment tokens, which are context without a weight
  mask_BT[is_token_BT] = np.concatenate([member.own for member in members])
  logp_BT, term_weight_BT = np.zeros_like(mask_BT), np.ones_like(mask_BT)
  is_carried_BT = np.zeros(mask_BT.shape, bool)
  logp_BT[is_token_BT] = np.concatenate([member.logp for member in members])  # row by row
  for b, member in enumerate(members):
    if isinstance(member, Trajectory):  # corrected only by its importance weight
      first_steps.append(member.step)
    else:
      first_steps.append(member.first_step(step))
      if member.tis_weight is not None:
        term_weight_BT[b, is_token_BT[b]] = member.tis_weight
      is_carried_BT[b, is_token_BT[b]] = np.arange(len(member.tokens)) < member.tokens_before(step)
  if config.m2po_threshold < float('inf') and is_replay_B.any():
    advantage_R = (advantage_B * trains_B)[is_replay_B]
    is_kept_N = _within_second_moment(config, replays, scores, advantage_R)
    term_weight_BT[(mask_BT > 0) & is_replay_B[:, None]] = is_kept_N
  routes_BTLC = None
  if rollout.config.router_replay:
    row_routes = [member.routes for member in members]
    routes_BTLC = routes.padded(rollout.score_spec.model, row_routes, tokens_BT.shape[1])
  return Batch(
    tokens_BT=tokens_BT,
    response_mask_BT=mask_BT * trains_B[:, None],
    old_logp_BT=logp_BT,
    advantage_B=advantage_B,
    is_replay_B=is_replay_B,
    policy_step_B=np.array(first_steps, np.int32),
    term_weight_BT=term_weight_BT,
    is_carried_BT=is_carried_BT if rollout.config.keeps_groups else None,
    routes_BTLC=routes_BTLC,
  )


def _advantages(
  config: objective.ObjectiveConfig,
  reward_QK: np.ndarray,
  is_replay_B: np.ndarray,
  trained: GradedGroups,
) -> np.ndarray:
  is_replay_QK = is_replay_B.reshape(reward_QK.shape)
  if config.baseline == 'history':
    counts = replay.counts_after(trained.plan, trained.verdicts)
    counts_Q2 = np.array([*counts.values()], np.float32)
    advantage_QK = advantages.history_advantages(reward_QK, counts_Q2, config.normalize_std)
    if config.replay_advantage == 'zero':
      advantage_QK *= ~is_replay_QK
  else:
    advantage_QK = advantages.group_advantages(
      reward_QK,
      config.normalize_std,
      is_replay_QK,
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
  """Return a flat bool mask, row by row, of the tokens to keep in the R replayed rows."""
  log_ratios = [
    replay_scores.logp - trajectory.logp[trajectory.own]
    for trajectory, replay_scores in zip(replays, scores)
    if trajectory and replay_scores
  ]
  advantage_N = np.repeat(advantage_R, [len(log_ratio) for log_ratio in log_ratios])
  return losses.within_second_moment(np.concatenate(log_ratios), advantage_N, config.m2po_threshold)


# ---- Plans without training ----


def plan_apart(data: QuestionSet, rows: Sequence[int], step: int) -> Plan:
  """Plan a step for the questions at `rows` of `data`, without the stream, the buffer or replay."""
  return Plan(
    step=step,
    cursor=Cursor(),
    replay_started=False,
    questions=tuple(data.questions.read(rows)),
    prompts=tuple(data.prompts[row] for row in rows),
    candidates=((),) * len(rows),
    is_drawn=(False,) * len(rows),
  )
