"""The batch of a step, from its prompts, responses and verdicts; NumPy."""

from collections.abc import Sequence

import numpy as np

from exgrpo_jax.algorithm import advantages, objective, replay
from exgrpo_jax.datatypes import Batch, Plan, Response, Trajectory, Verdict
from exgrpo_jax.padding import right_padded
from exgrpo_jax.rollout import carry


def batch(
  replay_config: replay.Config,
  objective_config: objective.Config,
  plan: Plan,
  responses: Sequence[Sequence[Response]],
  replays: Sequence[Trajectory | None],
  verdicts: Sequence[Sequence[Verdict]],
  *,
  longest_row: int,
  pad_id: int,
  carries: bool,
) -> Batch:
  """All rows of the step, group after group; the replayed row is the last of its group.

  Rows of questions outside `replay.difficulty` keep their place with an empty mask, so the
  normaliser stays the same.

  Args:
    replay_config: what counts as a success, and which questions train.
    objective_config: how advantages are made.
    plan: the step's questions.
    responses: fresh ones by group, complete.
    replays: the stored trajectory beside them; None for a fresh question.
    verdicts: of the responses, in the same order.
    longest_row: tokens that a row of the batch has room for.
    pad_id: any valid token.
    carries: whether responses may have been begun in earlier steps.
  """
  rewards, rows, trains = [], [], []
  members: list[Response | Trajectory] = []
  for prompt, group, replayed, judged in zip(plan.prompts, responses, replays, verdicts):
    own = [*group, replayed] if replayed else group
    rewards.append([v.reward for v in judged] + ([replayed.reward] if replayed else []))
    correctness = replay.group_correctness(replay_config, judged, replayed is not None)
    trains += [replay.trains(replay_config, correctness)] * len(own)
    rows += [(prompt, member.tokens) for member in own]
    members += own
  is_replay_B = np.array([isinstance(member, Trajectory) for member in members])
  reward_QK = np.array(rewards, np.float32)
  advantage_QK = advantages.group_advantages(
    reward_QK,
    objective_config.normalize_std,
    ~is_replay_B.reshape(reward_QK.shape) if objective_config.baseline == 'fresh' else None,
  )
  tokens_BT, mask_BT = right_padded(rows, longest_row, pad_id)
  logp_BT, tis_weight_BT = np.zeros_like(mask_BT), np.ones_like(mask_BT)
  is_carried_BT = np.zeros(mask_BT.shape, bool) if carries else None
  # Row after row, in the mask's order.
  logp_BT[mask_BT > 0] = np.concatenate([member.logp for member in members])
  policy_steps = []
  for b, member in enumerate(members):
    if isinstance(member, Trajectory):  # corrected by its importance weight alone
      policy_steps.append(member.step)
      continue
    policy_steps.append(carry.first_step(member, plan.step))
    if member.tis_weight is not None:
      tis_weight_BT[b, mask_BT[b] > 0] = member.tis_weight
    if is_carried_BT is not None:
      start = len(rows[b][0])
      is_carried_BT[b, start : start + carry.carried_tokens(member, plan.step)] = True
  return Batch(
    tokens_BT=tokens_BT,
    response_mask_BT=mask_BT * np.array(trains, np.float32)[:, None],
    behaviour_logp_BT=logp_BT,
    advantage_B=advantage_QK.reshape(-1),
    is_replay_B=is_replay_B,
    policy_step_B=np.array(policy_steps, np.int32),
    tis_weight_BT=tis_weight_BT,
    is_carried_BT=is_carried_BT,
  )
