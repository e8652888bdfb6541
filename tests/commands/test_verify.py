"""The command that explains verdicts."""

import subprocess
import sys

import pytest

from exgrpo_jax.commands import verify
from tests.grading import cases


@pytest.mark.parametrize(
  ('flags', 'verdict'),
  [
    ((r'--response=\boxed{5}', '--answer=6'), 'wrong'),
    ((r'--response=\boxed{0.5}', '--answer=1/2'), 'correct'),
    (('--response=5', '--answer=5', '--require_box'), 'no answer'),
    (('--response=5', '--answer=5', '--require_think'), 'no answer'),
    ((r'--response=\boxed{D}', '--answer=d', '--kind=text'), 'correct'),
    (('--response=5', '--answer=8', '--verifier=tests.helpers.chance:Chance'), 'correct'),
  ],
)
def test_one_response_is_judged(flags, verdict, capsys):
  verify.main(list(flags))
  assert capsys.readouterr().out.endswith(f'verdict    {verdict}\n')


def test_a_file_is_scored(capsys):
  verify.main([f'--file={cases.PATH}'])
  assert capsys.readouterr().out.endswith(f'; {len(cases.read())} as expected\n')


@pytest.mark.parametrize(
  ('flags', 'named'),
  [
    ((), '--response and --answer, or --file'),
    (('--file=x.jsonl', '--answer=5'), '--file and --answer'),
    (('--file=nowhere.jsonl',), '--file=nowhere.jsonl'),
    (('--respons=5',), '--respons=5'),
    (('--file',), '--file'),
    (('--response=5', '--answer=5', '--verifier=nowhere:X'), "'nowhere:X'"),
  ],
)
def test_wrong_usage_is_one_line(flags, named, capsys):
  with pytest.raises(SystemExit, match=r'^2$'):
    verify.main(list(flags))
  out, err = capsys.readouterr()
  assert out == '' and err.startswith('error: ') and err.count('\n') == 1 and named in err


def test_the_command_imports_no_jax():
  program = (
    'import sys; from exgrpo_jax import __main__; '
    'sys.argv = ["exgrpo", "verify", "--response=5", "--answer=5"]; __main__.main(); '
    'assert not {"jax", "jaxlib", "flax", "numpy"} & set(sys.modules)'
  )
  run = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert run.stdout.endswith('verdict    correct\n')
