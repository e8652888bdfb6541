"""An evaluation by hand."""

import copy
import json
import types

import pytest

from exgrpo_jax import evaluate
from exgrpo_jax.grading import pool
from exgrpo_jax.reporting import metrics
from tests.helpers import tiny


@pytest.fixture
def by_hand(recorded, values, tmp_path, monkeypatch):
  """Runs the command on a step of the recorded run; gives (its records, what it prints)."""
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
    (file,) = (tmp_path / 'out').iterdir()
    return file.read_text(), capsys.readouterr().out

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
  assert printed == f'{recorded.evaluations[0].spec} at step {step}, temperature 1.0\n' + (
    evaluate.table(scores) + '\n'
  )


def test_more_samples_are_asked_for_on_the_command_line(by_hand, capsys):
  written, printed = by_hand(tiny.NUM_STEPS, capsys, samples=3)
  assert {len(json.loads(line)['responses']) for line in written.splitlines()} == {3}
  assert 'avg@3' in printed and 'pass@3' in printed


def test_another_temperature_writes_other_responses(recorded, by_hand, capsys):
  written, _ = by_hand(tiny.NUM_STEPS, capsys, temperature=0.0)
  (own,) = (recorded.workdir / 'evaluation').glob(f'step_{tiny.NUM_STEPS:06d}_*.jsonl')
  assert written != own.read_text()
