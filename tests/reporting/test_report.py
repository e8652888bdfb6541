"""The command report: the files that it writes, reads and serves, and its errors."""

import base64
import contextlib
import gzip
import http.client
import json
import re
import shutil
import signal
import threading
import time
import types
import urllib.parse

import pytest

from exgrpo_jax.reporting import metrics, step_records
from exgrpo_jax.reporting.page import contents
from exgrpo_jax.reporting.report import Server, state_of, write_at_end
from exgrpo_jax.runtime.workdir import folder_held, is_abandoned
from tests.helpers import forked, other_runs, tiny
from tests.helpers.tabs import await_page, go, rows_of, shown, values_of


@pytest.fixture
def run(recorded, tmp_path):
  """A copy of the recorded run, which a test may change."""
  return shutil.copytree(recorded.workdir, tmp_path / 'run')


def report(*arguments):
  """Run the command."""
  return forked.run_one(['report', *arguments])


def files_of(folder):
  """All files below a folder, with the time and size that a change would alter."""
  paths = sorted(folder.rglob('*'))
  return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


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
@pytest.mark.parametrize('folder', ['there', 'made', 'made.2/'])
def test_out_may_be_a_folder_for_the_page(folder, run, tmp_path):
  (tmp_path / 'there').mkdir()
  before = files_of(run)
  outcome = report(run, f'--out={tmp_path}/{folder}')
  assert outcome.status == 0, outcome.err
  assert files_of(run) == before
  page = tmp_path / folder / 'report.html'
  assert outcome.out.startswith(f'{page} (') and [*page.parent.iterdir()] == [page]


@pytest.mark.full
def test_all_texts_are_written_next_to_the_page_and_loaded_on_demand(run, tmp_path, tab):
  first, *_ = step_records.files(run, 'tokens')
  first.unlink()
  outcome = report(run, f'--out={tmp_path}/page.html', '--texts=all')
  assert outcome.status == 0, outcome.err
  table = tiny.token_rows(run)
  last = table[-1]
  script = tmp_path / 'page_texts' / f'0_{last["step"]:06d}.js'
  assert script.read_text().startswith(f'exgrpoTexts("0/{last["step"]}","')
  go(tab, tmp_path / 'page.html', 'page=overview')
  # Remove the sampled texts in the file, as if the run were too large for it.
  tab.evaluate("parts['texts-0'] = Promise.resolve(null)")
  tab.evaluate(f"location.hash = '#page=responses&group={last['step']}/{last['group']}'")
  tab.wait_for_selector('.tokens')
  tab.evaluate(f"location.hash = '#page=responses&from={last['step']}&to={last['step']}'")
  tab.locator('main', has_text='If you choose a single step, the page').wait_for()
  of_step = [row for row in table if row['step'] == last['step']]
  assert tab.locator('td .text:not(:has(a)) .excerpt').count() == len(of_step)
  found = tab.evaluate(f'textsOf(0, {last["step"]})')
  members = found['groups'][f'{last["step"]}/{last["group"]}']
  # The first steps have no texts, and a request for them would log an error in the console.
  tab.evaluate("location.hash = '#page=responses&group=1/0'")
  tab.locator('main', has_text='not recorded token by token').wait_for()
  assert len(members[-1]['pieces']) == len(last['tokens'])


@pytest.mark.full
def test_the_page_of_an_older_run_says_what_is_missing(run, tmp_path, tab):
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
    assert 'There are no evaluation records (in the folder evaluation/)' in notes, name
    assert 'stored successes' not in notes  # their questions are unknown
  go(tab, page, 'page=overview')
  reward = next(r['reward'] for r in metrics.read(run) if 'reward' in r)
  assert values_of(tab, 'Reward')['reward'][0] == shown(reward)


