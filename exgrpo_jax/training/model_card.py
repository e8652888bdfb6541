"""The model card for an exported policy: README.md, generated from its run."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import huggingface_hub
from etils import epath

from exgrpo_jax import __version__
from exgrpo_jax.data import named_sets, prompt
from exgrpo_jax.data.questions import spec_name, split_spec
from exgrpo_jax.datatypes import Message
from exgrpo_jax.errors import counted
from exgrpo_jax.experiment.experiment import Experiment, RunConfig
from exgrpo_jax.huggingface import hub_checkpoint
from exgrpo_jax.reporting import metrics, runs
from exgrpo_jax.rollout.token_sampling import Distribution
from exgrpo_jax.runtime import environment, hosts, hub

FILE = 'README.md'

_MODEL = 'path/to/this/folder'  # placeholder for the model's name until it is published
_BASE = 'path/to/the/base/model'  # placeholder for a base model that is not on the Hub
_CODE = 'https://github.com/exgrpo-jax/exgrpo_jax'
_PAPERS = {
  'ExGRPO': 'Zhan et al. ExGRPO: Learning to Reason from Experience. 2025. '
  '[arXiv:2510.02245](https://arxiv.org/abs/2510.02245)',
  'GRPO': 'Shao et al. DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language '
  'Models. 2024. [arXiv:2402.03300](https://arxiv.org/abs/2402.03300)',
}
_SAMPLING = {field.name for field in dataclasses.fields(Distribution)}
_QUESTION = 'What is 12 * 13?'
# Settings that the card shows elsewhere, or that config.json contains.
_OTHER_SETTINGS = (*runs.SAME_SETTING, 'model.', 'prompt.system', 'data.train')
# The folders of a path such as /a/b, ~/a/b or gs://a/b. Hub names don't match.
_FOLDERS = re.compile(r'(?<![^\s\'"=,(\[])(\w+:/|~|\.{1,2})?/([^/\s\'",]+/)*')


def write(
  out: epath.PathLike,
  experiment: Experiment,
  step: int,
  scores: Mapping[str, float] | None = None,
  adapters: bool = False,
) -> None:
  """Write the model card for the policy after `step`.

  Pass the step's scores as `scores` if the run has not written them yet. The card leaves out
  the names of this machine's folders, because it may be published.
  """
  if not hosts.is_first():
    return
  config, (base, revision) = experiment.config, _base(experiment)
  local_name = os.path.basename(experiment.model_name.rstrip('/')) or 'A model from scratch'
  method = 'ExGRPO' if config.replay.ratio else 'GRPO'
  link = f'[{base}](https://huggingface.co/{base})' if base else local_name
  text = f"""---
{_metadata(experiment, base, adapters)}
---

# {base or local_name}, trained with {method}

{_table('', '', rows=[('base model', link), *_facts(experiment, step)])}

## Scores

{_scores(experiment, step, scores or {})}

## Use

{_usage(experiment, (base or _BASE) if adapters else '', revision)}

## Settings

Settings that differ from the [defaults]({_CODE}/blob/main/docs/configuration.md):

{_table('setting', 'value', 'default', rows=_settings(config))}

## Citation

{_PAPERS[method]}
"""
  (epath.Path(out) / FILE).write_bytes(text.encode())


def hub_card(folder: str, name: str) -> bytes:
  """Return the card in `folder`, with the Hub repository `name` as the model's name."""
  return pathlib.Path(folder, FILE).read_bytes().replace(_MODEL.encode(), name.encode())


def _base(experiment: Experiment) -> tuple[str, str]:
  """Return the Hub name and the revision of the model that the run started from; '' if unknown."""
  if repository := hub_checkpoint.parse_repository(experiment.model_name):
    return hub.as_known(repository)[1:]
  name, _, revision = experiment.config.model.repository.partition('@')
  return name, revision


