"""The arithmetic of a step's time, on programs whose times are given."""

import dataclasses

import numpy as np
import pytest

from exgrpo_jax.capacity import cycles, examination, step
from exgrpo_jax.capacity.devices import Chip
from exgrpo_jax.configs import base, one_gpu
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.policy import model, ragged_cache
from exgrpo_jax.rollout import programs
from tests.capacity.test_memory import SHAPE


@pytest.fixture(autouse=True)
def two_shapes(monkeypatch):
  """Has tiny models packed as large ones are, and one position of a cache read at a time."""
  monkeypatch.setattr(model, 'is_tiny', lambda *_: False)
  monkeypatch.setattr(ragged_cache, 'BLOCK', 1)


# A cycle is a second; memory gives a gigabyte a second; links are as slow.
CHIP = Chip(memory=1, flops=1e12, bandwidth=1e9, link=5e8, clock=1, matrix_unit=128)
WORK = step.Workload(
  prompt=10,
  fresh=np.array([1, 3]),
  groups=[np.array([1, 3]), np.array([2, 7])] * 50,
  replayed=np.array([2, 2]),
  candidates=np.array([5, 6, 7]),
  evaluated=np.array([1, 3, 1, 3]),
  evaluation_every=10,
)


def module(once=0, each=0, kernel=0):
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
  return cycles.parse(text)


# What a program of each name takes: once a run, and in each trip of its loop.
TIMES = {
  'reshard': module(once=1),
  'score': module(once=5),
  'empty': module(),
  'prefill': module(once=6),
  'insert': module(once=2),
  'decode': module(once=1, each=2, kernel=8),
  'resume': module(once=30, each=5),
  'zero': module(),
  'update': module(once=3, each=4),
  'optimizer': module(once=7),
  'merge_sums': module(),
}


@pytest.fixture(params=[False])
def whole(request):
  """Two slots of rows of 20 tokens; passes of the update and of scoring have 20 tokens."""
  values = base.get_config()
  values.optimizer.minibatches = 2
  values.gradient.tokens_per_microbatch = 20
  values.model.update(SHAPE)
  sizes = dict(questions=2, samples=2, max_prompt=12, max_response=8, slots=2, carry=request.param)
  values.rollout.update(sizes)
  return step.of_config(parse_config(values))


carrying = pytest.mark.parametrize('whole', [True], indirect=True)


def estimated(whole, work=WORK):
  found = step.needed(step.listed(whole, work, step.generations(whole, work)))
  return step.estimate(
    whole, work, found, {(one.name, one.size): TIMES[one.name] for one in found}, CHIP
  )


def part(whole, name, work=WORK):
  (found,) = [part for part in estimated(whole, work).parts if part.name == name]
  return found


def test_decoding_reads_what_is_written_of_the_cache(whole):
  """Three steps of 2 s; the kernel takes 8 s for 40 positions.

  Of these 11 + 11, 12 + 1 and 13 + 1 are read, a free slot's one included.
  """
  decode = part(whole, 'decode')
  assert decode.seconds == pytest.approx(1 + 3 * 2 + 8 * (22 + 13 + 14) / 40)
  assert decode.detail.startswith('3 x ') and ' of 2 x 20 tokens' in decode.detail
  assert part(whole, 'syncs').seconds == pytest.approx(step.SYNC_SECONDS)
  assert part(whole, 'insert').seconds == pytest.approx(2 * 2)  # one row at a time
  assert estimated(whole).live == pytest.approx(4 / 3)


def test_prompts_are_prefilled_together(whole):
  """Two prompts of 10 tokens in one prefill of two rows of 12."""
  assert part(whole, 'prefill').seconds == pytest.approx(6)


def test_the_update_takes_its_passes_and_one_start_for_each_stack(whole):
  """Two minibatches: rows of 11 and 13 tokens in two long passes, then 12 and 12 in two more."""
  work = dataclasses.replace(WORK, prompt=2, fresh=np.array([1, 1]), replayed=np.array([8, 1]))
  assert part(whole, 'update').seconds == pytest.approx(2 * (3 + 2 * 4))
  # Short ones: rows of 3 tokens fit sequences of 5.
  assert part(whole, 'update', work).detail.count(' tokens') == 2
  assert part(whole, 'optimizer').seconds == pytest.approx(2 * 7)


def test_scoring_takes_its_passes(whole):
  """Rows of 15, 16 and 17 tokens."""
  assert part(whole, 'score').seconds == pytest.approx(3 * 5)
  nothing = dataclasses.replace(WORK, candidates=np.array([], int))
  assert 'score' not in [found.name for found in estimated(whole, nothing).parts]