@pytest.mark.full
def test_a_run_without_replay_says_so_and_has_no_charts_of_zeros(recorded, tmp_path, tab):
  plain = other_runs.copied(recorded, tmp_path / 'plain', seed=5, ratio=0.0, shift=0.0)
  assert report(plain, f'--out={tmp_path}/page.html').status == 0
  no_replay = 'This run uses plain GRPO without replay (config.replay.ratio=0)'
  go(tab, tmp_path / 'page.html', 'page=overview')
  assert no_replay in tab.locator('main').inner_text()
  titles = tab.locator('figure h3').all_inner_texts()
  assert 'Reward' in titles and not [title for title in titles if re.search('[Rr]epla', title)]
  go(tab, tmp_path / 'page.html', 'page=buffer')
  assert no_replay in tab.locator('main').inner_text()
  assert tab.locator('figure, table').count() == 0


@pytest.mark.full
def test_the_page_of_a_new_run_says_what_is_missing(run, tmp_path, tab):
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
  assert 'before the first step' in text and 'no other score yet' in text
  assert text.count('No step has finished yet') == 2  # under missing data and under learning signal
  assert 'There are no' not in text


def test_placeholders_and_markup_in_the_data_have_no_effect():
  parts = {'page': {'title': '{{script}}</title><b>', 'runs': []}, 'visits-0': None}
  text = contents.render(parts)
  assert '<title>{{script}}&lt;/title&gt;&lt;b&gt;</title>' in text
  assert text.count('id="part-') == 1  # None is left out
  assert contents.pack({'text': '\udc80'})  # a lone surrogate can be written


# ---- Several runs ----


