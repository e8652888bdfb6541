"""Prior experience for a new run's replay buffer, from a file or from another run.

Prior experience is read, matched and graded before anything else is computed or written. Once the
run has a checkpoint, it loads the buffer from there and no longer reads prior experience.
"""

import dataclasses
import os
from collections.abc import Iterable

from exgrpo_jax import config
from exgrpo_jax.data import prompt, questions, tokenizer
from exgrpo_jax.datatypes import QuestionSet
from exgrpo_jax.errors import InputError, counted
from exgrpo_jax.experiment.experiment import Experiment, check_embedded
from exgrpo_jax.grading import pool
from exgrpo_jax.huggingface import hub_checkpoint
from exgrpo_jax.learner import checkpoint
from exgrpo_jax.rollout import seeding
from exgrpo_jax.runtime import activity, hub
from exgrpo_jax.runtime.workdir import check_local, check_no_model, read_config


def check(experience: seeding.ExperienceConfig, workdir: str) -> None:
  """Raise InputError if a new run in `workdir` could not read its prior experience."""
  path = os.path.expanduser(experience.path)
  if not path or checkpoint.steps(workdir):
    return
  if experience.is_file:
    seeding.check_columns(path)
    return
  check_local(f'config.experience.path={path}')
  check_no_model(f'config.experience.path={path}', path)
  if not os.path.exists(os.path.join(path, 'config.json')):
    raise InputError(
      f'config.experience.path={path}: experience must be a .jsonl file, a .parquet file or a '
      "run's workdir (a folder with a config.json)."
    )
  if not checkpoint.steps(path):
    raise InputError(
      f'config.experience.path={path}: the run has no checkpoint yet, so there is no buffer to '
      'load. Wait for its first checkpoint, or choose another run.'
    )


def load(experiment: Experiment, data: QuestionSet) -> list[seeding.Candidate]:
  """Load the successes in `config.experience.path` ([] if it is ''), and print their count.

  `data` are the training questions. All hosts must call this. Raises InputError if the experience
  cannot be used, or if none of its responses is correct.
  """
  run_config, decoder = experiment.config, experiment.tokenizer
  path, limit = os.path.expanduser(run_config.experience.path), run_config.rollout.max_response
  if not path:
    return []
  with activity.doing(f'reading the experience in {path}'):
    traces = seeding.read(path) if run_config.experience.is_file else _run_traces(experiment, path)
    candidates, counts = seeding.candidates(
      path, traces, data, decoder, limit, run_config.data.on_overlong
    )
  check_embedded(experiment, [candidate.tokens for candidate in candidates], f'{path}: a response')
  if run_config.objective.mask_truncated:
    candidates = _with_end_token(path, candidates, decoder, counts)
  grading = activity.doing(f'grading the experience in {path}')
  with grading, pool.Grader(run_config.grading, run_config.verifier) as grader:
    successes = seeding.successes(path, candidates, data, decoder, limit, grader)
  counts['wrong'] = len(candidates) - len(successes)
  omissions = [f'{count:,} {fate}' for fate, count in counts.items() if count and fate != 'traces']
  print(
    f'experience: {counted(counts["traces"], "response")} in {path}'
    + (f'; left out: {", ".join(omissions)}' if omissions else '')
    + f'; kept: {counted(len(successes), "correct response")} to '
    + counted(len({c.row for c in successes}), 'question'),
    flush=True,
  )
  return successes


def _with_end_token(
  path: str,
  candidates: list[seeding.Candidate],
  decoder: tokenizer.Tokenizer,
  counts: dict[str, int],
) -> list[seeding.Candidate]:
  """Return the candidates that end with an end token, and count the others in `counts`."""
  remaining = [
    candidate for candidate in candidates if int(candidate.tokens[-1]) in decoder.eos_ids
  ]
  counts['truncated'] = len(candidates) - len(remaining)
  if not remaining:
    raise InputError(
      f'config.objective.mask_truncated=True: no response in {path} ends with an end token, so all '
      'of them count as truncated. Add the end tokens, or set '
      'config.objective.mask_truncated=False.'
    )
  return remaining


def _run_traces(experiment: Experiment, path: str) -> Iterable[seeding.Trace]:
  """Yield the trajectories in another run's newest checkpoint. Skips retired questions."""
  values = read_config(path)
  model = values['model']
  with hub.as_in(path):
    tokenizer_name = values['tokenizer']['path'] or model['path'] or model.get('repository', '')
    folder = hub_checkpoint.folder(tokenizer_name, f'config.experience.path={path}: its tokenizer')
    run_tokenizer = tokenizer.load(folder or os.path.join(path, 'tokenizer.model'))
    names = ('tokenizer.json', 'tokenizer.model')  # these files map ids to text
    if any(run_tokenizer.files.get(name) != experiment.tokenizer.files.get(name) for name in names):
      raise InputError(
        f'config.experience.path={path}: that run has a different tokenizer, so its tokens '
        f'represent different text here. Set config.tokenizer.path={path}/tokenizer.model if this '
        "file exists; otherwise, set it to that run's config.tokenizer.path."
      )
    run_data = _run_questions(experiment, path, values)
  buffer, step = checkpoint.restore_buffer(path)
  rows = sorted(buffer.entries)
  if not rows:
    raise InputError(
      f"config.experience.path={path}: that run's buffer is empty after step {step}. Choose a run "
      'that has stored trajectories.'
    )
  for row in rows:
    length = buffer.entries[row].prompt_length
    if row >= len(run_data.prompts) or len(run_data.prompts[row]) != length:
      raise InputError(
        f'config.experience.path={path}: {run_data.spec} has changed since that run: the '
        f'prompt in row {row} used to be {length} tokens long. Restore the original data.'
      )
  for row, question in zip(rows, run_data.questions.read(rows)):
    entry = buffer.entries[row]
    for number, trajectory in enumerate(entry.trajectories):
      yield seeding.Trace(
        place=f'{path}, step {step}: trajectory {number} of question {row}',
        question=prompt.last_user_message(question.messages),
        response=None,
        tokens=trajectory.tokens,
        logp=trajectory.logp,
        correctness=entry.correctness,
        row=row,
      )


def _run_questions(experiment: Experiment, path: str, values: dict) -> QuestionSet:
  """Load another run's training questions, according to that run's config."""
  data_config = config.build(questions.DataConfig, values['data'], f'{path}/config.json: data')
  data_config = dataclasses.replace(data_config, cache_dir=experiment.config.data.cache_dir)
  prompt_config = config.build(prompt.PromptConfig, values['prompt'], f'{path}/config.json: prompt')
  max_prompt = values['rollout']['max_prompt']
  try:
    return questions.load_set(
      data_config, data_config.train, experiment.tokenizer, prompt_config, max_prompt
    )
  except InputError as error:
    raise InputError(
      f"config.experience.path={path}: that run's questions cannot be loaded. {error}"
    ) from error
