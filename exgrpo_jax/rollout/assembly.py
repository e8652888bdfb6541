"""The batch of a step, from its prompts, responses and verdicts; NumPy."""

from collections.abc import Sequence

import numpy as np

from exgrpo_jax.algorithm import advantages, objective, replay, terms
from exgrpo_jax.datatypes import Batch, Graded, ReplayScores, Response, Trajectory
from exgrpo_jax.padding import right_padded
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import routes


def batch(
  replay_config: replay.Config,
  objective_config: objective.Config,
  trained: Graded,
  replays: Sequence[Trajectory | None],
  scores: Sequence[ReplayScores | None],
  *,
  longest_row: int,
  pad_id: int,
  spans_steps: bool,
  keeps_routes: model.Config | None = None,
) -> Batch:
  """All rows of the step, group after group; the replayed row is the last of its group.

  Rows of questions outside `replay.difficulty` keep their place with an empty mask, so the
  normaliser stays the same. Rows have room for `longest_row` tokens; `spans_steps` says
  whether responses may span steps, and `keeps_routes` is the model whose routes they have, if any.
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
  # What an environment said is context: neither trained nor weighed.
  mask_BT[is_token_BT] = np.concatenate([member.own for member in members])
  logp_BT, term_weight_BT = np.zeros_like(mask_BT), np.ones_like(mask_BT)
  is_carried_BT = np.zeros(mask_BT.shape, bool)
  # Row after row, in the mask's order.
  logp_BT[is_token_BT] = np.concatenate([member.logp for member in members])
  for b, member in enumerate(members):
    if isinstance(member, Response):  # a replayed row is corrected by its importance weight alone
      if member.tis_weight is not None:
        term_weight_BT[b, is_token_BT[b]] = member.tis_weight
      is_carried_BT[b, is_token_BT[b]] = np.arange(len(member.tokens)) < member.tokens_before(step)
  if objective_config.second_moment < float('inf') and is_replay_B.any():
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
  config: objective.Config, reward_QK: np.ndarray, is_replay_B: np.ndarray
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
  config: objective.Config,
  replays: Sequence[Trajectory | None],
  scores: Sequence[ReplayScores | None],
  advantage_R: np.ndarray,
) -> np.ndarray:
  """Which tokens of the R replayed rows stay, row after row: bool."""
  log_ratios = [own.logp - row.logp[row.own] for row, own in zip(replays, scores) if row and own]
  advantage_N = np.repeat(advantage_R, [len(log_ratio) for log_ratio in log_ratios])
  return terms.within_second_moment(np.concatenate(log_ratios), advantage_N, config.second_moment)


def _first_step(member: Response | Trajectory, step: int) -> int:
  """The step that wrote the first token of what `step` trains."""
  return member.step if isinstance(member, Trajectory) else member.first_step(step)
