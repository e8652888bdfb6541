"""What a run records and reads back, its summary, and the intervals of its evaluations."""

import json
import math

import numpy as np
import pytest

from exgrpo_jax.errors import InputError
from exgrpo_jax.reporting import metrics


def write_steps(workdir, first_step, steps, value):
  with metrics.Writer(workdir, first_step) as writer:
    for step in steps:
      writer.write(step, {'reward': value})


@pytest.fixture(autouse=True)
def at_noon(monkeypatch):
  """Every record is written at second 12."""
  monkeypatch.setattr('time.time', lambda: 12.0)


def test_a_step_is_one_line_of_strict_json_that_can_be_read_at_once(tmp_path):
  with metrics.Writer(tmp_path, 0) as writer:
    writer.write(0, {'reward': np.float64(1 / 3), 'entropy': math.nan, 'max': math.inf, 'n': 2})
    (line,) = (tmp_path / 'metrics.jsonl').read_text().splitlines()
  assert line == (
    '{"step": 0, "reward": 0.3333333333333333, "entropy": "nan", "max": "inf", "n": 2.0, '
    '"timestamp": 12.0}'
  )
  (record,) = metrics.read(tmp_path)
  assert record['reward'] == 1 / 3 and math.isnan(record['entropy']) and record['max'] == math.inf


def test_a_resumed_run_drops_the_records_of_steps_that_it_repeats(tmp_path):
  write_steps(tmp_path, 0, range(4), 0.0)
  write_steps(tmp_path, 2, [2], 1.0)
  assert metrics.read(tmp_path) == [
    {'step': 0, 'reward': 0.0, 'timestamp': 12.0},
    {'step': 1, 'reward': 0.0, 'timestamp': 12.0},
    {'step': 2, 'reward': 1.0, 'timestamp': 12.0},
  ]


def test_an_incomplete_last_line_is_dropped(tmp_path):
  write_steps(tmp_path, 0, range(2), 0.0)
  with open(tmp_path / 'metrics.jsonl', 'a') as file:
    file.write('{"step": 2, "rew')
  assert [record['step'] for record in metrics.read(tmp_path)] == [0, 1]
  write_steps(tmp_path, 3, [3], 0.0)
  assert [record['step'] for record in metrics.read(tmp_path)] == [0, 1, 3]


@pytest.mark.parametrize(
  'line', [b'{"reward": 1.0}', b'oops', b'[1]', b'{"step": 1, "reward": "x"}', b'\xff']
)
def test_a_damaged_record_is_named(tmp_path, line):
  write_steps(tmp_path, 0, [0], 0.0)
  with open(tmp_path / 'metrics.jsonl', 'ab') as file:
    file.write(line + b'\n')
  with pytest.raises(InputError, match=r'metrics\.jsonl:2: .* is not a record of metrics'):
    metrics.Writer(tmp_path, 0)


