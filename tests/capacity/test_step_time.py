"""The arithmetic of a step's time, on programs whose times are given."""

import dataclasses

import jax
import numpy as np
import pytest

from exgrpo_jax import packing
from exgrpo_jax.capacity import arrays as held
from exgrpo_jax.capacity import hlo, passes, programs, report, schedule, step_time
from exgrpo_jax.capacity.chips import Chip
from exgrpo_jax.capacity.programs import Program
from exgrpo_jax.experiment import experiment
from exgrpo_jax.learner import gradients
from exgrpo_jax.policy import model, ragged_cache
from tests.capacity.shapes import SMALL


@pytest.fixture(autouse=True)
def two_shapes(monkeypatch):
  """Has tiny models packed as large ones are."""
  monkeypatch.setattr(model, 'is_tiny', lambda *_: False)


# A cycle is a second; memory gives a gigabyte a second, so that the small model's weights are
# nothing; links are as slow.
CHIP = Chip(memory=1, flops=1e12, bandwidth=1e9, link=5e8, clock=1, matrix_unit=128)
WORK = step_time.Workload(
  prompt=10,
  fresh=np.array([1, 3]),
  groups=[np.array([1, 3]), np.array([2, 7])] * 50,
  replayed=np.array([2, 2]),
  candidates=np.array([5, 6, 7]),
  evaluated=np.array([1, 3, 1, 3]),
  evaluation_every=10,
)


def program(shape, once=0, each=0, kernel=0):
  """A program that takes `once` seconds, and `each` and the kernel's time in a loop over data."""
  call = (
    f'  %k = s8[0]{{0}} custom-call(%s), custom_call_target="tpu_custom_call", '
    f'operand_layout_constraints={{s8[{kernel * 750_000_000}]{{0}}}}\n'
  )
  text = (
    '%c (s: (s32[])) -> pred[] {\n  %s = (s32[]) parameter(0)\n  ROOT %b = pred[] fusion(%s)\n}\n'
    '%d (s: (s32[])) -> (s32[]) {\n  %s = (s32[]) parameter(0)\n'
    f'  %f = f32[8]{{0}} copy(%s), backend_config={{"estimated_cycles":"{each}"}}\n{call}'
    '  ROOT %t = (s32[]) tuple(%f)\n}\n'
    f'ENTRY %m (x: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} copy(%x), '
    f'backend_config={{"estimated_cycles":"{once}"}}\n'
    '  ROOT %w = (s32[]) while(%a), condition=%c, body=%d\n}\n'
  )
  return Program(hlo.parse(text), shape, programs.Need(0, 0, 0))


@pytest.fixture
def estimator(parsed, mesh):
  """Two slots of rows of 20 tokens; passes of the update and of scoring have 20 tokens a shard."""
  rollout = dataclasses.replace(parsed.rollout, max_prompt=12, max_response=8, slots=2, questions=1)
  spec = dataclasses.replace(
    experiment.update_spec(parsed, SMALL, mesh),
    gradient=dataclasses.replace(parsed.gradient, tokens_per_microbatch=20),
    max_response=8,
    longest_row=20,
  )
  long, _ = gradients.pass_shapes(spec, mesh.size, 2)
  programs = {
    'score': program((long.count, long.length), once=5),
    'prefill': program((3, 24), once=6),
    'decode': program((2, 20), once=1, each=2, kernel=8),
    'update': program((long.count, long.length), once=3, each=4, kernel=2),
    'optimizer': program((0, 0), once=7),
  }
  return step_time.Estimator(rollout, spec, mesh, CHIP, programs)


def part(estimator, name, work=WORK):
  (found,) = [part for part in estimator.estimate(work).parts if part.name == name]
  return found


def test_decoding_reads_what_is_written_of_the_cache(estimator, monkeypatch):
  """Three steps of 2 s; the kernel takes 8 s for 40 positions.

  Of these 11 + 11, 12 + 1 and 13 + 1 are read, a free slot's one included.
  """
  monkeypatch.setattr(ragged_cache, 'BLOCK', 1)
  decode = part(estimator, 'decode')
  assert decode.seconds == pytest.approx(1 + 3 * 2 + 8 * (22 + 13 + 14) / 40)
  assert part(estimator, 'syncs').seconds == pytest.approx(step_time.SYNC_SECONDS)
  assert '3 decode steps' in decode.detail and '1 of 2 slots live' in decode.detail


