"""Several runs in one process: each as it would be by itself, up to the first that fails."""

import json

from exgrpo_jax.reporting import records
from tests.helpers import forked
from tests.helpers.devices import caching


def request(workdir, data, *flags):
  """A line that asks for two steps of the tiny run."""
  arguments = [
    '--config=tests/helpers/tiny.py',
    f'--workdir={workdir}',
    f'--config.data.train={data.train}',
    f'--config.data.evaluation=("{data.evaluation}",)',
    f'--config.data.cache_dir={data.cache}',
    f'--config.warm_start.data={data.train}',
    '--config.num_steps=2',
    *flags,
  ]
  return json.dumps({'arguments': arguments, 'log': f'{workdir}.txt'}) + '\n'


def measured(workdir):
  """The run's metrics, but those of time and memory."""
  return [
    {
      name: value
      for name, value in record.items()
      if not name.startswith(('time/', 'speed/', 'memory/')) and name != 'timestamp'
    }
    for record in records.read(str(workdir))
  ]


def test_runs_in_one_process_do_not_affect_each_other(data, compiled, tmp_path):
  """The third repeats the first; a fourth is refused, which ends the process."""
  lines = [
    request(tmp_path / 'first', data),
    request(tmp_path / 'other', data, '--config.seed=6', '--config.replay.ratio=0.0'),
    request(tmp_path / 'again', data),
    request(tmp_path / 'refused', data, '--config.replay.ratio=1.5'),
    request(tmp_path / 'never', data),
  ]
  outcome = forked.run_one(['train_server'], given=''.join(lines), **caching(compiled))
  assert outcome.out == 'finished\n' * 3 and outcome.status == 2, outcome.err
  first, other, again = (measured(tmp_path / name) for name in ('first', 'other', 'again'))
  assert len(first) == 3 and first == again and first != other
  assert 'step 2/2' in (tmp_path / 'other.txt').read_text()
  assert 'config.replay.ratio=1.5 must lie in' in (tmp_path / 'refused.txt').read_text()
  assert not (tmp_path / 'never.txt').exists()
