"""Print a policy's responses to a prompt, with their log-probabilities.

exgrpo generate --model=Qwen2.5-1.5B-Instruct --prompt='What is 12 * 13?'
exgrpo generate --checkpoint=/tmp/chains --prompt='48+3-9+7' --samples=2 --tokens
exgrpo generate --checkpoint=/tmp/guess --row=3
"""

from absl import flags

from exgrpo_jax.commands import command_line
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Response, turn_places
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.evaluation.responses import play, render, sample
from exgrpo_jax.experiment import policies
from exgrpo_jax.experiment.experiment import open_experiment
from exgrpo_jax.runtime import console, hosts, machine


def define_flags() -> None:
  """Define the flags of this command."""
  command_line.define_config()
  command_line.define_checkpoint()
  command_line.define_model()
  flags.DEFINE_string('prompt', None, "The user's message. It may contain several lines.")
  flags.DEFINE_integer(
    'row', None, 'With an environment: the row of config.data.train to play.', lower_bound=0
  )
  flags.DEFINE_integer('samples', 4, 'The number of responses.', lower_bound=1)
  command_line.define_sampling()
  flags.DEFINE_integer(
    'seed',
    0,
    'The sampling seed. The same seed gives the same responses.',
    lower_bound=0,
    upper_bound=2**63 - 1,  # the same limit as for config.seed
  )
  flags.DEFINE_bool('tokens', False, 'Print each token with its log-probability.')


def main(args: command_line.Args) -> None:
  """Print responses to --prompt, or episodes for --row."""
  if (args.row is None) == (not args.prompt):
    raise InputError(
      "exactly one of --prompt and --row is required: --prompt='What is 12 * 13?' asks a question, "
      'and --row=3 plays an episode in an environment.'
    )
  source = command_line.chosen_policy(args)
  values = policies.config_values(source, args.config, args.max_response)
  values = command_line.with_sampling(args, values)
  experiment = open_experiment(values, source.path)
  with console.opened(), machine.explained():
    policy = policies.restore(source, experiment)
    if args.prompt:
      prompt = render(policy, args.prompt)
      (responses,) = sample(policy, [args.prompt], args.samples, seed=args.seed)
    else:
      tokens, responses = play(policy, args.row, args.samples, seed=args.seed)
      prompt = experiment.tokenizer.decode(tokens, special=True)
  if hosts.is_first():
    print(prompt)
    for number, response in enumerate(responses, 1):
      print(f'--- {number} of {len(responses)}: {_summary(response)}')
      print(_text(experiment.tokenizer, response, args.tokens))


def _summary(response: Response) -> str:
  """Describe a response: its length, log-probability and, for an episode, its verdict."""
  total, count = float(response.logp.sum()), response.num_own
  cut = ', truncated' if response.truncated else ''
  ending = ''
  if verdict := response.verdict:
    reason = f' ({verdict.reason})' if verdict.reason else ''
    turns = counted(len(response.turns), 'turn')
    ending = f'{turns}, reward {verdict.reward:g}, {verdict.outcome}{reason}; '
  length = counted(count, 'token')
  return f'{ending}{length}{cut}, log-probability {total:.2f}, {total / count:.3f} per token'


def _text(tokenizer: Tokenizer, response: Response, by_token: bool) -> str:
  """Decode a response, or format an episode as a dialogue with one line per message.

  With `by_token`, each line shows a token and its log-probability in nats.
  """
  if by_token:
    pieces = tokenizer.pieces(response.tokens)
    return '\n'.join(f'{logp:9.3f} {piece!r}' for logp, piece in zip(response.logp, pieces))
  if not response.turns:
    return tokenizer.decode(response.tokens)
  lines = list[str]()
  for policy_slice, reply_slice in turn_places(response.turns):
    lines.append(f'policy: {tokenizer.decode(response.tokens[policy_slice])}')
    if reply_slice.stop > reply_slice.start:
      text = tokenizer.decode(response.tokens[reply_slice], special=True)  # with turn markers
      lines.append(f'environment: {text.strip()}')
  return '\n'.join(lines)


def run() -> None:
  """Run the CLI."""
  command_line.run(main, define_flags, on_all_hosts=True)
