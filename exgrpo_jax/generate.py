r"""What a policy writes: a few responses to a prompt, with their log-probabilities.

python -m exgrpo_jax.generate --model=Qwen2.5-1.5B-Instruct --prompt='What is 12 * 13?'
python -m exgrpo_jax.generate --checkpoint=/tmp/chains --prompt='48+3-9+7' --samples=2 --tokens
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from absl import flags

from exgrpo_jax import cli, policies
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import Message, Response
from exgrpo_jax.errors import InputError
from exgrpo_jax.experiment import open_experiment
from exgrpo_jax.policies import Policy
from exgrpo_jax.policy import model
from exgrpo_jax.rollout import scheduler
from exgrpo_jax.runtime import console, device_memory, hosts, randomness
from exgrpo_jax.runtime.randomness import Purpose

_SHORTEST_PREFILL = 64  # tokens: prompts are padded to a power of two, so that few programs compile


def define_flags() -> None:
  """Of this command."""
  cli.define_config()
  cli.define_checkpoint()
  cli.define_model()
  flags.DEFINE_string('prompt', None, 'What is asked, as the text of a user; it may have lines.')
  flags.DEFINE_integer('samples', 4, 'How many responses.', lower_bound=1)
  cli.define_sampling()
  flags.DEFINE_integer(
    'seed',
    0,
    'Of sampling: the same seed writes the same.',
    lower_bound=0,
    upper_bound=2**63 - 1,  # as of config.seed
  )
  flags.DEFINE_bool('tokens', False, 'Prints each token with its log-probability.')


def main(args: cli.Args) -> None:
  """Prints responses to --prompt."""
  if not args.prompt:
    raise InputError("--prompt is needed: what to ask, such as --prompt='What is 12 * 13?'.")
  source = policies.chosen(args)
  values = policies.with_sampling(args, policies.config_values(source, args.config))
  experiment = open_experiment(values, source.path)
  with console.opened(), device_memory.explained():
    policy = policies.restore(source, experiment)
    (responses,) = sample(policy, [args.prompt], args.samples, seed=args.seed)
  if hosts.is_first():
    print(render(policy, args.prompt))
    for number, response in enumerate(responses, 1):
      print(f'--- {number} of {len(responses)}: {_summary(response)}')
      print(_text(experiment.tokenizer, response, args.tokens))


def sample(
  policy: Policy, prompts: Sequence[str], samples: int = 1, *, seed: int = 0
) -> list[list[Response]]:
  """Responses to some prompts, sampled as config.evaluation of the policy's experiment says.

  Args:
    policy: which one.
    prompts: the text of a user each; rendered by config.prompt.
    samples: responses to each prompt.
    seed: of sampling; the same seed draws the same.

  Returns:
    For each prompt its responses, log-probabilities and entropies in nats under the distribution
    that was sampled from; at temperature 0, under that of temperature 1.

  Raises:
    InputError: a prompt is longer than config.rollout.max_prompt.
  """
  experiment, tokenizer = policy.experiment, policy.experiment.tokenizer
  rollout, evaluation = experiment.config.rollout, experiment.config.evaluation
  encoded = [np.array(tokenizer.encode(render(policy, text)), np.int32) for text in prompts]
  longest = max(map(len, encoded))
  if longest > rollout.max_prompt:
    raise InputError(
      f'a prompt has {longest} tokens, as the model reads it, and '
      f'config.rollout.max_prompt={rollout.max_prompt}: shorten it, or raise the limit.'
    )
  sized = dataclasses.replace(
    rollout,
    questions=len(prompts),
    slots=min(rollout.slots, len(prompts) * samples),
    max_prompt=min(rollout.max_prompt, max(_SHORTEST_PREFILL, 1 << (longest - 1).bit_length())),
  )
  with jax.set_mesh(experiment.meshes.training):
    responses = scheduler.generate(
      experiment.model,
      model.decode_layout(experiment.model, policy.params, experiment.meshes),
      [prompt for prompt in encoded for _ in range(samples)],
      [question for question in range(len(prompts)) for _ in range(samples)],
      list(range(samples)) * len(prompts),
      randomness.key(seed, Purpose.GENERATE),
      sized.decode_spec(tokenizer, evaluation.distribution),
      experiment.meshes.decoding,
    )
  return [responses[start : start + samples] for start in range(0, len(responses), samples)]


def render(policy: Policy, text: str) -> str:
  """A user's text as the prompt that the model reads."""
  experiment = policy.experiment
  return experiment.tokenizer.render([Message('user', text)], experiment.config.prompt)


def _summary(response: Response) -> str:
  """How long it is, and how probable."""
  total, count = float(response.logp.sum()), len(response.tokens)
  cut = ', cut at the limit' if response.truncated else ''
  return f'{count} tokens{cut}, log-probability {total:.2f}, {total / count:.3f} a token'


def _text(tokenizer: Tokenizer, response: Response, by_token: bool) -> str:
  """What it says, or a line for each token: log-probability in nats, and the token."""
  if not by_token:
    return tokenizer.decode(response.tokens)
  pieces = tokenizer.pieces(response.tokens)
  return '\n'.join(f'{logp:9.3f} {piece!r}' for logp, piece in zip(response.logp, pieces))


if __name__ == '__main__':
  cli.run(main, define_flags, on_all_hosts=True)
