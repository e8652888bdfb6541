// The filters for the list of responses, and the responses that pass them.

const TYPING = 150; // ms without a key press before the typed text is applied
const FILTERS =
  'words|from|to|advantage|outcome|kind|truncated|reward|shortest|longest|texts'.split('|');
const SORTS = ['step', 'reward', 'length', 'entropy', 'advantage'];
const ZERO = 1e-6; // smaller advantages and reward differences count as 0
const SIGNS = {
  positive: (advantages) => (i) => advantages[i] >= ZERO,
  zero: (advantages) => (i) => Math.abs(advantages[i]) < ZERO,
  negative: (advantages) => (i) => advantages[i] <= -ZERO,
};

// Filters apply while the reader types. They replace the URL instead of adding to the history, so
// that the back button leaves the list.
function filters(rows, update) {
  const now = choice();
  const field = (name, title, attributes) => {
    const value = now.get(name) || '';
    return h('label', `${title} `, h('input', { name, type: 'number', value, ...attributes }));
  };
  const menu = (name, title, values, otherwise = 'any') => {
    const options = values.map((value) => (Array.isArray(value) ? value : [value, value]));
    return select(title, { name }, [['', otherwise], ...options], now.get(name) || '');
  };
  const sorts = SORTS.flatMap((name) => [name, [`-${name}`, `${name}, descending`]]);
  let waiting = 0;
  const apply = () => {
    if (!form.isConnected) return; // the reader has left the list meanwhile
    const values = Object.fromEntries(new FormData(form));
    history.replaceState(null, '', address({ ...values, at: null }));
    update();
  };
  const onsubmit = (event) => event.preventDefault();
  const oninput = () => {
    clearTimeout(waiting);
    waiting = setTimeout(apply, TYPING);
  };
  const form = h(
    'form.filters',
    { 'aria-label': 'Filters', onsubmit, oninput },
    field('words', 'Find in questions and responses', { type: 'search', placeholder: 'text' }),
    field('from', 'step from', { min: 1 }),
    field('to', 'to', { min: 1 }),
    menu('advantage', 'advantage', Object.keys(SIGNS)),
    menu('outcome', 'outcome', rows.responses.outcomes),
    menu('kind', 'kind', ['fresh', 'replayed']),
    menu('truncated', 'truncated', ['yes', 'no']),
    field('reward', 'reward', { step: 'any' }),
    field('shortest', 'tokens from', { min: 1 }),
    field('longest', 'to', { min: 1 }),
    menu('texts', 'text', [['yes', 'in this file']]),
    menu('sort', 'sorted by', sorts.slice(1), 'step'),
    h('a', { href: cleared(...FILTERS, 'sort') }, 'Clear'),
  );
  return form;
}

// The URL without these choices.
function cleared(...names) {
  return address(Object.fromEntries([...names, 'at'].map((name) => [name, null])));
}

function words() {
  return (choice().get('words') || '').trim().toLowerCase();
}

// The responses that pass all filters, sorted.
function chosen(rows) {
  const now = choice();
  const has = (name) => now.get(name) !== null && now.get(name) !== '';
  const limit = (name) => Number(now.get(name));
  const { responses, visits, visitOf } = rows;
  const tests = [];
  const between = (first, last, value) => {
    const [low, high] = [limit(first), limit(last)];
    if (has(first)) tests.push((i) => value(i) >= low);
    if (has(last)) tests.push((i) => value(i) <= high);
  };
  const equal = (name, values, wanted) => {
    if (has(name)) tests.push((i) => Math.abs(values[i] - wanted) < ZERO);
  };
  between('from', 'to', (i) => visits.step[visitOf[i]]);
  if (now.get('advantage') in SIGNS) tests.push(SIGNS[now.get('advantage')](responses.advantage));
  equal('outcome', responses.outcome, responses.outcomes.indexOf(now.get('outcome')));
  equal('kind', responses.replayed, Number(now.get('kind') === 'replayed'));
  equal('truncated', responses.truncated, Number(now.get('truncated') === 'yes'));
  equal('reward', responses.reward, limit('reward'));
  between('shortest', 'longest', (i) => responses.length[i]);
  if (has('texts')) tests.push((i) => rows.texts[i] !== null);
  if (words()) tests.push(mentions(rows, words()));
  const found = [];
  for (let i = 0; i < responses.length.length; i++)
    if (tests.every((test) => test(i))) found.push(i);
  return sorted(rows, found, now.get('sort') || 'step');
}

// Return a test that is true if the question or the response contains these words.
function mentions(rows, wanted) {
  const { row, text } = rows.questions;
  const has = (words) => (words ?? '').toLowerCase().includes(wanted);
  const asked = new Set(row.filter((_, place) => has(text[place])));
  const { visitOf, visits, texts } = rows;
  return (i) => asked.has(visits.question[visitOf[i]]) || has(texts[i]);
}

function sorted(rows, found, wanted) {
  const name = wanted.replace('-', '');
  if (wanted === 'step') return found;
  const sign = wanted.startsWith('-') ? -1 : 1;
  const key =
    name === 'step'
      ? (i) => rows.visits.step[rows.visitOf[i]]
      : (i) => rows.responses[name][i] ?? -Infinity;
  return found.sort((a, b) => sign * (key(a) - key(b)) || a - b);
}

// ---- If no response passes ----

function nothingFound(rows) {
  const now = choice();
  const limit = (name, otherwise) => (now.get(name) ? Number(now.get(name)) : otherwise);
  const [from, to] = [limit('from', -Infinity), limit('to', Infinity)];
  if (rows.steps.some((step) => from <= step && step <= to)) {
    const clear = h('a', { href: cleared(...FILTERS) }, 'Clear them');
    return [h('b', '0 responses'), ' pass all of these filters. ', clear];
  }
  if (!rows.steps.length) return ['No responses were recorded for this run.'];
  const distance = (step) => Math.min(Math.abs(step - from), Math.abs(step - to));
  const nearest = rows.steps.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  const steps = from === to ? `Step ${from} has` : 'These steps have';
  const why = whyNoStep(rows, from, to);
  const href = address({ from: nearest, to: nearest, at: null });
  return [
    `${steps} no responses here: ${why}. The nearest step with responses is `,
    ...[h('a', { href }, `step ${nearest}`), '.'],
  ];
}

function whyNoStep(rows, from, to) {
  const { step } = rows.visits;
  if (from > to) return 'the first step is later than the last step';
  if (to < 1) return 'step 0 is the policy before the first update';
  if (from > step.at(-1))
    return `the newest records are from step ${step.at(-1)} (a run writes the records of several steps at once)`;
  if (step.some((other) => from <= other && other <= to))
    return `this file contains the responses of only one step in ${rows.every}`;
  return 'their records are missing';
}
