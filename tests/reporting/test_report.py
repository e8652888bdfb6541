"""The command report: the files that it writes, reads and serves, and its errors."""

import http.client
import itertools
import json
import re
import shutil
import signal
import types

import pytest

from exgrpo_jax.reporting import metrics, step_records
from exgrpo_jax.reporting.page import contents
from exgrpo_jax.reporting.report import write_at_end
from tests.helpers import forked, other_runs, tiny
from tests.helpers.tabs import await_page, go, rows_of, shown, values_of


@pytest.fixture
def run(recorded, tmp_path):
  """A copy of the recorded run, which a test may change."""
  return shutil.copytree(recorded.workdir, tmp_path / 'run')


@pytest.fixture(scope='module')
def report():
  """The command: a function of its arguments."""
  return lambda *arguments: forked.run_one(['report', *arguments])


def files_of(folder):
  """All files below a folder, with what a change of any of them would change."""
  return {
    path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(folder.rglob('*'))
  }


# ---- One file ----


def test_a_run_ends_with_its_page_which_loads_nothing(recorded, tab):
  page = recorded.workdir / 'report.html'
  go(tab, page, 'page=overview')
  assert f'step {tiny.NUM_STEPS} of {tiny.NUM_STEPS}' in tab.locator('h1').inner_text()
  text = (recorded.workdir / 'report.html').read_text()
  head = text[: text.index('<style>')]
  assert "default-src 'none'" in head
  code = re.sub(r'http://www.w3.org/2000/svg|https://github.com/leeoniya/uPlot', '', text)
  assert not re.search(r'https?://|src=|@import|url\(', code)


def test_a_damaged_file_does_not_fail_a_run_that_is_done(run, capsys):
  broken = next((run / 'evaluation').iterdir())
  broken.write_text('{"row": 0')
  (run / 'report.html').unlink()
  write_at_end(str(run))
  assert f'WARNING: report.html was not written: {broken}:1' in capsys.readouterr().err
  assert not (run / 'report.html').exists()


@pytest.mark.full
@pytest.mark.parametrize('folder', ['there', 'made/'])
def test_out_may_be_a_folder_for_the_page(folder, run, tmp_path, report):
  (tmp_path / 'there').mkdir()
  before = files_of(run)
  outcome = report(run, f'--out={tmp_path}/{folder}')
  assert outcome.status == 0, outcome.err
  assert files_of(run) == before
  page = tmp_path / folder / 'report.html'
  assert outcome.out.startswith(f'{page} (') and [*page.parent.iterdir()] == [page]


@pytest.mark.full
def test_all_texts_are_beside_the_page_and_read_on_demand(run, tmp_path, tab, report):
  first, *_ = step_records.files(run, 'tokens')
  first.unlink()
  outcome = report(run, f'--out={tmp_path}/page.html', '--texts=all')
  assert outcome.status == 0, outcome.err
  table = step_records.read_file(step_records.files(run, 'tokens')[-1], 'tokens').to_pylist()
  last = table[-1]
  script = tmp_path / 'page_texts' / f'0_{last["step"]:06d}.js'
  assert script.read_text().startswith(f'exgrpoTexts("0/{last["step"]}","')
  go(tab, tmp_path / 'page.html', 'page=overview')
  # Without the sample that the file itself holds, as of a run that is too large for it.
  tab.evaluate("parts['texts-0'] = Promise.resolve(null)")
  tab.evaluate(f"location.hash = '#page=responses&group={last['step']}/{last['group']}'")
  tab.wait_for_selector('.tokens')
  tab.evaluate(f"location.hash = '#page=responses&from={last['step']}&to={last['step']}'")
  tab.locator('main', has_text='For a single step, everything recorded is loaded').wait_for()
  of_step = [row for row in table if row['step'] == last['step']]
  assert tab.locator('td .text:not(:has(a)) .excerpt').count() == len(of_step)
  found = tab.evaluate(f'textsOf(0, {last["step"]})')
  members = found['groups'][f'{last["step"]}/{last["group"]}']
  # Of the first steps there is none, and none is asked for: that would be an error in the console.
  tab.evaluate("location.hash = '#page=responses&group=1/0'")
  tab.locator('main', has_text='not recorded token by token').wait_for()
  assert len(members[-1]['pieces']) == len(last['tokens'])


