"""The command line: shared flags, `--help`, overrides, exit statuses.

A command is a module with `define_flags()`, `main(args)` and `run()`, which calls `run` here. No
flags are defined on import, so any two commands can be imported together.

Every command exits with status 0 on success, or 2 if it cannot run (with a one-line explanation on
standard error). If the network or the storage failed, the status is 1 instead of 2, because the
same command may work later. `train` and `sweep` have additional statuses.
"""

import contextlib
import copy
import difflib
import os
import re
import select
import signal
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from exgrpo_jax import config
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.policies import Source
from exgrpo_jax.experiment.settings import check_length
from exgrpo_jax.runtime import hosts

Args = flags.FlagValues  # the values of a command's flags, e.g. args.workdir
_SETTINGS = {  # the settings that flags set
  'model': 'model.path',
  'compare': 'model.path',
  'temperature': 'evaluation.temperature',
}


# ---- Shared flags ----


class _Path(flags.ArgumentParser[str]):
  """A path parser that expands ~, because shells don't expand it in --flag=~/x."""

  syntactic_help = 'a path; a leading ~ must refer to an existing home folder'

  def parse(self, argument: str) -> str:
    path = os.path.expanduser(argument)
    if path.startswith('~'):
      raise ValueError('no such home folder')
    return path


class _Paths(flags.ListParser):
  """A parser for comma-separated paths."""

  syntactic_help = 'comma-separated paths; a leading ~ must refer to an existing home folder'

  def parse(self, argument: str | list[str]) -> list[str]:
    return [_Path().parse(path) for path in super().parse(argument)]


class _Specs(flags.ListParser):
  """A parser for comma-separated data specs. Commas inside brackets do not separate specs."""

  syntactic_help = 'comma-separated data specs'

  def parse(self, argument: str | list[str]) -> list[str]:
    specs, depth = [''], 0
    for character in argument if isinstance(argument, str) else ','.join(argument):
      depth += (character in '([{') - (character in ')]}')
      if character == ',' and depth <= 0:
        specs.append('')
      else:
        specs[-1] += character
    return [spec.strip() for spec in specs if spec.strip()]


def define_path(name: str, meaning: str, several: bool = False) -> None:
  """Define a flag for a file, a folder or a model on the Hub, or for several of them."""
  flags.DEFINE(_Paths() if several else _Path(), name, None, meaning)


def define_specs(name: str, meaning: str) -> None:
  """Define a flag for data specs."""
  flags.DEFINE(_Specs(), name, None, meaning)


def define_config() -> None:
  """Define --config: a config file, or the name of one that ships with the package."""
  config_flags.DEFINE_config_file(
    'config',
    None,
    'The config: a file such as path/to/file.py, or one of these names: '
    + ', '.join(config_files.shipped_names(config_files.CONFIGS))
    + '. Override any setting, for example with --config.replay.ratio=0.25. docs/configuration.md '
    'lists all settings.',
  )


def define_workdir() -> None:
  """Define --workdir, for commands that create a run."""
  define_path('workdir', 'The folder for everything the run writes. An existing run is resumed.')


def define_checkpoint() -> None:
  """Define --checkpoint and --step, for commands that read a run."""
  define_path('checkpoint', 'The workdir of the run to use.')
  flags.DEFINE_integer('step', None, 'The step of the checkpoint to use; by default the newest.')


def define_model(
  default: str = "Without --config, prompts use the model's chat template, and prompts and "
  'responses are limited to 2,048 tokens each.',
) -> None:
  """Define --model, for commands that read a run or a model."""
  define_path(
    'model',
    'A model to use instead of --checkpoint: a Hugging Face folder, a GGUF file (model.gguf), or a '
    'name on the Hub such as owner/name or owner/name@revision. ' + default,
  )


def define_sampling() -> None:
  """Define the flags that `with_sampling` applies, except --samples."""
  flags.DEFINE_float(
    'temperature',
    None,
    'The sampling temperature; 0 is greedy. The default is config.evaluation.temperature.',
    lower_bound=0.0,
  )
  flags.DEFINE_integer(
    'max_response',
    None,
    'The maximum response length, in tokens. The default is config.rollout.max_response.',
    lower_bound=1,
  )


def define_launcher(slurm: bool = False) -> None:
  """Define --parallel and --launcher, for commands that start runs; with `slurm`, also --sbatch."""
  flags.DEFINE_integer('parallel', 1, 'The number of trials to run at a time.', lower_bound=1)
  flags.DEFINE_enum(
    'launcher',
    'local',
    ['local', 'commands', *['slurm'] * slurm],
    "Run the trials here, or print one command per trial for a cluster's queue"
    + ', or submit the trials to Slurm as one array job.' * slurm
    + '.' * (not slurm),
  )
  if slurm:
    flags.DEFINE_string(
      'sbatch',
      '',
      'With --launcher=slurm: options for sbatch, such as "--partition=gpu --gres=gpu:1 '
      '--time=4:00:00". Each trial gets these resources.',
    )


