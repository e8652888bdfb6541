"""The stages of a step: plan, generate, old_logprobs, grade, split, pick_replays, assemble.

`Rollout` holds what all of them need and never changes during a run.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from exgrpo_jax.algorithm import objective, question_stream, replay
from exgrpo_jax.algorithm.replay import Buffer
from exgrpo_jax.data.tasks.catalogue import step_checker
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import (
  Batch,
  Carried,
  Cursor,
  Plan,
  Question,
  QuestionSet,
  ReplayScores,
  Response,
  Trajectory,
  Verdict,
)
from exgrpo_jax.grading import pool
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.policy.model import Params
from exgrpo_jax.rollout import assembly, carry, facts, parity, scheduler, scoring, selection, slots
from exgrpo_jax.rollout.settings import Config
from exgrpo_jax.runtime import randomness
from exgrpo_jax.runtime.randomness import Purpose

Responses = Sequence[Sequence[Response]]  # by group
Verdicts = Sequence[Sequence[Verdict]]  # of the responses, in the same order
Replays = Sequence[Trajectory | None]  # by group; None for a fresh question


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

  def plan(
    self, buffer: Buffer, cursor: Cursor, step: int, carried: Sequence[Carried] = ()
  ) -> tuple[Plan, Cursor]:
    """What is carried, then replayed questions from the buffer and the rest from the stream.

    As many are drawn as make up `groups_in_flight`, shuffled by group. Returns the plan and the
    cursor after this step's fresh questions. Depends on its arguments and the seed alone, so a
    resumed run makes the same plan.
    """
    in_flight = {group.question_row: group.is_replay for group in carried}
    num_drawn = self.config.groups_in_flight - len(carried)
    rng = randomness.generator(self.seed, Purpose.PLAN, step)
    entries = {row: entry for row, entry in buffer.entries.items() if row not in in_flight}
    free = dataclasses.replace(buffer, entries=entries)
    replayed = replay.draw_questions(self.replay, free, num_drawn, self.config.samples, rng)
    fresh, cursor = question_stream.take(
      cursor,
      num_drawn - len(replayed),
      len(self.data.questions),
      self.seed,
      buffer.retired_epoch,
      taken=[*in_flight, *replayed],
      at_once=self.config.groups_in_flight,
    )
    order = rng.permutation(num_drawn)
    rows = [*in_flight, *np.array([*replayed, *fresh], int)[order].tolist()]
    replayed += [row for row, is_replay in in_flight.items() if is_replay]
    plan = Plan(
      step=step,
      epoch=cursor.epoch,
      replay_started=buffer.started,
      questions=tuple(self.data.questions.read(rows)),
      prompts=tuple(self.data.prompts[row] for row in rows),
      candidates=tuple(buffer.entries[row].trajectories if row in replayed else () for row in rows),
      carried=tuple(carried),
    )
    return plan, cursor

  def reads_retired(self, buffer: Buffer, epoch: int) -> bool:
    """Whether so few questions are left that the stream reads retired ones in `epoch`."""
    return question_stream.reads_retired(
      epoch, len(self.data.questions), buffer.retired_epoch, self.config.groups_in_flight
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
    purpose: Purpose,
    on_finish: Callable[[tuple[int, int], pool.Submission], None],
  ) -> tuple[list[list[Response]], dict[str, float]]:
    """K fresh responses for a fresh question, K - 1 for a replayed one, by group; and metrics.

    With `carry` it returns as soon as the step can train (`carry.trained`): some responses are then
    not complete, or not even begun.

    Args:
      params: in the decode layout (`model.decode_layout`).
      plan: of the step.
      purpose: of the random numbers; their place is the step in which a group was drawn.
      on_finish: called with (group, sample) and what is to be judged as responses finish:
        `Grader.submit`.
    """
    groups = [list(group.responses) for group in plan.carried]
    new = plan.is_replay_Q[len(groups) :]
    groups += [[carry.UNBEGUN] * (self.config.samples - is_replay) for is_replay in new]
    rows = [
      (group, sample)
      for group, own in enumerate(groups)
      for sample, response in enumerate(own)
      if not response.is_complete
    ]
    keys = {step: randomness.key(self.seed, purpose, step) for step in {*plan.drawn}}
    key_of = [keys[step] for step in plan.drawn]
    begun = [groups[group][sample] for group, sample in rows]
    syncs: list[slots.Sync] = []

    def keep(index: int, response: Response) -> None:
      group, sample = rows[index]
      if self.config.carry:
        response = carry.continued(begun[index], response, plan.step)
      groups[group][sample] = response

    def submit(index: int, response: Response) -> None:
      keep(index, response)
      on_finish(rows[index], self._submission(plan.questions[rows[index][0]], response))

    responses = scheduler.generate(
      self.model,
      params,
      [plan.prompts[group] for group, _ in rows],
      [plan.questions[group].row for group, _ in rows],
      [sample for _, sample in rows],
      [key_of[group] for group, _ in rows],
      self.config.decode_spec(self.tokenizer),
      self.meshes.decoding,
      submit,
      begun=begun if self.config.carry else None,
      is_enough=lambda: self._trained(plan, groups) is not None,
      on_sync=syncs.append,
    )
    for index, response in enumerate(responses):
      keep(index, response)
    return groups, slots.metrics(syncs)

  def old_logprobs(
    self, params: Params, plan: Plan, responses: Responses
  ) -> tuple[Responses, dict[str, float]]:
    """The responses with the log-probabilities that training takes as the old policy's.

    The trainer's, with `objective.old_logprobs='recompute'`; else the sampler's, which every
    `parity.every` steps are compared with the trainer's. Either concerns the tokens that this step
    wrote: what earlier steps wrote has had its turn. Returns the differences too, as metrics, where
    any were computed.

    Raises:
      InputError: they differ by more than `parity.max`.
    """
    recomputes = self.objective.old_logprobs == 'recompute'
    if not recomputes and (plan.step - 1) % self.parity.every:
      return responses, {}
    pairs = [
      (prompt, response)
      for prompt, group in zip(plan.prompts, responses)
      for response in group
      if carry.carried_tokens(response, plan.step) < len(response.tokens)
    ]
    if not recomputes:
      pairs = pairs[: self.parity.rows]
    if not pairs:
      return responses, {}
    logps, _ = self.score(params, [(prompt, response.tokens) for prompt, response in pairs])
    measured = parity.differences(logps, [response for _, response in pairs], plan.step)
    if recomputes:
      return parity.recomputed(responses, logps, self.objective.tis_limit, plan.step), measured
    parity.check(self.parity, plan.step, measured)
    return responses, measured

  def grade(self, plan: Plan, responses: Responses, grader: Grader) -> list[list[Verdict]]:
    """Verdicts by group of the complete responses.

    Of those that were submitted to `grader` by (group, sample), and of what the plan carries.
    Raises InputError if grading failed for all that were submitted.
    """
    verdicts = grader.collect()
    pool.refuse_all_failed(f'step {plan.step}', list(verdicts.values()))
    earlier = {group: iter(carried.verdicts) for group, carried in enumerate(plan.carried)}
    return [
      [
        verdicts.get((group, sample)) or next(earlier[group])
        for sample, response in enumerate(own)
        if response.is_complete
      ]
      for group, own in enumerate(responses)
    ]

  def split(
    self, plan: Plan, responses: Responses, verdicts: Verdicts
  ) -> tuple[Plan, Responses, Verdicts, list[Carried]]:
    """(plan, responses, verdicts) of the groups that the step trains, and what it carries on.

    With `carry` the groups are shuffled anew, by seed and step: a minibatch holds old and new ones.
    """
    chosen = self._trained(plan, responses)
    assert chosen is not None, 'generate returns once the step can train'
    if self.config.carry:
      rng = randomness.generator(self.seed, Purpose.TRAINED_ORDER, plan.step)
      chosen = rng.permutation(chosen).tolist()
    return carry.split(plan, responses, verdicts, chosen)

  def assemble(
    self, plan: Plan, responses: Responses, replays: Replays, verdicts: Verdicts
  ) -> Batch:
    """All rows of the step, see `assembly.batch`."""
    return assembly.batch(
      self.replay,
      self.objective,
      plan,
      responses,
      replays,
      verdicts,
      longest_row=self.config.longest_row,
      pad_id=self.tokenizer.pad_id,
      carries=self.config.carry,
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

  def _trained(self, plan: Plan, responses: Responses) -> list[int] | None:
    """The groups that the step trains; None while it has to go on."""
    # Without carry all of the plan's groups, of which there may be any number (`plan_apart`).
    questions = self.config.questions if self.config.carry else len(responses)
    return carry.ready(responses, plan.step, questions, self.config.max_age)

  def _submission(self, question: Question, response: Response) -> pool.Submission:
    """What is to be judged of a complete response."""
    tokens, truncated, limit = response.tokens, response.truncated, self.config.max_response
    return pool.Submission(
      text=functools.partial(self.tokenizer.decode, tokens),
      answer=question.answer,
      kind=question.kind,
      check_steps=step_checker(question),
      facts=functools.partial(facts.of_response, question, tokens, truncated, limit),
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