@pytest.mark.full
def test_a_run_of_an_earlier_version_has_a_page_that_says_what_is_missing(
  run, tmp_path, tab, report
):
  for name in ('records', 'evaluation', 'checkpoints', 'tokenizer', 'samples'):
    shutil.rmtree(run / name)
  for name in ('tokenizer.model', 'environment.json', 'console.log'):
    (run / name).unlink(missing_ok=True)
  outcome = report(run, f'--out={tmp_path}/old.html')
  assert outcome.status == 0, outcome.err
  page = tmp_path / 'old.html'
  for name in ('overview', 'buffer', 'question', 'responses', 'evaluation'):
    go(tab, page, f'page={name}')
    notes = tab.get_by_label('Missing data').inner_text()
    assert 'There are no step records (in the folder records/)' in notes, name
    assert 'No evaluation is recorded (in the folder evaluation/)' in notes, name
    assert 'stored successes' not in notes  # their questions are not known, whatever is stored
  go(tab, page, 'page=overview')
  reward = next(r['reward'] for r in metrics.read(run) if 'reward' in r)
  assert values_of(tab, 'Reward')['reward'][0] == shown(reward)


@pytest.mark.full
def test_a_run_without_replay_says_so_and_has_no_charts_of_zeros(recorded, tmp_path, tab, report):
  plain = other_runs.copied(recorded, tmp_path / 'plain', seed=5, ratio=0.0, shift=0.0)
  assert report(plain, f'--out={tmp_path}/page.html').status == 0
  no_replay = 'This run does not replay (config.replay.ratio=0)'
  go(tab, tmp_path / 'page.html', 'page=overview')
  assert no_replay in tab.locator('main').inner_text()
  titles = tab.locator('figure h3').all_inner_texts()
  assert 'Reward' in titles and not [title for title in titles if re.search('[Rr]epla', title)]
  go(tab, tmp_path / 'page.html', 'page=buffer')
  assert no_replay in tab.locator('main').inner_text()
  assert tab.locator('figure, table').count() == 0


