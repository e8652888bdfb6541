"""A policy on the paper's suite, through the command that evaluates."""

import collections
import csv
import json
import re
import types

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from exgrpo_jax.commands import command_line, evaluate
from exgrpo_jax.config import overridden
from exgrpo_jax.configs import (
  base,
  llama3_1_8b_instruct,
  qwen2_5_7b_instruct,
  qwen2_5_math_1_5b,
  qwen2_5_math_7b,
)
from exgrpo_jax.data import tokenizer
from exgrpo_jax.errors import InputError
from exgrpo_jax.evaluation import scores, suites
from exgrpo_jax.experiment import config_files
from exgrpo_jax.experiment.experiment import parse_config
from tests.helpers import decoding, forked, tiny
from tests.helpers.paths import CHECKPOINTS, REPOSITORY

MODEL = CHECKPOINTS / 'qwen2_tied'
SETTINGS = {
  'prompt.template': 'chat',
  'rollout.max_prompt': 64,
  'rollout.max_response': 16,
  'rollout.slots': 32,
  'model.dtype': 'float32',
  'grading.workers': 1,  # starting a worker takes longer than its work here
}
# Source -> correct responses to each question, of 32 for repeated sources and of 1 for others.
RIGHT = {
  'aime': (8, 16),  # 12 of 32: .375
  'aime25': (16,),
  'amc': (8,),
  'math': (1, 0, 1, 0),
  'minerva': (0, 0),
  'olympiad_bench': (1, 0),
  'arc_c': (1, 1, 1, 0),
  'gpqa': (0, 1),
}
SHARES = {
  'AIME24': 0.375,
  'AIME25': 0.5,
  'AMC': 0.25,
  'MATH-500': 0.5,
  'Minerva': 0.0,
  'OlympiadBench': 0.5,
  'ARC-c': 0.75,
  'GPQA-diamond': 0.5,
}
REPEATED = ('aime', 'aime25', 'amc')
OUT = ('arc_c', 'gpqa', 'mmlu_pro')
PAPER = str(REPOSITORY / 'configs' / 'suites' / 'paper.py')
SUITE = """from exgrpo_jax.reporting.benchmark_table import Benchmark as B, Suite
def get_suite(): return Suite((B(%s),), {})"""


def write_benchmarks(path, right, copies=32):
  """Write questions in the authors' columns; each states its number of correct responses."""
  rows = [
    {
      'data_source': source,
      'prompt': [{'role': 'user', 'content': f'{source[-2:]}{number}: {count} of {answer}'}],
      'ability': 'math',
      'reward_model': {'ground_truth': answer, 'style': 'rule'},
      'extra_info': {'index': number, 'split': 'default'},
    }
    for source, counts in right.items()
    for answer in ['C' if source in OUT else '7']
    for number, count in enumerate(counts)
    for _ in range(copies if source in REPEATED else 1)
  ]
  pq.write_table(pa.Table.from_pylist(rows), path)
  return str(path)


@pytest.fixture
def files(tmp_path):
  """Small versions of the authors' files: in and out of distribution."""
  inside = {source: counts for source, counts in RIGHT.items() if source not in OUT}
  outside = {source: RIGHT[source] for source in OUT if source in RIGHT}
  return [
    write_benchmarks(tmp_path / 'test.id.parquet', inside),
    write_benchmarks(tmp_path / 'test.ood.parquet', outside),
  ]


@pytest.fixture
def add_row(tmp_path, data, recorded, monkeypatch, capsys):
  """A function that evaluates the stored checkpoint on fake responses: (row, output)."""

  def run(files, name='Base model', settings=None, write=None, **flags):
    settings = SETTINGS | {'data.cache_dir': data.cache} | (settings or {})
    values = overridden(base.get_config(), settings)
    unset = ('checkpoint', 'step', 'compare', 'samples', 'temperature', 'max_response')
    args = dict.fromkeys(unset) | dict(config=values, model=str(MODEL), suite='paper', name=name)
    args |= dict(out=str(tmp_path / 'table'), data=files)
    monkeypatch.setattr(
      command_line, 'given_overrides', lambda args: settings if args.config else {}
    )
    if write:
      decoding.scripted(monkeypatch, scores, write())
    with recorded.compiling():
      evaluate.main(types.SimpleNamespace(**args | flags))
    printed = capsys.readouterr().out
    if not name:
      return None, printed
    file = tmp_path / 'table' / 'paper' / f'{name.replace(" ", "_")}.json'
    return json.loads(file.read_text()), printed

  return run


