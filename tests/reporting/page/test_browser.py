"""The page of a run in a browser, compared with the records of the run."""

import collections
import datetime
import json
import operator
import re
import shutil
import types

import numpy as np
import pyarrow as pa
import pytest

from exgrpo_jax.data import tokenizer
from exgrpo_jax.reporting import metrics, step_records
from exgrpo_jax.reporting.page import contents
from exgrpo_jax.reporting.report import write_report
from tests.helpers import forked, tiny
from tests.helpers.tabs import await_page, go, open_tab, rows_of, shown, values_of

pytestmark = pytest.mark.full

KEY = operator.itemgetter('step', 'group', 'sample')  # of a response
PAGES = ('overview', 'buffer', 'question', 'responses', 'evaluation')
HOSTILE = '<script>document.title="run"</script></textarea><img src=x onerror=alert(1)>'
WARNING = 'step 7: no learning signal <b>at all</b>'
LONG = '123' * 500


def change(folder, name, changed):
  """Rewrite the rows of a table of records, each by `changed`."""
  for path in step_records.files(folder, name):
    rows = [changed(row) for row in step_records.read_file(path, name).to_pylist()]
    step_records.write_file(path, pa.Table.from_pylist(rows, step_records.SCHEMAS[name]))


@pytest.fixture(scope='module')
def run(recorded, tmp_path_factory):
  """A copy of the recorded run whose responses, questions and evaluations contain markup."""
  folder = tmp_path_factory.mktemp('report') / 'run'
  shutil.copytree(recorded.workdir, folder)
  ids = tokenizer.load(folder / 'tokenizer').encode(HOSTILE)
  attacked = tiny.token_rows(folder)[0]
  values = {'tokens': ids, 'logp': [0.5] * len(ids), 'entropy': [0.5] * len(ids)}
  change(folder, 'tokens', lambda row: row | (values if KEY(row) == KEY(attacked) else {}))
  asked, question = {'text': HOSTILE, 'answer': LONG}, attacked['question']
  change(folder, 'questions', lambda row: row | (asked if row['question'] == question else {}))
  for path in (folder / 'evaluation').iterdir():
    lines = [json.loads(line) | {'responses': [HOSTILE]} for line in path.read_text().splitlines()]
    path.write_text(''.join(f'{json.dumps(line)}\n' for line in lines))
  with open(folder / 'console.log', 'a') as file:
    file.write(f'WARNING: {WARNING}\n')
  tables = step_records.read(folder)
  return types.SimpleNamespace(
    folder=folder,
    metrics=metrics.read(folder),
    responses=tables.responses.to_pylist(),
    questions=tables.questions.to_pylist(),
    attacked=attacked,
    ids=ids,
  )


@pytest.fixture(scope='module')
def report(run):
  """The page of that run, written by the command."""
  out = run.folder.parent / 'deep' / 'report.html'
  (outcome,) = forked.run([['report', run.folder, f'--out={out}']])
  assert outcome.status == 0, outcome.err
  assert f'{run.folder}: step {tiny.NUM_STEPS} of {tiny.NUM_STEPS}' in outcome.out
  assert not outcome.used_device  # the run needs the TPU for itself
  return out


# ---- All pages ----


@pytest.mark.parametrize(('width', 'scheme'), [(1280, 'light'), (400, 'dark')])
def test_every_page_opens_and_fits_its_window(chromium, report, width, scheme):
  with open_tab(chromium, width, scheme) as tab:
    for name in PAGES:
      go(tab, report, f'page={name}')
      assert tab.locator('nav [aria-current=page]').inner_text() == name.title()
      assert tab.locator('main').inner_text().count('\n') > 5, name
      assert tab.evaluate('document.documentElement.scrollWidth') == width, name
      shade = tab.evaluate('getComputedStyle(document.body).backgroundColor')
      assert (shade == 'rgb(18, 22, 27)') == (scheme == 'dark')
      empty = tab.locator('.plot').evaluate_all('all => all.filter(area => !area.plot).length')
      assert empty == 0, name


