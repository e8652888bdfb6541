"""Two starts with a large file of questions: the first prepares the file for the second."""

import dataclasses
import json
import pathlib
import random
import tempfile
import time

from benchmarks.frame import Bench, Figure, in_own_process, peak_bytes
from exgrpo_jax.data import prompt, questions, tokenizer

_QUESTIONS = 300_000  # at scale 1
_STEP = 128  # questions
_TEXT = (
  'find the sum of all real numbers such that area is equal to half a circle of radius each day '
  'she buys more apples than before what how many if then let be positive integers total cost'
)


def measure(bench: Bench) -> list[Figure]:
  """Measure two starts, each in its own process."""
  rows = max(2, round(bench.size.scale * _QUESTIONS))
  with tempfile.TemporaryDirectory(prefix='exgrpo_jax_') as name:
    folder = pathlib.Path(name)
    _write(folder, rows)
    config = dataclasses.replace(bench.config.data, cache_dir=str(folder / 'cache'))
    (first, *_), (second, memory, step) = (
      in_own_process(_start, config, bench.config.prompt, folder) for _ in range(2)
    )
  return [
    Figure('first start', first, 's', f'{rows:,} questions'),
    Figure('second start', second, 's'),
    Figure('second start, memory', 1e-6 * memory, 'MB', 'growth of the peak memory'),
    Figure('questions of a step', 1e3 * step, 'ms'),
  ]


def _write(folder: pathlib.Path, rows: int) -> None:
  """Write questions of 60 words with solutions of 120 words, and train a tokenizer on them."""
  rng = random.Random(0)
  phrases = [' '.join(rng.choices(_TEXT.split(), k=10)) for _ in range(1000)]
  with (folder / 'train.jsonl').open('w') as file:
    for row in range(rows):
      question = f'{" ".join(rng.choices(phrases, k=6))} {row}?'
      answer = f'{" ".join(rng.choices(phrases, k=12))}\n#### {row}'
      file.write(json.dumps({'question': question, 'answer': answer}) + '\n')
  tokenizer.train([*phrases, '0123456789?#'], 1000, folder / 'tokenizer.model')


def _start(
  config: questions.DataConfig, prompts: prompt.PromptConfig, folder: pathlib.Path
) -> tuple[float, int, float]:
  """Return (seconds of a start, growth of its peak memory, seconds to read a step's questions)."""
  before, started = peak_bytes(), time.perf_counter()
  opened = tokenizer.load(str(folder / 'tokenizer.model'))
  path = str(folder / 'train.jsonl')
  data = questions.load_set(config, path, opened, prompts, max_prompt=1024)
  seconds = time.perf_counter() - started
  rows = random.Random(0).sample(range(len(data.questions)), k=min(_STEP, len(data.questions)))
  started = time.perf_counter()
  assert [question.row for question in data.questions.read(rows)] == rows
  return seconds, peak_bytes() - before, time.perf_counter() - started