def _metadata(experiment: Experiment, base: str, adapters: bool) -> str:
  """Return the card's YAML header. It names the base model and data only if they are on the Hub."""
  config = experiment.config
  readme = os.path.join(config.model.path, FILE)
  base_metadata = {}
  with contextlib.suppress(Exception):  # the base model's card may be missing or damaged
    base_metadata = huggingface_hub.metadata_load(readme) or {}
  split = named_sets.on_hub(config.data.cache_dir, split_spec(config.data.train)[0])
  return huggingface_hub.ModelCardData(
    **{key: value for key, value in base_metadata.items() if key.startswith('license')},
    library_name='peft' if adapters else 'transformers',
    pipeline_tag='text-generation',
    base_model=base or None,
    datasets=[split.repository.name] if split else None,
    tags=['exgrpo_jax', 'grpo', *['exgrpo'] * bool(config.replay.ratio)],
  ).to_yaml()


def _facts(experiment: Experiment, step: int) -> Iterator[tuple[str, str]]:
  """Yield (name, value) pairs for the table at the top."""
  config = experiment.config
  ratio = config.replay.ratio
  yield 'method', f'ExGRPO, `replay.ratio={ratio:g}`' if ratio else 'GRPO'
  yield 'policy', f'after step {step} of {config.num_steps}'
  yield 'training data', f'`{_cell(config.data.train)}`'
  if config.warm_start.num_updates:
    data = _cell(config.warm_start.data)
    yield 'warm start', f'{counted(config.warm_start.num_updates, "supervised update")} on `{data}`'
  if config.environment.name:
    yield 'environment', f'`{config.environment.name}` (multi-turn)'
  start = (environment.read(experiment.workdir) or [{}])[-1]
  version = start.get('packages', {}).get('exgrpo_jax', __version__)
  commit = start.get('commit')
  changes = ' and uncommitted changes' if commit and commit['has_uncommitted_changes'] else ''
  commit_text = f', commit {commit["hash"]}{changes}' if commit else ''
  yield 'software', f'[exgrpo_jax]({_CODE}) {version}{commit_text}'


def _settings(config: RunConfig) -> Iterator[tuple[str, ...]]:
  values = json.loads(json.dumps(dataclasses.asdict(config)))
  for name, default, value in runs.departures(runs.flat(values)):
    if name == 'seed' or not name.startswith(_OTHER_SETTINGS):
      yield f'`{name}`', f'`{_cell(value)}`', f'`{_cell(default)}`'


# ---- Scores ----


def _scores(experiment: Experiment, step: int, scores: Mapping[str, float]) -> str:
  """Return a table of the scores before the first step and at `step`, with 95% intervals.

  If the run was not evaluated at `step`, the table shows its last evaluation before that step.
  """
  config = experiment.config
  records = [*metrics.read(experiment.workdir), {'step': step, **scores}]
  records = [r for r in records if r['step'] <= step and runs.score_names([[r]])]
  manual_rows = list(_manual_rows(experiment.workdir, step))
  if not records and not manual_rows:
    return 'The run did not evaluate this policy.'
  last = records[-1] if records else {'step': step}
  first = next((record for record in records[:-1] if record['step'] == 0), {})
  validation = list(map(spec_name, config.data.validation))
  rows = []
  for source, name in runs.score_names([[last]]).items():
    kind = ' (validation)' if source.split('/')[0] in validation else ''
    intervals = _interval(first, name), _interval(last, name)
    rows.append((source + kind, *_size_and_measure(last, source, name), *intervals))
  note = 'Shares of correct responses, with 95% confidence intervals, at '
  note += f'{config.evaluation.distribution}{" unless stated otherwise" * bool(manual_rows)}.'
  if scores and validation:
    note += ' This policy was selected by its validation score, so this score is optimistic.'
  if last['step'] != step:
    note += f' The run did not evaluate this policy, which is from step {step}.'
  titles = 'data', 'questions', 'score', 'before step 1', f'after step {last["step"]:.0f}'
  return f'{_table(*titles, rows=[*rows, *manual_rows])}\n\n{note}'


def _manual_rows(workdir: str, step: int) -> Iterator[tuple[str, ...]]:
  """Yield a row for each score that `exgrpo evaluate` recorded for the policy."""
  for line in metrics.read_evaluations(workdir, step):
    for source, name in runs.score_names([[line['scores']]]).items():
      title = f'{source}, {Distribution(**{n: line[n] for n in line.keys() & _SAMPLING})}'
      size_and_measure = _size_and_measure(line['scores'], source, name)
      yield title, *size_and_measure, '–', _interval(line['scores'], name)