def test_pages_are_reached_and_charts_read_by_keyboard(tab, report, run):
  go(tab, report, 'page=overview')
  tab.keyboard.press('Tab')
  assert tab.locator(':focus').inner_text() == 'Skip to the content'
  tab.locator('nav a', has_text='Buffer').focus()
  tab.keyboard.press('Enter')
  tab.wait_for_selector('main[data-page=buffer]')
  go(tab, report, 'page=overview')
  figure = tab.locator('figure[data-title="Reward"]')
  figure.locator('.plot').focus()
  for _ in range(3):
    tab.keyboard.press('ArrowRight')
  expected = [(r['step'], r['reward']) for r in run.metrics if 'reward' in r]
  steps = figure.locator('.plot').evaluate('area => area.plot.data[0]')
  assert figure.locator('.readout').inner_text().strip() != 'step'
  step = steps[2]
  assert f'step {step}' in figure.locator('.readout').inner_text()
  assert shown(dict(expected)[step]) in figure.locator('.readout').inner_text()


# ---- Numbers ----


def test_overview_has_the_scores_the_signal_the_settings_and_the_warnings(tab, report, run):
  go(tab, report, 'page=overview')
  assert tab.locator('h2').all_inner_texts()[:3] == ['Score', 'Next steps', 'Learning signal']
  evaluated = [r for r in run.metrics if 'eval/data_evaluation/pass@1' in r]
  first, last = (evaluated[place]['eval/data_evaluation/pass@1'] for place in (0, -1))
  ends = [evaluated[-1][f'eval/data_evaluation/pass@1_{end}'] for end in ('low', 'high')]
  (tile,) = tab.locator('.scores > div').all_inner_texts()
  assert tile.splitlines()[:2] == ['pass@1 on data_evaluation', shown(last)]
  assert f'after step {tiny.NUM_STEPS}, 95% interval {" to ".join(map(shown, ends))}' in tile
  assert f'first {shown(first)} at step 0' in tile
  assert f'since step 0 {"+" if last > first else ""}{shown(last - first)}, 95% interval' in tile
  command = f'exgrpo evaluate --checkpoint={run.folder} --samples=4'
  assert command in tab.locator('pre').last.inner_text()
  signal = tab.locator('section', has=tab.locator('h2', has_text='Learning signal'))
  recent = [record for record in run.metrics if record['step'] > tiny.NUM_STEPS - 10]
  tiles = dict(tile.splitlines()[:2] for tile in signal.locator('.facts > div').all_inner_texts())
  for label, name in (
    ('groups without a learning signal', 'groups/zero_advantage'),
    ('groups solved by all responses', 'groups/solved_by_all'),
    ('groups solved by no response', 'groups/solved_by_none'),
  ):
    assert tiles[label] == f'{100 * np.mean([record[name] for record in recent]):.0f}%', label
  assert {'fresh tokens clipped', 'updates skipped', 'learning rate'} < set(tiles)
  assert 'had equal rewards, so they gave no learning signal' in tab.locator('#silent').inner_text()
  settings = tab.locator('section', has=tab.locator('h2', has_text='Settings'))
  table = {name: (base, own) for name, base, own in rows_of(settings.locator('table'))}
  assert table['rollout.questions'] == ('128', str(tiny.QUESTIONS))
  tiles = tab.locator('.facts').last.locator('> div').all_inner_texts()
  facts = dict(tile.splitlines() for tile in tiles)
  assert facts['tokens generated'] == f'{sum(r.get("length/total", 0) for r in run.metrics):,.0f}'
  speeds = [r['perf/tokens_per_second'] for r in run.metrics if r['step']]
  assert facts['tokens per second, median'] == f'{np.median(speeds):,.0f}'
  seconds = round(sum(r.get('time/step', 0) for r in run.metrics))
  in_steps = datetime.timedelta(seconds=seconds)
  assert re.fullmatch(rf'0:\d\d:\d\d, {in_steps} of it in steps', facts['duration'])
  assert WARNING in tab.locator('main').inner_text()


