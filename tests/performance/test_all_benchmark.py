"""`benchmark all`: its parts, its page, and what becomes of parts that fail or come too late."""

import json
import sys
import time

import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.performance import all_benchmark, benchmark_page, benchmark_parts
from exgrpo_jax.performance.all_benchmark import Ended
from exgrpo_jax.performance.measurement import Measurement
from exgrpo_jax.performance.shapes import SHAPES
from tests.helpers import forked

GPU = {
  'platform': 'gpu',
  'kind': 'NVIDIA H200',
  'is_known': True,
  'count': 1,
  'memory': 100 * 2**30,
  'driver': 'NVIDIA 570.1',
  'commit': 'abc',
  'versions': {'jax': '0.10.2', 'jaxlib': '0.10.2'},
  'host': {'name': 'host', 'system': 'Linux'},
  'time': '2026-01-01T00:00:00+00:00',
}
SHARES = {'rollout': ('share of bandwidth', 55.0), 'update': ('share of FLOPs', 39.0)}


def flag(command, name):
  return next(word.partition('=')[2] for word in command if word.startswith(f'--{name}='))


@pytest.fixture
def page(tmp_path, monkeypatch):
  """Runs all parts, with stand-ins for their commands; gives (whether it is good, the page)."""

  def run(facts=GPU, shape=None, minutes=60, stand_in=lambda _: None):
    def execute(command, _):
      name = command[3]
      if ended := stand_in(name):
        return ended
      with open(flag(command, 'facts'), 'w') as file:
        json.dump(facts, file)
      found = Measurement(*SHARES.get(name, ('figure', 1.0)), '%')
      with open(flag(command, 'json'), 'w') as file:
        json.dump([found._asdict()], file)
      return Ended(0, '')

    monkeypatch.setattr(all_benchmark, 'execute', execute)
    out = tmp_path / 'report.md'
    return all_benchmark.run(str(out), shape, minutes), out.read_text()

  return run


def test_every_part_runs_in_a_process_of_its_own_and_is_on_the_page(tmp_path, monkeypatch):
  out = tmp_path / 'report.md'

  def execute(command, _):
    if command[3] == 'smoke':  # half a minute; its figures are tested below
      return Ended(3, 'error: no smoke')
    outcome = forked.run_one([command[2].removeprefix('exgrpo_jax.'), *command[3:]])
    return Ended(outcome.status, outcome.out + outcome.err)

  monkeypatch.setattr(all_benchmark, 'execute', execute)
  good = all_benchmark.run(str(out), 'tiny', 60)
  text = out.read_text()
  assert not good
  assert '8 parts: 7 passed, 1 FAILED in ' in text, text
  assert '| smoke run | FAILED | 0 | exit status 3: error: no smoke |' in text
  for wanted in (
    '| largest gap |',
    '| share of bandwidth |',
    '| smoke run |',
    '| fused |',
    'jaxlib',
  ):
    assert wanted in text
  assert 'not applicable: the goals are for a GPU, and this is a cpu' in text


def test_a_part_that_fails_stops_no_other_and_is_named_with_its_error(page):
  crash = 'Traceback (most recent call last):\njax.errors.JaxRuntimeError: out of memory\n---\nnote'
  good, text = page(stand_in=lambda name: Ended(1, crash) if name == 'rollout' else None)
  assert not good
  assert '| rollout | FAILED | 0 | exit status 1: jax.errors.JaxRuntimeError: out of mem' in text
  assert '11 parts: 10 passed, 1 FAILED' in text


def test_a_device_that_cannot_be_asked_fails_and_the_rest_is_tried(page):
  good, text = page(facts={}, stand_in=lambda name: Ended(1, 'x') if name == 'device' else None)
  assert not good
  assert 'The device could not be asked' in text
  assert '| smoke run | passed |' in text


def test_a_part_without_end_is_stopped(page):
  good, text = page(stand_in=lambda name: Ended(None, 'compiling') if name == 'update' else None)
  assert not good
  assert '| update | FAILED | 0 | stopped after 320 s; its last line: compiling |' in text


def test_parts_for_which_the_time_is_short_are_shrunk_or_skipped(page):
  good, text = page(minutes=1)  # each part takes no time, so a minute is left for each
  assert good
  assert '| rollout | passed | 0 | shrunk to responses of half the length' in text
  assert '--response=256 --repeats=1' in text
  assert 'skipped' not in text
  good, text = page(minutes=0.6)
  assert good
  assert '| rollout | skipped | 0 | skipped: it takes about 90 s, and 3' in text


def test_goals_are_judged_on_a_known_gpu_with_the_whole_shape(page):
  _, text = page()
  assert "| decoding at half of the memory's bandwidth | 50% | 55% | reached |" in text
  assert '| an update at 40% of the peak FLOPs | 40% | 39% | missed |' in text
  _, text = page(facts=GPU | {'memory': 16 * 2**30})
  assert text.count('not applicable: the goals are for all of qwen2_5_1_5b') == 2
  assert 'of 28 layers, for the memory of the device' in text
  _, text = page(facts=GPU | {'kind': 'NVIDIA X', 'is_known': False})
  assert text.count('no peak of NVIDIA X is known') == 2


def test_a_check_that_fails_is_on_the_page():
  part = benchmark_parts.device_part(None)
  measured = [Measurement('values', float('nan'), 'relative', limit=0.02)]
  outcome = benchmark_page.Outcome(part, measured, 1.0, error='exit status 1: values')
  text = benchmark_page.text(GPU, [outcome], ['rollout'], 8, 60)
  assert '| device | values | nan | 0.02 | relative | FAIL |' in text
  assert '**Not run yet**: rollout.' in text


def test_as_many_layers_are_measured_as_can_be_trained():
  """Of 1.2 GB, 0.6: 45 million parameters of 16 bytes, 33 in the embeddings and 2.8 in a layer."""
  shape = SHAPES['reference']
  assert benchmark_parts.fitting_layers(shape, None) == 8
  assert benchmark_parts.fitting_layers(shape, 1e12) == 8
  assert benchmark_parts.fitting_layers(shape, 1.2e9) == 4
  assert benchmark_parts.fitting_layers(shape, 1) == 1


def test_a_command_that_takes_too_long_is_ended_with_what_it_has_started():
  started = time.monotonic()
  ended = all_benchmark.execute(
    [sys.executable, '-c', 'print("begun", flush=True); import time; time.sleep(600)'], 3
  )
  assert ended == (None, 'begun\n')
  assert time.monotonic() - started < 300
  assert all_benchmark.execute([sys.executable, '-c', 'raise SystemExit(7)'], 60) == (7, '')


@pytest.mark.parametrize(
  ('path', 'why'),
  [('nowhere/report.md', 'No such file'), ('.', 'it is a folder'), ('', '--out is needed')],
)
def test_a_page_that_cannot_be_written_is_refused(tmp_path, path, why):
  with pytest.raises(InputError, match=why):
    all_benchmark.check_out(path and str(tmp_path / path))


def test_every_implementation_of_attention_on_the_platform_is_measured():
  def names(platform):
    return [part.name for part in benchmark_parts.parts({'platform': platform}, None)]

  assert [name for name in names('tpu') if 'attention' in name] == [
    'training attention: blockwise',
    'training attention: splash',
    'decode attention: ragged',
  ]
  assert [name for name in names('gpu') if 'attention' in name] == [
    'training attention: blockwise',
    'training attention: cudnn',
    'decode attention: dense',
    'decode attention: cudnn',
    'decode attention: pallas',
  ]