def define_hosts() -> None:
  """Define the flags that let hosts find each other, for commands that run on several hosts."""
  flags.DEFINE_string(
    'coordinator_address',
    None,
    'host:port of the first host, to which all hosts connect. Not needed on Cloud TPU, GKE or '
    'Slurm.',
  )
  flags.DEFINE_integer(
    'num_processes',
    None,
    'The number of hosts. To run on this host only, set this flag to 1 and omit '
    '--coordinator_address and --process_id.',
    lower_bound=1,
  )
  flags.DEFINE_integer('process_id', None, 'The zero-based index of this host.', lower_bound=0)


# ---- Running a command ----


def run(
  main: Callable[..., None],
  define_flags: Callable[[], None],
  on_all_hosts: bool = False,
  metavar: str = '',
) -> None:
  """Run a command. If it raises an InputError, print one line and exit with the error's status.

  Args:
    main: called with the flags, followed by any words after the command.
    define_flags: defines the command's flags.
    on_all_hosts: True if several hosts can run the command together.
    metavar: a name for the words after the command, e.g. 'WORKDIR'; if set, at least one word is
      required.
  """
  try:
    define_flags()  # reads a --flagfile
  except flags.Error as error:
    refuse(InputError(str(error)))
  if on_all_hosts:
    define_hosts()
  args = flags.FLAGS
  sys.modules['__main__'].__doc__ = sys.modules[main.__module__].__doc__  # the top of --help
  # --help lists only the main module's flags, so register these as its flags.
  for module in (__name__, define_flags.__module__):
    for flag in args.flags_by_module_dict().get(module, []):
      args.register_key_flag_for_module(sys.argv[0], flag)

  def run_main(argv: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # orbax and TFDS log every detail at lower levels
    words = argv[1:]
    try:
      if metavar and not words:
        raise InputError(f'the command must be followed by at least one {metavar}. See --help.')
      if words and not metavar:
        raise InputError(f"'{words[0]}': this is not a flag. Write flags as --name=value.")
      with hosts.joined(_meeting(args)) if on_all_hosts else contextlib.nullcontext():
        main(args, *words)
    except (InputError, ImportError) as error:
      refuse(_for_user(args, error))

  with _closed_output():
    app.run(run_main, flags_parser=_parse_flags)


def _meeting(args: Args) -> hosts.Meeting:
  return hosts.Meeting(args.coordinator_address, args.num_processes, args.process_id)


@contextlib.contextmanager
def _closed_output() -> Iterator[None]:
  """Exit without a traceback if the reader of the output has closed the pipe, as in `| head`."""
  try:
    try:
      yield
    finally:
      print(end='', flush=True)
  except BrokenPipeError:
    readers = select.poll()
    readers.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in readers.poll(0)):
      raise  # a different pipe is broken
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(128 + signal.SIGPIPE)


def refuse(error: InputError) -> NoReturn:
  """Print the error on one line and exit with its status."""
  print(f'error: {error}', file=sys.stderr, flush=True)
  sys.exit(error.status)


def _for_user(args: Args, error: InputError | ImportError) -> InputError:
  """Return the error to print, which names the flags instead of the settings that they set."""
  if isinstance(error, ImportError):
    if 'gcsfs' not in str(error):
      raise error
    return InputError("gs:// paths need gcsfs. Run pip install -e '.[gcs]'.")
  message = str(error)
  for flag, key in _SETTINGS.items():
    given = getattr(args, flag, None)
    for value in given if isinstance(given, list) else [given]:
      message = message.replace(f'config.{key}={value}', f'--{flag}={value}')
  return InputError(message, error.status)


# ---- Reading flags ----


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    _check_names(argv[1:])
    words = _absl_flags(config_files.resolved(argv))
    if overrides := given_overrides(flags.FLAGS):
      check_length(flags.FLAGS.config, overrides)
    return words
  except InputError as error:
    refuse(error)


