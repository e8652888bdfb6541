"""The verbs of a step: plan, pick_replays, generate, grade, assemble.

`Rollout` holds what all of them need and never changes during a run. Padding
happens in `right_padded` alone.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np

from exgrpo_jax.algorithm import objective, question_stream, replay
from exgrpo_jax.config import setting
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Batch, Cursor, Plan, Question, Response, Trajectory, Verdict
from exgrpo_jax.errors import InputError
from exgrpo_jax.grading.pool import Grader
from exgrpo_jax.padding import length_bucket, right_padded
from exgrpo_jax.policy import logprobs, model, sharding
from exgrpo_jax.rollout import scheduler, token_sampling

SCORE_ROWS = 512  # stored trajectories in one forward pass, at most
_WHOLE = (
  'training samples from the whole softmax, for its importance weights are of that; '
  'evaluation.{} may cut it'
)


@dataclasses.dataclass(frozen=True)
class Config:
  questions: int = setting('[1, inf)', 'questions in a step (Q)')
  samples: int = setting('[2, inf)', 'rollouts of a question (K); an advantage compares at least 2')
  max_prompt: int = setting('[1, inf)', 'longest prompt, in tokens')
  max_response: int = setting('[1, inf)', 'longest response, in tokens')
  temperature: float = setting('(0, inf)', 'of sampling, and of every log-probability in training')
  top_k: int = setting('[0, 0]', _WHOLE.format('top_k'))
  top_p: float = setting('[1, 1]', _WHOLE.format('top_p'))
  min_p: float = setting('[0, 0]', _WHOLE.format('min_p'))
  slots: int = setting('[1, inf)', 'responses that are decoded together')
  logit_chunk: int = setting('[1, inf)', 'tokens whose logits exist at once in training')

  def sampling(
    self, tokenizer: Tokenizer, how: token_sampling.Config | None = None
  ) -> scheduler.Settings:
    """How to sample; from the softmax at the configured temperature unless told otherwise."""
    return scheduler.Settings(
      draw=how or token_sampling.Config(self.temperature),
      slots=self.slots,
      max_response=self.max_response,
      eos_ids=tokenizer.eos_ids,
      pad_id=tokenizer.pad_id,
    )


@dataclasses.dataclass(frozen=True)
class ParityConfig:
  """How far the sampler's log-probabilities may be from the trainer's."""

  every: int = setting('[1, inf)', 'steps between comparisons; the first step always has one')
  rows: int = setting('[1, inf)', 'responses that are compared')
  max: float = setting(
    '(0, inf)', 'largest difference of a token, in nats; beyond it the run stops'
  )


@dataclasses.dataclass(frozen=True)
class Rollout:
  """What every verb needs; made once a run."""

  config: Config
  replay: replay.Config
  objective: objective.Config
  parity: ParityConfig
  model: model.Config
  tokenizer: Tokenizer
  mesh: jax.sharding.Mesh
  seed: int
  dataset: Sequence[Question]
  prompts: Sequence[np.ndarray]  # [T] int32 of every question of the dataset

  def plan(self, buffer: replay.Buffer, cursor: Cursor, step: int) -> tuple[Plan, Cursor]:
    """Replayed questions from the buffer, the rest from the stream, shuffled by group.

    Returns the plan and the cursor behind this step's fresh questions. A function of
    its arguments and the seed: a resumed run plans the same.
    """
    num_questions = self.config.questions
    rng = np.random.default_rng((self.seed, step))
    replayed = replay.draw_questions(self.replay, buffer, num_questions, self.config.samples, rng)
    fresh, cursor = question_stream.take(
      cursor,
      num_questions - len(replayed),
      len(self.dataset),
      self.seed,
      buffer.retired_epoch,
      taken=replayed,
      questions_per_step=num_questions,
    )
    candidates = [buffer.entries[row].trajectories for row in replayed] + [()] * len(fresh)
    order = rng.permutation(num_questions)
    rows = np.array([*replayed, *fresh])[order]
    return Plan(
      step=step,
      epoch=cursor.epoch,
      replay_started=buffer.started,
      questions=tuple(self.dataset[int(row)] for row in rows),
      prompts=tuple(self.prompts[int(row)] for row in rows),
      candidates=tuple(candidates[index] for index in order),
    ), cursor

  def reads_retired(self, buffer: replay.Buffer, epoch: int) -> bool:
    """Whether so few questions are left that the stream reads retired ones in `epoch`."""
    return question_stream.reads_retired(
      epoch, len(self.dataset), buffer.retired_epoch, self.config.questions
    )

  def pick_replays(self, params, plan: Plan) -> list[Trajectory | None]:
    """The stored trajectory that each replayed question uses; None for a fresh one.

    The one of lowest mean token entropy under the current policy by default; ties go
    to the oldest. A question with one trajectory needs no scoring.
    """
    scored = [
      (index, trajectory)
      for index, stored in enumerate(plan.candidates)
      if len(stored) > 1
      for trajectory in stored
    ]
    kind = self.replay.trajectory_selection
    if kind in ('newest', 'random'):
      cost = dict(enumerate(self._model_free_costs(kind, plan, len(scored))))
    else:
      rows = [(plan.prompts[index], trajectory.tokens) for index, trajectory in scored]
      logps, entropies = self.score(params, rows)
      cost = {
        'lowest_entropy': [np.mean(e) for e in entropies],
        'highest_entropy': [-np.mean(e) for e in entropies],
        'lowest_perplexity': [-np.mean(logp) for logp in logps],
      }[kind]
    best = {}
    for number, (index, _) in enumerate(scored):
      if index not in best or cost[number] < cost[best[index]]:
        best[index] = number
    return [
      scored[best[index]][1] if index in best else (stored[0] if stored else None)
      for index, stored in enumerate(plan.candidates)
    ]

  def generate(
    self,
    params,
    plan: Plan,
    key: jax.Array,
    on_finish: Callable[[tuple[int, int], Callable[[], str], str, str], None],
  ) -> list[list[Response]]:
    """K fresh responses for a fresh question, K - 1 for a replayed one, by group.

    `params` in the decode layout (`model.decode_layout`). `on_finish((group, sample), text,
    answer, kind)` is called as responses finish: the grader's submit. `text()` is the response's.
    """
    samples = self.config.samples
    places = [
      (group, sample)
      for group, is_replay in enumerate(plan.is_replay_Q)
      for sample in range(samples - is_replay)
    ]

    def finished(index, response):
      question = plan.questions[places[index][0]]
      on_finish(
        places[index],
        functools.partial(self.tokenizer.decode, response.tokens),
        question.answer,
        question.kind,
      )

    responses = scheduler.generate(
      self.model,
      params,
      [plan.prompts[group] for group, _ in places],
      [plan.questions[group].row for group, _ in places],
      [sample for _, sample in places],
      key,
      self.config.sampling(self.tokenizer),
      self.mesh,
      finished,
    )
    groups = [[] for _ in plan.questions]
    for (group, _), response in zip(places, responses):
      groups[group].append(response)
    return groups

  def reconcile(
    self, params, plan: Plan, responses: Sequence[Sequence[Response]]
  ) -> tuple[list[list[Response]], dict[str, float]]:
    """Holds the sampler's log-probabilities against the trainer's, and says how far they are off.

    With `objective.old_logprobs='recompute'` in every step and on every response, which
    then carries the trainer's, and the tis_weight where `objective.tis_limit` asks for one;
    else as `parity` has it, and one that is off too far raises InputError.
    """
    recomputes = self.objective.old_logprobs == 'recompute'
    if not recomputes and (plan.step - 1) % self.parity.every:
      return responses, {}
    flat = [
      (prompt, response) for prompt, group in zip(plan.prompts, responses) for response in group
    ][: None if recomputes else self.parity.rows]
    logps, _ = self.score(params, [(prompt, response.tokens) for prompt, response in flat])
    off = np.abs(np.concatenate([logp - response.logp for logp, (_, response) in zip(logps, flat)]))
    found = {'parity/mean': float(off.mean()), 'parity/max': float(off.max())}
    if recomputes:
      own = iter(logps)
      responses = [
        [self._recomputed(response, next(own)) for response in group] for group in responses
      ]
    elif not off.max() <= self.parity.max:  # nor may it be NaN
      raise InputError(
        f"step {plan.step}: the sampler's log-probabilities are off the trainer's by up to "
        f'{off.max():.2g} nats (mean {off.mean():.2g}), over config.parity.max='
        f'{self.parity.max}: importance weights would be wrong. Raise the limit if the model '
        'computes in bfloat16 and this is its rounding, or set '
        "config.objective.old_logprobs='recompute'."
      )
    return responses, found

  def grade(
    self, plan: Plan, responses: Sequence[Sequence[Response]], grader: Grader
  ) -> list[list[Verdict]]:
    """Verdicts by group, for responses that were handed to `grader` by (group, sample)."""
    verdicts = grader.collect()
    return [
      [verdicts[group, sample] for sample in range(len(responses[group]))]
      for group in range(len(plan.questions))
    ]

  def assemble(self, plan: Plan, responses, replays, verdicts) -> Batch:
    """All rows of the step as NumPy arrays, group after group; the replayed row is the last.

    Rows of questions outside `replay.difficulty` keep their place with an empty mask,
    so the normaliser stays what it was.
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
      # A replayed row's own weight is all the tis_weight that it has.
      tis_weights += [response.tis_weight for response in group] + [None] * (replayed is not None)
    advantage_QK = objective.group_advantages(
      np.array(rewards, np.float32), self.objective.normalize_std
    )
    is_replay_B = np.array(
      [r is not None and k == samples - 1 for r in replays for k in range(samples)]
    )
    past_B = np.repeat([r.step if r else plan.step for r in replays], samples)
    limit = self.config.max_prompt + self.config.max_response
    tokens_BT, mask_BT = right_padded(rows, limit, self.tokenizer.pad_id)
    logp_BT = np.zeros_like(mask_BT)
    logp_BT[mask_BT > 0] = np.concatenate(logps)  # row after row, as the mask is read
    tis_weight_BT = np.ones_like(mask_BT)
    for b, tis_weight in enumerate(tis_weights):
      if tis_weight is not None:
        tis_weight_BT[b, mask_BT[b] > 0] = tis_weight
    return Batch(
      tokens_BT,
      mask_BT * np.array(trains, np.float32)[:, None],
      logp_BT,
      advantage_QK.reshape(-1),
      is_replay_B,
      np.where(is_replay_B, past_B, plan.step).astype(np.int32),
      tis_weight_BT,
    )

  def score(
    self, params, rows: Sequence[tuple[np.ndarray, np.ndarray]]
  ) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(log-probabilities, entropies) of response tokens under `params`, each [T] float32, nats.

    Args:
      params: the policy.
      rows: (prompt, response) token arrays.

    Rows of similar length share a forward pass of up to SCORE_ROWS.
    """
    logps, entropies = [None] * len(rows), [None] * len(rows)
    limit = self.config.max_prompt + self.config.max_response
    lengths = [length_bucket(len(prompt) + len(tokens), limit) for prompt, tokens in rows]
    for length in sorted(set(lengths)):
      same = [i for i, own in enumerate(lengths) if own == length]
      for start in range(0, len(same), SCORE_ROWS):
        chosen = same[start : start + SCORE_ROWS]
        # Some rows twice, so that few numbers of rows are compiled.
        repeated = np.resize(chosen, length_bucket(len(chosen), SCORE_ROWS))
        tokens_BT, mask_BT = right_padded([rows[i] for i in repeated], limit, self.tokenizer.pad_id)
        scored = score_tokens(
          self.model,
          params,
          sharding.put(tokens_BT, sharding.batch(self.mesh, len(tokens_BT))),
          self.config.temperature,
          self.config.logit_chunk,
        )
        logp_BT, entropy_BT = jax.device_get(scored)
        for b, i in enumerate(chosen):
          logps[i], entropies[i] = logp_BT[b, mask_BT[b] > 0], entropy_BT[b, mask_BT[b] > 0]
    return logps, entropies

  def samples(self, plan: Plan, responses, replays, verdicts, count: int) -> list[dict]:
    """Rows for a person to read: of each group the first response and what it replays."""
    rows = []
    for question, prompt, group, replayed, judged in zip(
      plan.questions, plan.prompts, responses, replays, verdicts
    ):
      if len(rows) >= count:
        break
      shared = {
        'row': question.row,
        'question': self.tokenizer.decode(prompt),
        'answer': question.answer,
      }
      rows.append(
        shared
        | {
          'response': self.tokenizer.decode(group[0].tokens),
          'reward': judged[0].reward,
          'correct': judged[0].correct,
          'outcome': judged[0].outcome,
          'truncated': group[0].truncated,
          'replayed': False,
        }
      )
      if replayed:
        rows.append(
          shared
          | {
            'response': self.tokenizer.decode(replayed.tokens),
            'reward': replayed.reward,
            'correct': True,
            'replayed': True,
            'written_in_step': replayed.step,
          }
        )
    return rows[:count]

  def _recomputed(self, response, logp):
    limit = self.objective.tis_limit
    return dataclasses.replace(
      response,
      logp=logp,
      tis_weight=objective.tis_weight(logp, response.logp, limit) if limit else None,
    )

  def _model_free_costs(self, kind, plan, count):
    if kind == 'newest':  # stored oldest first, so a later place is newer
      return -np.arange(count)
    return np.random.default_rng((self.seed, plan.step, 1)).random(count)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def score_tokens(config: model.Config, params, tokens_BT, temperature: float, logit_chunk: int):
  """(logp_BT, entropy_BT), float32, nats, of every token under `params`."""
  scored = logprobs.token_logprobs(
    model.hidden_states(config, params, tokens_BT),
    model.unembedding(config, params),
    tokens_BT,
    temperature=temperature,
    chunk=logit_chunk,
  )
  # Whole everywhere: every host reads them.
  return jax.tree.map(lambda x_BT: sharding.constrain(x_BT, (None, None)), scored)
