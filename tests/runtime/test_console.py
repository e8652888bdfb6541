"""The output of a running command, on a terminal and elsewhere, and its log file."""

import contextlib
import logging
import os
import re
import sys
import threading
import time

import pytest
from absl import flags
from absl import logging as absl_logging

from exgrpo_jax.errors import InputError
from exgrpo_jax.runtime import activity, console, hosts
from tests.helpers.stand_ins import wait_until

NEVER = 1e9  # seconds


@pytest.mark.parametrize(
  ('words', 'printed'),
  [
    ('exgrpo train --workdir=run', 'exgrpo train --workdir={here}/run'),
    (
      'exgrpo train --workdir run --compile_only',
      'exgrpo train --workdir={here}/run --compile_only',
    ),
    ('.venv/bin/python -m x --out=a/b', '{here}/.venv/bin/python -m x --out={here}/a/b'),
    ('/bin/python .venv/bin/exgrpo report', '/bin/python {here}/.venv/bin/exgrpo report'),
    ('python my.py --workdir=w', 'python {here}/my.py --workdir={here}/w'),
    ('tensorboard --logdir=/tmp/run', 'tensorboard --logdir=/tmp/run'),
    ('exgrpo export --out=gs://bucket/x', 'exgrpo export --out=gs://bucket/x'),
    # The name of a shipped config, even next to a folder with that name, and files.
    ('exgrpo sweep --config=configs', 'exgrpo sweep --config=configs'),
    (
      'exgrpo sweep --sweep=a.py --config=b.py:t4',
      'exgrpo sweep --sweep={here}/a.py --config={here}/b.py:t4',
    ),
    # A changed path would be a changed setting, which the workdir rejects.
    ('exgrpo train --config.data.train=x.jsonl', 'exgrpo train --config.data.train=x.jsonl'),
  ],
)
def test_a_command_to_copy_has_absolute_paths(words, printed):
  assert console.to_copy(words.split()) == printed.format(here=os.getcwd())


def test_a_recorded_command_gets_the_workdir_of_its_run():
  words = ['exgrpo', 'train', '--workdir', 'run']
  assert console.to_copy(words, '/a/my run') == "exgrpo train '--workdir=/a/my run'"


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'console.log'


@contextlib.contextmanager
def terminal(monkeypatch, width):
  """Replace both streams by a pseudo-terminal; yield a function that returns its output."""
  master, slave = os.openpty()
  received = []

  def read():
    with contextlib.suppress(OSError):  # closed
      while True:
        received.append(os.read(master, 1024))

  thread = threading.Thread(target=read, daemon=True)
  thread.start()
  with monkeypatch.context() as patch, open(slave, 'w', buffering=1) as stream:
    patch.setenv('TERM', 'xterm')
    patch.setenv('COLUMNS', str(width))
    patch.setattr(sys, 'stdout', stream)
    patch.setattr(sys, 'stderr', stream)
    yield lambda: b''.join(received).decode()
  thread.join()
  os.close(master)


def test_a_terminal_shows_the_status_line(monkeypatch, path):
  tokens = [1234]
  long = 'a line ' + 'that is longer than the terminal is wide ' * 3
  with terminal(monkeypatch, width=60) as written:
    with console.opened(str(path), NEVER):
      with activity.doing(lambda: f'step 1/9, {tokens[0]} tokens'):
        wait_until(lambda: 'step 1/9, 1234 tokens (0:00:0' in written())
        print(*long.split(' '))
        print('\x1b[31ma warning\x1b[0m', file=sys.stderr)
        tokens[0] = 5678
        wait_until(lambda: 'step 1/9, 5678 tokens (0:00:0' in written())
      print('the end')
    wait_until(lambda: 'the end' in written())
  lines = [line.rpartition('\r\x1b[2K')[2] for line in written().split('\r\n')]
  printed = [line for line in lines if re.search('line|warning|end', line)]
  assert [re.sub(r'\x1b\[[0-9;]*m', '', line) for line in printed] == [long, 'a warning', 'the end']
  assert '\x1b[?25l' not in written()  # a killed run could not show the cursor again
  start, *kept = path.read_text().splitlines()
  assert start.startswith('---- ') and sys.orig_argv[-1] in start
  assert kept == [long, 'a warning', 'the end']