def _size_and_measure(record: Mapping[str, float], source: str, name: str) -> tuple[str, str]:
  questions = record.get(f'eval/{source}/questions')
  return '–' if questions is None else f'{questions:,.0f}', name.rpartition('/')[2]


def _interval(record: Mapping[str, float], name: str) -> str:
  value, low, high = (record.get(name + end, math.nan) for end in ('', '_low', '_high'))
  if math.isnan(value):
    return '–'
  return f'{value:.3f}' + (f' ({low:.3f} to {high:.3f})' if math.isfinite(low) else '')


# ---- Use ----


def _usage(experiment: Experiment, base: str, revision: str) -> str:
  """Return example code for transformers and vLLM. `base` is the adapters' base model, or ''.

  vLLM needs the base's `revision`; PEFT reads it from the adapters.
  """
  config = experiment.config
  messages = [{'role': 'system', 'content': config.prompt.system}] * bool(config.prompt.system)
  messages.append({'role': 'user', 'content': _QUESTION})
  if config.prompt.template == 'chat':
    code = f'messages = {json.dumps(messages, indent=2, ensure_ascii=False)}\nprompt = tokenizer.'
    keywords = prompt.parsed_kwargs(config.prompt.template_kwargs)
    arguments = f', **{keywords!r}' if keywords else ''
    code += f'apply_chat_template(messages, tokenize=False, add_generation_prompt=True{arguments})'
    endpoint, request = 'chat/completions', {'messages': messages}
    request |= {'chat_template_kwargs': keywords} if keywords else {}
  else:  # transformers lacks our own templates, so the code contains the whole prompt
    text = prompt.render([Message('user', _QUESTION)], config.prompt, experiment.tokenizer.chat)
    code = f'prompt = {text!r}'
    endpoint, request = 'completions', {'prompt': text, 'add_special_tokens': False}
  limit = config.rollout.max_response
  # Without these values, the base model's generation_config.json or top_k=50 would apply.
  sampling = dataclasses.asdict(config.evaluation.distribution) | {'repetition_penalty': 1.0}
  sampling_code = ', '.join(f'{name}={value}' for name, value in sampling.items())
  greedy = 'do_sample=False, repetition_penalty=1.0'
  sampling_code = f'do_sample=True, {sampling_code}' if config.evaluation.temperature else greedy
  library, class_prefix = ('peft', 'AutoPeft') if base else ('transformers', 'Auto')
  vllm_arguments = base + f' --revision={revision}' * bool(revision)
  vllm_arguments += (
    f' --enable-lora --max-lora-rank={config.lora.rank} --lora-modules=policy={_MODEL}'
  )
  model = {'model': 'policy' if base else _MODEL}
  # vLLM writes -1 for all tokens.
  body = model | request | {'max_tokens': limit} | sampling | {'top_k': sampling['top_k'] or -1}
  return f"""```python
from {library} import {class_prefix}ModelForCausalLM
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained('{_MODEL}')
model = {class_prefix}ModelForCausalLM.from_pretrained('{_MODEL}')
{code}
inputs = tokenizer(prompt, add_special_tokens=False, return_tensors='pt')
tokens = model.generate(**inputs, max_new_tokens={limit}, {sampling_code})
print(tokenizer.decode(tokens[0, inputs.input_ids.shape[1] :], skip_special_tokens=True))
```

```bash
vllm serve {vllm_arguments if base else _MODEL}
curl http://localhost:8000/v1/{endpoint} -H 'Content-Type: application/json' \\
  -d {shlex.quote(json.dumps(body, ensure_ascii=False))}
```"""


# ---- Tables ----


def _cell(value: Any) -> str:
  """Format a value for a table, and remove folders from paths."""
  return _FOLDERS.sub('', str(value)).replace('|', '\\|').replace('\n', ' ')


def _table(*titles: str, rows: Iterable[tuple[str, ...]]) -> str:
  lines = [titles, ('---',) * len(titles), *rows]
  return '\n'.join(f'| {" | ".join(cells)} |' for cells in lines)