@pytest.mark.full
def test_what_a_run_has_not_yet_is_said(run, tmp_path, tab, report):
  def overview_of(kept):
    (run / 'metrics.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in kept))
    assert report(run, f'--out={tmp_path}/page.html').status == 0
    go(tab, tmp_path / 'page.html', 'page=overview')
    return tab.locator('main').inner_text()

  whole = metrics.read(run)
  not_evaluated = [
    {name: value for name, value in record.items() if not name.startswith('eval/')}
    for record in whole
    if record['step']
  ]
  text = overview_of(not_evaluated)
  assert 'This run has no evaluation; its pass rate in training is below.' in text
  assert tab.locator('figure[data-title="Pass rate"]').count() == 1
  for folder in ('records', 'checkpoints'):
    shutil.rmtree(run / folder)
  text = overview_of(whole[:1])
  assert 'before the first step' in text and 'the only one so far' in text
  assert text.count('No step is finished yet') == 2  # as what is missing, and of the signal
  assert 'There are no' not in text


def test_the_document_takes_nothing_of_its_data_for_its_own_words():
  parts = {'page': {'title': '{{script}}</title><b>', 'runs': []}, 'visits-0': None}
  text = contents.render(parts)
  assert '<title>{{script}}&lt;/title&gt;&lt;b&gt;</title>' in text
  assert text.count('id="part-') == 1  # None is no part
  assert contents.pack({'text': '\udc80'})  # a lone surrogate can be written


# ---- Several runs ----


@pytest.mark.full
def test_runs_are_compared_by_setting_with_seeds_as_bands(recorded, tmp_path, tab, report):
  folders = [
    other_runs.copied(recorded, tmp_path / name, seed=seed, ratio=ratio, shift=shift)
    for name, seed, ratio, shift in zip(
      'abcd', (5, 6, 5, 6), (0.5, 0.5, 0.0, 0.0), (0, 0.25, 0.125, 0.5)
    )
  ]
  page = tmp_path / 'both.html'
  outcome = report(*folders, f'--out={page}')
  assert outcome.status == 0, outcome.err
  go(tab, page, '')
  assert tab.locator('nav [aria-current=page]').inner_text() == 'Compare'
  tables = {
    section.locator('h2').inner_text(): rows_of(section.locator('table').first)
    for section in tab.locator('section').all()
    if section.locator('table').count()
  }
  assert [row[:2] for row in tables['Runs']] == [
    ['replay.ratio=0.5', '5, 6'],
    ['replay.ratio=0.0', '5, 6'],
  ]
  assert ['replay.ratio', '0.5', '0.0'] in tables['Settings that differ']
  differences = tables['Differences at the last common evaluation']
  (row,) = [row for row in differences if row[0] == 'data_evaluation']
  # Seed 5 is .125 apart, seed 6 .25; from two values no interval can be told.
  assert row[1:4] == [str(tiny.NUM_STEPS), 'replay.ratio=0.5', 'replay.ratio=0.0']
  assert row[4:6] == ['+0.188', '–'] and row[7] == '2 seeds'
  found = values_of(tab, 'Reward')
  rewards = [{r['step']: r['reward'] for r in metrics.read(f) if 'reward' in r} for f in folders]
  for step, mean in zip(found['step'], found['replay.ratio=0.5']):
    value = (rewards[0][int(step)] + rewards[1][int(step)]) / 2
    assert float(mean) == pytest.approx(value, abs=6e-4)
  tab.locator('nav a', has_text='Responses').click()
  tab.locator('#run').select_option('2')
  tab.locator('h1', has_text=re.compile('^c')).wait_for()
  assert 'responses' in tab.locator('#count').inner_text()


# ---- Runs that go on ----


@pytest.fixture
def growing(run):
  """A run with only its first records, and a function that adds the next ones."""
  lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (run / 'metrics.jsonl').write_text(''.join(lines[:20]))
  (run / 'report.html').unlink()

  rest = iter(lines[20:])

  def grow(count):
    with open(run / 'metrics.jsonl', 'a') as file:
      file.writelines(itertools.islice(rest, count))

  return types.SimpleNamespace(folder=run, grow=grow, rest=len(lines) - 20)


def start(*arguments):
  return forked.start(['report', *arguments])


@pytest.mark.full
def test_watch_waits_for_metrics_and_writes_the_page_until_the_run_has_ended(growing, tmp_path):
  out = tmp_path / 'page.html'
  kept = (growing.folder / 'metrics.jsonl').rename(tmp_path / 'kept')
  with start(growing.folder, f'--out={out}', '--watch', '--every=1') as process:
    assert 'waiting for the first metrics' in process.readline()
    shutil.copy(kept, growing.folder / 'metrics.jsonl')
    assert 'step 19 of' in process.readline()
    growing.grow(growing.rest)
    assert f'step {tiny.NUM_STEPS} of {tiny.NUM_STEPS}' in process.readline()
    assert process.wait().status == 0


@pytest.mark.full
def test_serve_shows_a_run_as_it_goes_on_and_writes_nothing(growing, tab, report):
  before = set(files_of(growing.folder))
  with start(growing.folder, '--serve', '--port=0', '--every=1') as process:
    url = process.readline().split()[0]
    assert re.fullmatch(r'http://127\.0\.0\.1:\d+/', url)
    tab.goto(f'{url}#page=overview')
    await_page(tab)
    assert 'step 19 of' in tab.locator('h1').inner_text()
    growing.grow(1)
    tab.locator('h1', has_text='step 20 of').wait_for()
    tab.keyboard.press('Tab')  # who is at work in the page is asked first
    growing.grow(1)
    tab.locator('#newer').wait_for()
    assert 'step 20 of' in tab.locator('h1').inner_text()
    tab.locator('#newer').click()
    tab.locator('h1', has_text='step 21 of').wait_for()
    table = step_records.read_file(step_records.files(growing.folder, 'tokens')[0], 'tokens')
    step = table['step'][0].as_py()
    assert tab.evaluate(f'textsOf(0, {step}).then(found => Object.keys(found.groups).length > 0)')
    for host, path, status in (
      ('example.com', '/', 403),
      ('127.0.0.1', '/etc/passwd', 404),
      ('localhost', '/texts/7_000001.js', 404),
      ('localhost', '/version', 200),
    ):
      connection = http.client.HTTPConnection(url.split('/')[2])
      connection.request('GET', path, headers={'Host': host})
      assert connection.getresponse().status == status, (host, path)
      connection.close()
    busy = report(growing.folder, '--serve', f'--port={url.split(":")[-1].strip("/")}')
    assert busy.status == 2 and 'cannot be bound on 127.0.0.1' in busy.err
    tab.goto('about:blank')  # the page asks each second, and its console says when no one answers
    process.send_signal(signal.SIGTERM)
    assert process.wait().status == -signal.SIGTERM
  assert set(files_of(growing.folder)) == before


# ---- Refusals ----


@pytest.mark.full
def test_what_cannot_be_is_refused_in_one_line(run, tmp_path, report):
  (tmp_path / 'file').touch()
  broken = shutil.copytree(run, tmp_path / 'broken')
  (broken / 'config.json').write_text('{}')
  refused = (
    ([], 'must be followed by at least one WORKDIR'),
    ([tmp_path], 'contains no config.json'),
    ([run, run], 'is given twice'),
    (
      [run, '--serve', f'--out={tmp_path}/x.html'],
      'x.html: this flag cannot be combined with --serve',
    ),
    ([run, '--serve', '--watch'], '--watch=True: '),
    ([run, '--texts=some'], '--texts=some: the value must be one of sampled, all'),
    ([run, f'--out={tmp_path}/file/x.html'], 'cannot be written'),
    ([run, '--port=99999', '--serve'], '--port=99999: the value must be'),
    ([run, '--watch', '--every=nan'], '--every=nan: the value must be'),
    ([broken], "config.json: this is not a run's config"),
  )
  for arguments, words in refused:
    outcome = report(*arguments)
    assert outcome.status == 2, arguments
    assert words in outcome.err and outcome.err.count('\n') == 1, outcome.err
