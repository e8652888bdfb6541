"""Partial groups in a checkpoint: the responses so far, and their verdicts.

An index in JSON; the tokens of all responses with the sampler's values, one response after the
other; a checksum of both. The item of a checkpoint is called 'carried'.
"""

import io
import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from exgrpo_jax.datatypes import PartialGroup, Response, Span, Turn, Verdict

_INDEX, _VALUES, _SUM = 'index.json', 'values.npz', 'crc32'
_ROUTES = 'routes'  # as bytes: their dtype and shape are in the index
_DTYPES = {'tokens': np.int32, 'logp': np.float32, 'entropy': np.float32, 'tis_weight': np.float32}


def write(folder: epath.Path, groups: Sequence[PartialGroup]) -> None:
  """Writes the groups into an existing, empty folder."""
  responses = [response for group in groups for response in group.responses]
  values = io.BytesIO()
  columns = {name: _flat(name, responses) for name in _DTYPES}
  columns[_ROUTES] = np.frombuffer(
    b''.join(one.routes.tobytes() for one in responses if one.routes is not None), np.uint8
  )
  np.savez(values, **columns)  # pyright: ignore[reportArgumentType]
  index = json.dumps([_described(group) for group in groups]).encode()
  (folder / _INDEX).write_bytes(index)
  (folder / _VALUES).write_bytes(values.getvalue())
  (folder / _SUM).write_text(str(zlib.crc32(values.getvalue(), zlib.crc32(index))))


def read(folder: epath.Path) -> tuple[PartialGroup, ...]:
  """What `write` wrote. Raises ValueError where bits have changed or are missing, and OSError."""
  index, values = (folder / _INDEX).read_bytes(), (folder / _VALUES).read_bytes()
  if str(zlib.crc32(values, zlib.crc32(index))) != (folder / _SUM).read_text():
    raise ValueError('carried: not the bits that were saved')
  with np.load(io.BytesIO(values)) as columns:
    rest = dict(columns)
  return tuple(_group(described, rest) for described in json.loads(index))


def _flat(name: str, responses: Iterable[Response]) -> np.ndarray:
  """A field of all responses, concatenated; responses without it add nothing."""
  values = (getattr(response, name) for response in responses)
  return np.concatenate([np.zeros(0, _DTYPES[name]), *(v for v in values if v is not None)])


def _described(group: PartialGroup) -> Mapping[str, Any]:
  """A group as JSON values, without the arrays in `_DTYPES`."""
  return {
    'question_row': group.question_row,
    'drawn': group.drawn,
    'is_replay': group.is_drawn,  # the key of earlier versions
    'verdicts': [verdict._asdict() for verdict in group.verdicts],
    'responses': [
      {
        'length': len(response.tokens),
        'weights': 0 if response.tis_weight is None else len(response.tis_weight),
        _ROUTES: []
        if response.routes is None
        else [str(response.routes.dtype), *response.routes.shape],
        'truncated': response.truncated,
        'is_complete': response.is_complete,
        'spans': response.spans,
        'turns': response.turns,
        'verdict': response.verdict and response.verdict._asdict(),
      }
      for response in group.responses
    ],
  }


def _group(described: Mapping[str, Any], rest: dict[str, np.ndarray]) -> PartialGroup:
  """A group again; takes its values from the front of `rest`."""

  def take(name: str, count: int) -> np.ndarray:
    values, rest[name] = np.split(rest[name], [count])
    return values.copy()

  def take_routes(dtype: str, *shape: int) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    return take(_ROUTES, size).view(dtype).reshape(shape)

  def response(own: Mapping[str, Any]) -> Response:
    return Response(
      tokens=take('tokens', own['length']),
      logp=take('logp', own['length']),
      entropy=take('entropy', own['length']),
      truncated=own['truncated'],
      tis_weight=take('tis_weight', own['weights']) if own['weights'] else None,
      is_complete=own['is_complete'],
      spans=tuple(Span(*span) for span in own['spans']),
      # Earlier versions had single turns alone.
      turns=tuple(Turn(*turn) for turn in own.get('turns', ())),
      routes=take_routes(*described) if (described := own.get(_ROUTES)) else None,
      verdict=Verdict(**verdict) if (verdict := own.get('verdict')) else None,
    )

  return PartialGroup(
    question_row=described['question_row'],
    drawn=described['drawn'],
    is_drawn=described['is_replay'],
    responses=tuple(map(response, described['responses'])),
    verdicts=tuple(Verdict(**verdict) for verdict in described['verdicts']),
  )
