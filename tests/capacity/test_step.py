"""Tests of a step's estimated time, using programs with given times."""

import dataclasses
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from exgrpo_jax.capacity import cycles, examination, step
from exgrpo_jax.capacity.devices import Chip
from exgrpo_jax.config import overridden
from exgrpo_jax.configs import base, one_gpu
from exgrpo_jax.experiment.settings import parse_config
from exgrpo_jax.policy import model, ragged_cache
from exgrpo_jax.rollout import programs
from tests.capacity.test_memory import SHAPE
from tests.helpers import forked
from tests.helpers.paths import TINY_CONFIG


@pytest.fixture(autouse=True)
def two_shapes(monkeypatch):
  """Pack tiny models like large ones, and read the cache one position at a time."""
  monkeypatch.setattr(model, 'is_tiny', lambda *_: False)
  monkeypatch.setattr(ragged_cache, 'BLOCK', 1)


# One cycle per second, 1 GB per second from memory, and links that are as slow.
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
  """Return a program of `once` seconds, with `each` and `kernel` seconds per trip of its loop."""
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


# Times by program name: once per run, and per trip of its loop.
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
  """Two slots for rows of 20 tokens. Update and scoring passes have 20 tokens."""
  values = base.get_config()
  values.optimizer.minibatches = 2
  values.microbatch.tokens = 20
  values.model.update(SHAPE)
  sizes = dict(
    questions=2, group_size=2, max_prompt=12, max_response=8, slots=2, partial=request.param
  )
  values.rollout.update(sizes)
  return step.of_config(parse_config(values))


carrying = pytest.mark.parametrize('whole', [True], indirect=True)


def modules_of(whole, work=WORK):
  return {(one.name, one.size): TIMES[one.name] for one in step.listed(whole, work)}


def estimated(whole, work=WORK):
  found = step.listed(whole, work)
  return step.estimate(whole, work, found, modules_of(whole, work), CHIP)


def part(whole, name, work=WORK):
  (found,) = [part for part in estimated(whole, work).parts if part.name == name]
  return found


def test_decoding_reads_only_the_filled_part_of_the_cache(whole):
  """Three steps of 2 s; the kernel takes 8 s for 40 positions.

  Of these, 11 + 11, 12 + 1 and 13 + 1 are read. A free slot reads one position.
  """
  decode = part(whole, 'decode')
  assert decode.seconds == pytest.approx(1 + 3 * 2 + 8 * (22 + 13 + 14) / 40)
  assert decode.detail.startswith('3 x ') and ' of 2 x 20 tokens' in decode.detail
  assert part(whole, 'syncs').seconds == pytest.approx(step.SYNC_SECONDS)
  assert part(whole, 'insert').seconds == pytest.approx(2 * 2)  # one row at a time
  assert estimated(whole).live == pytest.approx(4 / 3)
  # Two prompts of 10 tokens in one prefill of two rows of 12.
  assert part(whole, 'prefill').seconds == pytest.approx(6)


def test_the_updates_time_is_its_passes_plus_one_start_per_stack(whole):
  """Two minibatches: rows of 11 and 13 tokens in two long passes, then 12 and 12 in two more."""
  work = dataclasses.replace(WORK, prompt=2, fresh=np.array([1, 1]), replayed=np.array([8, 1]))
  assert part(whole, 'update').seconds == pytest.approx(2 * (3 + 2 * 4))
  # Rows of 3 tokens fit sequences of 5.
  assert part(whole, 'update', work).detail.count(' tokens') == 2
  assert part(whole, 'optimizer').seconds == pytest.approx(2 * 7)
  # Every epoch takes the same time.
  spec = dataclasses.replace(
    whole.spec, optimizer=dataclasses.replace(whole.spec.optimizer, epochs=3)
  )
  thrice = dataclasses.replace(whole, spec=spec)
  assert part(thrice, 'update').seconds == pytest.approx(3 * 2 * (3 + 2 * 4))
  assert part(thrice, 'optimizer').seconds == pytest.approx(3 * 2 * 7)


def test_the_time_of_scoring_is_its_passes(whole):
  """Rows of 15, 16 and 17 tokens."""
  assert part(whole, 'score').seconds == pytest.approx(3 * 5)
  nothing = dataclasses.replace(WORK, candidates=np.array([], int))
  assert 'score' not in [found.name for found in estimated(whole, nothing).parts]