def test_axis_labels_are_distinct_with_as_few_digits_as_possible(tab, report):
  go(tab, report, 'page=overview')
  for splits, labels in (
    ([0.9, 0.905, 0.91], ['0.900', '0.905', '0.910']),
    ([0, 0.5, 1], ['0', '0.5', '1.0']),
    ([0, 100000, 200000], ['0', '100,000', '200,000']),
    ([0, 5e-5, 1e-4], ['0', '5e-5', '1e-4']),
    ([-0.25, None, 0.25], ['-0.25', '', '0.25']),
  ):
    assert tab.evaluate('splits => tickLabels(splits)', splits) == labels
  for share, ends in ((True, [0, 1]), (False, [-0.1, 1.1])):  # a band may leave [0, 1]
    reach = 'share => tight({ share })(null, -0.05, 1.05).map((end) => Number(end.toFixed(1)))'
    assert tab.evaluate(reach, share) == ends
  drawn = 'all => all.map(area => area.plot.axes.map(axis => axis._values.filter(Boolean)))'
  for axes in tab.locator('.plot').evaluate_all(drawn):
    for labels in axes:
      assert len(labels) > 1 and len(set(labels)) == len(labels), labels


def test_the_values_of_a_chart_equal_the_metrics(tab, report, run):
  go(tab, report, 'page=overview')
  for title, label, name in (
    ('Reward', 'reward', 'reward'),
    ('Replay buffer', 'retired', 'buffer/retired'),
    ('Importance ratio of replayed tokens', 'max', 'replay/ratio_max'),
  ):
    found = values_of(tab, title)
    expected = {str(r['step']): shown(r[name]) for r in run.metrics if name in r}
    assert len(expected) > 15
    assert dict(zip(found['step'], found[label])) == expected, title


def test_a_question_shows_its_visits_and_responses(tab, report, run):
  replays = collections.Counter(r['question'] for r in run.responses if r['is_replay'])
  question = replays.most_common(1)[0][0]
  go(tab, report, f'page=question&question={question}')
  visits = [row for row in run.questions if row['question'] == question]
  table = tab.locator('section', has=tab.locator('h2', has_text='Visits')).locator('table')
  found = rows_of(table)
  assert [(int(row[0]), row[2]) for row in found] == [
    (visit['step'], shown(visit['correctness'])) for visit in visits
  ]
  chosen = {r['step']: r for r in run.responses if r['is_replay'] and r['question'] == question}
  assert len(chosen) > 1
  for row in found:
    if int(row[0]) in chosen:
      replay = chosen[int(row[0])]
      assert row[6] == str(replay['step'] - replay['policy_step'])
      assert row[7] == shown(round(replay['entropy'], 4)) and row[9] == shown(replay['ratio_mean'])
  assert tab.locator('.strip li').count() == len(visits)


def test_the_first_and_latest_solutions_are_chosen_from_recorded_texts(tab, recorded, tmp_path):
  """The first one comes from its replay, because its own step was not recorded token by token."""
  folder = tmp_path / 'run'
  shutil.copytree(recorded.workdir, folder)
  paths = step_records.files(folder, 'tokens')
  tables = {path: step_records.read_file(path, 'tokens') for path in paths}
  with_text = {KEY(row) for table in tables.values() for row in table.to_pylist()}
  rows = step_records.read(folder).responses.to_pylist()
  solved = [row for row in rows if row['outcome'] == 'correct' and KEY(row) in with_text]
  fresh, replayed = ([row for row in solved if row['is_replay'] == kind] for kind in (False, True))
  question, first, latest = next(
    (replay['question'], replay['policy_step'], last)
    for replay in replayed
    if (last := max((r['step'] for r in fresh if r['question'] == replay['question']), default=0))
    > replay['policy_step']
    == min(r['policy_step'] for r in replayed if r['question'] == replay['question'])
  )
  for path, table in tables.items():
    kept = table.filter(pa.array(table['step'].to_numpy() > first))
    step_records.write_file(path, kept)
  write_report([str(folder)], tmp_path / 'page.html')
  go(tab, tmp_path / 'page.html', f'page=question&question={question}')
  title = tab.locator('h2', has_text='First and latest solution with text')
  said = tab.locator('section', has=title).inner_text()
  assert f'step {first}' in said and f'tep {latest}' in said


# ---- Tables ----


