"""Importing the package: it changes the process of our own commands, and no other."""

import os
import subprocess
import sys

import pytest

AT_BEGIN = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
atexit.register(
  lambda: print(
    'XLA_CLIENT_MEM_FRACTION' in os.environ, signal.getsignal(signal.SIGINT) == signal.SIG_DFL
  )
)
"""


@pytest.mark.parametrize(('module', 'changed'), [('exgrpo_jax', True), ('mylab', False)])
def test_a_package_that_imports_this_one_keeps_its_memory_and_signals(tmp_path, module, changed):
  (tmp_path / 'sitecustomize.py').write_text(AT_BEGIN)  # Python imports it before anything else
  (tmp_path / 'mylab').mkdir()
  (tmp_path / 'mylab' / '__init__.py').write_text('import exgrpo_jax')
  (tmp_path / 'mylab' / '__main__.py').touch()
  environment = {'PYTHONPATH': str(tmp_path), 'PATH': os.environ['PATH']}
  said = subprocess.check_output(
    [sys.executable, '-m', module, 'verify', '--help'], env=environment, text=True
  )
  assert said.endswith(f'{changed} {changed}\n')
