"""The host's view of the slots: the response in each slot and its tokens so far.

Shape letters as in decode_loop.py.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from exgrpo_jax.datatypes import Array, Response
from exgrpo_jax.errors import counted
from exgrpo_jax.packing import rows_within
from exgrpo_jax.policy import model, sharding
from exgrpo_jax.rollout import decode_loop, drafts, routes
from exgrpo_jax.rollout.decode_loop import Decoded, DecodeSpec, Insertion, Prompts
from exgrpo_jax.rollout.drafts import Counts, Texts
from exgrpo_jax.rollout.sampler import Request
from exgrpo_jax.runtime import activity, randomness

# Refill once 1 / _REFILL_SHARE of the slots have finished, that many slots at a time. This
# limits both the number of host syncs and the number of idle slots.
_REFILL_SHARE = 16

Origin = tuple[int, bytes]  # (question row, prompt tokens): the same for equal prompts


@dataclasses.dataclass
class Row:
  """A response in progress."""

  index: int  # the index of its request
  request: Request
  key_X: np.ndarray  # uint32, key data of its step
  pieces: list[tuple[Array, ...]]  # (tokens, log-probabilities, entropies), in order
  length: int  # tokens in `pieces`
  is_filled: bool = False  # True if prompt and pieces, except `forced`, are in the cache
  truncated: bool | None = None  # None until it finishes
  complete: Response | None = None  # None until it leaves its slot
  place: int = 0  # where its cache is parked between turns, if there is room
  # The last tokens of `pieces`, which are not in the cache yet.
  forced: Array = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))

  @property
  def cached(self) -> int:
    """Return how many tokens of `pieces` are in the cache."""
    return self.length - len(self.forced)

  @property
  def position(self) -> int:
    """Return the cache position of the next token."""
    return len(self.request.prompt) + self.cached

  @property
  def written(self) -> np.ndarray:
    """Return the response tokens that are in the cache."""
    return np.concatenate([tokens for tokens, *_ in self.pieces])[: self.cached]

  @functools.cached_property
  def origin(self) -> Origin:
    """Return a key that is the same for all rows that share a prefill."""
    return self.request.question, self.request.prompt.tobytes()

  def response(
    self, routes_SLC: np.ndarray | None, is_complete: bool = False, truncated: bool = False
  ) -> Response:
    """Return the response so far. `routes_SLC` are the routes recorded in its slot, or None."""
    tokens, logp, entropy = (np.concatenate(parts) for parts in zip(*self.pieces))
    length = len(self.request.prompt) + len(tokens)
    return Response(
      tokens=tokens,
      logp=logp,
      entropy=entropy,
      truncated=truncated,
      is_complete=is_complete,
      routes=routes.completed(self.request.prefix.routes, routes_SLC, self.position, length),
    )


Slots = list[Row | None]
# Complete responses by question and sample, latest last; negative samples are `Request.past`.
Past = dict[int, dict[int, np.ndarray]]


class Sync(NamedTuple):
  """Statistics of the decoding between two host syncs."""

  slots: int  # slots that decoded together
  steps: int  # decode steps; each computes one token per slot, or several with drafts
  tokens: int  # tokens that rows sampled or read
  row_steps: int  # decode steps, summed over live rows; equal to `tokens` without drafts
  width: int = 0  # tokens drafted per row and step
  drafted: tuple[int, ...] = ()  # drafted tokens from each of drafts.SOURCES
  accepted: tuple[int, ...] = ()  # drafted tokens that became part of a response


def rows_of(
  spec: DecodeSpec,
  requests: Sequence[Request],
  step_key: Callable[[int], jax.Array],
  earlier_rows: Sequence[Row] = (),
) -> list[Row]:
  """Create a row for each request. Indices continue after the rows in `earlier_rows`.

  `step_key` returns the key of the step that began a response. A row's place is its own index,
  unless the row continues the episode of an earlier row; it then inherits that row's place.
  """
  for request in requests:
    fits = 1 <= len(request.prompt) <= spec.max_prompt and 1 <= request.limit <= spec.max_response
    assert fits, 'the prompt or the limit does not fit into the cache'
  keys = {
    step: jax.random.key_data(step_key(step)) for step in {request.step for request in requests}
  }
  key_data = jax.device_get(keys)
  rows = list[Row]()
  for request in requests:
    index = len(earlier_rows) + len(rows)
    row = Row(
      index=index,
      request=request,
      key_X=key_data[request.step],
      pieces=[(request.prefix.tokens, request.prefix.logp, request.prefix.entropy)],
      length=len(request.prefix.tokens),
      place=index,
    )
    if request.follows is not None:
      row.place = earlier_rows[request.follows].place
      if row.place < spec.parked:
        row.forced = request.prefix.tokens[earlier_rows[request.follows].length :]
    rows.append(row)
  return rows


def take_slots(slots: Slots, queue: collections.deque[Row]) -> None:
  """Assign free slots to waiting rows, in order."""
  free = [slot for slot, row in enumerate(slots) if row is None]
  for slot in free[: len(queue)]:
    slots[slot] = queue.popleft()


def rows_per_insert(slots: int) -> int:
  """Return how many slots are filled together (R)."""
  return max(1, slots // _REFILL_SHARE)


def insertion_of(entries: Sequence[tuple[int, int, Row]], num_slots: int, count: int) -> Insertion:
  """Build an insertion of `count` rows from (slot, source, row). Padding rows fill no slot."""

  def padded(values: Sequence[int], fill: int = 0) -> np.ndarray:
    return np.array([*values, *[fill] * (count - len(values))], np.int32)

  rows = [row for _, _, row in entries]
  step_key_RX = np.zeros((count, randomness.key_size()), np.uint32)
  for key_X, row in zip(step_key_RX, rows):
    key_X[:] = row.key_X
  return Insertion(
    slot_R=padded([slot for slot, _, _ in entries], fill=num_slots),
    source_R=padded([source for _, source, _ in entries]),
    position_R=padded([row.position for row in rows], fill=1),
    length_R=padded([row.cached for row in rows]),
    step_key_RX=step_key_RX,
    question_row_R=padded([row.request.question for row in rows]),
    sample_index_R=padded([row.request.sample for row in rows]),
    limit_R=padded([row.request.limit for row in rows]),
  )


def write(slots: Slots, decoded: Decoded, width: int = 0, counts: Counts | None = None) -> Sync:
  """Append the decoded tokens to their rows, and return the statistics of the sync."""
  tokens = [0]
  for slot, row in enumerate(slots):
    if row is None or row.truncated is not None:
      continue
    count = int(decoded.length_B[slot]) - row.cached
    num_read = min(count, len(row.forced))
    row.forced = row.forced[num_read:]
    columns = decoded.tokens_NB, decoded.logp_NB, decoded.entropy_NB
    row.pieces.append(tuple(values_NB[num_read:count, slot] for values_NB in columns))
    row.length += count - num_read
    if not decoded.live_B[slot]:
      row.truncated = not decoded.ended_B[slot]
    tokens.append(count)
  if counts is None:
    return Sync(len(slots), steps=max(tokens), tokens=sum(tokens), row_steps=sum(tokens))
  return Sync(
    slots=len(slots),
    steps=int(counts.passes),
    tokens=sum(tokens),
    row_steps=int(counts.row_passes),
    width=width,
    drafted=tuple(map(int, counts.drafted_X)),
    accepted=tuple(map(int, counts.accepted_X)),
  )


def joined(parts: Sequence[Sync]) -> Sync:
  """Combine one or more parts of the decoding between two syncs into a single `Sync`."""
  slots, steps, tokens, row_steps, widths, *counts = zip(*parts, strict=True)
  by_source = (tuple(map(sum, zip(*source_counts))) for source_counts in counts)
  return Sync(slots[-1], sum(steps), sum(tokens), sum(row_steps), widths[-1], *by_source)


def past_of(requests: Sequence[Request]) -> Past:
  """Collect the earlier responses that the requests contain."""
  past = collections.defaultdict[int, dict[int, np.ndarray]](dict)
  for request in requests:
    past[request.question] |= {-number: response for number, response in enumerate(request.past, 1)}
  return past


def text_length(config: model.ShapeConfig, spec: DecodeSpec, state: decode_loop.State) -> int:
  """Return the limit for `texts_of`: the smaller of the cache length and the longest row."""
  return min(model.cache_length(config, state.cache), spec.longest_row)


def texts_of(slots: Slots, past: Past, length: int) -> Texts:
  """Collect the texts that rows draft from, each cut off after `length` tokens.

  All rows for a question share its past responses, latest first. The total number of past responses
  is limited to the number of slots, or to `drafts.MAX_TEXTS` if that is larger.
  """
  count, max_texts = len(slots), drafts.MAX_TEXTS
  of_question = collections.defaultdict[int, dict[int, Row]](dict)
  for slot, row in enumerate(slots):
    if row:
      of_question[row.request.question][slot] = row
  num_past = max(count, max_texts)
  tokens_RS = np.zeros((count + num_past, length), np.int32)
  length_R, start_R = np.zeros((2, count + num_past), np.int32)
  peers_BM = np.full((count, max_texts), -1, np.int32)
  peers_BM[:, 0] = np.arange(count)

  def put(place: int, prompt: np.ndarray, response: np.ndarray) -> None:
    text = np.concatenate([prompt, response])[:length]
    tokens_RS[place, : len(text)] = text
    length_R[place], start_R[place] = len(text), len(prompt)

  next_place = count  # the next place of a past response
  for question, rows in of_question.items():
    for slot, row in rows.items():
      put(slot, row.request.prompt, row.written)
    prompt = next(iter(rows.values())).request.prompt[-drafts.LONGEST_MATCH :]
    samples = {row.request.sample for row in rows.values()}
    responses = [
      response for sample, response in past.get(question, {}).items() if sample not in samples
    ]
    share = min(max_texts - 1, num_past // len(of_question), len(responses))
    places = range(next_place, next_place := next_place + share)
    for place, response in zip(places, reversed(responses)):
      put(place, prompt, response)
    for slot in rows:
      peers = [*(peer for peer in rows if peer != slot), *places][: max_texts - 1]
      peers_BM[slot, 1 : 1 + len(peers)] = peers
  return Texts(tokens_RS, length_R, start_R, peers_BM)


def finished(slots: Slots) -> list[int]:
  """Return the slots with finished rows."""
  return [slot for slot, row in enumerate(slots) if row and row.truncated is not None]


def harvest(
  slots: Slots, routes_of: Mapping[int, np.ndarray]
) -> Iterator[tuple[int, Row, Response]]:
  """Free the slots of finished rows and yield (slot, row, response).

  `routes_of` maps these slots to their routes [S, L, C], if routes are kept.
  """
  for slot in finished(slots):
    row, slots[slot] = slots[slot], None
    assert row and row.truncated is not None
    row.complete = row.response(routes_of.get(slot), is_complete=True, truncated=row.truncated)
    yield slot, row, row.complete


def progress(rows: Sequence[Row]) -> str:
  """Return a progress message as of the last sync.

  It contains the number of complete responses and the total number of tokens.
  """
  complete = sum(row.complete is not None for row in rows)
  tokens = counted(sum(row.length for row in rows), 'token')
  return f'{complete} of {counted(len(rows), "response")}, {tokens}'


def metrics(syncs: Sequence[Sync]) -> dict[str, float]:
  """Compute how busy the slots were, as a fraction of their decode steps; {} without syncs.

  With drafts, also returns the tokens per pass, the draft width and the share of accepted drafts.
  """
  steps = sum(sync.slots * sync.steps for sync in syncs)
  row_steps = sum(sync.row_steps for sync in syncs)
  if not steps:
    return {}
  step_metrics = {'rollout/slots_busy': row_steps / steps}
  drafting = [sync for sync in syncs if sync.width]
  if not drafting:
    return step_metrics
  drafted, accepted = (
    np.sum([getattr(sync, name) for sync in drafting], axis=0) for name in ('drafted', 'accepted')
  )
  step_metrics |= {
    'rollout/tokens_per_pass': sum(sync.tokens for sync in syncs) / row_steps,
    'rollout/draft_width': sum(sync.width * sync.row_steps for sync in syncs) / row_steps,
    'rollout/drafts_accepted': float(accepted.sum() / max(1, drafted.sum())),
  }
  by_source = zip(drafts.SOURCES, drafted, accepted)
  return step_metrics | {
    f'rollout/drafts_accepted_{name}': float(b / a) for name, a, b in by_source if a
  }


# ---- Prefilling prompts ahead of time ----

# Up to `DecodeSpec.prompts` prompts are kept at a time; more are prefilled in waves. A prompt is
# padded to one of at most three lengths, each with a fixed batch size, so a run compiles at most
# three programs for its prompts. Responses begun earlier are prefilled by resuming.py.


# Tokens per prefill and data shard: enough to keep the matrix units busy, and few enough that a
# partly filled batch wastes little.
PREFILL_TOKENS = 512
SHORTEST_PREFILL = 64  # tokens; compiling even shorter shapes would cost more than padding
_Name = TypeVar('_Name', bound=Hashable)


@dataclasses.dataclass
class Prefilled:
  """The prefilled prompts and the place of each prompt."""

  prompts: Prompts
  places: dict[Origin, int] = dataclasses.field(default_factory=dict)

  def take_in(
    self,
    config: model.ShapeConfig,
    spec: DecodeSpec,
    params: model.Params,
    mesh: Mesh,
    requested_prompts: Iterable[tuple[Origin, np.ndarray]],
  ) -> None:
    """Prefill the first `spec.prompts` distinct requested prompts, and drop all others."""
    wave: dict[Origin, np.ndarray] = {}
    for origin, prompt in requested_prompts:
      wave.setdefault(origin, prompt)
      if len(wave) == spec.prompts:
        break
    self.places = {origin: place for origin, place in self.places.items() if origin in wave}
    new_prompts = {origin: prompt for origin, prompt in wave.items() if origin not in self.places}
    free = sorted({*range(spec.prompts)} - {*self.places.values()})
    self.places |= (new_places := dict(zip(new_prompts, free)))
    lengths = prefill_lengths(spec.max_prompt)
    num_prefilled = 0
    with activity.doing(
      lambda: f'{num_prefilled} of {counted(len(new_prompts), "prompt")} prefilled'
    ):
      for tokens_PT, origins in batches(new_prompts, lengths, spec.prompts, mesh, spec.pad_id):
        lengths_P = np.ones(len(tokens_PT), np.int32)
        place_P = np.full(len(tokens_PT), spec.prompts, np.int32)
        lengths_P[: len(origins)] = [len(new_prompts[origin]) for origin in origins]
        place_P[: len(origins)] = [new_places[origin] for origin in origins]
        self.prompts = decode_loop.prefill(
          config, params, self.prompts, tokens_PT, lengths_P, place_P
        )
        # Wait, to report progress accurately. The device is hardly idle between batches.
        jax.block_until_ready(self.prompts.hidden_WD)
        num_prefilled += len(origins)


def batches(
  rows: Mapping[_Name, np.ndarray], lengths: Sequence[int], max_rows: int, mesh: Mesh, pad_id: int
) -> Iterator[tuple[np.ndarray, list[_Name]]]:
  """Yield batches to prefill: (tokens_PT int32, names). Rows beyond the names are padding.

  `rows` maps names to token arrays, which are padded to one of `lengths` (in ascending order).
  `max_rows` is the maximum number of rows in a batch.
  """
  for shorter, length in zip([0, *lengths], lengths):
    matches = [name for name, tokens in rows.items() if shorter < len(tokens) <= length]
    count = prefilled_together(length, max_rows, mesh)
    for start in range(0, len(matches), count):
      names = matches[start : start + count]
      tokens_PT = np.full((count, length), pad_id, np.int32)
      for row_T, name in zip(tokens_PT, names):
        row_T[: len(rows[name])] = rows[name]
      yield tokens_PT, names


def prefill_lengths(max_prompt: int) -> list[int]:
  """Return the lengths to pad to: a quarter of `max_prompt`, half of it, and all of it.

  The first two are left out if they are shorter than SHORTEST_PREFILL.
  """
  parts = [-(-max_prompt // divisor) for divisor in (4, 2)]
  return [*(length for length in parts if length >= SHORTEST_PREFILL), max_prompt]


def prefilled_together(length: int, max_rows: int, mesh: Mesh) -> int:
  """Return how many rows of `length` tokens to prefill together; `max_rows` is the limit."""
  _, num_shards = sharding.split(mesh, 'batch')
  return min(max_rows, rows_within(PREFILL_TOKENS, length) * num_shards)
