"""Importing the package: it changes the process of our own commands, and no other."""

import os
import subprocess
import sys

import pytest

import exgrpo_jax

AT_BEGIN = """
import atexit, os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
atexit.register(
  lambda: print(
    'XLA_CLIENT_MEM_FRACTION' in os.environ, signal.getsignal(signal.SIGINT) == signal.SIG_DFL
  )
)
"""


@pytest.mark.parametrize(
  ('command', 'is_command'),
  [
    ('python -m exgrpo_jax.train --config=smoke', True),
    ('python -m exgrpo_jax.data show x.jsonl --model=y', True),
    ('python -P -m exgrpo_jax.grading.worker', True),
    ('/usr/bin/python3 -u -X dev -m exgrpo_jax.train', True),
    ('python -um exgrpo_jax.train -m', True),
    ('python -mexgrpo_jax.train -m mylab.train', True),
    ('python -umexgrpo_jax.train', True),
    ('python -m mylab.train', False),
    ('python -mmylab.train', False),
    ('python -m mylab.exgrpo_jax.train', False),
    ('python -m exgrpo_jax_mine.train', False),
    ('python -m mylab.launch exgrpo_jax.train', False),
    ('python -m mylab.launch -m exgrpo_jax.train', False),
  ],
)
def test_a_command_is_told_by_the_module_that_python_runs(monkeypatch, command, is_command):
  words = command.split()
  first = next(n for n, word in enumerate(words) if word[0] == '-' and 'm' in word)
  arguments = words[first + 1 + words[first].endswith('m') :]
  monkeypatch.setattr(sys, 'orig_argv', words)
  monkeypatch.setattr(sys, 'argv', ['-m', *arguments])  # until python has found the module
  assert exgrpo_jax._is_command() == is_command
  monkeypatch.setattr(sys, 'argv', ['/place/of/module.py', *arguments])
  assert not exgrpo_jax._is_command()


@pytest.mark.parametrize(('module', 'changed'), [('exgrpo_jax.errors', True), ('mylab', False)])
def test_a_package_that_imports_this_one_keeps_its_memory_and_signals(tmp_path, module, changed):
  (tmp_path / 'sitecustomize.py').write_text(AT_BEGIN)  # Python imports it before anything else
  (tmp_path / 'mylab').mkdir()
  (tmp_path / 'mylab' / '__init__.py').write_text('import exgrpo_jax')
  (tmp_path / 'mylab' / '__main__.py').touch()
  environment = {'PYTHONPATH': str(tmp_path), 'PATH': os.environ['PATH']}
  said = subprocess.check_output([sys.executable, '-m', module], env=environment, text=True)
  assert said == f'{changed} {changed}\n'
