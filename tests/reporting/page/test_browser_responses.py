"""Responses in the page: reached from a point of a curve, filtered and searched as one types."""

import collections
import re

import numpy as np
import pytest

from exgrpo_jax.data import tokenizer
from exgrpo_jax.reporting import step_records
from exgrpo_jax.reporting.page import contents
from exgrpo_jax.reporting.report import write_report
from tests.helpers import tiny
from tests.helpers.tabs import await_page, go, open_tab, rows_of

pytestmark = pytest.mark.full

RANGE = 'area => [area.plot.scales.x.min, area.plot.scales.x.max]'


@pytest.fixture
def page(recorded):
  """The page that the recorded run left."""
  return recorded.workdir / 'report.html'


@pytest.fixture
def responses(recorded):
  return step_records.read(recorded.workdir).responses.to_pylist()


def click(tab, step, count=1):
  """Clicks on a step in the chart of the reward."""
  area = tab.locator('figure[data-title="Reward"] .plot')
  place = area.evaluate(f'area => area.plot.valToPos({step}, "x")')
  area.locator('.u-over').click(position={'x': place, 'y': 60}, click_count=count)
  return area


def counted(tab, count):
  """Waits until the list says that it has so many responses; what it says."""
  found = tab.locator('#count', has_text=re.compile(f'^{count:,} response'))
  found.wait_for()
  return found.inner_text()


# ---- From a chart ----


def test_a_click_on_a_curve_leads_to_the_groups_that_taught_nothing(tab, page, responses):
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
  tab.go_back()  # filters are no history of their own
  tab.wait_for_selector('main[data-page=overview]')


def test_enter_opens_the_step_that_the_arrow_keys_reached(tab, page):
  go(tab, page, 'page=buffer')
  tab.locator('.plot').first.focus()
  for key in ('ArrowRight', 'ArrowRight', 'Enter'):
    tab.keyboard.press(key)
  tab.wait_for_selector('main[data-page=responses]')
  steps = {row[0] for row in rows_of(tab.locator('main table'))}
  assert len(steps) == 1 and tab.locator('[name=from]').input_value() in steps


def test_the_zoom_of_a_chart_is_in_the_address(tab, page):
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
  go(tab, page, kept)  # a drag is no click: it is still the overview
  ranges = tab.locator('.plot').evaluate_all(
    f'all => all.filter(area => area.plot.kind === "step").map({RANGE})'
  )
  assert len(ranges) > 8 and all(found == pytest.approx(zoomed, abs=0.01) for found in ranges)
  click(tab, 15, count=2)  # shows all steps, and opens none
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


def test_what_is_typed_is_searched_in_questions_and_responses(tab, page, recorded, responses):
  encoded = tokenizer.load(recorded.workdir / 'tokenizer')
  texts = {
    tuple(row[name] for name in ('step', 'group', 'sample')): encoded.decode(
      row['tokens'], special=True
    )
    for path in step_records.files(recorded.workdir, 'tokens')
    for row in step_records.read_file(path, 'tokens').to_pylist()
  }
  questions = step_records.read(recorded.workdir).questions.to_pylist()
  asked = {row['question']: row['text'] for row in questions}

  def mention(words):
    return [
      row
      for row in responses
      if words in asked[row['question']].lower()
      or words in texts.get((row['step'], row['group'], row['sample']), '').lower()
    ]

  go(tab, page, 'page=responses')
  note = tab.locator('main .quiet', has_text='have their text in this file').inner_text()
  assert note.startswith(f'{len(texts)} of the {len(responses)} responses')
  before = tab.evaluate('history.length')
  in_response = next(text for text in texts.values() if len(text.strip()) > 8).strip()[:4]
  for words in (asked[questions[0]['question']], in_response):
    found = mention(words.lower())
    assert 0 < len(found) < len(responses)
    tab.locator('[name=words]').fill('')
    tab.locator('[name=words]').press_sequentially(words)  # and no Enter
    counted(tab, len(found))
    assert tab.locator('[name=words]').input_value() == words
    assert tab.locator('main table mark').first.inner_text().lower() == words.lower()
  assert tab.evaluate('history.length') == before
  tab.reload()
  await_page(tab)
  counted(tab, len(mention(in_response.lower())))


# ---- Nothing to show ----


def test_a_step_without_responses_leads_to_the_nearest_that_has(tab, page):
  for step, why, nearest in ((0, 'before the first update', 1), (500, 'newest records', 32)):
    go(tab, page, f'page=responses&from={step}&to={step}')
    said = tab.locator('#count').inner_text()
    assert f'Step {step} has no responses here' in said and why in said
    tab.locator('#count a', has_text=f'step {nearest}').click()
    counted(tab, tiny.QUESTIONS * tiny.ROLLOUTS)


def test_where_steps_are_left_out_the_list_says_which(
  tab, recorded, responses, tmp_path, monkeypatch
):
  monkeypatch.setattr(contents, '_RESPONSES', len(responses) // 3)
  monkeypatch.setattr(contents, '_TOKENS', 0)
  write_report([str(recorded.workdir)], tmp_path / 'page.html')
  go(tab, tmp_path / 'page.html', 'page=responses')
  assert 'Of one step in 3 the responses are in this file' in tab.locator('main').inner_text()
  go(tab, tmp_path / 'page.html', 'page=responses&from=5&to=5')
  assert 'of one step in 3 they are in this file' in tab.locator('#count').inner_text()
  tab.locator('#count a', has_text='step 4').click()
  counted(tab, tiny.QUESTIONS * tiny.ROLLOUTS)


def test_filters_that_nothing_passes_can_be_cleared(tab, page, responses):
  go(tab, page, 'page=responses&longest=1&shortest=9')
  assert '0 responses pass all of these filters' in tab.locator('#count').inner_text()
  assert tab.locator('main table').count() == 0
  tab.locator('#count a', has_text='Clear').click()
  counted(tab, len(responses))


# ---- Narrow windows ----


def test_in_a_narrow_window_no_column_is_hidden(chromium, page):
  with open_tab(chromium, 400) as tab:
    for address, place in (
      ('page=overview', 'dl.scores'),
      ('page=responses', '[aria-label="Responses"]'),
      ('page=responses&group=3/0', '[aria-label="Responses of the group"]'),
    ):
      go(tab, page, address)
      sizes = tab.locator(place).evaluate(
        '({scrollWidth, clientWidth}) => [scrollWidth, clientWidth]'
      )
      assert sizes[0] == sizes[1], place
    heads = tab.locator(f'{place} th').evaluate_all('all => all.map(head => head.textContent)')
    cells = tab.locator(f'{place} tr').nth(1).locator('td')
    said = cells.evaluate_all("all => all.map(cell => getComputedStyle(cell, '::before').content)")
    assert said == [f'"{head}"' for head in heads]