def test_decoding_is_never_faster_than_memory(estimator):
  slow = dataclasses.replace(estimator, chip=CHIP._replace(bandwidth=1e-3))
  found = held.step_arrays(estimator.spec, estimator.decoding)
  at_least = 3 * held.bytes_per_chip(found.decode_params) / 1e-3
  assert part(slow, 'decode').seconds > at_least
  assert part(slow, 'decode').share <= 1


def test_prefill_takes_time_by_its_tokens(estimator):
  """The compiled program has 72 tokens; one prompt of 10 is padded to 12, the limit."""
  assert part(estimator, 'prefill').seconds == pytest.approx(6 * 12 / 72)


def test_the_update_takes_its_passes_and_one_start_for_each_stack(estimator):
  """Short ones: rows of 3 or 4 tokens fit sequences of 5."""
  work = dataclasses.replace(WORK, prompt=2, fresh=np.array([1, 1]))
  responses = np.concatenate([work.fresh, work.replayed])
  minibatches = passes.of_update(estimator.spec, responses, work.prompt)
  rows, length = estimator.programs['update'].shape
  assert {one.shape.length for minibatch in minibatches for one in minibatch} == {5} != {length}
  expected = 0.0
  for minibatch in minibatches:
    expected += 3 * len({one.shape for one in minibatch})
    for one in minibatch:
      tokens = one.shape.num_tokens / (rows * length)
      expected += 4 * tokens + 2 * tokens * one.shape.length / length  # attention by the square
  assert len(minibatches) == 2
  assert part(estimator, 'update', work).seconds == pytest.approx(expected)
  assert part(estimator, 'optimizer').seconds == pytest.approx(2 * 7)


def test_scoring_takes_its_passes(estimator):
  found = passes.of_scoring(estimator.spec, WORK.candidates, WORK.prompt)
  rows, length = estimator.programs['score'].shape
  tokens = sum(one.shape.num_tokens for one in found)
  assert tokens >= 5 + 6 + 7 + 3 * 10
  assert part(estimator, 'score').seconds == pytest.approx(5 * tokens / (rows * length))
  nothing = dataclasses.replace(WORK, candidates=np.array([], int))
  assert part(estimator, 'score', nothing).seconds == 0


def test_an_evaluation_is_shared_out_over_its_steps(estimator):
  """It takes as long as a rollout of its responses, of four questions in place of one."""
  evaluation = part(estimator, 'evaluation')
  rollout = dataclasses.replace(WORK, fresh=WORK.evaluated)
  times = {'reshard': 1, 'prefill': 4, 'decode': 1, 'syncs': 1}
  seconds = sum(count * part(estimator, name, rollout).seconds for name, count in times.items())
  assert evaluation.seconds == pytest.approx(seconds / 10)
  seldom = dataclasses.replace(WORK, evaluation_every=100)
  assert part(estimator, 'evaluation', seldom).seconds == pytest.approx(evaluation.seconds / 10)
  never = dataclasses.replace(WORK, evaluated=np.array([], int))
  assert 'evaluation' not in [found.name for found in estimator.estimate(never).parts]


@pytest.fixture
def carrying(estimator):
  """The same with responses that span steps, one question of two responses in two slots."""
  rollout = dataclasses.replace(estimator.rollout, carry=True, in_flight=0)
  return dataclasses.replace(estimator, rollout=rollout)


def test_a_carried_step_is_one_of_the_steady_state_on_average(carrying, monkeypatch):
  """Times of decoding are those of `test_decoding_reads_what_is_written_of_the_cache`."""
  monkeypatch.setattr(ragged_cache, 'BLOCK', 1)
  estimate = carrying.estimate(WORK)
  steps = schedule.steady(WORK.groups, carrying.rollout, 10, 1)
  seconds = sum(
    1 + span.steps * (2 + 8 * span.positions / 40)
    for step in steps
    for span in step.generation.spans
  )
  assert estimate.seconds_of('decode') == pytest.approx(seconds / len(steps))
  decode_steps = sum(step.generation.decode_steps for step in steps) / len(steps)
  syncs = sum(len(step.generation.spans) for step in steps) / len(steps)
  assert f'{decode_steps:,.0f} decode steps' in part(carrying, 'decode').detail
  assert part(carrying, 'syncs').seconds == pytest.approx(syncs * step_time.SYNC_SECONDS)
  prompts = sum(step.generation.prompts for step in steps) / len(steps)
  assert part(carrying, 'prefill').seconds == pytest.approx(prompts * 6 * 12 / 72)
  assert estimate.ages.max() > 0 and 0 < estimate.carried < 1
  assert estimate.live > 4 / 3  # that of a step alone