def test_an_evaluations_time_is_spread_over_its_steps(whole):
  """Four responses in two slots take as long as a rollout of four, with two prefills."""
  evaluation = part(whole, 'evaluation')
  alone = dataclasses.replace(WORK, fresh=WORK.evaluated)
  seconds = sum(part(whole, name, alone).seconds for name in ('decode', 'syncs', 'insert')) + 2 * 6
  assert evaluation.seconds == pytest.approx(seconds / 10)
  seldom = dataclasses.replace(WORK, evaluation_every=100)
  assert part(whole, 'evaluation', seldom).seconds == pytest.approx(evaluation.seconds / 10)
  never = dataclasses.replace(WORK, evaluated=np.array([], int))
  assert 'evaluation' not in [found.name for found in estimated(whole, never).parts]


def test_unused_programs_are_dropped_unless_they_are_the_largest(whole):
  """Three rows of 4 tokens do not need the long shape of scoring."""
  work = dataclasses.replace(WORK, prompt=1, candidates=np.array([3, 3, 3]))
  runs = {one.size: one.runs > 0 for one in step.listed(whole, work) if one.name == 'score'}
  assert runs == {(1, 20): False, (1, 5): True}


@carrying
def test_a_step_with_partial_rollouts_is_a_steady_state_average(whole):
  """Decoding is timed as in `test_decoding_reads_only_the_filled_part_of_the_cache`."""
  estimate = estimated(whole)
  steps = programs.steady_steps(WORK.groups, whole.config.rollout, 10, 1)
  spans = [span for each in steps for span in each.generation.spans]
  seconds = sum(1 + span.steps * (2 + 8 * span.positions / 40) for span in spans)
  assert estimate.seconds_of('decode') == pytest.approx(seconds / len(steps))
  assert part(whole, 'syncs').seconds == pytest.approx(len(spans) / len(steps) * step.SYNC_SECONDS)
  assert estimate.ages.max() > 0 and 0 < estimate.carried < 1


