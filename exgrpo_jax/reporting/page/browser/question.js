// One question: its visits, replays and responses.

const MOST_FOUND = 50;

async function questionPage(run) {
  const rows = await recorded(run);
  if (!rows || !rows.visits) return [notes(page.runs[run].missing)];
  const chosen = choice().get('question');
  const view = chosen === null ? null : await story(run, rows, Number(chosen));
  return [search(rows, choice().get('find') || '', view === null), view];
}

// ---- Search ----

function search(rows, wanted, isOpen) {
  const results = h('div', { 'aria-live': 'polite' });
  const placeholder = 'text, row or answer';
  const input = h('input', { type: 'search', id: 'find', value: wanted, placeholder });
  const update = () =>
    results.replaceChildren(...(input.value || isOpen ? found(rows, input.value) : []));
  input.addEventListener('input', () => {
    history.replaceState(null, '', address({ find: input.value }));
    update();
  });
  update();
  const label = h('label', { for: 'find' }, 'Find a question by its text, row or answer ');
  return h('search', label, input, results);
}

function found(rows, wanted) {
  const word = wanted.trim().toLowerCase();
  const places = [];
  rows.questions.row.forEach((row, place) => {
    const fields = [String(row), rows.questions.answer[place] ?? ''];
    const isExact = fields.some((field) => field.toLowerCase() === word);
    if (!word || isExact || (rows.questions.text[place] ?? '').toLowerCase().includes(word))
      places.push([isExact, place]);
  });
  const visits = (place) => rows.ofQuestion.get(rows.questions.row[place]).length;
  places.sort((a, b) => b[0] - a[0] || visits(b[1]) - visits(a[1]));
  const shown = places.slice(0, MOST_FOUND).map(([, place]) => {
    const row = rows.questions.row[place];
    const last = rows.ofQuestion.get(row).at(-1);
    return [
      ...[questionLink(row), questionText(rows, row), rows.questions.answer[place]],
      ...[visits(place), rows.visits.correctness[last]],
    ];
  });
  const more =
    places.length > MOST_FOUND ? `; the ${MOST_FOUND} with the most visits are shown` : '';
  return [
    quiet({ id: 'count' }, `${plural(places.length, 'question')}${more}`),
    shown.length > 0 &&
      table('question|text|answer|visits|last pass rate', shown, 'Questions found'),
  ];
}

// ---- One question ----

async function story(run, rows, row) {
  const visits = rows.ofQuestion.get(row);
  if (!visits) return h('p', `Question ${row} was never visited.`);
  const place = rows.place.get(row);
  const recordings = await Promise.all(
    visits.map((visit) => recordedGroup(run, rows.visits.step[visit], rows.groupOf[visit])),
  );
  const replays = lastReplays(rows, visits, recordings);
  return h(
    'article',
    { id: 'story' },
    h('h2', `Question ${row}`),
    h('blockquote.question', rows.questions.text[place] ?? 'Its text was not recorded.'),
    h('p', 'Answer: ', h('b', rows.questions.answer[place] ?? 'not recorded')),
    section('Visits', strip(rows, visits), visitsTable(rows, visits)),
    await solutions(run, rows, row, visits, recordings, replays),
    replayed(replays),
    mistakes(rows, visits, recordings),
  );
}

// A bar for each visit, with the pass rate as its height and facts about the visit below it.
function strip(rows, visits) {
  const { step, correctness, replayed, bucket_after, retired_step } = rows.visits;
  return h(
    'ol.strip',
    { tabindex: 0, 'aria-label': 'Visits in step order' },
    visits.map((visit) => {
      const share = correctness[visit];
      const bucket =
        bucket_after[visit] === null ? 'not in buffer' : `bucket ${bucket_after[visit]}`;
      const fate = retired_step[visit] === null ? bucket : 'retired';
      const replay = replayOfVisit(rows, visit);
      const facts = [kindOf(replayed[visit]), fate];
      if (replay) {
        const { age, entropy, ratio_mean } = replay;
        facts.push(`age ${age}`, `entropy ${number(entropy)}`, `ratio ${number(ratio_mean)}`);
      }
      const column = h(`span.bar.${replayed[visit] ? 'replayed' : 'fresh'}`);
      column.style.height = `${Math.round(4 + 56 * share)}px`;
      return h(
        'li',
        h(
          'a',
          { href: groupAddress(rows, visit) },
          h('span.well', column),
          h('b', `${Math.round(100 * share)}%`),
          facts.map((text) => h('span', text)),
          h('span.quiet', `step ${step[visit]}`),
        ),
      );
    }),
  );
}

// The key of a visit's group in the recorded texts.
function groupName(rows, visit) {
  return `${rows.visits.step[visit]}/${rows.groupOf[visit]}`;
}

function groupAddress(rows, visit) {
  return address({ page: 'responses', group: groupName(rows, visit), question: null, find: null });
}

function visitsTable(rows, visits) {
  const { step, correctness, replayed, bucket_before, bucket_after } = rows.visits;
  return table(
    'step|kind|pass rate|bucket before|bucket after|replay written in|age|' +
      "entropy|other candidates' entropies|mean ratio|largest ratio|mean weight",
    visits.map((visit) => {
      const replay = replayOfVisit(rows, visit);
      const link = h('a', { href: groupAddress(rows, visit) }, String(step[visit]));
      const buckets = [bucket_before, bucket_after].map((of) => of[visit]);
      const shared = [link, kindOf(replayed[visit]), correctness[visit], ...buckets];
      if (!replay) return [...shared, ...Array(7).fill(null)];
      const { written, age, entropy, others, ratio_mean, ratio_max, shaped_mean } = replay;
      const from = written ? `step ${written}` : 'before the run';
      return [...shared, from, age, entropy, others, ratio_mean, ratio_max, shaped_mean];
    }),
    'Visits to this question',
  );
}

// The stored success replayed in a visit, with its values; null if its record is lost.
function replayOfVisit(rows, visit) {
  const { replays } = rows;
  const index = rows.replayOf.get(visit);
  if (index === undefined || replays.written[index] === null) return null;
  const own = Object.fromEntries(Object.keys(replays).map((name) => [name, replays[name][index]]));
  // All candidates except the chosen one, whose entropy is nearest to the replay's.
  const distances = own.candidates?.map((value) => Math.abs((value ?? Infinity) - own.entropy));
  const chosen = distances?.indexOf(Math.min(...distances));
  const others = own.candidates?.filter((_, index) => index !== chosen);
  const words = others?.map((value) => number(value)).join(', ') ?? 'not compared';
  const age = rows.visits.step[visit] - own.written;
  return { ...own, age, others: words || 'the only candidate' };
}
