"""Show runs as one HTML page: curves, buffer, questions, responses token by token.

exgrpo report /tmp/chains --out=report.html
exgrpo report /tmp/first /tmp/second --out=both.html

The page works offline. It needs no other files, unless you set --texts=all. With --serve, you can
follow the runs in a local browser. Nothing is written into a workdir unless --out points there.
"""

import math
import pathlib

from absl import flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting.report import PAGE, print_written, serve, write_report
from exgrpo_jax.runtime.workdir import check_local


def define_flags() -> None:
  """Define the flags of this command."""
  command_line.define_path(
    'out', f'The file to write, e.g. run.html, or a folder for {PAGE}; ./{PAGE} by default.'
  )
  flags.DEFINE_enum(
    'texts',
    'sampled',
    ['sampled', 'all'],
    'The responses to show with their tokens. sampled shows as many as fit on the page; all '
    'shows all recorded responses, which are written to a folder next to the page.',
  )
  flags.DEFINE_bool(
    'serve', False, 'Serve the page on this machine and keep it up to date; write no file.'
  )
  flags.DEFINE_integer('port', 8700, 'The port for --serve; 0 chooses a free one.', 0, 65535)
  flags.DEFINE_float(
    'every',
    5.0,
    'The minimum time between updates of the served page, in seconds.',
    1.0,
  )


def main(args: command_line.Args, *workdirs: str) -> None:
  """Write the page, or serve it."""
  if not math.isfinite(args.every):
    raise InputError(f'--every={args.every}: the value must be a number of seconds, at least 1.')
  for name in ('out', 'texts'):
    if args.serve and args[name].present:
      raise InputError(
        f'--{name}={args[name].value}: this flag cannot be combined with --serve, which '
        f'writes no file and always includes all texts. Remove --{name}.'
      )
  check_local(f'--out={args.out}')
  name = args.out or PAGE
  out = pathlib.Path(name)
  if out.is_dir() or not out.suffix or name.endswith('/'):  # a Path drops a trailing slash
    out /= PAGE
  if args.serve:
    serve(workdirs, args.port, args.every)
  else:
    print_written(out, write_report(workdirs, out, args.texts == 'all'))


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags, metavar='WORKDIR')