def written():
  """A script that gives each prompt as many correct responses as it states."""
  text, seen = tokenizer.load(MODEL), collections.Counter()

  def script(request):
    prompt = text.decode(request.prompt)
    ((right, answer),) = re.findall(r': (\d+) of ([7C])', prompt)
    given = answer if seen[prompt] < int(right) else '9'
    seen[prompt] += 1
    return text.encode(f'so</think>\\boxed{{{given}}}')

  return script


@pytest.mark.full
def test_a_row_has_every_benchmark_the_averages_and_what_is_missing(files, add_row, tmp_path):
  row, printed = add_row(files, write=written)
  assert {label: one['score'] for label, one in row['benchmarks'].items()} == pytest.approx(SHARES)
  assert {label: one['responses'] for label, one in row['benchmarks'].items()} == {
    label: 32 * len(RIGHT[source]) if source in REPEATED else len(RIGHT[source])
    for label, source in zip(SHARES, RIGHT)
  }
  assert 'MMLU-Pro: no questions in' in printed
  (line,) = csv.DictReader((tmp_path / 'table' / 'paper.csv').open())
  inside = sum(list(SHARES.values())[:6]) / 6
  assert float(line['average in distribution']) == pytest.approx(100 * inside, abs=1e-4)
  assert float(line['average out of distribution']) == pytest.approx(62.5)
  assert line['average in distribution over'] == '6'
  assert line['average out of distribution over'] == '2'
  last = printed[printed.index('|  | AIME24 |') :]
  assert last == (tmp_path / 'table' / 'paper.md').read_text()
  assert f'{100 * inside:.1f} ±' in last and '62.5 ±' in last and '(2 of 3)' in last
  # Every response has a record, and a line says how the evaluation was made.
  made = (tmp_path / 'table' / 'evaluations.jsonl').read_text().splitlines()
  assert [json.loads(line)['model'] for line in made] == [str(MODEL)] * 2
  records = (tmp_path / 'table' / json.loads(made[0])['file']).read_text().splitlines()
  assert len(records) == 4 * 32 + 8


@pytest.mark.full
def test_avg_at_32_is_the_same_with_copies_and_with_samples(files, add_row, tmp_path):
  by_copies, _ = add_row(files, 'copies', write=written)
  for copies in (1, 8):
    inside = {source: counts for source, counts in RIGHT.items() if source not in OUT}
    listed = write_benchmarks(tmp_path / f'{copies}.parquet', inside, copies)
    by_samples, _ = add_row([listed, files[1]], f'{copies} copies', write=written)
    for label in ('AIME24', 'AIME25', 'AMC'):
      one, other = by_copies['benchmarks'][label], by_samples['benchmarks'][label]
      bounds = {end: pytest.approx(one[end]) for end in ('low', 'high')}
      same = {key: one[key] for key in ('score', 'questions', 'responses', 'content')}
      assert other == other | bounds | same
  table = (tmp_path / 'table' / 'paper.csv').read_text().splitlines()
  assert [line.split(',')[0] for line in table] == ['name', 'copies', '1 copies', '8 copies']
  assert len({line.split(',', 1)[1] for line in table[1:]}) == 1


def test_questions_with_the_same_text_but_different_answers_count_separately():
  """Environments such as guess ask these questions."""
  rows = [
    {'source': 'guess', 'question': '1-64', 'answer': answer, 'correct': [1], 'truncated': [0]}
    for answer in ('3', '3', '5')
  ]
  part = suites.Part(types.SimpleNamespace(questions=[], spec='guess:test'), 1, ())
  assert suites._result(part, 'guess', rows)['questions'] == 2


@pytest.mark.full
def test_a_model_generates_the_responses(files, add_row):
  """The stored checkpoint is sampled; each part gets as many responses as its questions need."""
  row, printed = add_row(files)
  assert row['model'] == str(MODEL) and row['step'] == 0 and row['template'] == 'chat'
  assert row['settings']['evaluation.require'] == ['think', 'box']
  assert row['settings']['rollout.max_response'] == 16
  assert sum(one['responses'] for one in row['benchmarks'].values()) == 4 * 32 + 8 + 6
  assert {one['score'] for one in row['benchmarks'].values()} == {0.0}
  assert all(one['high'] > 0 for one in row['benchmarks'].values())
  assert 'Base model' in printed