def test_a_kill_while_resuming_leaves_the_old_records(tmp_path, monkeypatch):
  write_steps(tmp_path, 0, range(3), 0.0)
  monkeypatch.setattr('os.replace', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
  with pytest.raises(KeyboardInterrupt):
    metrics.Writer(tmp_path, 1)
  assert len(metrics.read(tmp_path)) == 3


def test_without_a_file_there_are_no_records(tmp_path):
  assert metrics.read(tmp_path) == []


def test_rows_are_readable_text_and_strict_json(tmp_path):
  rows = [
    {'question': '1+1=?\n', 'response': '二 \ud800', 'reward': 1.0, 'correct': True},
    {'question': 'q', 'response': '', 'reward': math.nan, 'correct': False},
  ]
  path = tmp_path / 'samples' / 'step_000012.jsonl'
  metrics.write_rows(path, rows)
  text = path.read_text()
  assert '二' in text
  assert [json.loads(line) for line in text.splitlines()] == [rows[0], {**rows[1], 'reward': 'nan'}]
  assert list(path.parent.iterdir()) == [path]


def test_rows_are_written_atomically(tmp_path):
  path = tmp_path / 'rows.jsonl'
  metrics.write_rows(path, [{'question': 'a'}])
  with pytest.raises(TypeError):
    metrics.write_rows(path, [{'question': 'b'}, {'question': object()}])
  assert path.read_text() == '{"question": "a"}\n'


def test_the_summary_table():
  # 20 steps: a tenth is 2. Rewards are 0, 1, ..., 19; the evaluation in the middle is best, but
  # the most responses were truncated there.
  records = [{'step': step, 'reward': float(step), 'length/mean': 400.0} for step in range(20)]
  for step, value in (0, 0.25), (10, 0.75), (19, 0.5):
    records[step]['eval/gsm8k/pass@1'] = value
    records[step]['eval/gsm8k/truncated'] = value
  records[3]['entropy'] = math.nan
  records[4]['pass_rate/replay'] = math.nan
  assert metrics.summary_table(records).splitlines() == [
    '                      first    last    best  at step',
    'reward                0.500  18.500  19.000       19',
    'pass_rate/replay        nan     nan       -        -',
    'entropy                 nan     nan       -        -',
    'length/mean             400     400       -        -',
    'eval/gsm8k/pass@1     0.250   0.500   0.750       10',
    'eval/gsm8k/truncated  0.250   0.500   0.250        0',
  ]


def test_the_summary_of_no_records_is_its_header():
  assert metrics.summary_table([]).split() == ['first', 'last', 'best', 'at', 'step']


@pytest.mark.parametrize(
  ('correct_QK', 'cluster_Q', 'expected'),
  [
    # Wilson at 0 of n: [0, z^2 / (n + z^2)] with z^2 = 3.8415, so 3.8415 / 103.8415.
    pytest.param([[0]] * 100, range(100), (0.0, 0.0, 0.03699), id='none_of_100'),
    pytest.param([[1]] * 100, range(100), (1.0, 0.96301, 1.0), id='all_of_100'),
    # se^2 = 4/3 * 4 * (1/2 / 4)^2 = 1/12, so n = (1/4) / (1/12) = 3:
    # half = 1.95996 / (1 + 3.8415/3) * sqrt(.25/3 + 3.8415/36) = .37467.
    pytest.param([[1], [0], [1], [0]], range(4), (0.5, 0.12533, 0.87467), id='two_of_four'),
    # Eight equal samples of each of these questions add no information.
    pytest.param(
      [[1] * 8, [0] * 8, [1] * 8, [0] * 8], range(4), (0.5, 0.12533, 0.87467), id='equal_samples'
    ),
    # Nor do eight rows with the same prompt, as in AIME.
    pytest.param(
      [[1], [0], [1], [0]] * 8, list('abcd') * 8, (0.5, 0.12533, 0.87467), id='equal_rows'
    ),
    # Each question right half the time: the error is 0 and carries no information, n = 4 questions:
    # half = 1.95996 / (1 + 3.8415/4) * sqrt(.25/4 + 3.8415/64) = .34997.
    pytest.param([[1, 0]] * 4, range(4), (0.5, 0.15003, 0.84997), id='no_variance'),
    # One question, so n = 1: half = 1.95996 / 4.8415 * sqrt(.25 + 3.8415/4) = .44537.
    pytest.param([[1, 0]], [0], (0.5, 0.05463, 0.94537), id='one_question'),
  ],
)
def test_intervals_worked_out_by_hand(correct_QK, cluster_Q, expected):
  interval = metrics.interval_95(np.array(correct_QK, bool), list(cluster_Q))
  np.testing.assert_allclose(interval, expected, atol=2e-5)


def test_the_effective_sample_size_is_at_most_the_number_of_samples():
  # Question means .5 and .51 differ so little that p(1-p)/se^2 is 10,000, of 200 samples.
  correct_QK = np.zeros((2, 100))
  correct_QK[0, :50] = correct_QK[1, :51] = 1
  _, low, high = metrics.interval_95(correct_QK, [0, 1])
  # About 2 * 1.96 * sqrt(.25 / 200).
  assert high - low == pytest.approx(0.1373, abs=0.001)


@pytest.mark.parametrize(
  ('prompts', 'copies', 'samples', 'uneven'),
  [
    pytest.param(200, 1, 1, False, id='independent_questions'),
    pytest.param(60, 1, 8, True, id='eight_samples_of_each_question'),
    pytest.param(30, 32, 1, True, id='aime_rows'),
  ],
)
def test_95_percent_of_intervals_contain_the_true_mean(prompts, copies, samples, uneven):
  rng = np.random.default_rng(0)
  cluster_Q = np.repeat(np.arange(prompts), copies)

  def contains_the_mean():
    # Beta(.6, 1.4) has mean .3; most questions are nearly always or nearly never solved.
    p_Q = rng.beta(0.6, 1.4, prompts) if uneven else np.full(prompts, 0.3)
    correct_QK = rng.random((prompts * copies, samples)) < p_Q[cluster_Q][:, None]
    _, low, high = metrics.interval_95(correct_QK, cluster_Q)
    return low <= 0.3 <= high

  coverage = np.mean([contains_the_mean() for _ in range(4000)])
  assert 0.93 <= coverage <= 0.975


@pytest.mark.parametrize(
  ('difference_Q', 'cluster_Q', 'expected'),
  [
    # Residuals .75, -.25, -.25, -.25: se^2 = 4/3 * .75 / 16 = 1/16, so half = 1.95996 / 4.
    pytest.param([1.0, 0.0, 0.0, 0.0], range(4), (0.25, -0.23999, 0.73999), id='one_of_four'),
    pytest.param(
      [1.0, 0.0, 0.0, 0.0] * 8, list('abcd') * 8, (0.25, -0.23999, 0.73999), id='equal_rows'
    ),
    # se^2 = 2/1 * (1 + 1) / 4 = 1, so half = 1.95996, beyond what a difference can be.
    pytest.param([1.0, -1.0], range(2), (0.0, -1.0, 1.0), id='at_most_one'),
    # Of 16 questions none differs: one that does has a probability of at most 1 - .05^(1/16).
    pytest.param([0.0] * 16, range(16), (0.0, -0.17076, 0.17076), id='none_differs'),
    pytest.param([0.0] * 32, [*range(16)] * 2, (0.0, -0.17076, 0.17076), id='rows_of_16_prompts'),
    # And of two that gain .5 each, 1 - .05^(1/2) = .77639, which may lose 1.5 or gain .5 more.
    pytest.param([0.5, 0.5], range(2), (0.5, -0.66459, 0.88820), id='all_gain_alike'),
  ],
)
def test_paired_differences_worked_out_by_hand(difference_Q, cluster_Q, expected):
  found = metrics.difference_95(np.array(difference_Q), list(cluster_Q))
  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_every_row_needs_a_cluster():
  with pytest.raises(ValueError, match='same length'):
    metrics.interval_95(np.zeros((3, 1)), [0, 1])