def test_numbers_are_right_aligned_even_with_a_sign_or_in_a_link(tab, report, run):
  replay = next(r for r in run.responses if r['is_replay'])
  for address, names in (
    (f'page=question&question={replay["question"]}', ('step', 'pass rate', 'bucket after')),
    (f'page=responses&group={replay["step"]}/{replay["group"]}', ('advantage', 'reward')),
  ):
    go(tab, report, address)
    table = tab.locator('main table').first
    heads = table.locator('th').all_inner_texts()
    for name in names:
      cells = table.locator(f'tbody td:nth-child({heads.index(name) + 1})')
      aligned = cells.evaluate_all('all => all.map((cell) => getComputedStyle(cell).textAlign)')
      assert set(aligned) == {'right'}, name
    for name in {'kind', 'outcome'} & set(heads):
      assert not table.locator(f'td.number:nth-child({heads.index(name) + 1})').count()


def test_a_table_says_where_it_continues_and_nothing_is_cut_off(chromium, report, run):
  replays = collections.Counter(r['question'] for r in run.responses if r['is_replay'])
  with open_tab(chromium, 400) as narrow:
    go(narrow, report, f'page=question&question={replays.most_common(1)[0][0]}')
    visits = narrow.locator('[aria-label="Visits to this question"]')
    visits.locator('.hint', has_text='more columns →').wait_for()
    right = 'all => Math.max(...all.map((item) => item.getBoundingClientRect().right))'
    assert narrow.locator('.strip li').evaluate_all(right) <= 400
    go(narrow, report, 'page=overview')
    narrow.locator('[aria-label="Settings"] .hint', has_text='more rows ↓').wait_for()
    assert narrow.locator('[aria-label="Warnings"] .hint').inner_text() == ''


def test_a_printed_page_is_light_and_its_tables_are_complete(chromium, report):
  with open_tab(chromium, scheme='dark') as tab:
    go(tab, report, 'page=overview')
    theme, table = 'document.documentElement.dataset.theme', tab.locator('[aria-label=Settings]')
    hidden = '({scrollHeight, clientHeight}) => scrollHeight - clientHeight'
    assert tab.evaluate(theme) == 'dark' and table.evaluate(hidden) > 0
    tab.emulate_media(media='print')
    tab.evaluate('dispatchEvent(new Event("beforeprint"))')
    assert tab.evaluate(theme) == 'light' and table.evaluate(hidden) == 0
    tab.evaluate('dispatchEvent(new Event("afterprint"))')
    assert tab.evaluate(theme) == 'dark'


def test_a_list_without_entries_says_so(tab, report):
  go(tab, report, 'page=evaluation&first=0&second=0')
  assert tab.locator('main section table').count() == 0
  tab.locator('summary', has_text='gained: 0').click()
  tab.locator('section .quiet', has_text='None.').wait_for()


# ---- Many lines, many steps ----


def test_sixteen_lines_differ_in_color_or_dash(tab, report):
  go(tab, report, 'page=overview')
  samples = tab.evaluate('[...Array(16).keys()].map(place => sample(place).outerHTML)')
  assert len(set(samples)) == 16


def test_the_edges_between_areas_do_not_cover_a_long_run(tab, report):
  go(tab, report, 'page=overview')
  panel = 'steps: [...Array(n).keys()], top: 1, layers: [{label: "save", values: Array(n).fill(1)}]'
  width = f'n => stackChart({{{panel}}}).series[0].width'
  assert [tab.evaluate(width, count) for count in (9, 900)] == [1, 0]


# ---- Search, filters, groups ----


def test_a_question_is_found_by_text_row_and_answer(tab, report, run):
  other = next(q for q in run.questions if q['question'] != run.attacked['question'])
  for word in (other['text'], str(other['question']), '</textarea>'):
    go(tab, report, 'page=question')
    tab.locator('#find').fill(word)
    wanted = other if word != '</textarea>' else run.attacked
    links = tab.locator('search table tbody tr td:first-child').all_inner_texts()
    assert str(wanted['question']) in links, word
  tab.locator('search table a').first.click()
  tab.wait_for_selector('#story')


def test_filtered_responses_match_the_records(tab, report, run):
  wrong = [r for r in run.responses if r['outcome'] == 'wrong' and 5 <= r['step'] <= 9]
  go(tab, report, 'page=responses')
  tab.locator('[name=outcome]').select_option('wrong')
  tab.locator('[name=from]').fill('5')
  tab.locator('[name=to]').fill('9')
  assert len(wrong) > 1
  tab.locator('#count', has_text=re.compile(f'^{len(wrong)} responses')).wait_for()
  lengths = [int(row[9]) for row in rows_of(tab.locator('main table'))]
  assert lengths == [row['length'] for row in wrong][: len(lengths)]
  replayed = sum(r['is_replay'] for r in run.responses)
  go(tab, report, 'page=responses&kind=replayed&sort=-length')
  assert tab.locator('#count').inner_text().startswith(f'{replayed} responses')
  lengths = [int(row[9]) for row in rows_of(tab.locator('main table'))]
  assert lengths == sorted(lengths, reverse=True)