@pytest.mark.full
def test_a_run_is_evaluated_with_its_config_and_the_suites_settings(
  files, add_row, recorded, monkeypatch
):
  monkeypatch.setattr(tokenizer, 'load', lambda _: recorded.experiment.tokenizer)
  row, _ = add_row(files, write=written, config=None, model=None, checkpoint=str(recorded.workdir))
  assert (row['run'], row['step']) == (str(recorded.workdir), tiny.NUM_STEPS)
  assert row['template'] == 'plain' and row['seed'] == tiny.SEED
  settings = dict(suites.load_suite(PAPER).settings)
  assert row['settings'] == settings | {'evaluation.require': ['think', 'box']}
  assert {label: one['score'] for label, one in row['benchmarks'].items()} == pytest.approx(SHARES)


def test_a_model_is_evaluated_without_a_suite_too(files, add_row, tmp_path):
  _, printed = add_row(files[1:], name=None, suite=None, samples=2, temperature=0.5, write=written)
  assert re.search(r'test\.ood/arc_c +pass@1 +0\.7500', printed)
  # One of a question's two responses.
  assert re.search(r'test\.ood/gpqa +avg@2 +0\.2500', printed)
  assert sorted(path.suffix for path in (tmp_path / 'table').iterdir()) == ['.jsonl', '.jsonl']


# ---- The suite file ----


def test_the_papers_suite_is_found_by_name_and_fits_every_backbone():
  assert config_files.shipped_names(suites.SUITES) == ['paper']
  suite = suites.load_suite(PAPER)
  assert [(one.label, one.group, one.measure) for one in suite.benchmarks] == [
    *((label, 'in', 'avg@32') for label in ('AIME24', 'AIME25', 'AMC')),
    *((label, 'in', 'pass@1') for label in ('MATH-500', 'Minerva', 'OlympiadBench')),
    *((label, 'out', 'pass@1') for label in ('ARC-c', 'GPQA-diamond', 'MMLU-Pro')),
  ]
  assert suite.data == ('test.id.parquet', 'test.ood.parquet')
  for backbone in (qwen2_5_math_1_5b, qwen2_5_math_7b, qwen2_5_7b_instruct, llama3_1_8b_instruct):
    values = suites.with_settings(suite, backbone.get_config(), ())
    parsed = parse_config(values)
    extended = parsed.model.extension.max_position_embeddings or 32768  # Qwen2.5's own
    assert parsed.rollout.longest_row <= extended
    assert parsed.evaluation.require == ('think', 'box')


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (
      '',
      r'bad\.py: the file has no get_suite\(\)\. A suite is a Python file whose get_suite\(\) r',
    ),
    ('def get_suite(): return 1 / 0', r'bad\.py:1: ZeroDivisionError: division by zero\. A suit'),
    ('def get_suite(): return []', r'get_suite\(\) must return a Suite with benchmarks, not \[\]'),
    (SUITE % "'A', 'x.jsonl', 's', 'both', 1", r"'A': group='both' must be one of "),
    (
      SUITE % "'A', 'x.jsonl', 's', 'in', 1), B('B', 'x.jsonl', 's', 'in', 1",
      r"benchmarks 'B' and 'A' share a label or a source, but labels and sources must be unique",
    ),
  ],
)
def test_a_file_without_a_valid_suite_is_refused(text, message, tmp_path):
  (tmp_path / 'bad.py').write_text(text)
  with pytest.raises(InputError, match=message):
    suites.load_suite(str(tmp_path / 'bad.py'))


# ---- Errors found before anything is sampled ----


def refuse_to_sample():
  def script(_):
    raise AssertionError('it sampled')

  return script


