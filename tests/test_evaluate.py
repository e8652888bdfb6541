"""An evaluation by hand."""

import copy
import json
import types

import pytest

from exgrpo_jax import evaluate
from exgrpo_jax.data import spec_names
from exgrpo_jax.grading import pool
from exgrpo_jax.reporting import metrics
from tests.helpers import tiny


def metric_group(recorded):
  """What the metrics of the recorded run's evaluation begin with."""
  return f'eval/{spec_names.spec_name(recorded.evaluations[0].spec)}'


@pytest.fixture
def by_hand(recorded, values, tmp_path, monkeypatch):
  """Evaluates a step of the recorded run; gives (the newest file's text, what is printed)."""
  monkeypatch.setattr(pool, 'COMMAND', tiny.WORKER)

  def run(step, capsys, **changes):
    args = types.SimpleNamespace(
      config=copy.deepcopy(values),
      checkpoint=str(recorded.workdir),
      step=step,
      out=str(tmp_path / 'out'),
      data=None,
      samples=None,
      temperature=None,
    )
    vars(args).update(changes)
    capsys.readouterr()
    with recorded.compiling():
      evaluate.main(args)
    newest = max((tmp_path / 'out').glob('step_*.jsonl'), key=lambda file: file.stat().st_mtime_ns)
    return newest.read_text(), capsys.readouterr().out

  return run


@pytest.mark.parametrize('step', [tiny.NUM_STEPS // 2, tiny.NUM_STEPS])
def test_by_hand_it_repeats_the_runs_own_score_at_temperature_1(recorded, by_hand, capsys, step):
  """Response for response."""
  assert recorded.experiment.config.evaluation.temperature == 1
  written, printed = by_hand(step, capsys)
  (own,) = (recorded.workdir / 'evaluation').glob(f'step_{step:06d}_*.jsonl')
  assert written == own.read_text()
  (record,) = [record for record in metrics.read(recorded.workdir) if record['step'] == step]
  scores = {name: value for name, value in record.items() if name.startswith('eval/')}
  spec = recorded.evaluations[0].spec
  assert printed.startswith(f'{spec} at step {step}, temperature 1.0\n{evaluate.table(scores)}\n')


def test_evaluations_by_hand_overwrite_nothing_and_say_how_they_were_made(
  recorded, by_hand, capsys, tmp_path
):
  own = {file: file.read_bytes() for file in (recorded.workdir / 'evaluation').iterdir()}
  by_hand(tiny.NUM_STEPS, capsys, temperature=0.5)
  by_hand(tiny.NUM_STEPS, capsys, samples=2)
  lines = (tmp_path / 'out' / 'evaluations.jsonl').read_text().splitlines()
  made = [json.loads(line) for line in lines]
  assert [(line['temperature'], line['samples'], line['step']) for line in made] == [
    (0.5, 1, tiny.NUM_STEPS),
    (1.0, 2, tiny.NUM_STEPS),
  ]
  for line in made:
    record = json.loads((tmp_path / 'out' / line['file']).read_text().splitlines()[0])
    assert record['sampling']['temperature'] == line['temperature']
    assert len(record['responses']) == line['samples']
    assert 0 <= line['scores'][f'{metric_group(recorded)}/pass@1'] <= 1
  assert own == {file: file.read_bytes() for file in (recorded.workdir / 'evaluation').iterdir()}


def test_two_data_sets_of_one_source_have_scores_and_records_of_their_own(
  recorded, by_hand, capsys, tmp_path
):
  spec, group = recorded.evaluations[0].spec, metric_group(recorded)
  by_hand(tiny.NUM_STEPS, capsys, data=[f'{spec}[:1]', f'{spec}[1:4]'])
  lines = (tmp_path / 'out' / 'evaluations.jsonl').read_text().splitlines()
  made = [json.loads(line) for line in lines]
  assert [
    line['scores'][f'{group}{slicing}/questions']
    for line, slicing in zip(made, ('_to_1', '_1_to_4'))
  ] == [1, 3]
  assert [len((tmp_path / 'out' / line['file']).read_text().splitlines()) for line in made] == [
    1,
    3,
  ]


def test_more_samples_are_asked_for_on_the_command_line(by_hand, capsys):
  written, printed = by_hand(tiny.NUM_STEPS, capsys, samples=3)
  assert {len(json.loads(line)['responses']) for line in written.splitlines()} == {3}
  assert 'avg@3' in printed and 'pass@3' in printed


def test_another_temperature_writes_other_responses(recorded, by_hand, capsys):
  written, _ = by_hand(tiny.NUM_STEPS, capsys, temperature=0.0)
  (own,) = (recorded.workdir / 'evaluation').glob(f'step_{tiny.NUM_STEPS:06d}_*.jsonl')
  assert written != own.read_text()