def test_a_group_has_its_advantages_and_its_tokens(tab, report, run):
  replay = next(r for r in run.responses if r['is_replay'] and r['advantage'])
  members = [r for r in run.responses if KEY(r)[:2] == KEY(replay)[:2]]
  go(tab, report, f'page=responses&group={replay["step"]}/{replay["group"]}')
  found = rows_of(tab.locator('main table'))
  assert [(row[4], row[5]) for row in found] == [
    (shown(r['reward']), ('+' if r['advantage'] > 0 else '') + shown(round(r['advantage'], 6)))
    for r in members
  ]
  assert found[-1][8] == str(replay['policy_step'])
  last = tiny.token_rows(run.folder)[-1]
  go(tab, report, f'page=responses&group={last["step"]}/{last["group"]}')
  text = tokenizer.load(run.folder / 'tokenizer').decode(last['tokens'], special=True)
  tab.locator('main > div > details').last.evaluate('details => { details.open = true; }')
  tokens = tab.locator('main > div > details').last.locator('.tokens')
  tokens.wait_for()
  assert tokens.evaluate('element => element.textContent').replace('↵', '') == text
  tokens.focus()
  tab.keyboard.press('ArrowRight')
  said = tab.locator('main > div > details').last.locator('.readout').inner_text()
  assert f'token 1 of {len(last["tokens"])}' in said
  assert f'log-probability {shown(round(last["logp"][0], 3))}' in said


def test_model_output_is_shown_as_text_and_never_as_markup(tab, report, run):
  scripts = 'document.querySelectorAll("script, img, textarea").length'
  go(tab, report, f'page=responses&group={run.attacked["step"]}/{run.attacked["group"]}')
  before = tab.evaluate(scripts)
  tokens = tab.locator('.tokens').first
  assert tokens.evaluate('element => element.textContent') == HOSTILE
  assert tab.locator('.question').inner_text() == HOSTILE
  assert LONG in tab.locator('main').inner_text()
  assert tab.evaluate('document.documentElement.scrollWidth') == 1280
  go(tab, report, 'page=responses&words=</textarea>')
  for cell in tab.locator('td .excerpt', has=tab.locator('mark')).all():
    assert cell.inner_text() == HOSTILE
  assert tab.locator('td mark').count() > 1 and tab.evaluate(scripts) == before
  go(tab, report, 'page=evaluation')
  for details in tab.locator('main details').all():
    details.evaluate('details => { details.open = true; }')
  tab.locator('td details').first.evaluate('details => { details.open = true; }')
  tab.wait_for_selector('td .tokens')
  assert tab.locator('td .tokens').first.inner_text() == HOSTILE
  assert tab.evaluate(scripts) == before
  assert tab.title() == 'Evaluation · run'
  assert HOSTILE not in report.read_text()


# ---- From a chart ----

RANGE = 'area => [area.plot.scales.x.min, area.plot.scales.x.max]'


@pytest.fixture
def page(recorded):
  """The page that the recorded run wrote."""
  return recorded.workdir / 'report.html'


@pytest.fixture
def responses(recorded):
  return step_records.read(recorded.workdir).responses.to_pylist()


def click(tab, step, count=1):
  """Click on a step in the chart of the reward."""
  area = tab.locator('figure[data-title="Reward"] .plot')
  place = area.evaluate(f'area => area.plot.valToPos({step}, "x")')
  area.locator('.u-over').click(position={'x': place, 'y': 60}, click_count=count)
  return area


def counted(tab, count):
  """Wait until the list reports this many responses, and return its text."""
  found = tab.locator('#count', has_text=re.compile(f'^{count:,} response'))
  found.wait_for()
  return found.inner_text()