def test_begun_responses_are_prefilled_anew_in_whole_passes(carrying, monkeypatch):
  """Of two sequences of 20 tokens, the longest row; the prefill's program has 3 of 24.

  A row has at least 11 tokens, its prompt's 10 included, so a sequence holds one.
  """
  steps = schedule.steady(WORK.groups, carrying.rollout, 10, ragged_cache.BLOCK)
  resumed = [len(step.generation.resumed) for step in steps]
  passes_made = np.mean([-(-rows // 2) for rows in resumed])
  assert part(carrying, 'resume').seconds == pytest.approx(6 * 40 * passes_made / 72)
  own = {'resume': program((2, 20), once=30, each=5)}  # 5 s for each row that a device copies
  compiled = dataclasses.replace(carrying, programs=carrying.programs | own)
  copied = 5 * np.mean(resumed) / compiled.decoding.size
  assert part(compiled, 'resume').seconds == pytest.approx(30 * passes_made + copied)
  at_once = [packing.Pass(packing.Shape(2, 20, 8), [])]
  monkeypatch.setattr(passes, 'of_resuming', lambda *_: at_once)
  assert part(compiled, 'resume').seconds == pytest.approx(30 / len(steps) + copied)
  assert 'begun responses of' in part(carrying, 'resume').detail


def test_the_report_says_what_partial_rollouts_bring(estimator, carrying, capsys):
  whole, partial = estimator.estimate(WORK), carrying.estimate(WORK)
  report.print_partial_rollouts(whole, 2, partial)
  brought = capsys.readouterr().out
  assert f'decode {partial.seconds_of("decode"):.2f} s instead of ' in brought
  assert f'{whole.seconds_of("decode"):.2f} s, ' in brought
  assert 'of slots busy instead of 67%' in brought.replace('\n', '').replace('    ', '')
  ages = partial.ages
  words = f'responses up to {ages.max()} steps old as they are trained (mean {ages.mean():.1f})'
  assert ages.max() > ages.min() and words in brought
  report.print_partial_rollouts(partial, 2, None)
  assert words in capsys.readouterr().out


def test_the_report_adds_up(estimator, mesh, capsys):
  estimate = estimator.estimate(WORK)
  speed = report.print_time(estimate, WORK, mesh.size, 7200)
  printed = capsys.readouterr().out
  assert speed.seconds == pytest.approx(sum(found.seconds for found in estimate.parts))
  assert speed.tokens_per_second == pytest.approx((1 + 3 + 2 + 2) / speed.seconds)
  assert speed.chip_hours == pytest.approx(100 * speed.seconds * mesh.size / 3600)
  lines = {line.split()[0]: line for line in printed.splitlines()[1:]}
  assert f'{speed.seconds:.2f} s' in lines['sum']
  assert f'{2 * speed.seconds:,.1f} hours for config.num_steps=7200' in lines['sum']
  assert 'of peak bandwidth' in lines['decode'] and 'of peak FLOPs' in lines['update']
  assert 'not measured' in printed


def test_a_program_may_not_compile_and_arrays_may_not_fit(estimator, capsys):
  """A program for which the compiler finds no memory does not end the command."""
  arrays = held.step_arrays(estimator.spec, estimator.decoding)
  rollout, shape, decoding = estimator.rollout, estimator.spec.model, estimator.decoding

  def need_of(name):
    if name == 'decode':
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: too large')
    return programs.Need(1, 2, 3)

  peaks = report.print_memory(rollout, shape, decoding, arrays, 1e9, need_of)
  assert peaks['decode'] == float('inf') and peaks['update'] < 1e9
  assert 'DOES NOT FIT: RESOURCE_EXHAUSTED' in capsys.readouterr().out
  assert report.print_memory(rollout, shape, decoding, arrays, 1, need_of) == {}
  assert 'parameters, moments, gradient alone take' in capsys.readouterr().out