def test_an_evaluation_is_shared_out_over_its_steps(whole):
  """Four responses in two slots: a rollout of as many, and a second prefill."""
  evaluation = part(whole, 'evaluation')
  alone = dataclasses.replace(WORK, fresh=WORK.evaluated)
  names = 'decode', 'syncs', 'insert'
  seconds = sum(part(whole, name, alone).seconds for name in names) + 2 * 6
  assert evaluation.seconds == pytest.approx(seconds / 10)
  seldom = dataclasses.replace(WORK, evaluation_every=100)
  assert part(whole, 'evaluation', seldom).seconds == pytest.approx(evaluation.seconds / 10)
  never = dataclasses.replace(WORK, evaluated=np.array([], int))
  assert 'evaluation' not in [found.name for found in estimated(whole, never).parts]


def test_programs_that_a_step_does_not_run_are_left_out_unless_they_are_the_largest(whole):
  """Of scoring the long shape, which none of three rows of 4 tokens needs."""
  work = dataclasses.replace(WORK, prompt=1, candidates=np.array([3, 3, 3]))
  found = step.needed(step.listed(whole, work, step.generations(whole, work)))
  assert {one.size: one.runs > 0 for one in found if one.name == 'score'} == {
    (1, 20): False,
    (1, 5): True,
  }


@carrying
def test_a_carried_step_is_one_of_the_steady_state_on_average(whole):
  """Times of decoding are those of `test_decoding_reads_what_is_written_of_the_cache`."""
  estimate = estimated(whole)
  steps = programs.steady_steps(WORK.groups, whole.config.rollout, 10, 1)
  spans = [span for each in steps for span in each.generation.spans]
  seconds = sum(1 + span.steps * (2 + 8 * span.positions / 40) for span in spans)
  assert estimate.seconds_of('decode') == pytest.approx(seconds / len(steps))
  assert part(whole, 'syncs').seconds == pytest.approx(len(spans) / len(steps) * step.SYNC_SECONDS)
  assert estimate.ages.max() > 0 and 0 < estimate.carried < 1


@carrying
def test_begun_responses_are_prefilled_anew_in_whole_passes(whole):
  """Of two sequences of 20 tokens, of which one holds a row of more than 10; 5 s for each row."""
  steps = programs.steady_steps(WORK.groups, whole.config.rollout, 10, 1)
  resumed = [len(each.generation.resumed) for each in steps]
  passes = np.mean([-(-rows // 2) for rows in resumed])
  assert part(whole, 'resume').seconds == pytest.approx(30 * passes + 5 * np.mean(resumed))


def test_the_report_says_what_partial_rollouts_bring(whole, capsys):
  modules = {}
  found = step.needed(step.listed(whole, WORK, step.generations(whole, WORK)))
  modules = {(one.name, one.size): TIMES[one.name] for one in found}
  examination._print_partial_rollouts(whole, WORK, estimated(whole), modules, CHIP)
  brought = capsys.readouterr().out
  assert f'{part(whole, "decode").seconds:.2f} s, resume ' in brought
  assert 'busy instead of 67%; responses up to ' in brought


def test_the_report_adds_up(whole, capsys):
  estimate = estimated(whole)
  speed = examination._print_time(estimate, WORK, 3, 7200)
  printed = capsys.readouterr().out
  assert speed.seconds == pytest.approx(sum(found.seconds for found in estimate.parts))
  assert speed.tokens_per_second == pytest.approx((1 + 3 + 2 + 2) / speed.seconds)
  assert speed.chip_hours == pytest.approx(100 * speed.seconds * 3 / 3600)
  lines = {line.split()[0]: line for line in printed.splitlines()[1:]}
  assert f'{speed.seconds:.2f} s' in lines['sum']
  assert f'{2 * speed.seconds:,.1f} hours for config.num_steps=7200' in lines['sum']
  assert '% in kernels' in lines['decode'] and 'not measured' in printed


def test_every_step_draws_as_many_groups_with_replay():
  rollout = parse_config(one_gpu.get_config()).rollout
  groups = step._groups(rollout, 'lognormal:250', replayed=5)
  questions, samples = rollout.questions, rollout.samples
  for start in range(0, 3 * questions, questions):
    sizes = [len(lengths) for lengths in groups[start : start + questions]]
    assert sorted(sizes) == [samples - 1] * 5 + [samples] * (questions - 5)