def test_data_files_that_do_not_fit_the_suite_are_refused(files, add_row, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # where the suite's default files are
  once, twice, five = (
    write_benchmarks(tmp_path / f'{n}.parquet', {'amc': (n,)}, n) for n in (1, 2, 5)
  )
  unequal = str(tmp_path / 'unequal.parquet')
  pq.write_table(pa.concat_tables(map(pq.read_table, (once, twice))), unequal)
  unknown = write_benchmarks(tmp_path / 'unknown.parquet', {'gsm8k': (1,)})
  again = write_benchmarks(tmp_path / 'again.parquet', {'math': (1,)})
  for data, message in (
    ([unknown], r'--suite=paper: \S+ has no questions from AIME24, .*MMLU-Pro\. Use'),
    ([five], r"question from source 'amc' is listed 5 times, but AMC is scored by avg@32\. List "),
    ([unequal], r"from source 'amc' is listed 1 to 2 times, but AMC is"),
    ([*files, again], r"both contain questions from source 'math' \(MATH-500\)\. Pass"),
    (None, r'test\.ood\.parquet has no questions from MMLU-Pro\. Use --data'),
  ):
    with pytest.raises(InputError, match=message):
      add_row(data, write=refuse_to_sample)


@pytest.mark.full
def test_a_row_that_does_not_fit_the_table_is_refused(files, add_row, tmp_path):
  add_row(files, write=written)
  table = (tmp_path / 'table' / 'paper.md').read_text()
  other = write_benchmarks(tmp_path / 'other.parquet', {'math': (1, 0)})
  for changed, message in (
    ({}, r'--name=.*: .*Base_model\.json already exists\. Delete the file to evaluate again, or '),
    ({'name': 'new', 'temperature': 1.0}, r'evaluation\.temperature=1\.0: the row in'),
    ({'name': 'new', 'settings': {'rollout.max_response': 8}}, r'max_response=8: the row in'),
    ({'name': 'new', 'files': [other]}, r'MATH-500: the row in .* on different questions'),
    ({'name': ' '}, r"--name=' ': .* must be printable text"),
  ):
    with pytest.raises(InputError, match=message):
      add_row(**{'files': files} | changed, write=refuse_to_sample)
  assert (tmp_path / 'table' / 'paper.md').read_text() == table


@pytest.mark.full
def test_invalid_command_lines_are_refused_in_one_line():
  model, base_with = f'--model={MODEL}', '--config=base --config.data.cache_dir=/tmp/nowhere'
  short = '--config.rollout.max_prompt=64 --config.rollout.max_response=16'
  refused = (
    ('--suite=paper --out=o', r'--checkpoint or --model is required\. Set --checkpoint to a run'),
    (
      '--checkpoint=a --model=b',
      r'--checkpoint=a and --model=b: both flags choose a policy\. Remove one of them\.',
    ),
    ('--model=b --step=3', r'--step=3: only runs have steps, .* Remove --step'),
    (
      f'{base_with} --config.model.path=a --model=b',
      r'--config\.model\.path and --model=b: both flags choose a model\. Remove one of them\.',
    ),
    ('--model=b --name=n', r'--name=n: this flag names a table row, so it requires --suite'),
    (
      '--model=b --suite=paper --out=o --samples=2',
      r'--samples=2: the suite sets the number of samples for each benchmark\.',
    ),
    ('--model=b --suite=paper', r'--out is required with --suite\. Pass the folder for th'),
    (
      '--model=b --suite=papr --out=o',
      r"--suite=papr: there is no suite with this name\. Did you mean 'paper'\? .* names: paper\.",
    ),
    (
      '--compare=a,seed=1,b,seed=1',
      r'--compare=a,seed=1,b,seed=1: .* must be two policies, written as A,B\. Each .* '
      r'Quote a path that contains a comma: --compare=\'"',
    ),
    ('--compare="a,seed=1","b,seed=1" --step=1', '--step=1: --compare already names both policies'),
    (
      '--compare=a,b --model=b',
      r'--model=b: --compare already names both policies\. Remove --model\.',
    ),
    (model, r'--data is required, because neither the config nor the run '),
    (
      f'{base_with} {model} --data=x.jsonl',
      r'= 9216 tokens exceeds max_position_embeddings=128 in .*config\.json\. Lower one',
    ),
    (
      f'{model} --out=o --suite=paper {base_with} {short}',
      r'test\.id\.parquet: there is no such file\. A data spec that ends in \.parquet must be',
    ),
  )
  outcomes = forked.run(['evaluate', *flags.split()] for flags, _ in refused)
  for (flags, line), outcome in zip(refused, outcomes, strict=True):
    assert outcome.status == 2 and outcome.err.count('\n') == 1, (flags, outcome)
    assert re.match(f'error: .*{line}', outcome.err), (flags, outcome.err)
  assert not (REPOSITORY / 'o').exists()
