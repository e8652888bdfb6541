"""A script answers where no model is wanted, as the slot engine would."""

import dataclasses

import numpy as np

from exgrpo_jax.algorithm import replay
from exgrpo_jax.datatypes import Cursor
from exgrpo_jax.rollout.sampler import UNBEGUN, ScriptedSampler, requests_for

REQUESTS = requests_for([np.int32([9]), np.int32([8])], [5, 6], samples=2, step=1, limit=3)


def script(request):
  return [request.question, request.sample] * (1 + request.sample)


def test_requests_are_answered_in_order_and_cut_at_their_limits():
  finished = []
  sampler = ScriptedSampler(script)
  found, _ = sampler.generate(None, REQUESTS, lambda index, one: finished.append((index, one)))
  tokens = [one.tokens.tolist() for one in found]
  assert tokens == [[5, 0], [5, 1, 5], [6, 0], [6, 1, 6]]
  assert [one.truncated for one in found] == [False, True, False, True]
  assert [index for index, _ in finished] == [0, 1, 2, 3]
  assert all(found[index] is one for index, one in finished)


def test_it_stops_when_told_to():
  found, _ = ScriptedSampler(script).generate(None, REQUESTS, lambda index, _: index == 1)
  assert [one.is_complete for one in found] == [True, True, False, False] and found[3] is UNBEGUN


def test_the_stages_take_any_sampler(recorded):
  rollout = dataclasses.replace(recorded.rollout, sampler=ScriptedSampler(script))
  plan, submitted = rollout.plan(replay.Buffer(), Cursor(), 1), {}
  responses, _ = rollout.generate(None, plan, submitted.setdefault)
  for group, (question, own) in enumerate(zip(plan.questions, responses, strict=True)):
    for sample, one in enumerate(own):
      assert one.tokens.tolist() == [question.row, sample] * (1 + sample)
      assert submitted[group, sample].answer == question.answer