@carrying
def test_partial_rollouts_are_prefilled_in_whole_passes(whole):
  """A pass has two sequences of 20 tokens, each for one row of more than 10; 5 s per row."""
  steps = programs.steady_steps(WORK.groups, whole.config.rollout, 10, 1)
  resumed = [len(each.generation.resumed) for each in steps]
  passes = np.mean([-(-rows // 2) for rows in resumed])
  assert part(whole, 'resume').seconds == pytest.approx(30 * passes + 5 * np.mean(resumed))


def test_the_report_shows_the_gain_from_partial_rollouts_and_drafts(whole, capsys):
  """A decode call takes 1 s outside its loop. Drafts divide the loop's passes by 1.7."""
  [decode] = [key for key in modules_of(whole) if key[0] == 'decode']
  wide = decode[0], (4 * decode[1][0], decode[1][1])
  modules = modules_of(whole) | {wide: modules_of(whole)[decode]}
  examination._print_alternatives(whole, WORK, estimated(whole), modules, CHIP)
  seconds = part(whole, 'decode').seconds
  brought = capsys.readouterr().out
  assert '67% of 2 slots busy' in brought and '; responses up to ' in brought
  partial, drafts, both = re.findall(r'with (.*): .* decode (.*) s instead of ([\d.]+) s', brought)
  assert {partial[2], drafts[2], both[2]} == {f'{seconds:.2f}'}
  assert drafts[:2] == ('config.rollout.drafts=3', f'{(seconds - 1) / 1.7 + 1:.2f}')
  assert float(both[1]) < float(partial[1])
  assert both[0] == 'config.rollout.partial=True and config.rollout.drafts=3'


def test_a_program_that_does_not_fit_has_room_for_no_slots(whole, capsys):
  examination._print_cache(whole, {'decode': 3.0 * 2**30}, limit=1.0 * 2**30)
  assert 'up to about 0 slots' in capsys.readouterr().out


def test_the_report_adds_up(whole, capsys):
  estimate = estimated(whole)
  config = dataclasses.replace(whole.config, num_steps=7200)
  speed = examination._print_time(estimate, WORK, 3, config)
  printed = capsys.readouterr().out
  assert speed.seconds == pytest.approx(sum(found.seconds for found in estimate.parts))
  assert speed.tokens_per_second == pytest.approx((1 + 3 + 2 + 2) / speed.seconds)
  assert speed.chip_hours == pytest.approx(100 * speed.seconds * 3 / 3600)
  lines = {line.split()[0]: line for line in printed.splitlines()[1:]}
  assert f'{speed.seconds:.2f} s' in lines['sum']
  assert f'{2 * speed.seconds:,.1f} hours for config.num_steps=7200' in lines['sum']
  assert '% in kernels' in lines['decode'] and 'not measured' in printed


@pytest.mark.parametrize(
  ('questions', 'ratio', 'replayed'),
  [(16, 0.5, 8), (100, 0.29, 29)],  # 0.29 * 100 is less than 29 in floating point
)
def test_every_step_draws_the_same_number_of_groups_with_replay(questions, ratio, replayed):
  changes = {'rollout.questions': questions, 'replay.ratio': ratio, 'optimizer.minibatches': 1}
  config = parse_config(overridden(one_gpu.get_config(), changes))
  work = step.workload(config, 'lognormal:250', 0)
  samples = config.rollout.group_size
  assert len(work.replayed) == replayed
  for start in range(0, 3 * questions, questions):
    sizes = [len(lengths) for lengths in work.groups[start : start + questions]]
    assert sorted(sizes) == [samples - 1] * replayed + [samples] * (questions - replayed)


# ---- A run compiles few programs, and none after --compile_only ----


# For both commands: two sampling temperatures, and a KL term that needs a reference policy.
CHANGES = {'num_steps': 3, 'evaluation.every': 2, 'evaluation.temperature': 0.6}
CHANGES |= {'logprob_check.every': 1, 'objective.kl_coefficient': 0.01}
EPISODES = {
  'environment.name': 'tests.helpers.environments:Chance',
  'environment.max_turns': 3,
  'environment.max_turn_tokens': 5,
  'rollout.slots': 6,  # so that episodes wait for one
  'warm_start.num_updates': 0,
}

EPOCHS = {'optimizer.epochs': 2, 'optimizer.max_kl': 0.01}

DRAFTS = {'rollout.drafts': 'auto'}  # off with 24 slots, on after the slots are compacted

EXPERTS = {
  'model.num_experts': 4,
  'model.experts_per_token': 2,
  'objective.balance_coefficient': 0.01,
  'rollout.router_replay': True,
}


def counts(output, pattern):
  """Return {function: number of programs} from the output."""
  (listed,) = re.findall(pattern, output)
  pairs = [entry.partition(' ') for entry in listed.split(', ')]
  return {name: int(number or 1) for name, _, number in pairs}


@pytest.mark.full
@pytest.mark.parametrize(
  'kind',
  [EPISODES, EXPERTS, DRAFTS | EPOCHS],
  ids=['turns', 'experts', 'drafts_and_epochs'],
)
def test_a_run_compiles_few_programs_and_none_after_compile_only(kind, data, tmp_path):
  """The run has another workdir than --compile_only, but the same cache."""
  settings = CHANGES | {
    'compilation_cache': '{workdir}/../compiled',
    'data.train': data.train,
    'warm_start.data': data.train,
    'data.evaluation': f"('{data.evaluation}',)",
    'data.cache_dir': data.cache,
  }
  settings |= kind
  command = ['train', f'--config={TINY_CONFIG}']
  command += [f'--config.{name}={value}' for name, value in settings.items()]

  def train(name, *more):
    outcome = forked.run_one([*command, f'--workdir={tmp_path / name}', *more], JAX_PLATFORMS='cpu')
    assert outcome.status == 0, outcome.err
    return outcome.out

  first, second = train('first', '--compile_only'), train('second')
  names = counts(second, r'compiled \d+ programs in \d+ s: (.*); not')
  assert {'decode', 'insert', 'prefill', 'empty'} <= {*names}
  assert sum(names.values()) < (24 if 'park' in names else 20), names
  rehearsed = counts(first, r'not in the compilation cache: (.*)\n')
  # With one turn: 24, 6 and 1 slots. A tiny model's update has one shape.
  assert rehearsed['decode'] == (1 if 'park' in rehearsed else 3) and rehearsed['accumulate'] == 1
  assert re.findall('not in the compilation cache: (.*)', second) == ['none']
  assert not {'metrics.jsonl', 'checkpoints', 'config.json'} & {*os.listdir(tmp_path / 'first')}
  assert (tmp_path / 'second' / 'metrics.jsonl').exists()


# ---- Does a config fit a TPU slice or a GPU? ----


@pytest.mark.full
def test_a_small_config_compiles_for_a_slice():
  """Runs in a separate process because of libtpu."""
  pytest.importorskip('libtpu')
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'exgrpo_jax', 'capacity'),
      *('--config=qwen2_5_math_1_5b', '--topology=v5e:2x2', '--lengths=lognormal:40'),
      *('--evaluated=20', '--config.rollout.max_response=1024', '--config.rollout.slots=8'),
      *('--config.model.num_layers=2', '--config.model.vocab_size=512'),
      *('--config.model.width=256', '--config.model.mlp_width=512'),
    ],
    env=os.environ | {'XLA_FLAGS': ''},  # libtpu aborts on flags it does not know
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  part = r'  {} +[0-9.]+ s  [0-9.,e+]+ x [0-9.e-]+ ms{}'
  for name, words in (('decode', ' of 8 x '), ('update', ' of .* tokens'), ('optimizer', '')):
    assert re.search(part.format(name, words), done.stdout)
  assert re.search(r'  sum +[0-9.]+ s  [0-9,]+ response tokens per second', done.stdout)
  assert 'with config.rollout.partial=True' in done.stdout
  assert 'median 40, 99th percentile 8 medians, limit 1,024' in done.stdout
  assert done.stdout.splitlines()[-1] == 'fits'


def examined(capsys, device='l4', fit=False, **changes):
  """Return (True if the smallest model with these changes fits a GPU, the printed output)."""
  values = one_gpu.get_config()
  values.update_from_flattened_dict(changes)
  found = examination.examine_gpu(parse_config(values), device, fit)
  return found.fits, capsys.readouterr().out


@pytest.mark.parametrize('carry', [False, True])
def test_a_gpu_is_examined_by_formula_without_times(capsys, carry):
  fits, printed = examined(capsys, **{'rollout.partial': carry})
  assert fits and printed.splitlines()[-1] == 'fits'
  assert printed.startswith('l4: 20.12 GiB, 90% of its memory; 0.49 billion parameters')
  peak = r'^  {} [0-9,]+ x [0-9,]+ +[0-9.]+ GiB at its peak: .* fits, [0-9]+% to spare'
  assert re.search(peak.format('update'), printed, re.MULTILINE)
  assert bool(re.search(peak.format('resume'), printed, re.MULTILINE)) == carry
  assert ' s ' not in printed and 'hours' not in printed


def test_episodes_are_resumed_and_their_caches_kept(capsys):
  fits, printed = examined(capsys, **{'environment.name': 'attempts'})
  assert fits and '  resume ' in printed and 'half of it for episodes between' in printed
  many = {'environment.name': 'attempts', 'rollout.slots': 4096}
  assert 'config.environment.keep_caches=False' in examined(capsys, **many)[1]
  fits, printed = examined(capsys, **many, **{'environment.keep_caches': False})
  assert 'half of it' not in printed and 'keep_caches' not in printed


@pytest.mark.full
def test_fit_finds_slots_for_a_config_that_does_not_fit(capsys):
  fits, printed = examined(capsys, **{'rollout.slots': 4096})
  assert not fits and printed.splitlines()[-1] == 'does not fit'
  assert 'lower config.rollout.slots=4096' in printed and '--fit chooses both' in printed
  fits, printed = examined(capsys, fit=True, **{'rollout.slots': 4096})
  assert fits and printed.startswith('--config.rollout.slots=256 ')


@pytest.mark.full
def test_a_step_of_fewer_rows_than_the_fewest_slots_is_fitted(capsys):
  few = {'rollout.questions': 1, 'rollout.group_size': 4, 'optimizer.minibatches': 1}
  fits, printed = examined(capsys, fit=True, **few, **{'replay.ratio': 0.0})
  assert fits and printed.startswith('--config.rollout.slots=8 ')


@pytest.mark.full
@pytest.mark.parametrize('fit', [False, True])
def test_advice_for_one_gpu_never_asks_for_more_chips(capsys, fit):
  fits, printed = examined(capsys, fit=fit, **{'model.num_layers': 300})
  assert not fits and 'chip' not in printed
  assert 'config.lora.rank=32' in printed and 'a GPU with more memory' in printed
  # Shorter responses do not help if the model alone is too large.
  assert ('gradient already take' in printed, 'shorten responses' in printed) == (not fit, fit)
