"""The questions of a data spec with their prompts: what a run trains or is evaluated on."""

from exgrpo_jax.data import prompt, prompt_file, questions
from exgrpo_jax.data.tokenizer import Tokenizer
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.runtime import hosts


def load(
  config: questions.Config, spec: str, tokenizer: Tokenizer, prompts: prompt.Config, max_prompt: int
) -> QuestionSet:
  """The questions of `spec`, prepared and tokenised if that has not been done; all hosts call it.

  Args:
    config: where data is kept, and what to do with prompts over the limit.
    spec: the data spec.
    tokenizer: of the prompts.
    prompts: how messages become text.
    max_prompt: the limit, in tokens.

  Raises:
    InputError: there is no such data, a row cannot be used or is too long, or hosts disagree.
  """
  questions.settle(config, spec)
  with hosts.first_host_first('load_questions'):  # prepared data may lie in a shared folder
    loaded = questions.load(config, spec)
    tokens = prompt_file.tokenized(loaded, tokenizer, prompts)
  kept = questions.check_prompts(spec, tokens.lengths, max_prompt, config.overlong)
  hosts.check_same(spec, 'the questions', lambda: tokens.checksum + kept.tobytes())
  # Rows are numbered anew: the stream and the buffer address questions by place.
  return QuestionSet(spec=spec, questions=loaded.select(kept), prompts=tokens.select(kept))