def test_the_status_line_is_wrapped_on_a_narrow_terminal(monkeypatch):
  with terminal(monkeypatch, width=30) as written:
    with console.opened(), activity.doing('step 1/9: generate, 80 of 96 graded'):
      wait_until(lambda: 'step 1/9: generate, 80 of 96\r\ngraded (0:00:0' in written())
      print('a line')
    wait_until(lambda: 'a line\r\n' in written())


def test_elsewhere_the_status_line_is_printed_only_after_a_silence(capsys, path):
  with console.opened(str(path), silence=0.05), activity.doing('step 1/9'):
    wait_until(lambda: path.read_text().count('step 1/9') >= 2)
  out = capsys.readouterr().out
  assert re.fullmatch(r'(\.\.\. step 1/9 \(0:00:\d\d\)\n)+', out) and out in path.read_text()
  with console.opened(silence=NEVER), activity.doing('step 1/9'):
    print('a', 'line')
    print('a warning', file=sys.stderr)
    time.sleep(0.05)
  with console.opened(silence=0.01):  # idle
    time.sleep(0.05)
  assert capsys.readouterr() == ('a line\n', 'a warning\n')


def test_a_resumed_run_appends_to_the_log(path):
  for name in 'first', 'second':
    with console.opened(str(path), NEVER):
      print(name)
      print('downloading 1%\rdownloading 100%', file=sys.stderr)
      hosts.warn('a surrogate \ud800')
  lines = path.read_text().splitlines()
  rest = ['downloading 100%', 'WARNING: a surrogate \\ud800']
  assert lines[1:4] == ['first', *rest] and lines[5:] == ['second', *rest]


@pytest.mark.parametrize(
  ('error', 'last'),
  [(InputError('the disk is full'), 'error: the disk is full'), (KeyError('x'), "KeyError: 'x'")],
)
def test_the_log_contains_the_error_that_ends_a_run(path, error, last):
  with pytest.raises(type(error)), console.opened(str(path)):
    raise error
  assert path.read_text().splitlines()[-1] == last


def test_the_log_contains_log_messages_of_libraries(path, monkeypatch):
  monkeypatch.setattr(flags.FlagValues, 'is_parsed', lambda _: True)  # as in a command
  record = logging.LogRecord('orbax', logging.ERROR, 'x.py', 1, 'cannot write', None, None)
  with console.opened(str(path)):
    absl_logging.get_absl_handler().handle(record)
  assert path.read_text().endswith('cannot write\n')


def test_a_full_disk_for_the_log_does_not_end_a_run(capsys):
  with console.opened('/dev/full'):
    print('goes on')
  assert capsys.readouterr().out == 'goes on\n'


def test_only_a_command_with_a_log_goes_on_when_nobody_reads_its_output(path, monkeypatch):
  reader, writer = os.pipe()
  os.close(reader)  # as `| head -1` does
  with open(writer, 'w') as stream:
    monkeypatch.setattr(sys, 'stdout', stream)
    with pytest.raises(BrokenPipeError), console.opened():
      print('a result', flush=True)
    with console.opened(str(path)):
      print('goes on', flush=True)
    print('a result', flush=True)
  assert path.read_text().endswith('goes on\n')


def test_only_the_first_host_prints_and_logs(path, monkeypatch, capsys):
  monkeypatch.setattr(hosts, 'is_first', lambda: False)
  with console.opened(str(path), silence=0.01), activity.doing('step 1/9'):
    time.sleep(0.05)
  assert not path.exists() and capsys.readouterr().out == ''
