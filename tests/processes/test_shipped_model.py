"""The shipped base policy of chains is what its command makes."""

import json
import subprocess
import sys

import pytest

SCORES = 'eval/chains_test/pass@1', 'eval/chains_ood_to_500/pass@1'


def first_scores(config, workdir, *overrides):
  """The scores before the first step, of a run that takes none."""
  flags = f'--config={config}', f'--workdir={workdir}', '--config.num_steps=0', *overrides
  subprocess.run([sys.executable, '-m', 'exgrpo_jax', 'train', *flags], check=True)
  record = json.loads((workdir / 'metrics.jsonl').read_text().splitlines()[0])
  return [record[name] for name in SCORES]


@pytest.mark.slow
def test_what_is_made_scores_what_is_shipped(tmp_path):
  made = first_scores('chains_from_scratch', tmp_path / 'made', '--config.export.last=True')
  shipped = first_scores('chains', tmp_path / 'shipped')
  assert made == pytest.approx(shipped, abs=0.06)  # an interval of 1,000 questions is this wide
  again = f'--config.model.path={tmp_path}/made/export/last'
  assert first_scores('chains', tmp_path / 'again', again) == pytest.approx(made, abs=1e-9)