@pytest.mark.full
def test_runs_are_compared_by_setting_with_seeds_as_bands(recorded, tmp_path, tab):
  made = ('a', 5, 0.5, 0), ('b', 6, 0.5, 0.25), ('c', 5, 0.0, 0.125), ('d', 6, 0.0, 0.5)
  folders = [
    other_runs.copied(recorded, tmp_path / name, seed=seed, ratio=ratio, shift=shift)
    for name, seed, ratio, shift in made
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
  shown_runs = [row[:2] for row in tables['Runs']]
  assert shown_runs == [['replay.ratio=0.5', '5, 6'], ['replay.ratio=0.0', '5, 6']]
  assert ['replay.ratio', '0.5', '0.0'] in tables['Settings that differ']
  differences = tables['Differences at the last common evaluation']
  (row,) = [row for row in differences if row[0] == 'data_evaluation']
  # Seed 5 differs by .125 and seed 6 by .25; two values have no interval.
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


# ---- Active runs ----

PARTS = ('visits', 'evaluations', 'texts', 'stored')


@pytest.fixture
def growing(run):
  """An active run with its first 20 records, and a function that sets their number."""
  lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
  (run / 'report.html').unlink()

  def have(count):
    (run / 'metrics.jsonl').write_text(''.join(lines[:count]))

  have(20)
  with contextlib.ExitStack() as process:
    process.enter_context(folder_held(str(run), 'run.lock', ''))
    yield types.SimpleNamespace(folder=run, have=have, end=process.close)


@pytest.fixture
def serve():
  """A function that serves runs, and returns a function that requests a path: status and text."""
  with contextlib.ExitStack() as stack:

    def start(*workdirs):
      server = stack.enter_context(Server(list(map(str, workdirs)), 0, 0.0))
      threading.Thread(target=server.serve_forever, daemon=True).start()
      stack.callback(server.shutdown)

      def ask(path, host='127.0.0.1', method='GET'):
        connection = http.client.HTTPConnection(*server.server_address, timeout=60)
        with contextlib.closing(connection):
          connection.request(method, path, headers={'Host': host})
          response = connection.getresponse()
          return response.status, response.read().decode()

      ask.url = 'http://{}:{}/'.format(*server.server_address)
      ask.server = server
      return ask

    yield start


def news_of(ask, have=''):
  """The answer about the runs, its page unpacked."""
  status, text = ask(f'/news?have={urllib.parse.quote(have)}')
  assert status == 200
  found = json.loads(text)
  return found | {'page': found['page'] and unpacked(found['page'])}


def unpacked(text):
  return json.loads(gzip.decompress(base64.b64decode(text)))


def test_a_served_run_waits_continues_is_reset_and_ends(growing, serve, tmp_path):
  kept = growing.folder.rename(tmp_path / 'kept')
  growing.folder.mkdir()
  (kept / 'run.lock').rename(growing.folder / 'run.lock')  # at first, the run has only a lock
  ask = serve(growing.folder)
  found = news_of(ask)
  assert found['states'] == [['waiting', 'Waiting for the first step.']] and not found['page']
  assert ask('/')[0] == 200
  shutil.copytree(kept, growing.folder, dirs_exist_ok=True)
  version, parts = '', {}
  for count, kind in ((20, 'running'), (21, 'running'), (5, 'running'), (33, 'ended')):
    growing.have(count)
    deadline = time.monotonic() + 30  # the server renders only a tenth of the time
    while not (found := news_of(ask, version))['page']:
      assert time.monotonic() < deadline
    ((said, text),) = found['states']
    step = f'step {count - 1} of {tiny.NUM_STEPS}'
    assert said == kind and step in text.lower()
    assert found['again'] == (10 if kind == 'ended' else 2)
    assert found['page']['runs'][0]['progress'] == step
    version, before, parts = found['page']['version'], parts, found['page']['parts']
    assert news_of(ask, version)['page'] is None  # the reader already has it
  assert parts == before and set(parts) == {f'{name}-0' for name in PARTS}  # only metrics changed
  held = unpacked(ask('/parts/visits-0')[1])
  assert held['recorded'] and len(held['responses']['length']) > 100
  growing.have(0)  # restarted from the beginning: the old page stays
  assert news_of(ask, version)['states'][0][0] == 'waiting' and not news_of(ask, version)['page']
  (growing.folder / 'metrics.jsonl').write_text('{}\n')
  assert 'metrics.jsonl:1' in news_of(ask, version)['states'][0][1]


def test_a_page_is_not_served_before_its_parts(growing, serve, monkeypatch):
  ask, pages, pack = serve(growing.folder), [], contents.pack

  def observed(part):
    pages.append(ask.server._page)
    return pack(part)

  monkeypatch.setattr(contents, 'pack', observed)
  before = ask.server._page
  ask.server.refresh()
  assert pages == [before] * len(PARTS) and ask.server._page['version'] != before['version']


def test_a_server_answers_only_get_for_its_own_paths_and_host(growing, serve):
  ask = serve(growing.folder)
  news_of(ask)
  step = tiny.token_rows(growing.folder)[0]['step']
  for path, status in (
    ('/', 200),
    (f'/texts/0_{step:06d}.js', 200),
    ('/texts/7_000001.js', 404),
    ('/texts/0_999999.js', 404),
    ('/parts/visits-0', 200),
    ('/parts/visits-1', 404),
    ('/parts/../metrics.jsonl', 404),
    ('/parts/%2e%2e/metrics.jsonl', 404),
    ('/metrics.jsonl', 404),
    ('/../../../../etc/passwd', 404),
    ('//etc/passwd', 404),
  ):
    assert ask(path)[0] == status, path
  assert ask('/news', host='example.com')[0] == 403
  assert ask('/', method='POST')[0] == 501


def test_several_runs_are_told_apart_by_name(growing, recorded, serve, tmp_path):
  other = other_runs.copied(recorded, tmp_path / 'other', seed=9, ratio=0.5, shift=0.0)
  found = news_of(serve(growing.folder, other))
  (_, first), (_, second) = found['states']
  assert first.startswith(f'{growing.folder}: ') and second.startswith(f'{other}: The run ended')
  assert found['again'] == 2 and found['page']['compare']


def test_a_runs_state_follows_from_its_records_and_its_lock(recorded):
  """Steps take 20 s, so no step for 200 s is too long."""
  workdir, started = str(recorded.workdir), 1e6
  step = [{'step': n, 'timestamp': started + 20 * (n + 1)} for n in range(tiny.NUM_STEPS + 1)]
  four = step[:4], started, False
  for (records, begun, is_gone), later, kind in (
    (([], started, False), 1e5, 'waiting'),
    (([], started, True), 0, 'stopped'),
    (four, 0, 'running'),
    (four, 199, 'running'),
    (four, 201, 'stalled'),
    ((step[:3], started, False), 1e5, 'running'),  # two step times are too few for a median
    ((step[:4], started + 30, False), 1e5, 'running'),  # one step before the latest start
    ((step[:4], started, True), 0, 'stopped'),
    ((step, started, False), 1e5, 'ended'),
    ((step, started, True), 1e5, 'ended'),
    (([{'step': 3}], 0.0, False), 1e5, 'running'),  # of an earlier version
  ):
    now = (records or step)[-1].get('timestamp', started) + later
    state = state_of(workdir, records, begun, is_gone, now)
    assert state.kind == kind, (len(records), begun, is_gone, later)
  quick = [{'step': n, 'timestamp': started + n} for n in range(1, 9)]
  for later, kind in ((59, 'running'), (61, 'stalled')):  # a run never stalls within a minute
    assert state_of(workdir, quick, started, False, started + 8 + later).kind == kind


def test_a_run_whose_process_is_gone_has_stopped_until_the_next_starts(growing, serve, tmp_path):
  lock = growing.folder / 'run.lock'
  assert not is_abandoned(lock)  # this test holds it
  assert not is_abandoned(tmp_path / 'none')
  with folder_held(str(tmp_path), 'run.lock', ''):
    pass
  assert is_abandoned(tmp_path / 'run.lock')
  (tmp_path / 'run.lock').write_text('another machine process 7 on host, at noon')
  assert not is_abandoned(tmp_path / 'run.lock')
  ask = serve(growing.folder)
  assert news_of(ask)['states'][0][0] == 'running'
  growing.end()
  ((kind, text),) = news_of(ask)['states']
  assert kind == 'stopped' and f'after step 19 of {tiny.NUM_STEPS}' in text
  with folder_held(str(growing.folder), 'run.lock', ''):
    assert news_of(ask)['states'][0][0] == 'running'


@pytest.mark.full
def test_the_command_serves_a_run_and_writes_nothing(growing, tab):
  before = set(files_of(growing.folder))
  with forked.start(['report', growing.folder, '--serve', '--port=0', '--every=1']) as process:
    line = process.readline()
    served = re.fullmatch(
      r'Serving \S+ at (http://127\.0\.0\.1:(\d+)/)\. Press Ctrl-C to stop\.', line.strip()
    )
    assert served, line
    url, port = served.groups()
    assert f'ssh -L {port}:127.0.0.1:{port} ' in process.readline()
    tab.goto(f'{url}#page=overview')
    await_page(tab)
    finished = re.compile(rf'step 19 of {tiny.NUM_STEPS} (has )?finished', re.IGNORECASE)
    tab.locator('#states', has_text=finished).wait_for()
    growing.have(21)
    tab.locator('h1', has_text='step 20 of').wait_for()
    busy = report(growing.folder, '--serve', f'--port={port}')
    assert busy.status == 2 and 'cannot bind to this port on 127.0.0.1' in busy.err
    tab.goto('about:blank')  # the page would log an error once the server stops
    process.send_signal(signal.SIGTERM)
    assert process.wait().status == -signal.SIGTERM
  assert set(files_of(growing.folder)) == before


@pytest.mark.full
def test_an_update_keeps_the_readers_place(growing, serve, tab):
  def arrive(count):
    growing.have(count)
    tab.locator('h1', has_text=f'step {count - 1} of').wait_for()

  figure = tab.locator('figure[data-title="Reward"]')
  settings = tab.locator('[aria-label="Settings"]')

  def where():
    facts = '[document.activeElement.ariaLabel, location.hash]'
    readout = figure.locator('.readout').inner_text()
    scrolled = settings.evaluate('box => box.scrollTop')
    return *tab.evaluate(facts), scrolled, re.search(r'step \d+', readout)[0]

  def top():
    return figure.evaluate('one => one.getBoundingClientRect().top')

  ask = serve(growing.folder)
  news_of(ask)
  tab.goto(f'{ask.url}#page=overview&zoom_step=2_9')
  await_page(tab)
  tab.evaluate('window.isSame = true')  # lost by a reload
  figure.locator('summary').click()
  settings.evaluate('box => { box.scrollTop = 30; }')
  figure.locator('.plot').focus()
  for _ in range(3):
    tab.keyboard.press('ArrowRight')
  tab.evaluate('scrollBy(0, 50)')
  before, height = where(), top()
  assert before[2:] == (30, 'step 3')
  growing.have(22)
  for _ in range(200):  # a busy reader can request the update at once
    tab.keyboard.press('Shift')
    tab.wait_for_timeout(100)
    if tab.locator('#newer').count():
      break
  assert 'step 19 of' in tab.locator('h1').inner_text() and where() == before
  assert tab.locator('#newer').is_visible()
  tab.locator('h1', has_text='step 21 of').wait_for()  # appears by itself after a pause
  await_page(tab)
  assert where() == before and top() == pytest.approx(height, abs=2)
  assert figure.locator('tbody tr').count() == 21
  assert figure.locator('.plot').evaluate('area => area.plot.scales.x.max') == 9
  tab.keyboard.press('ArrowRight')
  assert 'step 4' in figure.locator('.readout').inner_text()
  tab.locator('nav a', has_text='Responses').click()
  tab.locator('[name=words]').fill('a')
  steps = 'recorded(0).then((rows) => rows.steps.at(-1))'
  last = tab.evaluate(steps)
  for name in ('responses', 'questions'):
    step_records.files(growing.folder, name)[-1].unlink()
  arrive(23)
  assert tab.evaluate(steps) < last
  assert tab.evaluate('document.activeElement.name') == 'words'
  assert tab.locator('[name=words]').input_value() == 'a'
  tab.locator('nav a', has_text='Question').click()
  tab.locator('#find').press_sequentially('1')
  arrive(5)  # the run goes back
  assert tab.locator('#find').input_value() == '1'
  growing.have(33)
  tab.locator('#states .ended', has_text=f'ended after step {tiny.NUM_STEPS}').wait_for()
  assert tab.evaluate('isSame')


@pytest.mark.full
def test_a_response_stays_open_with_its_colours_when_the_page_is_updated(growing, serve, tab):
  ask = serve(growing.folder)
  news_of(ask)
  row = tiny.token_rows(growing.folder)[0]
  tab.goto(f'{ask.url}#page=responses&group={row["step"]}/{row["group"]}')
  tab.wait_for_selector('.tokens')
  folds = tab.locator('main > div > details')
  folds.nth(0).locator('> summary').click()  # is open at first
  folds.nth(1).locator('> summary').click()
  folds.nth(1).locator('select').select_option('logp')
  folds.nth(1).locator('.tokens').focus()
  tab.keyboard.press('ArrowRight')
  growing.have(21)
  tab.locator('h1', has_text='step 20 of').wait_for()
  assert folds.nth(0).get_attribute('open') is None
  assert folds.nth(1).locator('select').input_value() == 'logp'
  tab.keyboard.press('ArrowRight')
  assert 'token 2 of' in folds.nth(1).locator('.readout').inner_text()


@pytest.mark.full
def test_a_page_opened_before_the_first_step_shows_it_when_it_comes(growing, serve, tab):
  growing.have(0)
  ask = serve(growing.folder)
  news_of(ask)
  tab.goto(ask.url)
  tab.locator('main', has_text='appears here after the first step').wait_for()
  tab.locator('#states .waiting').wait_for()
  growing.have(2)
  tab.locator('h1', has_text='step 1 of').wait_for()
  await_page(tab)


# ---- Refusals ----


@pytest.mark.full
def test_invalid_arguments_are_refused_in_one_line(run, tmp_path):
  (tmp_path / 'file').touch()
  refused = (
    ([], 'must be followed by at least one WORKDIR'),
    (
      [run, '--serve', f'--out={tmp_path}/x.html'],
      'x.html: this flag cannot be combined with --serve',
    ),
    ([run, '--serve', '--texts=all'], '--texts=all: '),
    ([run, run, '--serve', '--port=0'], 'was given twice'),
    ([run, '--texts=some'], '--texts=some: the value must be one of sampled, all'),
    ([run, f'--out={tmp_path}/file/x.html'], 'cannot be written'),
    ([run, '--port=99999', '--serve'], '--port=99999: the value must be'),
    ([run, '--serve', '--every=nan'], '--every=nan: the value must be'),
  )
  for arguments, words in refused:
    outcome = report(*arguments)
    assert outcome.status == 2, arguments
    assert words in outcome.err and outcome.err.count('\n') == 1, outcome.err