def test_a_click_on_a_curve_leads_to_the_groups_without_a_learning_signal(tab, page, responses):
  rewards = collections.defaultdict(list)
  for row in responses:
    rewards[row['step'], row['group']].append(row['reward'])
  equal = {key: group[0] for key, group in rewards.items() if len(set(group)) == 1}
  step = next(step for step, _ in equal if 0 < sum(key[0] == step for key in equal) < 6)
  of_step = [reward for key, reward in equal.items() if key[0] == step]
  go(tab, page, 'page=overview')
  click(tab, step)
  counted(tab, tiny.QUESTIONS * tiny.ROLLOUTS)
  assert tab.locator('[name=from]').input_value() == tab.locator('[name=to]').input_value()
  tab.locator('[name=advantage]').select_option('zero')
  said = counted(tab, len(of_step) * tiny.ROLLOUTS)
  assert f'of {len(of_step)} group' in said
  for reward, words in ((1, 'all solved'), (0, 'none solved')):
    count = of_step.count(reward)
    assert (f'{count} {words}' if count else words) in said or (not count and words not in said)
  assert 'partly solved' not in said
  tab.go_back()  # filters do not add to the history
  tab.wait_for_selector('main[data-page=overview]')


def test_enter_opens_the_step_that_the_arrow_keys_reached(tab, page):
  go(tab, page, 'page=buffer')
  tab.locator('.plot').first.focus()
  for key in ('ArrowRight', 'ArrowRight', 'Enter'):
    tab.keyboard.press(key)
  tab.wait_for_selector('main[data-page=responses]')
  steps = {row[0] for row in rows_of(tab.locator('main table'))}
  assert len(steps) == 1 and tab.locator('[name=from]').input_value() in steps


def test_the_zoom_of_a_chart_is_in_the_url(tab, page):
  go(tab, page, 'page=overview')
  area = tab.locator('figure[data-title="Reward"] .plot')
  whole = area.evaluate(RANGE)
  box = area.locator('.u-over').bounding_box()
  tab.mouse.move(box['x'] + 0.3 * box['width'], box['y'] + 60)
  tab.mouse.down()
  tab.mouse.move(box['x'] + 0.6 * box['width'], box['y'] + 60, steps=5)
  tab.mouse.up()
  zoomed = area.evaluate(RANGE)
  assert whole[0] < zoomed[0] < zoomed[1] < whole[1]
  kept = tab.evaluate('location.hash.slice(1)')
  go(tab, page, kept)  # a drag is not a click, so this is still the overview
  over_steps = f'all => all.filter(area => area.plot.kind === "step").map({RANGE})'
  ranges = tab.locator('.plot').evaluate_all(over_steps)
  assert len(ranges) > 8 and all(found == pytest.approx(zoomed, abs=0.01) for found in ranges)
  click(tab, 15, count=2)  # shows all steps but opens none
  tab.wait_for_function('!location.hash.includes("zoom")')
  assert area.evaluate(RANGE) == whole
  tab.wait_for_timeout(400)
  assert tab.locator('main').get_attribute('data-page') == 'overview'
  for wrong in ('9_3', 'x', '500_600', '-Infinity_Infinity'):
    go(tab, page, f'page=overview&zoom_step={wrong}')
    assert area.evaluate(RANGE) == whole, wrong


# ---- Filters and search ----


@pytest.mark.parametrize(('name', 'sign'), [('positive', 1), ('zero', 0), ('negative', -1)])
def test_advantages_are_filtered_by_their_sign(tab, page, responses, name, sign):
  go(tab, page, f'page=responses&advantage={name}')
  count = sum(np.sign(row['advantage']) == sign for row in responses)
  assert count > 5
  counted(tab, count)