def _check_names(args: Sequence[str]) -> None:
  """Reject text that isn't UTF-8, flags with non-ASCII names, and flags given twice.

  For a flag given twice, absl would use the last value.
  """
  args_by_name = {}
  for arg in args:
    if re.search('[\ud800-\udfff]', arg):  # Python's replacement for bytes it cannot decode
      raise InputError(
        f'{arg!a}: this argument is not valid {sys.getfilesystemencoding().upper()} text. Set '
        'your terminal and LANG to UTF-8, or use only ASCII characters.'
      )
    name = arg.partition('=')[0]
    # Some editors insert characters that only look like - or =.
    symbol = next((character for character in name if not character.isascii()), None)
    # A name with a space is the value of the flag before it, such as --prompt '— why?'.
    if symbol and unicodedata.category(name[0]) == 'Pd' and ' ' not in name:
      raise InputError(
        f"{arg}: '{symbol}' ({unicodedata.name(symbol, 'without a name')}) cannot be part of a "
        'flag name. Retype the flag as --name=value.'
      )
    if match := re.match(r'--?(?:no(?=config\.))?([a-z][\w.]*)', arg):
      name = match[1]
      flag = flags.FLAGS._flags().get(name)
      if name in args_by_name and not isinstance(flag, flags.MultiFlag):
        is_list = isinstance(getattr(flag, 'parser', None), flags.ListParser)
        remedy = 'Separate its values with commas' if is_list else 'Remove one of them'
        raise InputError(
          f'--{name}: this flag is given twice, as {args_by_name[name]} and as {arg}. {remedy}.'
        )
      args_by_name[name] = arg


def _absl_flags(argv: list[str]) -> list[str]:
  """Parse flags with absl and return the remaining words. Turns absl errors into InputErrors."""
  try:
    return flags.FLAGS(argv)
  except SystemExit:  # absl exits with status 1 after --help
    sys.exit(0)
  except flags.UnrecognizedFlagError as error:
    names = [flag.name for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])]
    matches = difflib.get_close_matches(error.flagname, names, n=1)
    flag_list = f'The flags are --{", --".join(sorted(names))}.' if names else 'It has no flags.'
    hint = f'Did you mean --{matches[0]}?' if matches else flag_list
    if not error.flagname.startswith('config.'):  # a name that is not ours
      hint = config.counterpart_hint(error.flagname) or hint
    raise InputError(f'--{error.flagname}: this command has no such flag. {hint}') from error
  except (flags.Error, ValueError) as error:
    raise InputError(_explanation(str(error))) from error


def _explanation(message: str) -> str:
  """Expand an absl error message. For a bad value, say what is accepted and what the flag means."""
  match = re.match(r'flag --(\w+)=(.*?): ', message, re.DOTALL)
  if not match:
    return f'{message.rstrip(".")}. --help lists all flags.'
  flag = flags.FLAGS[match[1]]
  choices = getattr(flag.parser, 'enum_values', ())
  kind = f'one of {", ".join(choices)}' if choices else flag.parser.syntactic_help
  kind = re.sub('^number', 'a number', kind)  # absl writes 'number >= 1.0'
  meaning = flag.help.removeprefix(f'<{"|".join(choices)}>: ')  # absl puts the choices in front
  return f'--{match[1]}={match[2]}: the value must be {kind}. Description: {meaning}'


# ---- Flags that choose a policy ----


def chosen_policy(args: Args) -> Source:
  """Return the policy given by --checkpoint (and --step) or --model. Exactly one must be set."""
  if args.checkpoint and args.model:
    raise InputError(
      f'--checkpoint={args.checkpoint} and --model={args.model}: both flags choose a policy. '
      'Remove one of them.'
    )
  if not args.checkpoint and not args.model:
    raise InputError(
      "--checkpoint or --model is required. Set --checkpoint to a run's workdir, or --model to a "
      "model's folder, GGUF file or name on the Hub."
    )
  if args.checkpoint:
    return Source('run', args.checkpoint, args.step)
  if args.step is not None:
    raise InputError(
      f'--step={args.step}: only runs have steps, but --model={args.model} is not a run. Remove '
      '--step.'
    )
  if 'model.path' in given_overrides(args):
    raise InputError(
      f'--config.model.path and --model={args.model}: both flags choose a model. Remove one '
      'of them.'
    )
  return Source('model', args.model)


def with_sampling(args: Args, values: ConfigDict) -> ConfigDict:
  """Return a copy of the config with --samples, --temperature and --max_response applied."""
  new_values: Any = copy.deepcopy(values)
  with new_values.unlocked():
    new_values.evaluation.samples = args.samples or new_values.evaluation.samples
    if args.temperature is not None:
      new_values.evaluation.temperature = args.temperature
    new_values.rollout.max_response = args.max_response or new_values.rollout.max_response
  return new_values


def given_overrides(args: Args) -> dict[str, Any]:
  """Return the config overrides given on the command line, as dotted key -> value."""
  is_given = getattr(args, 'config', None)  # some commands have no --config
  return config_flags.get_override_values(args['config']) if is_given else {}
