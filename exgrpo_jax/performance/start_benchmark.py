"""Starting with a large file of questions: the first start, which prepares it, and the next.

Each start is a process of its own, whose memory nothing else has touched.
"""

import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time

from absl import logging

from exgrpo_jax.data import prompt, question_set, questions, tokenizer

QUESTIONS = 300_000  # at scale 1
_STEP = 128  # questions, at most
_VOCABULARY = 1000
_TEXT = (
  'find the sum of all real numbers such that area is equal to half a circle of radius each day '
  'she buys more apples than before what how many if then let be positive integers total cost'
)


def measure(scale: float) -> dict[str, float]:
  """Figures by name, of a file with `scale` times QUESTIONS questions in a temporary folder."""
  rows = round(scale * QUESTIONS)
  with tempfile.TemporaryDirectory() as folder:
    _write(pathlib.Path(folder), rows)
    first, second = [_start(folder) for _ in range(2)]
  return {
    'rows': rows,
    'first start, s': first['seconds'],
    'second start, s': second['seconds'],
    'second start, peak memory growth, GiB': second['gibibytes'],
    'questions of a step, ms': second['step_milliseconds'],
  }


def _write(folder: pathlib.Path, rows: int) -> None:
  """Writes `rows` questions of 60 words with solutions of 120, and a tokenizer trained on some."""
  rng = random.Random(0)
  phrases = [' '.join(rng.choices(_TEXT.split(), k=10)) for _ in range(1000)]
  with open(folder / 'train.jsonl', 'w') as file:
    for row in range(rows):
      question = f'{" ".join(rng.choices(phrases, k=6))} {row}?'
      answer = f'{" ".join(rng.choices(phrases, k=12))}\n#### {row}'
      file.write(json.dumps({'question': question, 'answer': answer}) + '\n')
  tokenizer.train([*phrases, '0123456789?#'], _VOCABULARY, folder / 'tokenizer.model')


def _start(folder: str) -> dict[str, float]:
  command = [sys.executable, '-m', 'exgrpo_jax.performance.start_benchmark', folder]
  process = subprocess.run(command, check=True, stdout=subprocess.PIPE)
  return json.loads(process.stdout.splitlines()[-1])


def _main(folder: str) -> None:
  """One start, and one step's questions; prints what they took."""
  logging.set_verbosity(logging.ERROR)  # TFDS logs every detail below it
  config = questions.Config(
    train='',
    validation=(),
    evaluation=(),
    question_field='',
    answer_field='',
    solution_field='',
    default_kind='',
    unverifiable='refuse',
    overlong='refuse',
    cache_dir=os.path.join(folder, 'cache'),
  )
  before, started = _peak_memory(), time.perf_counter()
  opened = tokenizer.load(os.path.join(folder, 'tokenizer.model'))
  path = os.path.join(folder, 'train.jsonl')
  prompts = prompt.Config(template='plain', system='')
  data = question_set.load(config, path, opened, prompts, max_prompt=1024)
  seconds = time.perf_counter() - started
  rows = random.Random(0).sample(range(len(data.questions)), k=min(_STEP, len(data.questions)))
  started = time.perf_counter()
  assert [question.row for question in data.questions.read(rows)] == rows
  figures = {
    'seconds': seconds,
    'gibibytes': (_peak_memory() - before) / 2**30,
    'step_milliseconds': 1e3 * (time.perf_counter() - started),
  }
  print(json.dumps(figures))


def _peak_memory() -> int:
  """Of this process, in bytes."""
  status = pathlib.Path('/proc/self/status')
  if status.exists():  # where getrusage begins with what the parent process had
    (line,) = [line for line in status.read_text().splitlines() if line.startswith('VmHWM:')]
    return int(line.split()[1]) * 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == '__main__':
  _main(sys.argv[1])