def test_typed_text_is_searched_in_questions_and_responses(tab, page, recorded, responses):
  encoded = tokenizer.load(recorded.workdir / 'tokenizer')
  texts = {
    KEY(row): encoded.decode(row['tokens'], special=True)
    for row in tiny.token_rows(recorded.workdir)
  }
  questions = step_records.read(recorded.workdir).questions.to_pylist()
  asked = {row['question']: row['text'] for row in questions}

  def mention(words):
    return [
      row
      for row in responses
      if words in asked[row['question']].lower() or words in texts.get(KEY(row), '').lower()
    ]

  go(tab, page, 'page=responses')
  note = tab.locator('main .quiet', has_text='This file contains the texts of').inner_text()
  assert f'the texts of {len(texts)} of the {len(responses)} responses' in note
  before = tab.evaluate('history.length')
  in_response = next(text for text in texts.values() if len(text.strip()) > 8).strip()[:4]
  for words in (asked[questions[0]['question']], in_response):
    found = mention(words.lower())
    assert 0 < len(found) < len(responses)
    tab.locator('[name=words]').fill('')
    tab.locator('[name=words]').press_sequentially(words)  # without pressing Enter
    counted(tab, len(found))
    assert tab.locator('[name=words]').input_value() == words
    assert tab.locator('main table mark').first.inner_text().lower() == words.lower()
  assert tab.evaluate('history.length') == before
  tab.reload()
  await_page(tab)
  counted(tab, len(mention(in_response.lower())))


# ---- Nothing to show ----


def test_a_step_without_responses_links_to_the_nearest_step_with_responses(tab, page):
  for step, why, nearest in ((0, 'before the first update', 1), (500, 'newest records', 32)):
    go(tab, page, f'page=responses&from={step}&to={step}')
    said = tab.locator('#count').inner_text()
    assert f'Step {step} has no responses here' in said and why in said
    tab.locator('#count a', has_text=f'step {nearest}').click()
    counted(tab, tiny.QUESTIONS * tiny.ROLLOUTS)


def test_the_list_says_which_steps_are_left_out(tab, recorded, responses, tmp_path, monkeypatch):
  monkeypatch.setattr(contents, '_RESPONSES', len(responses) // 3)
  monkeypatch.setattr(contents, '_TOKENS', 0)
  write_report([str(recorded.workdir)], tmp_path / 'page.html')
  go(tab, tmp_path / 'page.html', 'page=responses')
  assert 'This file contains the responses of one step in 3' in tab.locator('main').inner_text()
  go(tab, tmp_path / 'page.html', 'page=responses&from=5&to=5')
  said = tab.locator('#count').inner_text()
  assert 'this file contains the responses of only one step in' in said
  tab.locator('#count a', has_text='step 4').click()
  counted(tab, tiny.QUESTIONS * tiny.ROLLOUTS)


def test_filters_that_nothing_passes_can_be_cleared(tab, page, responses):
  go(tab, page, 'page=responses&longest=1&shortest=9')
  assert '0 responses pass all of these filters' in tab.locator('#count').inner_text()
  assert tab.locator('main table').count() == 0
  tab.locator('#count a', has_text='Clear').click()
  counted(tab, len(responses))


# ---- Narrow windows ----


def test_long_names_of_runs_fit_a_narrow_window(chromium, recorded, tmp_path):
  names = [f'question_selection=uniform,trajectory_selection=random,seed={n}' for n in '01']
  for name in names:
    shutil.copytree(recorded.workdir, tmp_path / name)
  config = tmp_path / names[1] / 'config.json'
  values = json.loads(config.read_text())
  values['replay']['question_selection'] = 'uniform'
  config.write_text(json.dumps(values))
  write_report([str(tmp_path / name) for name in names], tmp_path / 'page.html')
  for width, address, place in (
    (400, 'page=overview&run=0', 'html'),
    (1000, 'page=compare', '[aria-label^="Scores:"]'),
  ):
    with open_tab(chromium, width) as tab:
      go(tab, tmp_path / 'page.html', address)
      assert tab.locator(place).evaluate('one => one.scrollWidth === one.clientWidth'), place


def test_in_a_narrow_window_no_column_is_hidden(chromium, page):
  with open_tab(chromium, 400) as tab:
    for address, place in (
      ('page=overview', 'dl.scores'),
      ('page=responses', '[aria-label="Responses"]'),
      ('page=responses&group=3/0', '[aria-label="Responses in the group"]'),
    ):
      go(tab, page, address)
      fits = '({scrollWidth, clientWidth}) => scrollWidth === clientWidth'
      assert tab.locator(place).evaluate(fits), place
    heads = tab.locator(f'{place} th').evaluate_all('all => all.map(head => head.textContent)')
    cells = tab.locator(f'{place} tr').nth(1).locator('td')
    said = cells.evaluate_all("all => all.map(cell => getComputedStyle(cell, '::before').content)")
    assert said == [f'"{head}"' for head in heads]
