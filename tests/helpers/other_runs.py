"""Copies of the recorded run that look like other runs, for tests of what compares them."""

import json
import shutil

import pyarrow as pa

from exgrpo_jax.reporting import step_records


def copied(recorded, folder, *, seed, ratio, shift):
  """A copy of the recorded run with other metrics, whose steps can be checked, with code blocks."""
  folder.mkdir()
  config = json.loads((recorded.workdir / 'config.json').read_text())
  config['seed'], config['replay']['ratio'] = seed, ratio
  (folder / 'config.json').write_text(json.dumps(config))
  with open(folder / 'metrics.jsonl', 'w') as file:
    for line in (recorded.workdir / 'metrics.jsonl').read_text().splitlines():
      record = json.loads(line)
      changed = {
        name: value + shift
        for name, value in record.items()
        if name in ('reward', 'entropy') or name.startswith('eval/')
      }
      if not ratio:
        changed |= {name: 0.0 for name in record if name.startswith('buffer/')}
      file.write(json.dumps(record | changed) + '\n')
  shutil.copytree(recorded.workdir / 'records', folder / 'records')
  for path in step_records.files(folder, 'responses'):
    table = step_records.read_file(path, 'responses')
    rows = [row | _marks(row, seed) for row in table.to_pylist()]
    step_records.write_file(path, pa.Table.from_pylist(rows, step_records.RESPONSES))
  return folder


def _marks(row, seed):
  place = row['step'] + row['group'] * 3 + row['sample'] + seed
  return {'valid_steps': (None, True, False)[place % 3], 'has_code_block': place % 4 == 0}
